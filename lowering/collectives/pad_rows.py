"""What a padded row holds: the one definition, the operator that restores it, and the one that fills padding.

A shard of s rows a rank has padded rows where the ranks do not divide the sequence, or where a value is a window of
it. In every tensor of a local graph

    row at position p  =  row at position clamp(p, start, start + length - 1)        (`frames.nearest_rows`)

also on ranks that hold no valid row. So a function of rows is defined on a padded row, in its values and in its
derivatives, wherever it is defined on that valid row, and an integer there is one that a valid row has. Cotangents of
padded rows are zero by selection: a sum over rows reads a filled copy (``sp::mask``), and what removes padding has a
zero there in its adjoint.

Operators that make rows of their own declare what their padded rows hold (`library.PADDED`): "nearest" keeps the
definition; "finite" is any finite number, and `passes.localize.padding` puts ``sp::window`` after these where an
operator that reads the result may notice. That pass names all values whose padded rows are other ones.
"""

from __future__ import annotations

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
    """Shard(dim) -> Shard(dim): ``value`` at the positions outside the window.

    Shapes: any -> same; dtype kept. Bytes: none. Backward: the cotangent, zero where masked.
    Source: masked_fill; nothing when no position can be outside.
    """
    if not is_padded(frame, n):
        return x
    return x.masked_fill(outside_window(x, dim % x.ndim, frame, n, group), value)


@composite(
    "window(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("all_gather", ""), padded="nearest"
)
def window(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Shard(dim) -> Shard(dim): padded rows are replaced by the nearest valid row.

    Shapes: any -> same, any dtype. Bytes: none, unless a rank holds padded rows whose nearest valid row is on another
    rank (`frames.has_remote_edges`): then one all_gather of the first or last valid row, or of both. Backward: the
    cotangent, with exact zeros (whatever is there, NaN too) outside the window. Source: `where`.
    """
    return LinearMap.apply(x, _fill_nearest_rows, _zero_outside, dim % x.ndim, frame, n, group)


def _zero_outside(grad: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    return fill_padding(grad, dim, frame, 0, n, group)


def _fill_nearest_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    outer, _, start, length = frame[:4]
    if not is_padded(frame, n) or is_known(length == 0):
        return x.view_as(x)
    held = local_row_count(frame, n)
    inner = inner_rows(x.shape[dim], outer * held)
    flat = is_known(outer * inner == 1)
    rows, at = (x, dim) if flat else (x.unflatten(dim, (outer, held, inner)), dim + 1)
    positions = column_along(own_positions(frame, n, group, x.device), at, rows.ndim)
    first, last = _edge_rows(rows, at, frame, n, group)
    if first is not None:
        rows = torch.where(positions < start, first, rows)
    if last is not None:
        rows = torch.where(positions >= start + length, last, rows)
    return rows if flat else rows.flatten(dim, dim + 2)


def _edge_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> tuple[Tensor | None, Tensor | None]:
    """The first and the last valid row, (..., 1, ...), None where no padded row needs it.

    On a rank that has no padded row next to it, a row that nothing reads.
    """
    start, length = frame[2:4]
    before, after = not is_known(start == 0), not is_known(start + length == n * local_row_count(frame, n))
    edges = [(start, before), (start + length - 1, after)]
    places = [row_of_position(position, frame, n) for position, needed in edges if needed]
    rows = [x.narrow(dim, row, 1) for _, row in places]
    elsewhere = has_remote_edges(frame, n)
    if any(missing and needed for missing, (_, needed) in zip(elsewhere, edges)):
        sent = torch.cat([row.movedim(dim, 0) for row in rows])
        everywhere = current_communicator().all_gather(sent, n, group)
        rows = [everywhere.narrow(0, rank * len(places) + i, 1).movedim(0, dim) for i, (rank, _) in enumerate(places)]
    found = iter(rows)
    return next(found) if before else None, next(found) if after else None
