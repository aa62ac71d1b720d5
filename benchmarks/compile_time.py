"""Measure the compile time that the backend adds, in new processes without caches.

    python benchmarks/compile_time.py

The first table has the time that compilation adds to a first step, with backend="inductor" and with backend="sp" on one
rank. The second one has tracing and the passes without Inductor, which should be linear in the layers. The third one
compares one graph of the model with one of each block, on real ranks with Inductor: equal blocks share a graph, so
their time should not grow. CPU seconds include the C++ compiler, so that a busy machine does not matter. Tables are
written to results/compile_cpu.md; `--only blocks` selects one of them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring.gloo_ranks import joined
from measuring.tables import markdown, processor
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from models import DecoderLM

SEQ = 512  # short: compile time does not depend on it
TABLES = "backends", "growth", "blocks"
RESULTS = Path(__file__).parent / "results" / "compile_cpu.md"


def inputs(layers: int) -> tuple[DecoderLM, Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(256, (1, SEQ))
    return DecoderLM(layers=layers), ids, ids.clone()


def cpu_seconds() -> float:
    """CPU time so far of this process and of the children it has waited for."""
    return sum(os.times()[:4])


def first_step(compiled: Callable[[Tensor, Tensor], Tensor], ids: Tensor, labels: Tensor) -> float:
    """CPU seconds that compiling forward and backward adds to the first step."""
    seconds = []
    for _ in range(2):
        start = cpu_seconds()
        compiled(ids, labels).backward()
        seconds.append(cpu_seconds() - start)
    return seconds[0] - seconds[1]


def compile_seconds(backend: str, layers: int) -> float:
    model, ids, labels = inputs(layers)
    return first_step(torch.compile(model, backend=backend), ids, labels)


def by_blocks(model: DecoderLM) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the model with each block and the tail compiled separately; values between them stay sharded."""
    options = {"outputs": "lazy"}
    for block in model.blocks:
        block.compile(backend="sp", options=options)

    @torch.compile(backend="sp", options=options)
    def loss_of(x: Tensor, labels: Tensor) -> Tensor:
        logits = model.head(model.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        x = model.embed(ids)
        for block in model.blocks:
            x = block(x)
        return loss_of(x, labels)

    return step


def rank_seconds(way: str, layers: int, ranks: int) -> float:
    """CPU seconds of rank 0, with the others in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", way, str(layers), str(ranks), folder]
        others = [subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL) for rank in range(1, ranks)]
        seconds = one_rank(way, layers, ranks, folder, 0)
        if any(other.wait() for other in others):
            raise SystemExit("a rank failed")
    return seconds


def one_rank(way: str, layers: int, ranks: int, folder: str, rank: int) -> float:
    with joined(rank, ranks, folder):
        model, ids, labels = inputs(layers)
        return first_step(by_blocks(model) if way == "blocks" else torch.compile(model, backend="sp"), ids, labels)


def passes_seconds(ranks: int, layers: int) -> tuple[float, float]:
    """Seconds of the passes, and of `explain`, which traces and runs the model too. A tiny model loads the code."""
    import sp_compile

    sp_compile.explain(*inputs(1), sp=ranks)
    model, ids, labels = inputs(layers)
    start = cpu_seconds()
    report = sp_compile.explain(model, ids, labels, sp=ranks)
    return sum(report.seconds.values()), cpu_seconds() - start


def in_fresh_process(*measure: str) -> list[float]:
    """Runs this file with `measure` as its arguments and returns the numbers it prints."""
    off = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--measure", *measure]
    printed = subprocess.run(command, env={**os.environ, **off}, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [float(word) for word in printed.splitlines()[-1].split()]


def compare_backends(console: Console, layers: int, repeats: int) -> Table:
    """The best of `repeats` for each backend."""
    best = {"inductor": float("inf"), "sp": float("inf")}
    with console.status("compiling"):
        in_fresh_process("compile", "inductor", "1")  # the C++ headers that Inductor precompiles once a machine
        for _ in range(repeats):
            for backend in best:
                best[backend] = min(best[backend], *in_fresh_process("compile", backend, str(layers)))
        own, _ = in_fresh_process("passes", "1", str(layers))
    table = Table("backend", "CPU s", "ratio", title=f"compile time, {layers} layers, 1 rank")
    for backend, seconds in best.items():
        table.add_row(backend, f"{seconds:.1f}", f"{seconds / best['inductor']:.2f}")
    table.add_row("passes of sp alone", f"{own:.1f}", f"{own / best['inductor']:.2f}")
    return table


def growth(console: Console, ranks: int) -> Table:
    """`explain` in CPU seconds; the passes' part of it by their own clock, which a busy machine disturbs."""
    table = Table("layers", "explain, CPU s", "ms a layer", "passes, s", title=f"the passes, {ranks} ranks")
    with console.status("running the passes"):
        for layers in (2, 4, 8, 16, 32):
            passes, everything = in_fresh_process("passes", str(ranks), str(layers))
            each = f"{1000 * everything / layers:.0f}"
            table.add_row(str(layers), f"{everything:.2f}", each, f"{passes:.2f}")
    return table


def blocks_and_model(console: Console, ranks: int) -> Table:
    table = Table("layers", "one graph, CPU s", "block by block, CPU s", title=f"compile time of a rank of {ranks}")
    with console.status("compiling on ranks"):
        for layers in (4, 16):
            whole, blocks = (in_fresh_process(way, str(layers), str(ranks))[0] for way in ("whole", "blocks"))
            table.add_row(str(layers), f"{whole:.1f}", f"{blocks:.1f}")
    return table


def report(tables: Sequence[Table], args: argparse.Namespace) -> str:
    """Return the report, with the load of the machine, which slightly increases CPU seconds."""
    flags = f"--layers {args.layers} --ranks {args.ranks} --repeats {args.repeats} --only {' '.join(args.only)}"
    load = f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    facts = [
        f"- {date.today()}, {processor()}, torch {torch.__version__}",
        f"- `python benchmarks/compile_time.py {flags}`, every cache off",
        f"- {load}{f'; beside {args.beside}' if args.beside else ''}",
    ]
    parts = [part for table in tables for part in (f"## {str(table.title).capitalize()}", markdown(table))]
    return "\n\n".join(["# Compile time", "\n".join(facts), *parts]) + "\n"


def write_results(args: argparse.Namespace) -> None:
    console, tables = Console(), list[Table]()
    makes = {
        "backends": partial(compare_backends, console, args.layers, args.repeats),
        "growth": partial(growth, console, args.ranks),
        "blocks": partial(blocks_and_model, console, args.ranks),
    }
    for name in args.only:
        tables.append(makes[name]())
        console.print(tables[-1])
        args.output.write_text(report(tables, args))
    console.print(f"written: {args.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that the passes are planned for")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--beside", default="", help="other work on the machine, for the report")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    match args.measure:
        case ["compile", backend, layers]:
            print(compile_seconds(backend, int(layers)))
        case ["passes", ranks, layers]:
            print(*passes_seconds(int(ranks), int(layers)))
        case ["whole" | "blocks" as way, layers, ranks]:
            print(rank_seconds(way, int(layers), int(ranks)))
        case ["whole" | "blocks" as way, layers, ranks, folder, rank]:
            one_rank(way, int(layers), int(ranks), folder, int(rank))
        case _:
            write_results(args)


if __name__ == "__main__":
    main()
