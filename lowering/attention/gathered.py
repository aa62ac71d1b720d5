"""Attention of local queries over gathered keys and values: one all-gather forward, nothing of it kept.

    k, v  (B, Hkv, s, D)  ->  rows first, side by side, one all_gather  ->  views (B, Hkv, S, D)
    backward: the same all-gather again, then one reduce-scatter of dK and dV in float32

Llama 3's choice (arXiv:2407.21783, section 3.3.2): cheap where there are few key heads, and every block is large. The
causal part of a contiguous or zigzag shard is cut into full blocks and diagonals (``masks/plan.py``), never a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.communicator import current
from sp_compile.lowering.frames import FrameArg, by_rank, in_order, pad, trim
from sp_compile.lowering.masks.spans import whole

from .args import SEQUENCE, LocalArgs
from .ring import unpacked

Cat = Callable[[list[Tensor], int], Tensor]


class GatheredKeys(NamedTuple):
    """Where keys lie. frame: None if they are whole on every rank already.

    orders: None, or the order in which ranks hold them, and its inverse (see ``sp::deal``).
    """

    frame: FrameArg | None
    n: int
    group: str
    orders: Sequence[Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: LocalArgs) -> tuple[Tensor, Tensor]:
        keys, values = self._gather(k, v, torch.cat)
        return args.attend(q, keys, values, whole(keys.shape[SEQUENCE]))

    def backward(
        self, given: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, mask_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = self._gather(k, v, lambda xs, dim: torch.ops.sp.pack(xs, dim, given[0]))
        dq, dk, dv, dmask = args.grads(given, q, keys, values, whole(keys.shape[SEQUENCE]), mask_grad)
        return dq, *self._scatter(dk, dv), dmask

    def _gather(self, k: Tensor, v: Tensor, cat: Cat) -> tuple[Tensor, Tensor]:
        frame, n = self.frame, self.n
        if frame is None:
            return k, v
        if n == 1:
            return trim(k, SEQUENCE, frame, 1, 1), trim(v, SEQUENCE, frame, 1, 1)
        rows = in_order(current().all_gather(_side_by_side(k, v, cat), n, self.group), frame, n)
        rows = trim(rows, 0, frame, n, 1)
        if self.orders:
            order, inverse = self.orders
            rows = torch.ops.sp.reorder(rows, 0, frame, inverse, order)
        return unpacked(rows.movedim(0, SEQUENCE), k, v)

    def _scatter(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        frame, n = self.frame, self.n
        if frame is None:
            return dk, dv
        if n == 1:
            return pad(dk, SEQUENCE, frame, 1, edge=False), pad(dv, SEQUENCE, frame, 1, edge=False)
        rows = _side_by_side(dk, dv, torch.cat)
        rows = torch.ops.sp.reorder(rows, 0, frame, *self.orders) if self.orders else rows
        rows = pad(rows, 0, frame, n, edge=False)
        scattered = current().reduce_scatter(by_rank(rows, frame, n), n, self.group)
        return unpacked(scattered.movedim(0, SEQUENCE), dk, dv)


def _side_by_side(k: Tensor, v: Tensor, cat: Cat) -> Tensor:
    """(B, Hkv, s, D) and (B, Hkv, s, E) -> (s, B, Hkv, D + E), copied once."""
    return cat([x.movedim(SEQUENCE, 0) for x in (k, v)], 3)
