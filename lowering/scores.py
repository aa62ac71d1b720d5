"""What attention does besides multiplying: its mask, dropout and scale, and the blocks that it is asked for.

A bundle of arguments that go to every block unchanged; see ``attend.py`` for their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .frames import Frame, folds_of

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
