"""Measure the CPU time of sequence-parallel attention, of all ranks together over a single device.

    python benchmarks/attention.py [--seq 8192] [--ranks 2 4] [--rounds 5]

A block of causal attention with its projections and a norm is compiled with backend="sp" for every strategy. It is
compared with backend="inductor" on one process, the ops of sp_compile.functional, and handwritten modules (both in
eager mode; handwritten.py). Forward and backward are measured. The variants take turns in every round. The medians over
the rounds of (CPU time summed over the ranks) / (CPU time of a single device in the same round) are printed. All
processes share one core, so that no variant has more concurrent processes than another; freed memory is not returned.
Writes benchmarks/results/attention_cpu.md.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from measuring.attention_ranks import Case, cases, work
from measuring.counting import Counts
from measuring.tables import commit, markdown, processor

RESULTS = Path(__file__).parent / "results" / "attention_cpu.md"
TARGETS = {"ulysses": 1.05, "ring": 1.15, "gather": 1.10}
TOLERANCE = 1e-3  # float32 sums in another order


def measure(args: argparse.Namespace) -> list[dict]:
    """Run all ranks; return the measurements that each rank saved."""
    with tempfile.TemporaryDirectory(prefix="attention-") as folder:
        torch.multiprocessing.spawn(work, (args, folder), nprocs=max(args.ranks))
        return [torch.load(f"{folder}/rank{r}.pt", weights_only=False) for r in range(max(args.ranks))]


def share_one_core() -> None:
    """Run this process and its children on one core, as hardware threads of a core increase each other's CPU time."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def keep_memory() -> None:
    """Make later processes keep freed memory, as on a GPU: new pages would cost more than copies into them."""
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def totals(found: list[dict], which: int = 0) -> dict[Case, list[float]]:
    """Return the CPU seconds of all ranks in each round, by case; with which=1 those in the kernel."""
    rounds = list(zip(*(rank["seconds"] for rank in found)))
    return {case: [sum(rank[case][which] for rank in ranks) for ranks in rounds] for case in rounds[0][0]}


def ratios(found: list[dict], over: Case) -> dict[Case, list[float]]:
    """case -> in each round, its CPU time over all ranks / that of `over`."""
    seconds = totals(found)
    return {case: [a / b for a, b in zip(of, seconds[over])] for case, of in seconds.items()}


def time_table(found: list[dict]) -> Table:
    table = Table("ranks", "attention", "how", "CPU / one device", "rounds", "CPU s", "kernel s", "target", "")
    seconds, kernel = totals(found), totals(found, 1)
    for case, values in ratios(found, Case("one device", "compiled", 1)).items():
        median = statistics.median(values)
        target = TARGETS.get(case.what) if case.how == "compiled" else None
        judged = ["", ""] if target is None else [f"{target:.2f}", "met" if median <= target else "MISSED"]
        spread = f"{min(values):.3f} to {max(values):.3f}"
        spent = [f"{statistics.median(of[case]):.2f}" for of in (seconds, kernel)]
        table.add_row(str(case.ranks), case.what, case.how, f"{median:.3f}", spread, *spent, *judged)
    return table


def hand_table(found: list[dict]) -> Table:
    """Return the ratios of CPU time to the handwritten module of the same strategy, and the counts."""
    table = Table("ranks", "attention", "how", "CPU / handwritten", "collectives", "which", "copies")
    counts: dict[Case, Counts] = found[0]["counts"]
    for hand in (case for case in counts if case.how == "handwritten"):
        against = ratios(found, hand)
        for how in ("compiled", "op", "handwritten"):
            case = Case(hand.what, how, hand.ranks)
            if case not in counts:
                continue
            c = counts[case]
            which = ", ".join(f"{number} {name}" for name, number in sorted(c.collectives.items()))
            row = [f"{statistics.median(against[case]):.3f}", str(sum(c.collectives.values())), which]
            table.add_row(str(case.ranks), case.what, how, *row, str(c.copies))
    return table


def report(args: argparse.Namespace, tables: list[Table]) -> str:
    facts = [
        f"- {date.today()}, {processor()}, {os.cpu_count()} logical CPUs; all ranks share one, with one thread each",
        f"- commit {commit()}",
        f"- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}",
        f"- `python benchmarks/attention.py {' '.join(sys.argv[1:])}".rstrip() + "`",
        f"- S = {args.seq}, {args.heads} heads of {args.head_dim}, batch 1, float32, causal; {args.rounds} rounds",
        "- malloc " + ("as it is" if args.return_memory else "(glibc) keeps freed memory in all variants"),
        "- CPU s: sum over the ranks, forward and backward; CPU / one device: median of the ratios within a round",
        "- collectives and copies: counts in one step of rank 0, from its profile",
    ]
    return "\n\n".join(["# Attention on CPU", "\n".join(facts), *map(markdown, tables)]) + "\n"


def show_heaviest(console: Console, counts: dict[Case, Counts]) -> None:
    for case, c in counts.items():
        console.print(f"\n{case.ranks} ranks, {case.what}, {case.how}: ms of rank 0, waiting for the core included")
        for name, milliseconds in c.heaviest.items():
            console.print(f"  {milliseconds:9.1f}  {name}", highlight=False, markup=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--return-memory", action="store_true", help="leave the C library's malloc as it is")
    parser.add_argument("--only", nargs="+", help="kinds of attention to run")
    parser.add_argument("--profile", action="store_true", help="show the operators of rank 0's time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.cases = [c for c in cases(args.ranks, args.heads) if c.ranks == 1 or c.what in (args.only or [c.what])]
    return args


def main() -> None:
    args = parse_args()
    share_one_core()
    if not args.return_memory:
        keep_memory()
    console = Console()
    found = measure(args)
    errors = [(error, case) for rank in found for case, error in rank["errors"].items()]
    worst, where = max(errors, key=lambda pair: pair[0])
    if worst > TOLERANCE:
        raise SystemExit(f"{where}: the gradients differ from one device's by {worst:.1e} of the largest")
    tables = [time_table(found), hand_table(found)]
    console.print(*tables)
    if args.profile:
        show_heaviest(console, found[0]["counts"])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(report(args, tables))
    console.print(f"written: {args.output}")


if __name__ == "__main__":
    main()
