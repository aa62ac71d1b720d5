"""Run the recipes of docs/ as typed: two processes, Inductor, empty caches, an unmodified environment.

    make recipes RECIPES="start blocks"

Losses are compared with a single device that runs the same lines eagerly. The time from the command to the first
improved loss is measured. Each recipe is a row of benchmarks/results/checks/recipes.md; a rerun replaces its row.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from models.docs.test_recipes import NEEDS, ROOT, alone_is, run

RESULTS = ROOT / "benchmarks" / "results" / "checks" / "recipes.md"
HEADER = (
    "recipe",
    "steps",
    "loss, first to last",
    "difference of a loss",
    "of a weight",
    "s to the first step",
    "s until the loss falls",
    "s in all",
    "CPU s in all",
)
ABOUT = """# Recipes, run as on their pages

- {}, torch {}, {} cores
- `make recipes`: `torchrun --nproc-per-node 2`, Inductor, empty caches; seconds since the
  start of the command, import of torch included; CPU seconds of both ranks, the C++ compiler and torchrun
- the largest differences are those to a single device that runs the same lines eagerly, in float32 (blocks: in bf16)
"""


def row(name: str, folder: Path, beside: str) -> list[str]:
    """Run one recipe; return its row."""
    alone = run(name, folder / "alone", 1, *alone_is(name))
    begun, cpu = time.time(), cpu_seconds()
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    found = run(name, folder / "shared", 2, timeout=1500, RECIPE_COMPILER="inductor", **caches)
    whole, cpu = time.time() - begun, cpu_seconds() - cpu
    losses, ends = found["losses"], [end - begun for end in found["ends"]]
    assert len(losses) == len(alone["losses"])
    worst = max(abs(a - b) for a, b in zip(losses, alone["losses"], strict=True))
    weights = max((found["weights"][key] - weight).abs().max().item() for key, weight in alone["weights"].items())
    falls = next(i for i, loss in enumerate(losses) if loss < losses[0])
    until = ends[min(len(ends) - 1, falls * len(ends) // len(losses))]
    numbers = f"{len(ends)}", f"{losses[0]:.3f} to {losses[-1]:.3f}", f"{worst:.0e}", f"{weights:.0e}"
    return [name, *numbers, *(f"{seconds:.0f}" for seconds in (ends[0], until, whole, cpu)), facts(beside)]


def cpu_seconds() -> float:
    """Return the CPU seconds of finished child processes."""
    return sum(os.times()[2:4])


def facts(beside: str) -> str:
    load = f"load {os.getloadavg()[0]:.1f}"
    return f"{date.today()}, {load}, {beside}" if beside else f"{date.today()}, {load}"


def write(new: list[str]) -> None:
    """Write a row into the table, which has the order of names."""
    header = [*HEADER, "when, load of the machine at the end"]
    text = RESULTS.read_text() if RESULTS.exists() else ""
    rows = {line.split(" | ")[0]: line for line in re.findall(r"^\| (\w+ \| .*) \|$", text, re.MULTILINE)}
    rows.pop(header[0], None)
    rows[new[0]] = " | ".join(new)
    lines = [" | ".join(header), *(rows[name] for name in sorted(rows))]
    lines = [f"| {line} |" for line in lines]
    lines.insert(1, "| " + " | ".join(["---"] * len(header)) + " |")
    RESULTS.write_text(ABOUT.format(processor(), torch.__version__, os.cpu_count()) + "\n" + "\n".join(lines) + "\n")


def processor() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="start, or a page of docs/recipes; all by default")
    parser.add_argument("--beside", default="", help="other work on the machine, for the table")
    given = parser.parse_args()
    for name in given.names or ["start", *NEEDS]:
        with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
            new = row(name, Path(folder), given.beside)
        write(new)
        print(" | ".join(new), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
