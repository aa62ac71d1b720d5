"""Check attention kernels on one GPU, then measure their times. Run this script on a machine with a GPU.

    python benchmarks/gpu/gpu_attention.py                          bf16, 8 ranks of 8192 tokens, 32 heads of 128
    python benchmarks/gpu/gpu_attention.py --device cpu --small     the same code on a CPU; its times mean nothing

values  every strategy on simulated ranks against float64, forward and gradients, next to the error of a single device;
        causal, in windows, and in packed documents, in bfloat16 and float32
kernels every kernel of a block that takes it, by itself
biases  those that take floats added to scores, of heads that all of a batch share: values with and without their
        gradient against float64, some rows and keys left out; and times, beside dense arithmetic
merge   the log-sum-exp merge of two blocks, as a share of a copy_ of the same number of bytes
ranks   the steps of all ranks, one after another on this device, against single-device causal attention on the full
        sequence. The ranks' exchanges are copies within the device and are not counted; the packing around them is

Times are medians over interleaved repeats, by CUDA events. Writes benchmarks/results/gpu/attention_<device name>.md.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))

from measuring.clock import Clock, Job
from measuring.handwritten import zigzag
from measuring.tables import describe_run, markdown, processor

from sp_compile.functional import attention_functions as functional
from sp_compile.lowering import triton as triton_kernels
from sp_compile.lowering.attention.kernel_args import Kernel, KernelArgs, KernelKey
from sp_compile.lowering.attention.kernels import BLOCK_KERNELS
from sp_compile.lowering.attention.merge_blocks import merge_pointwise
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.masks.block_plan import plan_blocks
from sp_compile.lowering.masks.blocks import Kind
from sp_compile.lowering.masks.spans import full_span, span_rows
from sp_compile.lowering.triton.flex.flex_texts import PairTexts
from sp_compile.passes.canonical.attention.score_functions import SCORE, register_expression

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
WAYS = {"ulysses": "contiguous", "ring": "zigzag", "gathered": "zigzag"}
TARGETS = {"ulysses": (0.97, 0.97), "ring": (0.85, 0.90), "gathered": (0.95, 0.95)}
MERGE_TARGETS = {"share of copy": 0.85, "over eager": 4.0}
SOFT_CAP = register_expression(50 * sympy.tanh(SCORE / 50))
"""Score function of the kernel that is compiled for it."""
BIASED_SCALE, BIASED_ERROR = 0.1, {torch.bfloat16: 2e-2, torch.float32: 2e-4}
"""Scale of kernels with a bias, and their largest error over the largest value, by dtype."""
ALLOWED, EXACT = 2.0, {torch.bfloat16: 0.0, torch.float32: 1e-5}
"""Largest error as a multiple of the single-device error in the same dtype; errors that are always allowed."""


@dataclass(frozen=True)
class Sizes:
    """tokens: of each rank. checked: tokens of each rank where values are compared with float64."""

    ranks: int = 8
    tokens: int = 8192
    heads: int = 32
    head_dim: int = 128
    checked: int = 256
    repeats: int = 7
    inner: int = 10


THREADS = [ThreadPoolExecutor(1) for _ in range(Sizes.ranks)]
"""Threads of the simulated ranks: cuDNN caches its programs by thread."""
SMALL = Sizes(ranks=4, tokens=64, heads=4, head_dim=16, checked=32, repeats=2, inner=1)
Inputs = tuple[Tensor, ...]


def draw(sizes: Sizes, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Return q, k, v and a cotangent of the full sequence, (1, S, H, D)."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, tokens * sizes.ranks, sizes.heads, sizes.head_dim)
    return tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4))


def shards(whole: Inputs, way: str, n: int) -> list[Inputs]:
    """Return each rank's q, k, v and cotangent: (1, H, s, D), with rows before heads in memory, as of projections."""

    def of(x: Tensor, rank: int) -> Tensor:
        return zigzag(x, rank, n) if WAYS[way] == "zigzag" else x.chunk(n, 1)[rank].contiguous()

    return [tuple(of(x, rank).transpose(1, 2) for x in whole) for rank in range(n)]


