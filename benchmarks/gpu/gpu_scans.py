"""Check scans on one GPU, then measure their times. Run this script on a machine with a GPU.

    python benchmarks/gpu/gpu_scans.py                      values and times of every way of the Triton row
    python benchmarks/gpu/gpu_scans.py values               some minutes of it, most of them Triton's compiler
    python benchmarks/gpu/gpu_scans.py times --only 1-D --sizes     tiles and warps, to set `dispatch.TileSizes` by

values  every way against float64 by other code, exactly for integers
times   every way next to torch and cupy, as a share of a copy_ in the same process of the bytes that the scan
        reads and writes; "default" is the choice of the table in `kernels/triton/dispatch.py`. That table should
        have a row for the way with the best share on a shape

Times are medians over interleaved repeats, by CUDA events. Writes benchmarks/results/gpu/scans_gpu.md. Without a GPU
the values of tiny tensors are checked in Triton's interpreter, and nothing is written.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

if not find_spec("triton"):
    print("Triton is not installed: nothing to check, nothing to time")
    sys.exit()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

sys.path.insert(0, str(Path(__file__).parents[1]))

from measuring.clock import Clock, Job
from measuring.scans.scan_schedules import SCHEDULES, using_schedule
from measuring.scans.scan_values import CHECKED, F32, FEW, I64, ROW, Shape, draw, draw_starts, values
from measuring.tables import describe_run, markdown

from sp_compile import linear_scan
from sp_compile.lowering.scan import scan_table as table
from sp_compile.lowering.scan.kernels.triton.dispatch import TileSizes

PARTS = ["values", "times"]
RESULTS = Path(__file__).parents[1] / "results" / "gpu" / "scans_gpu.md"
BF16 = torch.bfloat16
SIZES = [TileSizes(walk) for walk in [(8192, 4), (4096, 2), (16384, 4), (16384, 8), (32768, 8)]]


@dataclass(frozen=True)
class Case:
    """A scan. ours: runs by each way; bytes: reads and writes; others: jobs to compare with, the first one torch's."""

    name: str
    lines: int
    bytes: int
    ours: Job
    share: float
    others: dict[str, Job] = field(default_factory=dict)
    over: float | None = None


def cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    """Made one at a time: they are large."""
    for power, dtype in itertools.product((26, 28, 29), (F32, BF16)):
        yield lambda p=power, d=dtype: one_dim(2**p, d, device)
    for experts, dtype in itertools.product((2, 8, 16, 64, 128), (F32, torch.int32)):
        yield lambda e=experts, d=dtype: columns((1, 2**20, e), d, device)
    yield lambda: columns((1, 2**24, 16), F32, device)
    yield lambda: columns((8, 4096, 8192), F32, device)
    yield lambda: columns((2**18, 1024, 1), F32, device)
    yield lambda: segmented((1, 2**28, 1), device)
    yield lambda: segmented((1, 2**22, 64), device)
    for shape in ((1, 2**27, 1), (1, 2**22, 64), (8, 4096, 4096)):
        yield lambda s=shape: recurrence(s, device)
        yield lambda s=shape: recurrence_backward(s, device)
    for length in (8192, 32768):
        yield lambda n=length: delta_rule(n, device)


def one_dim(length: int, dtype: torch.dtype, device: torch.device) -> Case:
    x = draw((1, length, 1), dtype, device)
    flat, out = x.flatten(), torch.empty(length, dtype=dtype, device=device)
    others: dict[str, Job] = {"torch.cumsum": lambda: torch.cumsum(flat, 0, out=out)}
    if find_spec("cupy") and dtype is F32:
        import cupy

        source, target = cupy.from_dlpack(flat), cupy.from_dlpack(out)
        others["cupy.cumsum"] = lambda: cupy.cumsum(source, out=target)
    name = f"1-D {str(dtype)[6:]} 2^{length.bit_length() - 1}"
    moved = 2 * x.numel() * x.element_size()
    return Case(name, 1, moved, lambda: ROW.scan(x, None, "sum", False, False, dtype, F32), 0.80, others, 1.0)


