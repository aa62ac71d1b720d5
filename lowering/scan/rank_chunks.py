"""Scan the chunks of a rank with the carries from other ranks: values only, no derivatives.

Tensors are chunked: dim `way.dim` counts the chunks (one, or two in a zigzag frame), the next dim their rows.

    cuts    bool, like x but with one row more: True between two rows, in index order, where a segment ends and another
            begins. Both ends of a chunk count; an end that is not compared with the next chunk yet is False.
            Other dims may be 1.
    first, last     the segment ids at the ends of each chunk in index order, (..., chunks, 1, ...), if not compared yet

The carry is added as ordinary pointwise operations, which a compiler fuses into the consumers of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import column_along

from .carries import CarryExchange, extremes_carry, recurrence_carry, scan_carry
from .monoids import MONOIDS, select_combine

sp = torch.ops.sp


class ScanSpec(NamedTuple):
    """Options of a scan; dtype is that of the result."""

    op: str
    exclusive: bool
    way: CarryExchange
    dtype: torch.dtype
    accumulate: torch.dtype


class RecurrenceSpec(NamedTuple):
    """Options of a recurrence; see ``sp::local_linear_scan``."""

    lagged: bool
    way: CarryExchange
    dtype: torch.dtype
    accumulate: torch.dtype


def segment_starts(cuts: Tensor, way: CarryExchange) -> Tensor:
    """Return True for rows at which a segment begins in scan order: cuts without the last boundary."""
    return cuts.narrow(way.rows, int(way.reverse), cuts.shape[way.rows] - 1)


def shift_rows(x: Tensor, carry: Tensor, way: CarryExchange) -> Tensor:
    """Return the previous row of each row, in scan order.

    The row before a chunk's first is its `carry`, (..., chunks, 1, ...).
    """
    others = x.narrow(way.rows, int(way.reverse), x.shape[way.rows] - 1)
    return torch.cat([others, carry] if way.reverse else [carry, others], way.rows)


def chunks_first(x: Tensor, way: CarryExchange) -> Tensor:
    """Move the chunks first: (..., chunks, ...) without the dim of rows -> (chunks, ...)."""
    return x.movedim(way.dim, 0)


def chunk_rows(x: Tensor, way: CarryExchange) -> Tensor:
    """Undo `chunks_first`, as one row of every chunk: (chunks, ...) -> (..., chunks, 1, ...)."""
    return x.movedim(0, way.dim).unsqueeze(way.rows)


def last_rows(x: Tensor, way: CarryExchange) -> Tensor:
    """Return the last row of each chunk in scan order as a summary, (chunks, ...)."""
    return chunks_first(x.select(way.rows, 0 if way.reverse else -1), way)


def scan_chunks(
    x: Tensor, cuts: Tensor | None, first: Tensor | None, last: Tensor | None, job: ScanSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the scan in job.dtype, the carries into the chunks, and where segments begin (cut).

    The carry is None on one rank; the cut is None unless first and last were compared. Both are rows,
    (..., chunks, 1, ...).
    """
    op, exclusive, way, dtype, accumulate = job
    begins, options = None if cuts is None else segment_starts(cuts, way), (op, exclusive, way.reverse)
    if way.is_single:
        return sp.local_scan(x, begins, way.rows, *options, dtype, accumulate, False)[0], None, None
    # Not rounded before the carry is added: the sum may be small where both are large.
    out, total = sp.local_scan(x, begins, way.rows, *options, accumulate, accumulate)
    total, stops = chunks_first(total, way), None
    if cuts is not None and begins is not None:
        leaving = last_rows(cuts, way)
        total = total.masked_fill(leaving, MONOIDS[op].identity(accumulate))
        stops = chunks_first(begins.any(way.rows), way) | leaving
    first, last = (last, first) if way.reverse else (first, last)
    ends = None if first is None or last is None else (last_rows(first, way), last_rows(last, way))
    carry, cut = scan_carry(total, stops, ends, op, way)
    carry, cut = chunk_rows(carry, way), None if cut is None else chunk_rows(cut, way)
    both = MONOIDS[op].combine(carry, out)
    if begins is not None:
        both = torch.where(_carry_reach(begins, cut, way), both, out)
    return both.to(dtype), carry, cut


def join_boundaries(cuts: Tensor, cut: Tensor, way: CarryExchange) -> Tensor:
    """Return cuts with the first row of each chunk, in scan order, compared with the row before it."""
    index, last = _row_indices(cuts, way), cuts.shape[way.rows] - 1
    return cuts | (cut & (index == (last if way.reverse else 0)))


def _row_indices(x: Tensor, way: CarryExchange) -> Tensor:
    """Return the indices of the rows, int64, broadcast to x."""
    return column_along(torch.arange(x.shape[way.rows], device=x.device), way.rows, x.ndim)


def _carry_reach(begins: Tensor, cut: Tensor | None, way: CarryExchange) -> Tensor:
    """Return True for rows that the carry reaches: no segment begins between the chunk start and the row."""
    index, size = _row_indices(begins, way), begins.shape[way.rows]
    if way.reverse:
        reached = index > torch.where(begins, index, -1).amax(way.rows, keepdim=True)
    else:
        reached = index < torch.where(begins, index, size).amin(way.rows, keepdim=True)
    return reached if cut is None else reached & ~cut


def extremum_chunks(x: Tensor, op: str, way: CarryExchange) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the running extreme, its position, and the extreme carried into the chunks.

    The carried extreme is None on one rank.
    """
    best, index = sp.local_extremes(x, None, way.rows, op, way.reverse)
    if way.is_single:
        return best, index, None
    first = way.chunk_indices(x.device) * x.shape[way.rows]
    index = index + column_along(first, way.dim, x.ndim)
    carry = extremes_carry(last_rows(best, way), last_rows(index, way), op, way)
    value, position = (chunk_rows(x, way) for x in carry)
    best, index = select_combine(op)((value, position), (best, index))
    return best, index, value


def recurrence_chunks(
    a: Tensor, b: Tensor, initial: Tensor | None, job: RecurrenceSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h in job.dtype, the carries into the chunks, and the state after the last chunk.

    The carries are (..., chunks, 1, ...). `initial` and the final state are like h without chunks and rows. The carries
    and the final state are None on one rank.
    """
    lagged, way, dtype, accumulate = job
    options = way.rows, way.reverse, lagged
    if way.is_single:
        given = None if initial is None else initial.unsqueeze(way.dim)
        return sp.local_linear_scan(a, b, given, *options, dtype, accumulate), None, None
    factor, state = (chunks_first(x, way) for x in sp.local_linear_total(a, b, *options, accumulate))
    carry, final = recurrence_carry(factor, state, initial, way)
    h = sp.local_linear_scan(a, b, carry.movedim(0, way.dim), *options, dtype, accumulate)
    return h, chunk_rows(carry, way), final
