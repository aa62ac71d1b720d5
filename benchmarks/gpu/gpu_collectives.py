"""Check permutes around all-to-alls on one GPU, then measure their times. Run this script on a machine with a GPU.

    python benchmarks/gpu/gpu_collectives.py      values and times of kernels; writes results/gpu/collectives_gpu.md
    python benchmarks/gpu/gpu_collectives.py --smoke  tiny sizes, on a CPU in Triton's interpreter; nothing is written

values   the pack kernel, of many shapes and dtypes, against PyTorch
pack     64 MB of bfloat16 (8 ranks, 32 heads of 128) and runs of 16, 32 and 64 bytes, as a share of a copy_ of
         the same number of bytes in the same process
rope     RoPE whose kernel writes the send buffer, against RoPE and then the pack

Times are medians over interleaved repeats of CUDA graphs, by CUDA events.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

if not find_spec("triton"):
    print("Triton is not installed: nothing to check, nothing to time")
    sys.exit()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

sys.path.insert(0, str(Path(__file__).parents[1]))

from measuring.clock import Clock, Job
from measuring.tables import describe_run, markdown

from sp_compile.lowering.triton import move_kernel as move

RESULTS = Path(__file__).parents[1] / "results" / "gpu" / "collectives_gpu.md"
BF16 = torch.bfloat16
TARGETS = {"1 KB": 0.90, "64 B": 0.80, "32 B": 0.65, "16 B": 0.50}
ROPE_TARGET = 1.7


@dataclass(frozen=True)
class Sizes:
    """rows: of each rank."""

    ranks: int = 8
    rows: int = 8192
    heads: int = 32
    head_dim: int = 128
    repeats: int = 15
    inner: int = 20


SMOKE = Sizes(ranks=2, rows=32, heads=4, head_dim=16, repeats=1, inner=1)


def blocks(x: Tensor, n: int) -> Tensor:
    """Return a view (n, s, h, ...) of x (s, n * h, ...), which is packed before heads are scattered."""
    return x.unflatten(1, (n, -1)).movedim(1, 0)


# Values.


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * 50
    return x.to(dtype)


def same(found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise SystemExit(f"wrong values: {list(found.shape)} {found.dtype}")


def values(device: torch.device, large: bool) -> str:
    """Raise if a value is wrong; return the number of checks as text."""
    checked = 0
    shapes = [(6, 4, 10), (130, 16, 8), (1, 8, 3), (64, 4, 128)] + ([(4096, 32, 128), (100003, 8, 8)] if large else [])
    for shape, dtype in itertools.product(shapes, (BF16, torch.float32, torch.bool, torch.int64, torch.complex64)):
        x = draw(shape, dtype, device)
        for source in (blocks(x, 2), x.movedim(2, 0), x[::2, :, 1:].movedim(0, 2), x[:1].expand(x.shape)):
            target = torch.empty(source.shape, dtype=dtype, device=device)
            assert move.copy_strided(target, source)
            same(target, source.clone())
            checked += 1
    return f"{checked} copies are right"


# Times.


def timed(jobs: dict[str, Job], sizes: Sizes, clock: Clock) -> dict[str, float]:
    """Milliseconds of each. On a GPU `inner` calls are one CUDA graph: to launch a copy takes longer than it runs."""
    if not clock.cuda:
        return clock.interleaved(jobs, sizes.repeats, sizes.inner)
    graphs: dict[str, Job] = {name: _graph(job, sizes.inner) for name, job in jobs.items()}
    times = clock.interleaved(graphs, sizes.repeats, 1)
    return {name: ms / sizes.inner for name, ms in times.items()}


def _graph(job: Job, calls: int) -> Job:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and allocates buffers that stay
            job()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            job()
    return graph.replay


def packing(sizes: Sizes, device: torch.device, clock: Clock) -> Table:
    """Return the times of packs of 2 * rows * heads * head_dim bytes for several runs, of a copy_ and of PyTorch."""
    n, elements = sizes.ranks, sizes.rows * sizes.heads * sizes.head_dim
    table = Table("run", "shape", "way", "ms", "GB/s", "share of copy", "target", title="pack, bfloat16")
    for name in TARGETS:
        run = sizes.heads * sizes.head_dim // n if name == "1 KB" else int(name.split()[0]) // 2
        x = draw((elements // (n * run), n * run), BF16, device)
        source = blocks(x, n)
        target = torch.empty(source.shape, dtype=BF16, device=device)
        flat, other = x.flatten(), torch.empty_like(x.flatten())
        jobs: dict[str, Job] = {
            "copy_": partial(other.copy_, flat),
            "kernel": partial(move.copy_strided, target, source),
            "contiguous": partial(lambda source: source.contiguous(), source),
        }
        times = timed(jobs, sizes, clock)
        for way, ms in times.items():
            share = f"{times['copy_'] / ms:.2f}"
            rate = f"{2 * x.numel() * 2 / ms / 1e6:.0f}"
            goal = f"{TARGETS[name]:.2f}" if way == "kernel" else ""
            table.add_row(f"{run * 2} B", str(list(source.shape)), way, f"{ms:.4f}", rate, share, goal)
    return table


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def roping(sizes: Sizes, device: torch.device, clock: Clock) -> Table:
    """Both by Inductor: one kernel that rotates and packs, or one that rotates and then a copy."""
    n, shape = sizes.ranks, (sizes.rows, sizes.heads, sizes.head_dim)
    x = draw(shape, BF16, device)
    cos, sin = (draw((shape[0], 1, shape[2]), BF16, device, seed) for seed in (1, 2))
    rotate = torch.compile(rope, dynamic=False)
    both = torch.compile(lambda *args: blocks(rope(*args), n).contiguous(), dynamic=False)
    target = torch.empty(blocks(x, n).shape, dtype=BF16, device=device)
    expected = blocks(rotate(x, cos, sin), n)
    if not torch.allclose(both(x, cos, sin).float(), expected.float(), rtol=2e-2, atol=2e-2):
        raise SystemExit("wrong values: RoPE and pack in one kernel")
    jobs: dict[str, Job] = {
        "in one kernel": lambda: both(x, cos, sin),
        "RoPE, then contiguous": lambda: blocks(rotate(x, cos, sin), n).contiguous(),
        "RoPE, then the pack kernel": lambda: move.copy_strided(target, blocks(rotate(x, cos, sin), n)),
    }
    times = timed(jobs, sizes, clock)
    table = Table("", "ms", "in one is faster by", "target", title=f"RoPE of {list(shape)} bfloat16 and pack")
    for name, ms in times.items():
        goal = f"{ROPE_TARGET}" if "contiguous" in name else ""
        table.add_row(name, f"{ms:.4f}", f"{ms / times['in one kernel']:.2f}", goal)
    return table


def facts(device: torch.device) -> str:
    return "\n".join(
        (
            describe_run(device.type),
            f"- `python benchmarks/gpu/gpu_collectives.py {' '.join(sys.argv[1:])}".rstrip() + "`",
            "- medians of interleaved repeats",
        )
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; times mean nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args, console = parse_args(), Console()
    cuda = torch.cuda.is_available()
    if not cuda and not args.smoke:
        console.print("no GPU here: --smoke checks tiny values in Triton's interpreter")
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    lines = [values(device, large=cuda and not args.smoke)]
    console.print(lines[0])
    sizes, clock = Sizes() if cuda and not args.smoke else SMOKE, Clock(device)
    parts: list[Callable[..., Table]] = [packing, roping]
    tables = [part(sizes, device, clock) for part in parts] if cuda or args.smoke else []
    for table in tables:
        console.print(table)
    if cuda and not args.smoke:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        text = [f"## {table.title}\n\n{markdown(table)}" for table in tables]
        checks = "\n".join(f"- {line}" for line in lines)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n\n".join(["# Permutes around all-to-alls", facts(device), checks, *text]) + "\n")
        console.print(f"written: {os.path.relpath(args.output)}")


if __name__ == "__main__":
    main()
