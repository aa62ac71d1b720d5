"""Helpers for the reports of the benchmarks."""

import platform
import subprocess
from functools import cache
from pathlib import Path

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


@cache
def commit() -> str:
    """Return the commit of this tree, with a + if files differ from it; "?" outside of a repository."""
    root = Path(__file__).parents[2]
    words = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "?"
