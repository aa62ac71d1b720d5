"""Attention of local queries over gathered keys and values: one all-gather forward, nothing of it kept.

    k, v  (B, Hkv, s, D)  ->  rows first, side by side, one all_gather  ->  views (B, Hkv, S, D)
    backward: the same all-gather again, then one reduce-scatter of dK and dV in float32

Llama 3's choice (arXiv:2407.21783, section 3.3.2): cheap where there are few key heads, and every block is large. The
causal part of a contiguous or zigzag shard is cut into full blocks and diagonals by ``blocks.py``, never into a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .communicator import current
from .frames import Frame, by_rank, in_order, pad, trim
from .scores import Scores, span, whole_span

SEQUENCE = -2
Cat = Callable[[list[Tensor], int], Tensor]


class Gathering(NamedTuple):
    """Where queries and keys lie. `k_frame` None: the keys are whole on every rank already."""

    q_frame: Frame
    k_frame: Frame | None
    n: int
    group: str


def gathered(q: Tensor, k: Tensor, v: Tensor, scores: Scores, where: Gathering) -> Tensor:
    """Attention of q (B, H, s, D) over all keys: (B, H, s, E). Differentiable."""
    return _Gathered.apply(scores, where, q, k, v, *scores.tensors())[0]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Scores, where: Gathering, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = scores.holding(list(tensors))
        keys, values = _gather(k, v, where, torch.cat)
        out, lse = scores.attend(
            q, keys, values, span(where.q_frame, where.n), whole_span(keys.shape[SEQUENCE])
        )
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.scores, ctx.where = scores.holding([None] * len(tensors)), where
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        wants_mask, where = ctx.needs_input_grad[5], ctx.where
        scores = ctx.scores.holding(tensors)
        keys, values = _gather(k, v, where, lambda xs, dim: torch.ops.sp.pack(xs, dim, grad))
        spans = span(where.q_frame, where.n), whole_span(keys.shape[SEQUENCE])
        dq, dk, dv, dmask = scores.grads((grad, out, lse), q, keys, values, *spans, mask_grad=wants_mask)
        dk, dv = _scatter(dk, dv, where)
        rest = [None] * (len(tensors) - 1)
        return (
            None,
            None,
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv.to(v.dtype),
            dmask if wants_mask else None,
            *rest,
        )


def _side_by_side(k: Tensor, v: Tensor, cat: Cat) -> Tensor:
    """(B, Hkv, s, D) and (B, Hkv, s, E) -> (s, B, Hkv, D + E), copied once."""
    return cat([x.movedim(SEQUENCE, 0) for x in (k, v)], 3)


def _apart(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `_side_by_side` for any number of rows; views."""
    keys, values = (piece.movedim(0, SEQUENCE) for piece in rows.split([k.shape[3], v.shape[3]], 3))
    return keys, values


def _gather(k: Tensor, v: Tensor, where: Gathering, cat: Cat) -> tuple[Tensor, Tensor]:
    frame, n = where.k_frame, where.n
    if frame is None:
        return k, v
    if n == 1:
        return trim(k, 2, frame, 1, 1), trim(v, 2, frame, 1, 1)
    rows = in_order(current().all_gather(_side_by_side(k, v, cat), n, where.group), frame, n)
    return _apart(trim(rows, 0, frame, n, 1), k, v)


def _scatter(dk: Tensor, dv: Tensor, where: Gathering) -> tuple[Tensor, Tensor]:
    frame, n = where.k_frame, where.n
    if frame is None:
        return dk, dv
    if n == 1:
        return pad(dk, 2, frame, 1, edge=False), pad(dv, 2, frame, 1, edge=False)
    rows = pad(_side_by_side(dk, dv, torch.cat), 0, frame, n, edge=False)
    return _apart(current().reduce_scatter(by_rank(rows, frame, n), n, where.group), dk, dv)
