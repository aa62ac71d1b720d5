"""Exchange contiguous shards for zigzag shards, and back, to balance causal attention.

Used inside an operator, where no other tensor may be permuted:

    rank r holds chunks 2r, 2r + 1 of 2n    ->    chunks r, 2n - 1 - r

One exchange for all tensors: each rank sends two chunks to at most two ranks. The adjoint is the inverse exchange.
To fold is to exchange contiguous rows for zigzag rows; to unfold is the inverse.
"""

import math

import torch
from torch import Tensor

from sp_compile.lowering.base.library import LinearMap
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.communicator import current_communicator

SEQUENCE_DIM = 2  # dim of the rows in tensors (B, H, s, D)


def to_zigzag_rows(xs: list[Tensor], n: int, group: str, back: bool = False) -> list[Tensor]:
    """Exchange the rows of tensors between the contiguous and the zigzag layout. Differentiable.

    Args:
        xs: Tensors (B, H, s, D) with even s, equal in s.
        n: The number of ranks.
        group: The process group.
        back: Exchange zigzag shards for contiguous ones.

    Returns:
        This rank's rows of each tensor in the other layout.
    """
    if n == 1:
        return xs
    rows_first = [x.movedim(SEQUENCE_DIM, 0) for x in xs]
    flat = torch.cat([x.flatten(1) for x in rows_first], 1)  # one exchange for all tensors
    maps = (_undo_fold, _fold) if back else (_fold, _undo_fold)  # the exchange and its adjoint
    exchanged = LinearMap.apply(flat, *maps, n, group).split([math.prod(x.shape[1:]) for x in rows_first], 1)
    return [y.unflatten(1, x.shape[1:]).movedim(0, SEQUENCE_DIM) for y, x in zip(exchanged, rows_first, strict=True)]


def _fold(x: Tensor, n: int, group: str) -> Tensor:
    """Exchange contiguous rows (s, ..) for zigzag rows (s, ..): send each of this rank's two chunks to its owner."""
    chunks = x.unflatten(0, (2, x.shape[0] // 2)).index_select(0, _chunks_by_owner(n, group, x.device))
    return current_communicator().all_to_all(chunks, 2, routes.fold_route(group)).flatten(0, 1)


def _undo_fold(x: Tensor, n: int, group: str) -> Tensor:
    """Exchange zigzag rows (s, ..) for contiguous rows: the inverse and the adjoint of `_fold`."""
    chunks = x.unflatten(0, (2, x.shape[0] // 2))
    # One chunk to each of two ranks; the received chunks are in the order of their senders.
    chunks = current_communicator().all_to_all(chunks, 2, routes.fold_route(group, back=True))
    return chunks.index_select(0, _chunks_by_owner(n, group, x.device)).flatten(0, 1)


def _chunks_by_owner(n: int, group: str, device: torch.device) -> Tensor:
    """Return the order of this rank's contiguous chunks 2r, 2r + 1 by their zigzag owners: [0, 1] or [1, 0], int64.

    An all-to-all sends blocks in ascending order of ranks. In the zigzag layout, rank r has the chunks r and
    2n - 1 - r: the owners of the first n chunks ascend, those of the others descend. The order is its own inverse.
    """
    in_second_half = torch.ops.sp.rank(group, device) * 2 >= n
    first = in_second_half.to(torch.int64)
    return torch.stack([first, 1 - first])
