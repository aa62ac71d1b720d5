"""Move the sharded dim of several tensors to another dim with ``sp::all_to_all``, in one exchange.

    x         (..., g, ..., H, ...)    the gather dim is sharded, g rows on a rank; the scatter dim is full
    blocks    (n, g, cols)             H is cut into n blocks, one per rank; all other dims are columns
    sent      (n, g, total)            the blocks of all tensors, concatenated along the columns
    received  (n * g, total)           the rows of all ranks, in the order of the sequence
    result    (..., G, ..., h, ...)    the columns of one tensor, split and permuted: views

A frame describes how a dim is sharded, with padding (`base/frames.py`). Tensors may differ in g, as query and key heads
do. The smallest g is the number of rows, and further rows of the others become columns: all tensors share one exchange,
and unpacking copies only those with more rows.
"""

import math
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering import triton
from sp_compile.lowering.base import frames
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import FrameArg
from sp_compile.lowering.base.library import composite
from sp_compile.lowering.comm.communicator import current_communicator


class Reshard(NamedTuple):
    """Change of the sharded dim by an exchange, Shard(gather_dim) -> Shard(scatter_dim)."""

    scatter_dim: int  # dim that becomes sharded
    scatter_frame: FrameArg  # frame of the scatter dim
    gather_dim: int  # dim that becomes full
    gather_frame: FrameArg  # frame of the gather dim
    n: int  # number of ranks
    group: str  # name of the process group

    def inverse(self) -> "Reshard":
        """Return the reshard in the opposite direction, which the backward runs."""
        return Reshard(self.gather_dim, self.gather_frame, self.scatter_dim, self.scatter_frame, self.n, self.group)


