"""What the backend adds to compilation, in fresh processes with every cache off.

    python benchmarks/compile_time.py

First torch.compile's time to the end of the first step with backend="inductor" and with backend="sp", less the time of
a step that is already compiled. Then the passes alone (capture, analysis, rewrites, proof; no Inductor), which should
grow in proportion to the number of layers.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from models import DecoderLM

SEQ = 512  # short: compile time does not depend on it


def inputs(layers: int) -> tuple[DecoderLM, Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(256, (1, SEQ))
    return DecoderLM(layers=layers), ids, ids.clone()


def compile_seconds(backend: str, layers: int) -> float:
    """Seconds that compiling forward and backward adds to the first step."""
    model, ids, labels = inputs(layers)
    compiled = torch.compile(model, backend=backend)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        compiled(ids, labels).backward()
        seconds.append(time.perf_counter() - start)
    return seconds[0] - seconds[1]


def passes_seconds(ranks: int, layers: int) -> float:
    """Seconds from a model to its proved graph for `ranks` ranks. A tiny model goes first, to load what loads once."""
    import sp_compile

    sp_compile.explain(*inputs(1), sp=ranks)
    model, ids, labels = inputs(layers)
    start = time.perf_counter()
    sp_compile.explain(model, ids, labels, sp=ranks)
    return time.perf_counter() - start


def in_fresh_process(*measure: str) -> float:
    """Runs this file with `measure` as its arguments and returns the number it prints."""
    env = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, __file__, "--measure", *measure]
    return float(
        subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    )


def compare_backends(console: Console, layers: int, repeats: int) -> None:
    """The best of `repeats` for each backend, taken in turn so that a busy machine hurts both alike."""
    best = {"inductor": float("inf"), "sp": float("inf")}
    with console.status("compiling"):
        for _ in range(repeats):
            for backend in best:
                best[backend] = min(best[backend], in_fresh_process("compile", backend, str(layers)))
    table = Table(
        "backend", "seconds", "ratio", title=f"compile time, {layers} layers, forward and backward, 1 rank"
    )
    for backend, seconds in best.items():
        table.add_row(backend, f"{seconds:.1f}", f"{seconds / best['inductor']:.2f}")
    console.print(table)


def show_growth(console: Console, ranks: int) -> None:
    table = Table("layers", "seconds", "ms a layer", title=f"passes alone, {ranks} ranks")
    with console.status("running the passes"):
        for layers in (2, 4, 8, 16, 32):
            seconds = in_fresh_process("passes", str(ranks), str(layers))
            table.add_row(str(layers), f"{seconds:.2f}", f"{1000 * seconds / layers:.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that the passes are planned for")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    match args.measure:
        case ["compile", backend, layers]:
            print(compile_seconds(backend, int(layers)))
        case ["passes", ranks, layers]:
            print(passes_seconds(int(ranks), int(layers)))
        case _:
            console = Console()
            compare_backends(console, args.layers, args.repeats)
            show_growth(console, args.ranks)


if __name__ == "__main__":
    main()
