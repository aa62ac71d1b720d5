"""Measure the CPU time of scans, relative to torch's scans and to a copy of the input (one pass over memory).

    python benchmarks/scans.py [--rounds 9] [--length 65536]

In every round, our scan, torch's and a copy run in turn, in one process with one thread. The tables have the medians
over the rounds of the ratios of their CPU times in a round. There are two such processes. In the first one, malloc
returns large freed memory to the system, as it does by default. In the second one, it keeps freed memory, so that the
time of new pages is not included. Recurrences are compared with torch.associative_scan(combine_mode="generic"), in
eager mode and compiled by Inductor: time, compile time and memory of the backward. Writes
benchmarks/results/scans_cpu.md.
"""

import argparse
import os
import pickle
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from measuring.scans.scan_cases import Times, cases, time_of
from measuring.scans.scan_linear import WIDTH, extra_bytes, fresh, slope
from measuring.tables import commit, markdown, processor

RESULTS = Path(__file__).parent / "results" / "scans_cpu.md"
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
SWEEP = [1 << k for k in range(10, 17)]
SWEEP_OF_TORCH = [128, 256, 512, 1024]


def measure(args: argparse.Namespace, environment: dict[str, str]) -> list[Times]:
    """Run all cases in a new process with these environment variables, and return their times."""
    command = [sys.executable, __file__, "--measure", "--rounds", str(args.rounds)] + ["--small"] * args.small
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
    return pickle.loads(done.stdout)


def time_tables(returned: list[Times], kept: list[Times]) -> list[Table]:
    tables = []
    for part in dict.fromkeys(times.part for times in returned):
        ratios = ["its time / ours", "freed memory kept", "ours / copy", "freed memory kept"]
        columns = ["ms", "against", *ratios, "target", ""]
        table = Table(part, *columns)
        for a, b in zip(returned, kept):
            if a.part == part:
                table.add_row(*row(a, b))
        tables.append(table)
    return tables


def row(times: Times, kept: Times) -> list[str]:
    other = next(iter(times.others))
    ratio = times.ratio(other)
    judged = ["", ""]
    if times.target is not None:
        judged = [f"{times.target:g}", "met" if ratio >= times.target else "MISSED"]
    copies = [f"{1 / t.ratio('copy'):.2f}" for t in (times, kept)]
    found = [f"{ratio:.2f}", f"{kept.ratio(other):.2f}", *copies]
    return [times.name, f"{statistics.median(times.ours):.2f}", other, *found, *judged]


def compile_table(length: int) -> Table:
    """Compare scans compiled by Inductor, each in a process with an empty cache."""
    table = Table(f"torch.compile, [{length}, 64] dim 0", "CPU s to compile", "ms to run", "target", "")
    ours, torchs = fresh("ours", length), fresh("torch", length)
    (seconds,), (others,) = ours["compile"], torchs["compile"]
    run, other_run = statistics.median(ours["run"]), statistics.median(torchs["run"])
    table.add_row("linear_scan", f"{seconds:.1f}", f"{run:.3f}", "", "")
    table.add_row("associative_scan, generic", f"{others:.1f}", f"{other_run:.3f}", "", "")
    compiled, ran = others / seconds, other_run / run
    for what, ratio, target in (("to compile", compiled, 5), ("to run", ran, 1.2)):
        cells = [f"{ratio:.1f}", ""] if what == "to compile" else ["", f"{ratio:.1f}"]
        table.add_row(f"theirs / ours, {what}", *cells, f"{target}", "met" if ratio >= target else "MISSED")
    return table


def memory_table(small: bool) -> Table:
    """Compare the extra memory of forward and backward by length."""
    table = Table(f"(S, {WIDTH}), S =", "linear_scan: extra / input", "associative_scan's operator: extra / input")
    lengths, of_torch = (SWEEP[:2], SWEEP_OF_TORCH[:2]) if small else (SWEEP, SWEEP_OF_TORCH)
    ours = {length: extra_bytes(length) for length in lengths}
    torchs = {length: extra_bytes(length, torchs=True) for length in of_torch}
    for length in sorted({*ours, *torchs}):
        cells = (f"{found[length]:.2f}" if length in found else "" for found in (ours, torchs))
        table.add_row(str(length), *cells)
    slopes = [slope(list(found), list(found.values())) for found in (ours, torchs)]
    table.add_row("slope, both as logarithms", *(f"{value:.3f}" for value in slopes))
    met = max(ours.values()) <= 4 and slopes[0] <= 1.05
    table.add_row("target", "4, slope 1.05: " + ("met" if met else "MISSED"), "")
    return table


def report(args: argparse.Namespace, tables: list[Table]) -> str:
    facts = [
        f"- {date.today()}, {processor()}, {os.cpu_count()} logical CPUs shared with other programs; one thread",
        f"- commit {commit()}",
        f"- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}",
        f"- `python benchmarks/scans.py {' '.join(sys.argv[1:])}".rstrip() + "`",
        f"- CPU time; medians of the ratios within each of {args.rounds} rounds",
        "- ours: the public functions of `sp_compile.functional`",
        "- columns `freed memory kept`: malloc keeps freed memory, so that no time is spent on new pages. In the "
        "other columns, large buffers are in new pages. Ours requests huge pages for them, as NumPy does; torch may "
        "reuse pages",
        "- copy: reads x once and writes the result once; a scan cannot do less",
    ]
    return "\n\n".join(["# Scans on CPU", "\n".join(facts), *map(markdown, tables)]) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, default=65536, help="length of the compiled scans")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if args.measure:
        found = [time_of(make(), args.rounds) for make in cases(args.small)]
        sys.stdout.buffer.write(pickle.dumps(found))
        return
    console = Console(width=160)
    tables = time_tables(measure(args, {}), measure(args, KEEPING))
    tables += [compile_table(args.length), memory_table(args.small)]
    console.print(*tables)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(report(args, tables))
    console.print(f"written: {args.output}")


if __name__ == "__main__":
    main()