def all_ranks(way: str, given: list[Inputs], backward: bool, **masks: Any) -> list[list[Tensor]]:
    """Result and gradients of every rank."""
    op = getattr(functional, f"{way}_attention")
    mesh = Ranks(len(given), SIMULATED_GROUP)

    def live(rank: int) -> list[Tensor]:
        *operands, grad = given[rank]
        leaves = [x.detach().requires_grad_(backward) for x in operands]
        out = op(*leaves, mesh=mesh, layout=WAYS[way], is_causal=True, check=False, **masks)
        return [out, *(torch.autograd.grad(out, leaves, grad) if backward else ())]

    return run_ranks(len(given), live, THREADS[: len(given)])


def one_device(whole: Inputs, backward: bool, allowed: Tensor | None = None) -> list[Tensor]:
    *operands, grad = (x.transpose(1, 2) for x in whole)
    leaves = [x.detach().requires_grad_(backward) for x in operands]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=allowed, is_causal=allowed is None)
    return [out, *(torch.autograd.grad(out, leaves, grad) if backward else ())]


# Values.


def masks_of(tokens: int, device: torch.device) -> dict[str, tuple[dict[str, Any], Tensor | None]]:
    """The options of each mask, and the mask as (S, S)."""
    row = torch.arange(tokens, device=device)
    causal, near = row <= row[:, None], row[:, None] - row < tokens // 50
    documents = (row * 37 // tokens)[None]
    same = documents == documents.T
    window = {"window": tokens // 50}
    return {
        "causal": ({}, None),
        "window": (window, causal & near),
        "documents": ({"documents": documents}, causal & same),
        "documents in a window": ({"documents": documents, **window}, causal & same & near),
    }


def values(sizes: Sizes, device: torch.device) -> Table:
    """Largest error over the largest true value, of results and gradients; exits where it is too large."""
    table, wrong = Table("dtype", "mask", "", "out", "dq", "dk", "dv", title="largest error against float64"), []
    masks = masks_of(sizes.checked * sizes.ranks, device).items()
    for dtype, (mask, (options, allowed)) in product(EXACT, masks):
        whole, named = draw(sizes, sizes.checked, device, dtype), (str(dtype).removeprefix("torch."), mask)
        true = one_device(tuple(x.double() for x in whole), True, allowed)
        alone = [_error(t, x) for t, x in zip(true, one_device(whole, True, allowed))]
        table.add_row(*named, "one device", *(f"{e:.1e}" for e in alone))
        for way in WAYS:
            found = all_ranks(way, shards(whole, way, sizes.ranks), True, **options)
            mine = [
                shards(tuple(t.transpose(1, 2) for t in true), way, sizes.ranks)[rank] for rank in range(sizes.ranks)
            ]
            errors = [
                max(_error(mine[rank][i], found[rank][i], t) for rank in range(sizes.ranks)) for i, t in enumerate(true)
            ]
            table.add_row(*named, way, *(f"{e:.1e}" for e in errors))
            good = all(e <= max(ALLOWED * a, EXACT[dtype]) for e, a in zip(errors, alone))
            wrong += [] if good else [", ".join((way, *named))]
    if wrong:
        Console().print(table)
        raise SystemExit(f"{'; '.join(wrong)}: more than {ALLOWED} times the error of a single device")
    return table


def _error(true: Tensor, found: Tensor, scale: Tensor | None = None) -> float:
    largest = (true if scale is None else scale).abs().max()
    return ((true - found.double()).abs().max() / largest).item()


# Times.


def merging(sizes: Sizes, device: torch.device, clock: Clock) -> Table:
    """The merge of a float32 accumulator and a bfloat16 block: kernels, a copy_, and the block itself."""
    shape = (1, sizes.heads, sizes.tokens, sizes.head_dim)
    out = torch.randn(shape, device=device)
    block = torch.randn(shape, device=device).bfloat16()
    lse, block_lse = (torch.randn(shape[:3], device=device) for _ in range(2))
    operands = out, lse, block, block_lse
    moved = 2 * (_bytes(out) + _bytes(lse)) + _bytes(block) + _bytes(block_lse)
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    compiled = torch.compile(merge_pointwise, dynamic=False)
    keys = block[:, :, : sizes.tokens // 2]
    jobs: dict[str, Job] = {
        "copy_ of the same size": lambda: target.copy_(source),
        "eager": lambda: merge_pointwise(*operands),
        "Inductor": lambda: compiled(*operands),
        "one ring step's attention": lambda: F.scaled_dot_product_attention(block, keys, keys),
    }
    kernels: dict[str, Callable[..., Any]] = {"Inductor": compiled}
    if triton_kernels.can_use_triton(out):
        from sp_compile.lowering.triton.merge_kernel import launch_merge

        jobs["Triton"] = lambda: launch_merge(*operands)
        kernels["Triton"] = launch_merge
    _check_merge(operands, kernels)
    times = clock.interleaved(jobs, sizes.repeats, sizes.inner)
    title = f"merge of {list(shape)}, {moved / 1e6:.0f} MB moved"
    table = Table("", "ms", "GB/s", "share of copy", "over eager", "of a step", title=title)
    copy, eager, step = (times[name] for name in ("copy_ of the same size", "eager", "one ring step's attention"))
    for name, ms in times.items():
        kernel = name in ("eager", "Inductor", "Triton")
        share = [f"{copy / ms:.2f}", f"{eager / ms:.1f}", f"{ms / step:.3f}"] if kernel else ["", "", ""]
        table.add_row(name, f"{ms:.3f}", f"{moved / ms / 1e6:.0f}" if share[0] else "", *share)
    table.add_row("target", "", "", *(str(t) for t in MERGE_TARGETS.values()), "0.1")
    return table


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _check_merge(operands: Inputs, kernels: dict[str, Callable[..., Any]]) -> None:
    true = merge_pointwise(*(x.double() for x in operands))
    for kernel in kernels.values():
        for expected, found in zip(true, kernel(*operands)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def kernels(sizes: Sizes, device: torch.device, clock: Clock) -> Table:
    """Kernels of one block, in the order of the table from which `sp::attend` takes the first that fits."""
    q, k, v, grad = (x[:, : sizes.tokens].transpose(1, 2) for x in draw(sizes, sizes.tokens, device))
    scale = sizes.head_dim**-0.5
    flops = 4 * sizes.heads * sizes.head_dim * sizes.tokens**2
    table = Table("block", "kernel", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s", title="kernels of a block")
    for kind in (Kind.FULL, Kind.CAUSAL):
        need = KernelKey(device, q.dtype, kind, sizes.head_dim, sizes.tokens)
        rows = span_rows(full_span(sizes.tokens), sizes.tokens, 0)
        predicate = "k <= q" if kind is Kind.CAUSAL else ""
        capped = PairTexts(plan_blocks(predicate, rows, rows), rows, rows, predicate, SOFT_CAP, {}, {}, [], [], None)
        jobs: dict[str, Job] = {}
        for kernel in BLOCK_KERNELS:
            if kernel.can_run(need) and not kernel.dense:
                case = (
                    KernelArgs(scale, pairs=capped) if kernel.fused else KernelArgs(scale, causal=kind is Kind.CAUSAL)
                )
                results = kernel.forward(q, k, v, case)
                jobs[kernel.name] = partial(kernel.forward, q, k, v, case)
                jobs[f"{kernel.name} back"] = partial(kernel.backward, grad, q, k, v, *results, case)
        times, work = clock.interleaved(jobs, sizes.repeats, 1), flops / (2 if kind is Kind.CAUSAL else 1)
        for name in (name for name in jobs if not name.endswith(" back")):
            forward, backward = times[name], times[f"{name} back"]
            rates = f"{work / forward / 1e9:.0f}", f"{2.5 * work / backward / 1e9:.0f}"
            table.add_row(kind.value, name, f"{forward:.3f}", rates[0], f"{backward:.3f}", rates[1])
    return table


def _with_bias(kernel: Kernel, bias: Tensor, causal: bool, learned: bool) -> KernelArgs:
    """The block's case for this kernel, as `sp::attend` makes it."""
    rows, scale = span_rows(full_span(bias.shape[3]), bias.shape[3], 0), BIASED_SCALE
    if kernel.fused:
        predicate = "k <= q" if causal else ""
        return KernelArgs(
            scale, pairs=PairTexts(plan_blocks(predicate, rows, rows), rows, rows, predicate, "", {}, {}, [], [], bias)
        )
    if kernel.aligned_at_end or not causal:
        return KernelArgs(scale, causal, bias=bias, bias_grad=learned)
    allowed = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).tril()[None, None]
    return KernelArgs(scale, allowed=allowed, bias=bias, bias_grad=learned)


def biases(sizes: Sizes, device: torch.device, clock: Clock) -> Table:
    """Kernels of one block with a bias (1, H, S, S), in the order of the table; dense arithmetic last."""
    columns = "dtype", "block", "kernel", "gradient", "largest error", "forward, ms", "backward, ms"
    table, wrong = Table(*columns, title=f"a bias of {sizes.heads} heads, {sizes.tokens // 2} tokens"), []
    for dtype, kind, learned in product(BIASED_ERROR, (Kind.FULL, Kind.CAUSAL), (False, True)):
        need = KernelKey(device, dtype, kind, sizes.head_dim, sizes.checked, bias=dtype, bias_grad=learned)
        jobs: dict[str, Job] = {}
        errors = {}
        for kernel in (kernel for kernel in BLOCK_KERNELS if kernel.can_run(need)):
            errors[kernel.name] = _biased_error(kernel, sizes, dtype, kind is Kind.CAUSAL, learned, device)
            q, k, v, grad, bias = _biased(sizes, sizes.tokens // 2, dtype, device)
            case = _with_bias(kernel, bias, kind is Kind.CAUSAL, learned)
            results = kernel.forward(q, k, v, case)
            jobs[kernel.name] = partial(kernel.forward, q, k, v, case)
            jobs[f"{kernel.name} back"] = partial(kernel.backward, grad, q, k, v, *results, case)
        times = clock.interleaved(jobs, sizes.repeats, 1)
        for name, error in errors.items():
            shown = f"{times[name]:.3f}", f"{times[f'{name} back']:.3f}"
            row = str(dtype).removeprefix("torch."), kind.value, name, "yes" if learned else "no"
            table.add_row(*row, f"{error:.1e}", *shown)
            wrong += [", ".join(row)] if not error <= BIASED_ERROR[dtype] else []
    if wrong:
        Console().print(table)
        raise SystemExit(f"too large an error of a bias: {'; '.join(wrong)}")
    return table


def _biased(sizes: Sizes, tokens: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """q, k, v, a cotangent, (1, H, S, D), and a bias (1, H, S, S)."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, sizes.heads, tokens, sizes.head_dim)] * 4 + [(1, sizes.heads, tokens, tokens)]
    return tuple(torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes)


def _biased_error(
    kernel: Kernel, sizes: Sizes, dtype: torch.dtype, causal: bool, learned: bool, device: torch.device
) -> float:
    """The largest, over the largest value of each result, of a batch of two that share the bias."""
    q, k, v, grad, bias = _biased(sizes, sizes.checked, dtype, device)
    q, k, v, grad = (torch.cat([x, x.flip(2)]) for x in (q, k, v, grad))
    bias[:, :, 3:7] = bias[..., 5] = -torch.inf
    found = _biased_results(kernel, q, k, v, grad, bias, causal, learned)
    true = _biased_results(BLOCK_KERNELS[-1], *(x.double() for x in (q, k, v, grad, bias)), causal, learned)
    shown = [(t.nan_to_num(neginf=0.0), x.double().nan_to_num(neginf=0.0)) for t, x in zip(true, found, strict=True)]
    without = torch.equal(true[1] == -torch.inf, found[1] == -torch.inf)
    return max(_error(t, x) for t, x in shown) if without else torch.inf


def _biased_results(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor, causal: bool, learned: bool
) -> list[Tensor]:
    case = _with_bias(kernel, bias, causal, learned)
    out, lse = kernel.forward(q, k, v, case)
    return [out, lse, *(x for x in kernel.backward(grad, q, k, v, out, lse, case) if x is not None)]


def stepping(sizes: Sizes, device: torch.device, clock: Clock) -> Table:
    """All ranks' work in one row against one device's attention, which PyTorch chose, and PyTorch's flash kernel."""
    whole = draw(sizes, sizes.tokens, device)
    title = f"{sizes.ranks} ranks of {sizes.tokens} tokens in turn, {sizes.heads} heads of {sizes.head_dim}, bfloat16"
    columns = "", "pass", "ms", "exchanges, ms", "TFLOP/s", "of default", "of flash", "target"
    table = Table(*columns, title=title)
    for backward in (False, True):
        jobs: dict[str, Job] = {
            "one device, default": lambda b=backward: one_device(whole, b),
            "one device, flash": lambda b=backward: _flash(whole, b),
        }
        for way in WAYS:
            given = shards(whole, way, sizes.ranks)
            jobs[way] = lambda w=way, g=given, b=backward: all_ranks(w, g, b)
        times = clock.interleaved(jobs, sizes.repeats, 1)
        for name, ms in times.items():
            own = ms - clock.exchanged[name]
            shares = [f"{times[f'one device, {which}'] / own:.2f}" for which in ("default", "flash")]
            target = f"{TARGETS[name][backward]:.2f}" if name in TARGETS else ""
            spent = [f"{ms:.2f}", f"{clock.exchanged[name]:.2f}", f"{_flops(sizes, backward) / own / 1e9:.0f}"]
            table.add_row(name, "both" if backward else "forward", *spent, *shares, target)
    return table


def _flash(whole: Inputs, backward: bool) -> list[Tensor]:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return one_device(whole, backward)


def _flops(sizes: Sizes, backward: bool) -> float:
    """Return the FLOPs of causal attention; a backward has 2.5 times the FLOPs of a forward."""
    length = sizes.ranks * sizes.tokens
    return 4 * sizes.heads * sizes.head_dim * length**2 / 2 * (3.5 if backward else 1)


def facts(device: torch.device) -> str:
    lines = [
        describe_run(device.type),
        f"- `python benchmarks/gpu/gpu_attention.py {' '.join(sys.argv[1:])}".rstrip() + "`",
        "- medians of interleaved repeats; rates and shares without the simulated exchanges",
    ]
    return "\n".join(lines)


PARTS: dict[str, Callable[..., Table]] = {
    "values": values, "kernels": kernels, "biases": biases, "merging": merging, "stepping": stepping
}  # fmt: skip


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all if none is given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--repeats", type=int, help=f"of each time, {Sizes.repeats} if not given")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the report")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = parse_args()
    device, sizes = torch.device(args.device), SMALL if args.small else Sizes()
    sizes = replace(sizes, repeats=args.repeats or sizes.repeats)
    clock, console = Clock(device), Console()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {processor()}"
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"attention_{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}.md"
    sections = [f"# Attention on {name}", facts(device)]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for part in args.parts or PARTS:
            table = PARTS[part](sizes, device, *([] if part == "values" else [clock]))
            console.print(table)
            sections.append(f"## {table.title}\n\n{markdown(table)}")
            path.write_text("\n\n".join(sections) + "\n")  # after each part, since a time limit may end the next one
    console.print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
