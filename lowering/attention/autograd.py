"""Attention as one differentiable step, whatever way its keys travel: what it keeps, and what it returns.

What attention does besides multiplying: its mask, dropout and scale, and the blocks that it is asked for.

A bundle of arguments that go to every block unchanged; see ``attend.py`` for their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sp_compile.lowering.frames import Frame, folds_of

Span = list[int]


@dataclass(frozen=True)
class Scores:
    """mask: data; rows, cols, sizes, predicate: a mask that no tensor holds; split_heads: ranks that share heads."""

    mask: Tensor | None
    rows: list[Tensor]
    cols: list[Tensor]
    sizes: list[int]
    predicate: str
    seed: Tensor | None
    dropout_p: float
    scale: float
    split_heads: int
    group: str

    def _rest(self, q_span: Span, k_span: Span) -> tuple[object, ...]:
        drawn = (self.seed, self.dropout_p, self.scale)
        places = (q_span, k_span, self.split_heads, self.group)
        return (self.mask, self.rows, self.cols, self.sizes, self.predicate, *drawn, *places)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_span: Span, k_span: Span, after: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of local queries over these keys alone: (B, H, s, E), and its lse (B, H, s)."""
        return torch.ops.sp.attend(q, k, v, *self._rest(q_span, k_span), after)

    def grads(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_span: Span,
        k_span: Span,
        after: Tensor | None = None,
        mask_grad: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv (and of the mask) from these keys; `given`: the cotangent, and the row's global out and lse."""
        grad, out, lse = given
        rest = self._rest(q_span, k_span)
        return torch.ops.sp.attend_backward(grad, q, k, v, out, lse, *rest, mask_grad, after)

    def tensors(self) -> list[Tensor | None]:
        """What a backward must save."""
        return [self.mask, self.seed, *self.rows, *self.cols]

    def holding(self, tensors: list[Tensor | None]) -> Scores:
        """The same with other `tensors()`."""
        mask, seed, *vectors = tensors
        rows, cols = vectors[: len(self.rows)], vectors[len(self.rows) :]
        return replace(self, mask=mask, seed=seed, rows=rows, cols=cols)


def span(frame: Frame, n: int, stride: int = 1, shift: int = 0) -> Span:
    """The span of a frame's shard over n ranks, or over the n // stride neighbourhoods of a hybrid."""
    return [n // stride, folds_of(frame), stride, shift, frame[2], frame[3]]


Forward = Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
"""(q, k, v, scores) -> out and lse over all keys."""
Backward = Callable[
    [tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor, Scores, bool],
    tuple[Tensor, Tensor, Tensor, Tensor | None],
]
"""((cotangent, out, lse), q, k, v, scores, is the mask's gradient wanted) -> dq, dk, dv, dmask."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, forward: Forward, backward: Backward
) -> Tensor:
    """The result of `forward` in q's dtype; only shards, it and its lse are kept. No second derivatives."""
    return _Attention.apply(scores, forward, backward, q, k, v, *scores.tensors())[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Scores,
        forward: Forward,
        backward: Backward,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, scores.holding(list(tensors)))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.scores, ctx.back = scores.holding([None] * len(tensors)), backward
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        wants_mask, scores = ctx.needs_input_grad[6], ctx.scores.holding(tensors)
        dq, dk, dv, dmask = ctx.back((grad, out, lse), q, k, v, scores, wants_mask)
        rest = [None] * (len(tensors) - 1)
        grads = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask if wants_mask else None
        return None, None, None, *grads, *rest
