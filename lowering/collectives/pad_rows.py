"""Define the contents of padded rows, and the operators that restore and fill them: ``sp::window``, ``sp::mask``.

A shard of s rows per rank has padded rows if the ranks do not divide the sequence, or if a value is a window of it. In
every tensor of a local graph

    row at position p  =  row at position clamp(p, start, start + length - 1)        (`frames.nearest_rows`)

also on ranks without valid rows. A function of rows is therefore defined on a padded row, in its values and in its
derivatives, wherever it is defined on that valid row. An integer in a padded row is one of a valid row. Cotangents of
padded rows are zero by selection: a sum over rows reads a filled copy (``sp::mask``), and operators that remove padding
have zeros there in their adjoints.

Operators that create rows declare the contents of their padded rows (`library.PADDED`): "nearest" follows the
definition; "finite" is any finite number. `passes.localize.padding` inserts ``sp::window`` after "finite" operators if
an operator that reads the result depends on padding. That pass lists all values whose padded rows differ.
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import (
    FrameArg,
    column_along,
    has_remote_edges,
    inner_rows,
    is_known,
    is_padded,
    local_row_count,
    outside_window,
    own_positions,
    row_of_position,
)
from sp_compile.lowering.base.library import LinearMap, composite
from sp_compile.lowering.comm.communicator import current_communicator


@composite("mask(Tensor x, int dim, SymInt[] frame, Scalar value, int n, str group) -> Tensor", padded="finite")
def fill_padding(x: Tensor, dim: int, frame: FrameArg, value: float, n: int, group: str) -> Tensor:
    """Write ``value`` to the positions outside the window: Shard(dim) -> Shard(dim).

    Shapes: any -> same; dtype unchanged. Bytes: none. Backward: the cotangent, zero where filled.
    Source: masked_fill; nothing if no position can be outside.
    """
    if not is_padded(frame, n):
        return x
    return x.masked_fill(outside_window(x, dim % x.ndim, frame, n, group), value)


@composite(
    "window(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("all_gather", ""), padded="nearest"
)
def window(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Replace padded rows by the nearest valid row: Shard(dim) -> Shard(dim).

    Shapes: any -> same, any dtype.
    Bytes: none, unless a rank has padded rows whose nearest valid row is on another rank (`frames.has_remote_edges`):
    then one all_gather of the first or last valid row, or of both.
    Backward: the cotangent, with exact zeros outside the window, also in place of NaN.
    Source: `where`.
    """
    return LinearMap.apply(x, _fill_nearest_rows, _zero_outside, dim % x.ndim, frame, n, group)


def _zero_outside(grad: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return the cotangent with zeros at positions outside the window."""
    return fill_padding(grad, dim, frame, 0, n, group)


def _fill_nearest_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return x with the nearest valid row of any rank in each padded row."""
    outer, _, start, length = frame[:4]
    if not is_padded(frame, n) or is_known(length == 0):
        return x.view_as(x)
    rows_per_rank = local_row_count(frame, n)
    inner = inner_rows(x.shape[dim], outer * rows_per_rank)
    is_flat = is_known(outer * inner == 1)  # the dim has the rows only
    rows, row_dim = (x, dim) if is_flat else (x.unflatten(dim, (outer, rows_per_rank, inner)), dim + 1)
    positions = column_along(own_positions(frame, n, group, x.device), row_dim, rows.ndim)
    first, last = _edge_rows(rows, row_dim, frame, n, group)
    if first is not None:
        rows = torch.where(positions < start, first, rows)
    if last is not None:
        rows = torch.where(positions >= start + length, last, rows)
    return rows if is_flat else rows.flatten(dim, dim + 2)


def _edge_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the first and the last valid row, (..., 1, ...), or None if no rank has padding before or after it.

    Without an all-gather, each rank returns its own row at the same local index: the rank of the valid row is the only
    one that uses it.
    """
    start, length = frame[2:4]
    has_padding = not is_known(start == 0), not is_known(start + length == n * local_row_count(frame, n))
    positions = compress((start, start + length - 1), has_padding)
    owners = [row_of_position(position, frame, n) for position in positions]  # (rank, its row) of each valid row
    rows = [x.narrow(dim, row, 1) for _, row in owners]
    if any(compress(has_remote_edges(frame, n), has_padding)):
        sent = torch.cat([row.movedim(dim, 0) for row in rows])
        gathered = current_communicator().all_gather(sent, n, group)  # len(owners) rows of each rank
        rows = [gathered.narrow(0, rank * len(owners) + i, 1).movedim(0, dim) for i, (rank, _) in enumerate(owners)]
    remaining = iter(rows)
    first, last = (next(remaining) if padded else None for padded in has_padding)
    return first, last