class _AllToAllFunction(torch.autograd.Function):
    """Exchange of tensors, whose backward is the inverse exchange, with zeros for padding."""

    @staticmethod
    def forward(ctx: Any, reshard: Reshard, edge: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        """Pad the scatter dims, and exchange the tensors with as few collectives as possible.

        Args:
            ctx: Stores the reshard for the backward.
            reshard: The change of the sharded dim.
            edge: True for values, whose padding copies valid rows. False for gradients, whose padding is zero.
            *xs: The tensors.
        """
        ctx.reshard = reshard
        padded = [frames.pad_to_frame(x, reshard.scatter_dim, reshard.scatter_frame, reshard.n, edge) for x in xs]
        results: list[Tensor] = list(xs)
        for indices in _shareable_groups(xs, reshard.gather_dim):
            exchanged = exchange([padded[i] for i in indices], reshard)
            for i, result in zip(indices, exchanged, strict=True):
                results[i] = result
        return tuple(results)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the inverse exchange on the gradients of the tensors that need one."""
        is_needed = ctx.needs_input_grad[2:]  # of each x, after the arguments `reshard` and `edge`
        # edge=False: gradients are padded by zeros.
        x_grads = iter(_AllToAllFunction.apply(ctx.reshard.inverse(), False, *compress(grads, is_needed)))
        return None, None, *(next(x_grads) if needed else None for needed in is_needed)


def _shareable_groups(xs: Sequence[Tensor], gather_dim: int) -> list[list[int]]:
    """Return the indices of all tensors, in groups that can share an exchange.

    Tensors of a group have one dtype and device, and one of their gather lengths divides all others: gather lengths 8,
    32, 12 make the groups [0, 1] and [2].
    """
    groups: list[list[int]] = []
    for i, x in enumerate(xs):
        for indices in groups:
            first, members = xs[indices[0]], [xs[j] for j in (*indices, i)]
            same_kind = (x.dtype, x.device) == (first.dtype, first.device)
            if same_kind and _common_rows(members, gather_dim) is not None:
                indices.append(i)
                break
        else:  # no group accepts the tensor
            groups.append([i])
    return groups


def _common_rows(xs: Sequence[Tensor], gather_dim: int) -> int | None:
    """Return the gather length that divides those of all tensors, or None if none is known to. Adds no guards.

    The tensors can share an exchange whose blocks have this number of rows.
    """

    def is_divisor(rows: int, length: int) -> bool:
        """Return True if `rows` is known to divide `length`."""
        return frames.is_known(rows == length) or (frames.is_known(rows > 0) and frames.is_known(length % rows == 0))

    lengths = [x.shape[gather_dim] for x in xs]
    return next((rows for rows in lengths if all(is_divisor(rows, length) for length in lengths)), None)


def exchange(xs: list[Tensor], reshard: Reshard) -> list[Tensor]:
    """Exchange ``xs`` in one all_to_all_single. `_AllToAllFunction` makes it differentiable.

    Each x is full along its scatter dim, of which block r goes to rank r, and sharded along its gather dim, of which
    the result has the rows of all ranks. The exchange sends matrices: rows are those of the gather dim, all other dims
    are columns, and the columns of all tensors are concatenated.

    Args:
        xs: Tensors of a group of `_shareable_groups`. Their scatter dims are padded to n equal blocks.
        reshard: The change of the sharded dim.

    Returns:
        The result of each tensor, in the order of ``xs``.
    """
    rows_per_rank = frames.local_row_count(reshard.gather_frame, reshard.n)  # positions, padding included
    # If the gather dim is flattened with a dim after it, it has positions * inner rows; `inner_rows` returns inner.
    if reshard.n == 1:  # only the padding of the gather dim is dropped
        gather, frame = reshard.gather_dim, reshard.gather_frame
        return [frames.trim(x, gather, frame, 1, frames.inner_rows(x.shape[gather], rows_per_rank)) for x in xs]
    rows = _common_rows(xs, reshard.gather_dim)
    assert rows is not None, "the tensors of an exchange are a group of `_shareable_groups`"
    blocks = [_to_blocks(x, reshard, rows) for x in xs]
    sent = _pack_blocks(blocks)
    received = current_communicator().all_to_all(sent, reshard.n, reshard.group).flatten(0, 1)  # (rows of all, columns)
    received = frames.to_sequence_order(received, reshard.gather_frame, reshard.n)
    received = frames.trim(received, 0, reshard.gather_frame, reshard.n, frames.inner_rows(rows, rows_per_rank))
    columns = received.split([math.prod(block.shape[2:]) for block in blocks], 1)  # of each tensor
    results = []
    for x, block, x_columns in zip(xs, blocks, columns, strict=True):
        result = x_columns.unflatten(1, block.shape[2:])
        if result.ndim != x.ndim:  # `_to_blocks` moved some rows of x to columns; merging them again is a copy
            result = result.flatten(0, 1)
        results.append(result.movedim(0, reshard.gather_dim))
    return results


def _to_blocks(x: Tensor, reshard: Reshard, rows: int) -> Tensor:
    """Return (..., g, ..., n * h, ...) as the blocks to send, (n, rows, ...); in most cases a view.

    Block r is for rank r. The dims after `rows` are the other dims of x in order, with h in place of the scatter dim.
    If g exceeds `rows`, a dim of g / rows precedes them: x (B, g, n * h, D) gives (n, rows, g / rows, B, h, D).
    """
    n, scatter, gather = reshard.n, reshard.scatter_dim, reshard.gather_dim
    if frames.frame_folds(reshard.scatter_frame) == 2:  # zigzag: rank r receives the chunks r and 2n - 1 - r
        x = frames.to_rank_order(x.movedim(scatter, 0), reshard.scatter_frame, n).movedim(0, scatter)
    x = x.unflatten(scatter, (n, x.shape[scatter] // n)).movedim(scatter, 0)  # (n, dims of x, with h)
    x = x.movedim(gather + 1, 1)
    return x if frames.is_known(x.shape[1] == rows) else x.unflatten(1, (rows, x.shape[1] // rows))


def _pack_blocks(blocks: list[Tensor]) -> Tensor:
    """Concatenate the blocks (n, g, ...) of all tensors to the send buffer (n, g, total); copy each at most once."""
    widths = [math.prod(block.shape[2:]) for block in blocks]  # columns of each tensor
    if not all(map(triton.can_use_triton, blocks)):
        matrices = [block.reshape(*block.shape[:2], width) for block, width in zip(blocks, widths, strict=True)]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices, -1)
    sent = blocks[0].new_empty((*blocks[0].shape[:2], sum(widths)))
    for columns, block in zip(sent.split(widths, 2), blocks, strict=True):
        triton.copy_tensor(columns.unflatten(2, block.shape[2:]), block)
    return sent


@composite(
    "all_to_all(Tensor[] xs, int scatter_dim, SymInt[] scatter_frame, int gather_dim, SymInt[] gather_frame,"
    " int n, str group) -> Tensor[]",
    moves=("all_to_all", "all_to_all"),
    padded="nearest",
)
def all_to_all(
    xs: list[Tensor],
    scatter_dim: int,
    scatter_frame: FrameArg,
    gather_dim: int,
    gather_frame: FrameArg,
    n: int,
    group: str,
) -> list[Tensor]:
    """Convert Shard(gather_dim) to Shard(scatter_dim), for every x.

    Shapes: the gather dim of s * inner -> length * inner, the scatter dim of length * inner -> s * inner, each with the
    s and the length of its own frame. Tensors with more rows per position, such as the query
    heads of one key head, have a larger inner and share the frames.
    Bytes: (n - 1) / n of the operands', in one all_to_all_single for all tensors of one dtype whose local gather
    lengths are multiples of the smallest.
    Backward: the inverse exchange, of the same number of bytes.
    Kernels: one copy into the send buffer, all_to_all_single, views.
    Errors: SpError if the dims are equal or the outer factor of a frame is not 1.
    """
    ndim = xs[0].ndim
    reshard = Reshard(scatter_dim % ndim, scatter_frame, gather_dim % ndim, gather_frame, n, group)
    if reshard.scatter_dim == reshard.gather_dim:
        cause = f"sp::all_to_all: expected two different dims, got {reshard.scatter_dim} as scatter and gather dim."
        raise SpError("SP542", cause)
    scatter_outer, gather_outer = scatter_frame[0], gather_frame[0]
    if not (frames.is_known(scatter_outer == 1) and frames.is_known(gather_outer == 1)):
        cause = f"sp::all_to_all: expected frames with outer == 1, got {scatter_outer} and {gather_outer}."
        raise SpError("SP507", cause, "Unflatten the dims, so that the sequence is the first factor of each.")
    return list(_AllToAllFunction.apply(reshard, True, *xs))  # True: padding copies the nearest valid row
