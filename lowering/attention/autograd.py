"""Attention as one differentiable step, whatever way its keys travel: what it keeps, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .args import LocalArgs

Forward = Callable[[Tensor, Tensor, Tensor, LocalArgs], tuple[Tensor, Tensor]]
"""(q, k, v, args) -> out and lse over all keys."""
Backward = Callable[
    [tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor, LocalArgs, bool],
    tuple[Tensor, Tensor, Tensor, Tensor | None],
]
"""((cotangent, out, lse), q, k, v, args, is the mask's gradient wanted) -> dq, dk, dv, dmask."""


def attention(q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, forward: Forward, backward: Backward) -> Tensor:
    """The result of `forward` in q's dtype; only shards, it and its lse are kept. No second derivatives."""
    return _Attention.apply(args, forward, backward, q, k, v, *args.tensors())[0]


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        args: LocalArgs,
        forward: Forward,
        backward: Backward,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, args.holding(list(tensors)))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.args, ctx.back = args.holding([None] * len(tensors)), backward
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        wants_mask, args = ctx.needs_input_grad[6], ctx.args.holding(tensors)
        dq, dk, dv, dmask = ctx.back((grad, out, lse), q, k, v, args, wants_mask)
        rest = [None] * (len(tensors) - 1)
        grads = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask if wants_mask else None
        return None, None, None, *grads, *rest
