"""Move a split from one dim to another with ``sp::all_to_all``, for several tensors in one exchange.

x       (..., g, ..., H, ...)      gather dim sharded, scatter dim full pack    (n, g, cols)               H cut into n
blocks, one per rank, followed by the rows cat     (n, g, total)              tensors concatenated along the columns
recv    (n * g, total)             rows of all ranks, in order unpack  (..., G, ..., h, ...)      split of the columns
and a permute: views

Tensors may differ in g, as query and key heads do. The smallest g is the number of rows, and further rows of the others
become columns: all tensors share one exchange, and unpacking copies only those with more rows.
"""

import math
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering import triton
from sp_compile.lowering.base.frames import (
    FrameArg,
    frame_folds,
    inner_rows,
    is_known,
    local_row_count,
    pad_to_frame,
    to_rank_order,
    to_sequence_order,
    trim,
)
from sp_compile.lowering.base.library import composite
from sp_compile.lowering.comm.communicator import current_communicator


class _Reshard(NamedTuple):
    """Dims, frames and ranks that all tensors of one exchange share."""

    scatter_dim: int  # dim that becomes sharded
    scatter_frame: FrameArg  # frame of the scatter dim
    gather_dim: int  # dim that becomes full
    gather_frame: FrameArg  # frame of the gather dim
    n: int  # number of ranks
    group: str  # name of the process group

    def inverse(self) -> "_Reshard":
        """Return the reshard in the opposite direction."""
        return _Reshard(self.gather_dim, self.gather_frame, self.scatter_dim, self.scatter_frame, self.n, self.group)