def columns(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """int32 is summed up in int64, as torch does."""
    x = draw(shape, dtype, device)
    result = dtype if dtype.is_floating_point else I64
    moved = x.numel() * (x.element_size() + result.itemsize)
    return Case(
        f"{list(shape)} dim 1, {str(dtype)[6:]}",
        shape[0] * shape[2],
        moved,
        lambda: ROW.scan(x, None, "sum", False, False, result, result),
        0.60,
        {"torch.cumsum": lambda: torch.cumsum(x, 1)} if shape[1] <= 2**20 else {},  # takes seconds otherwise
        20.0 if shape[0] == 1 else None,
    )


def segmented(shape: Shape, device: torch.device) -> Case:
    """Return a segmented scan whose starts are equal in all lines, as in packed sequences."""
    x, starts = draw(shape, F32, device), draw_starts((1, shape[1], 1), device)
    moved = 8 * x.numel() + starts.numel()
    job = lambda: ROW.scan(x, starts, "sum", False, False, F32, F32)  # noqa: E731
    return Case(f"segmented {list(shape)}, float32", shape[0] * shape[2], moved, job, 0.65)


def recurrence(shape: Shape, device: torch.device) -> Case:
    a, b = draw(shape, F32, device).sigmoid(), draw(shape, F32, device, 1)
    job = lambda: ROW.linear(a, b, None, False, False, F32, F32)  # noqa: E731
    return Case(f"linear_scan {list(shape)}", shape[0] * shape[2], 12 * a.numel(), job, 0.70)


def recurrence_backward(shape: Shape, device: torch.device) -> Case:
    """Return the backward of the public function: it reads a, h and a cotangent, and writes two gradients."""
    a, b = draw(shape, F32, device).sigmoid().requires_grad_(), draw(shape, F32, device, 1).requires_grad_()
    with table.using_lowering("triton"):
        h = linear_scan(a, b, 1)
    g = draw(shape, F32, device, 2)

    def job() -> object:
        with table.using_lowering("triton"):
            return torch.autograd.grad(h, (a, b), g, retain_graph=True)

    return Case(f"linear_scan backward {list(shape)}", shape[0] * shape[2], 20 * a.numel(), job, 0.60)


def delta_rule(length: int, device: torch.device) -> Case:
    """Return a forward and backward of the gated delta rule, 64 heads of 128.

    32768 tokens, and a quarter of them, as fla measured its context parallelism on 4 H800: 15.56 -> 5.73 ms
    (flash-linear-attention, pull request 691).
    """
    q, k, v = (draw((length, 64, 128), BF16, device, seed)[None].requires_grad_() for seed in range(3))
    beta, decay = draw((1, length, 64), F32, device, 3).sigmoid(), -draw((1, length, 64), F32, device, 4).exp()
    arguments = (decay[..., None], beta, *[None] * 6, 128**-0.5, "")  # no low rank, documents or initial state

    def job() -> object:
        keys = torch.nn.functional.normalize(k, dim=-1)
        out = torch.ops.sp.linear_attention(q, keys, v, *arguments)
        return torch.autograd.grad(out, (q, k, v), v)

    moved = 11 * q.numel() * q.element_size()  # four reads and writes of the forward, seven of the backward
    return Case(f"gated delta rule {length} x 64 x 128, forward and backward", 64, moved, job, 0.0)


def timed(
    case: Case, clock: Clock, repeats: int, sizes: list[TileSizes | None], device: torch.device
) -> list[list[str]]:
    """Return a row of cells for every way and every other job."""
    source = torch.zeros(case.bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    jobs: dict[str, Job] = {"copy_": lambda: target.copy_(source), "default": case.ours}
    for way, size in itertools.product(SCHEDULES, sizes):
        if way != "one" or case.lines >= FEW:
            jobs[_label(way, size)] = lambda w=way, s=size: _run(case.ours, w, s)
    jobs.update(case.others)
    times = clock.interleaved(jobs, repeats, 3)
    rival = next(iter(case.others), None)
    cells = []
    for name, ms in times.items():
        over = f"{times[rival] / ms:.2f}" if rival and name not in case.others else ""
        wanted = f"{case.share:.2f}" + (f", {case.over:g}x" if case.over else "") if name == "default" else ""
        share = f"{times['copy_'] / ms:.2f}"
        cells.append([case.name, name, f"{ms:.3f}", f"{case.bytes / ms / 1e6:.0f}", share, over, wanted])
    return cells


def _run(job: Job, way: str, sizes: TileSizes | None) -> object:
    with using_schedule(way, sizes):
        return job()


def _label(way: str, sizes: TileSizes | None) -> str:
    if sizes is None:
        return way
    held, warps = sizes.walk
    return f"{way}, {held} bytes, {warps} warps"


def facts() -> str:
    lines = [
        f"{describe_run('cuda')}, cupy {_version('cupy')}",
        f"- `python benchmarks/gpu/gpu_scans.py {' '.join(sys.argv[1:])}".rstrip() + "`",
        "- medians of interleaved repeats; GB/s and shares of a copy_ count the bytes that a scan must move: one read"
        " of its inputs and one write of its results",
    ]
    return "\n".join(lines)


def _version(package: str) -> str:
    return __import__(package).__version__ if find_spec(package) else "none"


def stop_if(wrong: list[str]) -> None:
    if wrong:
        raise SystemExit("\n".join(wrong))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="values|times", help="all if none is given")
    parser.add_argument("--sizes", action="store_true", help="time every way with several sizes")
    parser.add_argument("--only", default="", help="time only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.parts = args.parts or PARTS
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    return args


def main() -> None:
    args, console = parse_args(), Console()
    if not torch.cuda.is_available():
        stop_if(values([(2, 20, 1)], torch.device("cpu")))
        console.print("no GPU here: nothing timed; tiny values are right in Triton's interpreter")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    if "values" in args.parts:
        stop_if(values(CHECKED, device))
        console.print("values: right")
    if "times" in args.parts:
        times(args, device, console)


def times(args: argparse.Namespace, device: torch.device, console: Console) -> None:
    """Prints and writes after every case: a lease of a GPU may end."""
    headers = "case", "way", "ms", "GB/s", "of copy_", "over torch", "target"
    report = Table(*headers, title="Times")
    clock = Clock(device)
    sizes: list[TileSizes | None] = [*SIZES] if args.sizes else [None]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for make in cases(device):
        case = make()
        if args.only in case.name:
            for cells in timed(case, clock, args.repeats, sizes, device):
                report.add_row(*cells)
                console.print("  ".join(cells))
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(f"# Scans on one GPU\n\n{facts()}\n\n{markdown(report)}\n")
        del case
        torch.cuda.empty_cache()
    console.print(f"written: {os.path.relpath(args.output)}")


if __name__ == "__main__":
    main()
