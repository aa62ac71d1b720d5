"""CPU time and memory of scans on one device, one thread, against torch's own and against a copy of the same tensor.

    python benchmarks/scans.py [--rounds 9] [--seq 65536] [--generic 4096]

The functions take turns, in every round the same; medians over the rounds of the ratios of CPU time, so that a machine
which others use slows both. `copy` is a clone: what reading x and writing the result cannot be faster than. Memory is
what the functions allocate, counted op by op. Writes benchmarks/results/scans_cpu.md.
"""

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from tables import markdown, processor

from sp_compile import inclusive_scan, linear_scan, segmented_scan
from sp_compile.lowering.scan import native

RESULTS = Path(__file__).parent / "results" / "scans_cpu.md"
Job = Callable[[], object]
TORCH = {
    "sum": torch.cumsum,
    "prod": torch.cumprod,
    "max": torch.cummax,
    "min": torch.cummin,
    "logsumexp": torch.logcumsumexp,
}


def seconds(job: Job) -> float:
    begin = time.process_time()
    job()
    return time.process_time() - begin


def interleaved(jobs: dict[str, Job], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each job in each round, after one round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            found[name].append(seconds(job))
    return {name: each[1:] for name, each in found.items()}


def ratio(found: dict[str, list[float]], over: str, under: str) -> float:
    return statistics.median(a / b for a, b in zip(found[over], found[under]))


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).mul_(0.01).add_(1).to(dtype)
    return torch.randint(0, 2, shape, dtype=dtype)