class _AllToAllFunction(torch.autograd.Function):
    """Exchange. Its adjoint is the inverse exchange, with zeros for padding."""

    @staticmethod
    def forward(ctx: Any, reshard: _Reshard, edge: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        """Pad the tensors to their frames and exchange them, in one collective where possible."""
        ctx.reshard = reshard
        padded = [pad_to_frame(x, reshard.scatter_dim, reshard.scatter_frame, reshard.n, edge) for x in xs]
        results: list[Tensor] = list(xs)
        for members in _group_shareable(xs, reshard.gather_dim):
            for i, y in zip(members, exchange([padded[i] for i in members], reshard), strict=True):
                results[i] = y
        return tuple(results)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the inverse exchange on the required gradients."""
        needed = ctx.needs_input_grad[2:]
        moved = iter(_AllToAllFunction.apply(ctx.reshard.inverse(), False, *compress(grads, needed)))
        return None, None, *(next(moved) if need else None for need in needed)


def _group_shareable(xs: Sequence[Tensor], gather_dim: int) -> list[list[int]]:
    """Return groups of indices of tensors that can share an exchange.

    Tensors of a group have one dtype and device, and one of their gather lengths divides all others.
    """
    groups: list[list[int]] = []
    for i, x in enumerate(xs):
        for members in groups:
            y, together = xs[members[0]], [xs[j] for j in (*members, i)]
            if (x.dtype, x.device) == (y.dtype, y.device) and _common_divisor_rows(together, gather_dim) is not None:
                members.append(i)
                break
        else:
            groups.append([i])
    return groups


def _common_divisor_rows(xs: Sequence[Tensor], gather_dim: int) -> int | None:
    """Return the gather length that divides all others, or None if none is known to."""
    lengths = [x.shape[gather_dim] for x in xs]
    return next((a for a in lengths if all(_divides_rows(a, b) for b in lengths)), None)


def _divides_rows(few: int, many: int) -> bool:
    return is_known(few == many) or (is_known(few > 0) and is_known(many % few == 0))


def equal_reshard(scatter_dim: int, gather_dim: int, n: int, group: str) -> _Reshard:
    """Return the reshard of equal shares: its frame has n positions, one per rank, for all sizes."""
    return _Reshard(scatter_dim, (1, n, 0, n), gather_dim, (1, n, 0, n), n, group)


def exchange(xs: list[Tensor], reshard: _Reshard) -> list[Tensor]:
    """Exchange ``xs`` in one all_to_all_single. Not differentiable.

    Args:
        xs: Tensors of one dtype and device. Their scatter dims are padded to n equal blocks.
        reshard: Dims, frames and ranks.
    """
    rows_per_rank = local_row_count(reshard.gather_frame, reshard.n)
    if reshard.n == 1:
        gather, frame = reshard.gather_dim, reshard.gather_frame
        return [trim(x, gather, frame, 1, inner_rows(x.shape[gather], rows_per_rank)) for x in xs]
    rows = _common_divisor_rows(xs, reshard.gather_dim)
    assert rows is not None
    blocks = [_to_blocks(x, reshard, rows) for x in xs]
    sent = _pack_blocks(blocks)
    received = current_communicator().all_to_all(sent, reshard.n, reshard.group).flatten(0, 1)
    received = to_sequence_order(received, reshard.gather_frame, reshard.n)
    received = trim(received, 0, reshard.gather_frame, reshard.n, inner_rows(rows, rows_per_rank))
    pieces = received.split([math.prod(b.shape[2:]) for b in blocks], 1)
    return [_unpack_block(piece, b, x, reshard) for piece, b, x in zip(pieces, blocks, xs, strict=True)]


def _to_blocks(x: Tensor, reshard: _Reshard, rows: int) -> Tensor:
    """Reshape (..., g, ..., n * h, ...) to (n, rows, ...), in most cases a view.

    The other dims follow, with h in place of the scatter dim. If g exceeds `rows`, the first of them is g / rows.
    """
    n, scatter, gather = reshard.n, reshard.scatter_dim, reshard.gather_dim
    if frame_folds(reshard.scatter_frame) == 2:
        x = to_rank_order(x.movedim(scatter, 0), reshard.scatter_frame, n).movedim(0, scatter)
    x = x.unflatten(scatter, (n, x.shape[scatter] // n)).movedim(scatter, 0).movedim(gather + 1, 1)
    return x if is_known(x.shape[1] == rows) else x.unflatten(1, (rows, x.shape[1] // rows))


def _pack_blocks(blocks: list[Tensor]) -> Tensor:
    """Concatenate (n, g, ...) of several tensors to (n, g, cols), with one copy of each."""
    first = blocks[0]
    columns = [math.prod(b.shape[2:]) for b in blocks]
    if not all(map(triton.can_use_triton, blocks)):
        packed = [b.reshape(*b.shape[:2], width) for b, width in zip(blocks, columns, strict=True)]
        return packed[0] if len(packed) == 1 else torch.cat(packed, -1)
    sent = first.new_empty((*first.shape[:2], sum(columns)))
    for part, b in zip(sent.split(columns, 2), blocks, strict=True):
        triton.copy_tensor(part.unflatten(2, b.shape[2:]), b)
    return sent


def _unpack_block(piece: Tensor, block: Tensor, x: Tensor, reshard: _Reshard) -> Tensor:
    """Reshape (G, cols) to (..., G, ..., h, ...), a view if the block's rows are all rows of x."""
    found = piece.unflatten(1, block.shape[2:])
    return (found if found.ndim == x.ndim else found.flatten(0, 1)).movedim(0, reshard.gather_dim)


@composite(
    "all_to_all(Tensor[] xs, int scatter_dim, SymInt[] scatter_frame, int gather_dim, SymInt[] gather_frame,"
    " int n, str group) -> Tensor[]",
    moves=("all_to_all", "all_to_all"),
    padded="nearest",
)
def all_to_all(
    xs: list[Tensor], scatter_dim: int, scatter: FrameArg, gather_dim: int, gather: FrameArg, n: int, group: str
) -> list[Tensor]:
    """Convert Shard(gather_dim) to Shard(scatter_dim), for every x.

    Shapes: gather dim s_g * inner -> length_g * inner; scatter dim length_s * inner -> s_s * inner. Tensors with more
    rows per position, such as the query heads of one key head, have a larger inner and share the frames.
    Bytes: (n - 1) / n of the operands', in one all_to_all_single for all tensors that agree in dtype and divide in
    local gather length.
    Backward: the inverse exchange, of the same number of bytes.
    Source: one copy into the send buffer, all_to_all_single, views.
    Errors: ValueError if the dims are equal or the outer factor of a frame is not 1.
    """
    ndim = xs[0].ndim
    reshard = _Reshard(scatter_dim % ndim, scatter, gather_dim % ndim, gather, n, group)
    if reshard.scatter_dim == reshard.gather_dim:
        raise ValueError(f"sp::all_to_all: scatter and gather dim are both {reshard.scatter_dim}")
    if not (is_known(scatter[0] == 1) and is_known(gather[0] == 1)):
        raise ValueError("sp::all_to_all: both frames need outer == 1")
    return list(_AllToAllFunction.apply(reshard, True, *xs))
