"""Helpers for the reports of the benchmarks."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.table import Table


def markdown(table: Table) -> str:
    """A rich table as Markdown, without its title."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    lines = [f"| {' | '.join(row)} |" for row in zip(*columns)]
    return "\n".join([lines[0], "|" + " --- |" * len(columns), *lines[1:]])


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_run(device: str) -> str:
    """Return a line with the date, the card or processor, the versions and the commit, for the head of a report."""
    is_cuda = device == "cuda"
    name = f"{torch.cuda.get_device_name()}, {processor()}" if is_cuda else processor()
    versions = [f"torch {torch.__version__}"]
    if is_cuda:
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    for package in ("triton", "transformers"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return f"- {date.today()}, {name}; {', '.join(versions)}; commit {os.environ.get('COMMIT') or commit()}"


@cache
def commit() -> str:
    """Return the commit of this tree, with a + if files differ from it; "?" outside of a repository."""
    root = Path(__file__).parents[2]
    words = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "?"
