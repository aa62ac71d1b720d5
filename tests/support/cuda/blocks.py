"""Run one block of attention on borrowed tensors, forward and backward, and its reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from support.attention.attending import Problem, dense, leaves
from support.cuda.borrowed import Watch, borrow, give_back
from torch import Tensor

from sp_compile.lowering.attention import attend as bodies
from sp_compile.lowering.masks.spans import full_span

sp = torch.ops.sp
Found = tuple[list[Tensor], list[Tensor], list[str]]
"""Results on borrowed tensors, reference results in float64, and the attention kernels that ran."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def on_gpu(xs: Sequence[Tensor]) -> list[Tensor]:
    return [borrow(x) for x in xs]


def rounded(p: Problem, dtype: torch.dtype) -> None:
    """Round the operands to the dtype of the kernels; in memory, heads come after rows."""
    for name in ("q", "k", "v", "grad"):
        x = getattr(p, name).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
        setattr(p, name, x)


def arguments(p: Problem, q_span: Sequence[int], k_span: Sequence[int], group: str = "") -> list[object]:
    """Return the operators' arguments with tables of pieces, as in graphs."""
    mask, rows, cols, _, *rest = p.arguments(q_span, k_span, group)
    return [mask, on_gpu(rows), on_gpu(cols), sp.pieces([*rows, *cols]), *rest]


def reference(p: Problem) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of q, k, v by dense arithmetic in float64."""
    q, k, v = leaves(p.q.double(), p.k.double(), p.v.double())
    out, lse = dense(q, k, v, p.allowed())
    out.backward(p.grad.double())
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]


def one_device(
    name: str, q_len: int, k_len: int, key_heads: int, widths: tuple[int, int], dtype: torch.dtype,
    glue: Mapping[Any, Callable[..., Any]] | None = None,
) -> Found:  # fmt: skip
    """Return the results and the reference of a block on a single device. glue: see `Watch`."""
    p = Problem(name, q_len, k_len, key_heads=key_heads, width=widths[0], v_width=widths[1])
    rounded(p, dtype)
    args = arguments(p, full_span(q_len), full_span(k_len))
    with Watch(glue) as watch, torch.no_grad():
        q, k, v, grad = on_gpu([p.q, p.k, p.v, p.grad])
        out, lse = bodies.attend(q, k, v, *args)
        *grads, _ = bodies.attend_backward(grad, q, k, v, out, lse, *args, False)
    return [give_back(x) for x in (out, lse, *grads)], reference(p), watch.seen.kernels


def check(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    """Compare results. Log-sum-exps are always float32, precise enough to detect a single extra key."""
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        shown = torch.where(b == -torch.inf, 0.0, b)
        atol = TOLERANCE[dtype] * shown.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=atol)
