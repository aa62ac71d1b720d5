"""Kernels for one block of attention on a GPU: right values first, then times. What the table of kernels is set by.

    python benchmarks/gpu_kernels.py                  bfloat16, 8192 queries and keys, 32 heads over 8, of 128
    python benchmarks/gpu_kernels.py --only window

values  out, log-sum-exp and gradients of every kernel against float64, at a small size: rows without keys, keys and
        queries of different number, heads that share keys, and operands with the heads behind the rows in memory
times   forward and backward, milliseconds and TFLOP/s of the pairs that attend
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from measuring.clock import Clock

aten = torch.ops.aten
DEVICE = torch.device("cuda")
Mask = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Block:
    """allowed: of query and key indices, columns and a row."""

    queries: int
    keys: int
    allowed: Mask
    ends: tuple[list[int], list[int]] | None = None
    window: tuple[int | None, int | None] = (None, None)
    causal: bool = False


def full(n: int) -> Block:
    return Block(n, n, lambda q, k: q >= -1)


def causal(n: int) -> Block:
    return Block(n, n, lambda q, k: k <= q, causal=True)


def window(n: int, wide: int) -> Block:
    return Block(n, n, lambda q, k: (k <= q) & (q - k < wide), window=(wide - 1, 0))


def later(n: int, wide: int) -> Block:
    """The keys of the rank before: a triangle at their end, and queries without any."""
    return Block(n, n, lambda q, k: k - q > n - wide, window=(wide - 1 - n, None))


def shorter(n: int, m: int) -> Block:
    """Fewer queries than keys, causal at the end."""
    return Block(n, m, lambda q, k: k <= q + (m - n), window=(None, 0))


def documents(n: int, count: int, is_causal: bool = True) -> Block:
    ends = [n * i // count + (i * 37 % 11 if 0 < i < count else 0) for i in range(count + 1)]
    at = torch.tensor(ends[1:], device=DEVICE)

    def allowed(q: Tensor, k: Tensor) -> Tensor:
        same = torch.bucketize(q, at, right=True) == torch.bucketize(k, at, right=True)
        return same & (k <= q) if is_causal else same

    return Block(n, n, allowed, ends=(ends, ends), causal=is_causal)


Operands = tuple[Tensor, Tensor, Tensor]
Run = tuple[Callable[[], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]]


def flash(x: Operands, block: Block) -> Run:
    """FlashAttention through `_flash_attention_forward`: rows before heads; a window, or sequences by their ends."""
    q, k, v = (t.transpose(1, 2) for t in x)
    cum: list[Any] = [None, None]
    longest = block.queries, block.keys
    if block.ends is not None:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        cum = [torch.tensor(e, dtype=torch.int32, device=DEVICE) for e in block.ends]
        longest = tuple(max(b - a for a, b in zip(e, e[1:])) for e in block.ends)
    left, right = block.window
    sizes = {"window_size_left": left, "window_size_right": right, "scale": 0.1}
    unused = torch.empty((), dtype=torch.int64, device=DEVICE)

    def forward() -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *cum, *longest, 0.0, block.causal, False, **sizes)
        if block.ends is not None:
            out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        return out.transpose(1, 2), lse

    def backward(grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        grad, out = (t.transpose(1, 2) for t in (grad, out))
        if block.ends is not None:
            grad, out, lse = grad.flatten(0, 1), out.flatten(0, 1), lse.squeeze(0)
        found = aten._flash_attention_backward(
            grad, q, k, v, out, lse, *cum, *longest, 0.0, block.causal, unused, unused, **sizes
        )
        return tuple((g.unsqueeze(0) if block.ends is not None else g).transpose(1, 2) for g in found)

    return forward, backward


def cudnn(x: Operands, block: Block) -> Run:
    q, k, v = x
    unused = torch.empty((), dtype=torch.int64, device=DEVICE)

    def forward() -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, block.causal, False, scale=0.1
        )
        return out, lse

    def backward(grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, unused, unused, None, None, None, block.queries, block.keys, 0.0, block.causal,
            scale=0.1,
        )  # fmt: skip

    return forward, backward


def efficient(x: Operands, block: Block) -> Run:
    """Shared key heads are expanded, which it does not know."""
    q = x[0].transpose(1, 2)
    k, v = (t.repeat_interleave(x[0].shape[1] // t.shape[1], 1).transpose(1, 2) for t in x[1:])
    kind = 2 if block.causal or block.window[1] == 0 else 0
    wide = None if block.window[0] is None else block.window[0] + 1
    seed = torch.empty((), dtype=torch.int64, device=DEVICE)
    lengths = None, None, block.queries, block.keys

    def forward() -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._efficient_attention_forward(
            q, k, v, None, *lengths, 0.0, kind, True, scale=0.1, window_size=wide
        )
        return out.transpose(1, 2), lse[..., : block.queries]

    def backward(grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        grad, out = (t.transpose(1, 2) for t in (grad, out))
        dq, dk, dv, _ = aten._efficient_attention_backward(
            grad, q, k, v, None, out, None, None, block.queries, block.keys, padded, 0.0, seed, seed, kind, False,
            scale=0.1, window_size=wide,
        )  # fmt: skip
        shared = x[0].shape[1] // x[1].shape[1]
        return dq.transpose(1, 2), *(g.transpose(1, 2).unflatten(1, (-1, shared)).sum(2) for g in (dk, dv))

    return forward, backward


def flex(x: Operands, block: Block) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves = [t.detach().requires_grad_() for t in x]
    mask = create_block_mask(
        lambda b, h, q, k: block.allowed(q, k), None, None, block.queries, block.keys, device=DEVICE
    )
    run = torch.compile(flex_attention, dynamic=False)
    last: list[Tensor] = []

    def forward() -> tuple[Tensor, Tensor]:
        last[:] = run(*leaves, block_mask=mask, scale=0.1, enable_gqa=True, return_lse=True)
        return last[0].detach(), last[1].detach()

    def backward(grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(last[0], leaves, grad, retain_graph=True)

    return forward, backward


def dense(x: Operands, block: Block) -> Run:
    """Ours: float32 scores of the whole block."""
    from sp_compile.lowering.attention.kernels import KERNELS, Case

    at = torch.arange(max(block.queries, block.keys), device=DEVICE)
    allowed = block.allowed(at[: block.queries, None], at[None, : block.keys])
    case = Case(0.1, allowed=allowed.expand(1, 1, block.queries, block.keys))
    kernel = KERNELS[-1]
    return lambda: kernel.forward(*x, case), lambda grad, out, lse: kernel.backward(grad, *x, out, lse, case)[:3]


KERNELS = {"flash": flash, "cudnn": cudnn, "efficient": efficient, "flex": flex, "dense": dense}
FITS = {
    "full": KERNELS, "causal": KERNELS, "window": ["flash", "efficient", "flex", "dense"], "later": ["flash", "flex", "dense"],
    "shorter": ["flash", "flex", "dense"], "documents": ["flash", "flex", "dense"], "separate documents": ["flash", "flex", "dense"],
}  # fmt: skip


def blocks(n: int) -> dict[str, Block]:
    wide = max(n // 8, 2)
    return {
        "full": full(n), "causal": causal(n), "window": window(n, wide), "later": later(n, wide),
        "shorter": shorter(n // 2 - 3, n), "documents": documents(n, max(n // 64, 3)),
        "separate documents": documents(n, max(n // 64, 3), False),
    }  # fmt: skip


def draw(block: Block, heads: int, kv: int, width: int, dtype: torch.dtype) -> Operands:
    """(1, H, S, D), heads behind rows in memory."""

    def one(rows: int, h: int) -> Tensor:
        return torch.randn(1, rows, h, width, device=DEVICE).to(dtype).transpose(1, 2)

    return one(block.queries, heads), one(block.keys, kv), one(block.keys, kv)


def truth(x: Operands, block: Block, grad: Tensor) -> list[Tensor]:
    q, k, v = (t.detach().double().requires_grad_() for t in x)
    shared = q.shape[1] // k.shape[1]
    at = torch.arange(max(block.queries, block.keys), device=DEVICE)
    scores = q @ k.repeat_interleave(shared, 1).mT * 0.1
    scores = scores.masked_fill(~block.allowed(at[: block.queries, None], at[None, : block.keys]), -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse).detach().unsqueeze(-1))
    weights = torch.where(lse.unsqueeze(-1) == -math.inf, 0.0, weights / weights.sum(-1, keepdim=True).clamp_min(1e-30))
    out = weights @ v.repeat_interleave(shared, 1)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def values(name: str, block: Block, kernel: str, width: int, dtype: torch.dtype) -> list[str]:
    x = draw(block, 8, 2, width, dtype)
    grad = torch.randn(1, block.queries, 8, width, device=DEVICE).to(dtype).transpose(1, 2)
    out, lse, *grads = truth(x, block, grad)
    forward, backward = KERNELS[kernel](x, block)
    found, found_lse = forward()
    raw = found_lse
    if found_lse.dim() == 4:
        found_lse = found_lse.squeeze(-1)
    empty = lse == -math.inf
    same = torch.where(empty, 0.0, lse), torch.where(empty, 0.0, found_lse.double())
    told = [error(out, found), error(*same)]
    if empty.any():
        told[1] += f" (empty: {found_lse[empty].unique().tolist()}, out {found.mT.mT[empty].abs().max().item():.0e})"
        raw = torch.where(empty.reshape(raw.shape), math.inf, raw)
    told += [error(t, f) for t, f in zip(grads, backward(grad, found, raw))]
    print(
        f"    {name} {kernel} {width} {dtype}: lse {list(raw.shape)} {raw.stride()} {raw.dtype}, out {found.stride()}",
        flush=True,
    )
    return told


def error(true: Tensor, found: Tensor) -> str:
    return f"{((true - found.double()).abs().max() / true.abs().max()).item():.0e}"


def pairs(block: Block) -> int:
    at = torch.arange(max(block.queries, block.keys), device=DEVICE)
    return sum(
        int(block.allowed(rows[:, None], at[None, : block.keys]).expand(len(rows), block.keys).sum())
        for rows in at[: block.queries].split(512)
    )


def times(block: Block, kernels: list[str], clock: Clock, given: argparse.Namespace) -> list[list[str]]:
    x = draw(block, 32, 8, given.width, given.dtype)
    grad = torch.randn(1, block.queries, 32, given.width, device=DEVICE).to(given.dtype).transpose(1, 2)
    flops = 4 * 32 * given.width * pairs(block)
    jobs, rows = {}, []
    for kernel in kernels:
        try:
            forward, backward = KERNELS[kernel](x, block)
            out, lse = forward()
            backward(grad, out, lse)
        except Exception as e:
            rows.append([kernel, f"{type(e).__name__}: {str(e).splitlines()[0][:100]}"])
            continue
        jobs[f"{kernel} forward"] = forward
        jobs[f"{kernel} backward"] = lambda b=backward, o=out, s=lse: b(grad, o, s)
    for name, ms in clock.interleaved(jobs, 5, 3).items():
        work = flops * (2.5 if "backward" in name else 1)
        rows.append([name, f"{ms:.3f}", f"{work / ms / 1e9:.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--times", action="store_true", help="no values")
    given = parser.parse_args()
    given.dtype = torch.float32 if given.float32 else torch.bfloat16
    console, clock = Console(width=150), Clock(DEVICE)
    torch.manual_seed(0)
    if not given.times:
        table = Table("block", "kernel", "width", "out", "lse", "dq", "dk", "dv", title="largest error against float64")
        for name, block in blocks(389).items():
            for kernel in FITS[name]:
                for width in (64, 72, 256) if kernel in ("flash", "cudnn") else (64,):
                    if given.only not in name:
                        continue
                    try:
                        found = values(name, block, kernel, width, given.dtype)
                    except Exception as e:
                        found = [f"{type(e).__name__}: {str(e).strip().splitlines()[0][:120]}"]
                    table.add_row(name, kernel, str(width), *found)
        console.print(table)
    table = Table(
        "block", "kernel", "ms", "TFLOP/s", title=f"{given.tokens} rows, {given.dtype}, heads of {given.width}"
    )
    for name, block in blocks(given.tokens).items():
        if given.only in name:
            for row in times(block, list(FITS[name]), clock, given):
                table.add_row(name, *row)
    console.print(table)


if __name__ == "__main__":
    main()
