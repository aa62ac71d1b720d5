"""Contiguous shards to zigzag ones and back: what causal attention needs where nothing else may be permuted.

    rank r holds chunks 2r, 2r + 1 of 2n    ->    chunks r, 2n - 1 - r

One exchange for all tensors: each rank sends two chunks to at most two ranks. The adjoint is the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering import routes
from sp_compile.lowering.communicator import current

SEQUENCE = 2


def folded(xs: list[Tensor], n: int, group: str, back: bool = False) -> list[Tensor]:
    """Each x (B, H, s, D) with s even, as this rank's rows of the other layout. Differentiable."""
    if n == 1:
        return xs
    rows = [x.movedim(SEQUENCE, 0) for x in xs]
    flat = torch.cat([r.flatten(1) for r in rows], 1)
    moved = _Fold.apply(flat, n, group, back).split([r.shape[1:].numel() for r in rows], 1)
    return [m.unflatten(1, r.shape[1:]).movedim(0, SEQUENCE) for m, r in zip(moved, rows, strict=True)]


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int, group: str, back: bool) -> Tensor:
        ctx.where = n, group, back
        return _unfold(x, n, group) if back else _fold(x, n, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        n, group, back = ctx.where
        return _Fold.apply(grad, n, group, not back), None, None, None


def _fold(x: Tensor, n: int, group: str) -> Tensor:
    chunks = x.unflatten(0, (2, x.shape[0] // 2)).index_select(0, _by_owner(n, group, x.device))
    return current().all_to_all(chunks, 2, routes.fold(group)).flatten(0, 1)


def _unfold(x: Tensor, n: int, group: str) -> Tensor:
    chunks = current().all_to_all(x.unflatten(0, (2, x.shape[0] // 2)), 2, routes.fold(group, back=True))
    return chunks.index_select(0, _by_owner(n, group, x.device)).flatten(0, 1)


def _by_owner(n: int, group: str, device: torch.device) -> Tensor:
    """Chunks 2r, 2r + 1 in the order of the ranks that hold them in the zigzag layout: descending from chunk n on."""
    behind = torch.ops.sp.rank(group, device) * 2 >= n
    first = behind.to(torch.int64)
    return torch.stack([first, 1 - first])
