"""Attention as one differentiable step, whatever way its keys travel: what it keeps, and what it returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .args import LocalArgs
from .gathered import GatheredKeys
from .merge import sinks_grad, with_sinks
from .ring import RingKeys

Keys = GatheredKeys | RingKeys
"""Where keys lie, and how they come to the queries.

`forward` gives out and lse over all keys; `backward`, of the cotangent, out and lse, gives dq, dk, dv, and dmask, or
the gradients of tables, if it is wanted.
"""


def attention(q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, keys: Keys, sinks: Tensor | None = None) -> Tensor:
    """Attention of q (B, H, s, D) over all keys in q's dtype; keeps shards, it and its lse. No second derivatives.

    sinks: (H,), a logit of each head that takes its share of the weights and gives nothing. Given the result and the
    lse with them, the gradients of q, k and v are those without.
    """
    return _AttentionFunction.apply(args, keys, q, k, v, sinks, *args.tensors())[0]


class _AttentionFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        args: LocalArgs,
        keys: Keys,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = keys.forward(q, k, v, args.holding(list(tensors)))
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *tensors)
        ctx.args, ctx.keys = args.holding([None] * len(tensors)), keys
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        wants_sinks, wants_mask, *others = ctx.needs_input_grad[5:]
        args = ctx.args.holding(tensors)
        wants_tables = any(others[len(others) - len(args.tables) :])
        dsinks = sinks_grad(grad, out, lse, sinks) if wants_sinks else None
        dq, dk, dv, learned = ctx.keys.backward((grad, out, lse), q, k, v, args, wants_mask or wants_tables)
        dtables = args.grads_of_tables(learned) if wants_tables else [None] * len(args.tables)
        rest = [None] * (len(tensors) - 1 - len(dtables))
        grads = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), learned if wants_mask else None
        return None, None, *grads[:3], dsinks, grads[3], *rest, *dtables
