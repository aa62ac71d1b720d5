"""Measure the compile time that the backend adds, in new processes without caches.

    python benchmarks/compile_time.py

The first table has the time that compilation adds to a first step, with backend="inductor" and with backend="sp" on one
rank. The second one has tracing and the passes without Inductor, which should be linear in the layers. The third one
compares one graph of the model with one of each block, on real ranks with Inductor: equal blocks share a graph, so
their time should not grow. The fourth one, "starts", has the CPU seconds of all ranks with torch's caches on disk: a
first start with an empty cache, and a second start of the same program with the cache of the first. The other tables
have no caches. CPU seconds include the C++ compiler, so that a busy machine does not matter. Tables are written to
results/compile_cpu.md; `--only blocks` selects one of them. "starts" is written only if it is selected.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring.gloo_ranks import joined
from measuring.tables import commit, markdown, processor
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from models import DecoderLM

SEQ = 512  # short: compile time does not depend on it
Options = dict[str, str]
TABLES = "backends", "growth", "blocks", "starts"
RESULTS = Path(__file__).parent / "results" / "compile_cpu.md"


def inputs(layers: int) -> tuple[DecoderLM, Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(256, (1, SEQ))
    return DecoderLM(layers=layers), ids, ids.clone()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    return sum(os.times()[:4])


def first_step(compiled: Callable[[Tensor, Tensor], Tensor], ids: Tensor, labels: Tensor) -> float:
    """Return the CPU seconds that compiling forward and backward adds to the first step."""
    seconds = []
    for _ in range(2):
        start = cpu_seconds()
        compiled(ids, labels).backward()
        seconds.append(cpu_seconds() - start)
    return seconds[0] - seconds[1]


def compile_seconds(backend: str, layers: int) -> float:
    model, ids, labels = inputs(layers)
    return first_step(torch.compile(model, backend=backend), ids, labels)


def by_blocks(model: DecoderLM, backend: str = "sp", options: Options | None = None) -> Callable[..., Tensor]:
    """Return the model with each block and the tail compiled separately; with "sp" values between them stay sharded."""
    if backend == "sp":
        options = {"outputs": "lazy", **(options or {})}
    for block in model.blocks:
        block.compile(backend=backend, options=options)

    @torch.compile(backend=backend, options=options)
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


def start_seconds(backend: str, compiler: str, way: str, layers: int) -> tuple[float, float]:
    """CPU seconds that compilation adds to this process's first step, and those of the process so far."""
    model, ids, labels = inputs(layers)
    name, options = ("sp", {"compiler": compiler}) if backend == "sp" else (compiler, None)
    whole = partial(torch.compile, model, backend=name, options=options)
    added = first_step(by_blocks(model, name, options) if way == "blocks" else whole(), ids, labels)
    return added, cpu_seconds()


def start_of_rank(case: Sequence[str], folder: str, ranks: int, rank: int) -> tuple[float, float]:
    """The start of one rank; without this package, each rank is a program of its own."""
    backend, compiler, way, layers = case
    if backend != "sp" or ranks == 1:
        torch.set_num_threads(1)
        return start_seconds(backend, compiler, way, int(layers))
    with joined(rank, ranks, folder):
        return start_seconds(backend, compiler, way, int(layers))


def start(case: Sequence[str], ranks: int, cache: str) -> list[tuple[float, float]]:
    """The seconds of `start_of_rank` for each rank, in processes that share a cache."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env |= {"PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": ""}  # an installed package has its bytecode
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", "start", *case, folder, str(ranks)]
        pipe = partial(subprocess.Popen, env=env, stdout=subprocess.PIPE, text=True)
        processes = [pipe([*command, str(rank)]) for rank in range(ranks)]
        printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return [(float(a), float(b)) for a, b in (text.splitlines()[-1].split() for text in printed)]


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


def starts(console: Console, args: argparse.Namespace) -> Table:
    """First and second start of each case: compile seconds of all ranks and of the largest one, the least of `repeats`.

    A ratio compares the largest rank with plain torch.compile, which each rank would run for itself.
    """
    table = Table("compiler", "way", "layers", "backend", "ranks", title="first and second start, CPU s")
    for column in ("first, sum", "largest rank", "ratio", "second, sum", "largest rank", "ratio", "process of rank 0"):
        table.add_column(column)
    for compiler, way, layers in product(args.compilers, args.ways, args.start_layers):
        sides = [("plain", 1), *(("sp", ranks) for ranks in range(1, args.ranks + 1))]
        least: dict[tuple[str, int], tuple[float, ...]] = dict.fromkeys(sides, (float("inf"),) * 5)
        with console.status(f"starting {compiler} {way} {layers}"):
            for _, (backend, ranks) in product(range(args.repeats), sides):  # the sides alternate
                with tempfile.TemporaryDirectory() as cache:
                    pair = [start((backend, compiler, way, layers), ranks, cache) for _ in range(2)]
                seconds = [of(a for a, _ in one) for one in pair for of in (sum, max)]
                least[backend, ranks] = tuple(map(min, least[backend, ranks], [*seconds, pair[1][0][1]]))
        plain = least["plain", 1]
        for (backend, ranks), of_side in least.items():
            numbers = [f"{x:.1f}" for x in of_side]
            numbers.insert(2, f"{of_side[1] / plain[1]:.2f}")
            numbers.insert(5, f"{of_side[3] / plain[3]:.2f}")
            table.add_row(compiler, way, layers, backend, str(ranks), *numbers)
        console.print(table)
    return table


def report(tables: Sequence[Table], args: argparse.Namespace) -> str:
    """Return the report, with the load of the machine, which slightly increases CPU seconds."""
    flags = f"--layers {args.layers} --ranks {args.ranks} --repeats {args.repeats} --only {' '.join(args.only)}"
    load = f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    facts = [
        f"- {date.today()}, {processor()}, torch {torch.__version__}",
        f"- `python benchmarks/compile_time.py {flags}`, every cache off except in starts; commit {commit()}",
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
        "starts": partial(starts, console, args),
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
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES[:3])
    parser.add_argument("--compilers", nargs="+", default=["aot_eager", "inductor"], help="of starts")
    parser.add_argument("--ways", nargs="+", default=["whole", "blocks"], help="of starts")
    parser.add_argument("--start-layers", nargs="+", default=["4", "16"], help="of starts")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--beside", default="", help="other work on the machine, for the report")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    match args.measure:
        case ["compile", backend, layers]:
            print(compile_seconds(backend, int(layers)))
        case ["start", *case, folder, ranks, rank]:
            print(*start_of_rank(case, folder, int(ranks), int(rank)))
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
