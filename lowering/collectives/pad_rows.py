"""Define the contents of padded rows, and ``sp::window`` and ``sp::mask``, which fill them.

A shard of s rows per rank has padded rows if the ranks do not divide the sequence, or if a value is a window of it. The
valid rows of a frame `[outer, size, start, length]` are those from start to start + length - 1: its window. In every
tensor of a local graph

    row at position p  =  row at position clamp(p, start, start + length - 1)        (`frames.nearest_rows`)

also on ranks without valid rows. A function of rows is therefore defined on a padded row, in its values and in its
derivatives, wherever it is defined on that valid row. An integer in a padded row is one of a valid row. Cotangents of
padded rows are zero, also where a product with zero would be NaN: a sum over rows reads a filled copy (``sp::mask``),
and operators that remove padding have zeros there in their adjoints.

Operators that create rows declare the contents of their padded rows (`library.PADDED`): "nearest" follows the
definition; "finite" is any finite number. `Localize` inserts ``sp::window`` after "finite" operators if an operator
that reads the result depends on padding. `passes/localize/fill_padding.py` lists all values whose padded rows differ.
"""

from itertools import compress

import torch
from torch import Tensor

from sp_compile.lowering.base import frames
from sp_compile.lowering.base.frames import FrameArg
from sp_compile.lowering.base.library import LinearMap, composite
from sp_compile.lowering.comm.communicator import current_communicator


@composite("mask(Tensor x, int dim, SymInt[] frame, Scalar value, int n, str group) -> Tensor", padded="finite")
def fill_padding(x: Tensor, dim: int, frame: FrameArg, value: float, n: int, group: str) -> Tensor:
    """Write ``value`` to the positions outside the window: Shard(dim) -> Shard(dim).

    Shapes: any -> same; dtype unchanged. Bytes: none. Backward: the cotangent, zero where filled.
    Runs: masked_fill, or where; nothing if no position can be outside.
    """
    if not frames.is_padded(frame, n):
        return x
    return frames.fill_rows(x, frames.outside_window(x, dim % x.ndim, frame, n, group), value)


@composite(
    "window(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("all_gather", ""), padded="nearest"
)
def window(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Replace padded rows by the nearest valid row: Shard(dim) -> Shard(dim).

    Shapes: any -> same, any dtype.
    Bytes: none, unless a rank has padded rows whose nearest valid row is on another rank (`frames.has_remote_edges`):
    then one all_gather of the first or last valid row, or of both.
    Backward: the cotangent, with exact zeros outside the window, also in place of NaN.
    Runs: `where`.
    """
    return LinearMap.apply(x, _fill_nearest_rows, _zero_outside, dim % x.ndim, frame, n, group)


def _zero_outside(grad: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return the cotangent with zeros at positions outside the window: the adjoint of `window`."""
    return fill_padding(grad, dim, frame, 0, n, group)


def _fill_nearest_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return x with the nearest valid row, of any rank, in each padded row: the forward of `window`."""
    outer, _, start, length = frame[:4]
    if not frames.is_padded(frame, n) or frames.is_known(length == 0):
        return x.view_as(x)
    rows_per_rank = frames.local_row_count(frame, n)
    inner = frames.inner_rows(x.shape[dim], outer * rows_per_rank)
    is_flat = frames.is_known(outer * inner == 1)  # the dim has the rows only, without outer and inner factors
    rows, row_dim = (x, dim) if is_flat else (x.unflatten(dim, (outer, rows_per_rank, inner)), dim + 1)
    positions = frames.column_along(frames.own_positions(frame, n, group, x.device), row_dim, rows.ndim)
    first, last = _edge_rows(rows, row_dim, frame, n, group)
    if first is not None:
        rows = torch.where(positions < start, first, rows)
    if last is not None:
        rows = torch.where(positions >= start + length, last, rows)
    return rows if is_flat else rows.flatten(dim, dim + 2)


def _edge_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the first and the last valid row, (..., 1, ...), which `_fill_nearest_rows` writes to padded rows.

    The first is None if no rank has padding before it, and the last if no rank has padding after it. The owner of a
    valid row is the rank that stores it. Every rank selects the row at the local index that the valid row has on its
    owner. If all padding is on the owner, no other rank uses its row, and none is sent; otherwise the rows are
    gathered, and that of the owner is selected. With 5 positions on 2 ranks (3 rows each) the padding is row 2 of rank
    1, whose nearest valid row is row 1 of rank 1: nothing is sent.
    """
    start, length = frame[2:4]
    rows = n * frames.local_row_count(frame, n)
    has_padding = not frames.is_known(start == 0), not frames.is_known(start + length == rows)  # before, after
    positions = compress((start, start + length - 1), has_padding)  # of the valid rows that are needed
    owners = [frames.row_of_position(position, frame, n) for position in positions]  # (rank, local index) of each
    edges = [x.narrow(dim, row, 1) for _, row in owners]
    if any(compress(frames.has_remote_edges(frame, n), has_padding)):
        sent = torch.cat([edge.movedim(dim, 0) for edge in edges])
        gathered = current_communicator().all_gather(sent, n, group)  # len(owners) rows of each rank
        edges = [gathered.narrow(0, rank * len(owners) + i, 1).movedim(0, dim) for i, (rank, _) in enumerate(owners)]
    remaining = iter(edges)
    first, last = (next(remaining) if padded else None for padded in has_padding)
    return first, last