def scans(args: argparse.Namespace) -> Table:
    """Times of torch and of a copy over ours."""
    table = Table("op", "shape", "dim", "dtype", "ms", "torch / ours", "ours / copy", "target")
    rows = args.seq
    cases = [
        ("sum", (rows, 64), 0, dtype) for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    ]
    cases += [("sum", (rows, 128), 0, torch.float32), ("sum", (8, rows // 8, 256), 1, torch.float32)]
    cases += [(op, (rows, 64), 0, torch.float32) for op in TORCH if op != "sum"]
    cases += [(op, (64, rows), 1, torch.float32) for op in TORCH]
    cases += [("sum", (64, rows), 1, dtype) for dtype in (torch.int64, torch.bfloat16)]
    cases += [("sum", (rows * 64,), 0, torch.float32)]
    for op, shape, dim, dtype in cases:
        x = values(shape, dtype)
        jobs: dict[str, Job] = {
            "torch": lambda op=op, x=x, dim=dim: TORCH[op](x, dim),
            "ours": lambda op=op, x=x, dim=dim: inclusive_scan(x, dim, op, check=False),
            "copy": x.clone,
        }
        found = interleaved(jobs, args.rounds)
        target = ">= 4" if dim < x.ndim - 1 else ">= 0.95"
        size = " x ".join(map(str, shape))
        ms = 1000 * statistics.median(found["ours"])
        faster, floor = ratio(found, "torch", "ours"), ratio(found, "ours", "copy")
        name = str(dtype).removeprefix("torch.")
        table.add_row(op, size, str(dim), name, f"{ms:.2f}", f"{faster:.2f}", f"{floor:.2f}", target)
    return table


def segments(args: argparse.Namespace) -> Table:
    """A segmented scan over an inclusive one, and over torch's cumsum."""
    table = Table("shape", "segments", "ms", "torch.cumsum / ours", "ours / unsegmented")
    x = values((args.seq, 64), torch.float32)
    for count in (1, 64, args.seq // 4):
        ids = torch.arange(args.seq) * count // args.seq
        jobs: dict[str, Job] = {
            "ours": lambda ids=ids: segmented_scan(x, ids, 0, check=False),
            "plain": lambda: inclusive_scan(x, 0),
            "torch": lambda: x.cumsum(0),
        }
        found = interleaved(jobs, args.rounds)
        ms = 1000 * statistics.median(found["ours"])
        table.add_row(
            f"{args.seq} x 64", str(count), f"{ms:.2f}", f"{ratio(found, 'torch', 'ours'):.2f}",
            f"{ratio(found, 'ours', 'plain'):.2f}",
        )  # fmt: skip
    return table


def generic(a: Tensor, b: Tensor) -> Tensor:
    """torch.associative_scan as one can run it on a CPU."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def step(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(step, (a, b), dim=0, combine_mode="generic")[1]


def recurrences(args: argparse.Namespace) -> Table:
    """linear_scan against the generic associative_scan: eager at the whole length, compiled at a shorter one."""
    table = Table(
        "length", "ours ms", "eager / ours", "compiled / ours", "compile s", "ours compile s", "target"
    )
    for rows, compiled in ((args.seq, False), (args.generic, True)):
        a, b = torch.rand(rows, 64), torch.randn(rows, 64)
        jobs: dict[str, Job] = {
            "ours": lambda a=a, b=b: linear_scan(a, b, 0),
            "eager": lambda a=a, b=b: generic(a, b),
        }
        took = {}
        if compiled:
            for name, fn in (("compiled", generic), ("ours compiled", lambda a, b: linear_scan(a, b, 0))):
                torch._dynamo.reset()
                run = torch.compile(fn, fullgraph=True)
                begin = time.process_time()
                run(a, b)
                took[name] = time.process_time() - begin
                jobs[name] = lambda run=run, a=a, b=b: run(a, b)
        found = interleaved(jobs, args.rounds)
        faster = f"{ratio(found, 'compiled', 'ours compiled'):.2f}" if compiled else "-"
        each = [f"{took[name]:.1f}" if compiled else "-" for name in ("compiled", "ours compiled")]
        ms = 1000 * statistics.median(found["ours"])
        table.add_row(
            str(rows), f"{ms:.2f}", f"{ratio(found, 'eager', 'ours'):.2f}", faster, *each,
            "run >= 1.2, compile <= 1/5" if compiled else "-",
        )  # fmt: skip
    return table


def peak(job: Job) -> int:
    """The most bytes that ops of the job hold at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        job()
    held = most = 0
    for event in sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def memory(args: argparse.Namespace) -> tuple[Table, float]:
    """Bytes that forward and backward of a linear_scan hold at a time, over those of a and b; and their growth."""
    table = Table("length", "held MB", "held / bytes of a and b", "target")
    points = []
    for rows in (args.seq // 16, args.seq // 8, args.seq // 4, args.seq // 2, args.seq):
        a, b = (torch.rand(rows, 64, requires_grad=True) for _ in range(2))
        grad = torch.randn(rows, 64)
        held = peak(lambda a=a, b=b, grad=grad: linear_scan(a, b, 0).backward(grad))
        points.append((math.log(rows), math.log(held)))
        table.add_row(str(rows), f"{held / 1e6:.1f}", f"{held / (2 * a.nbytes):.2f}", "<= 4")
    return table, statistics.linear_regression(*zip(*points)).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seq", type=int, default=65536)
    parser.add_argument(
        "--generic", type=int, default=4096, help="the length at which associative_scan is compiled"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table, slope = memory(args)
    parts = {
        "Scans": scans(args),
        "Segmented sums, float32": segments(args),
        "Linear recurrence, float32, 64 columns, against torch.associative_scan (generic)": recurrences(args),
        f"Memory of linear_scan, forward and backward; bytes grow as S^{slope:.2f}": table,
    }
    how = "C++" if native.available() else "torch ops: no C++ compiler was found"
    head = (
        f"{date.today()}, {processor()}, {platform.system()}, torch {torch.__version__}, 1 thread, {args.rounds} rounds; "
        f"scans run in {how}"
    )
    lines = ["# Scans on a CPU", "", f"`python benchmarks/scans.py`: {head}.", ""]
    for title, part in parts.items():
        Console().print(title, part)
        lines += [f"## {title}", "", markdown(part), ""]
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
