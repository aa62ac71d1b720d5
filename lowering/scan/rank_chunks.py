"""Scans of a rank's chunks, with what other ranks carry into them: values only, no derivatives.

Tensors are chunked: dim `way.dim` counts the chunks (one, or two in a zigzag frame), the next one their rows.

    cuts    bool, like x but with a row more: True between two rows, in index order, where a segment ends and another
            begins. Either end of a chunk counts; an end that nobody has compared with the next chunk yet is False.
            Other dims may be 1.
    first, last     the segment ids at the ends of each chunk in index order, (..., chunks, 1, ...), if that is so

The carry is added as ordinary pointwise operations, which a compiler fuses into whatever reads the result.
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
    """What a scan is asked for. dtype: of the result."""

    op: str
    exclusive: bool
    way: CarryExchange
    dtype: torch.dtype
    accumulate: torch.dtype


class RecurrenceSpec(NamedTuple):
    """What a recurrence is asked for; see ``sp::local_linear_scan``."""

    lagged: bool
    way: CarryExchange
    dtype: torch.dtype
    accumulate: torch.dtype


def segment_starts(cuts: Tensor, way: CarryExchange) -> Tensor:
    """Does a segment begin at the row, in scan order? cuts without the row behind the last one."""
    return cuts.narrow(way.rows, int(way.reverse), cuts.shape[way.rows] - 1)


def shift_rows(x: Tensor, carry: Tensor, way: CarryExchange) -> Tensor:
    """At each row what stands at the row before, in scan order: `carry` (..., chunks, 1, ...) at a chunk's first."""
    others = x.narrow(way.rows, int(way.reverse), x.shape[way.rows] - 1)
    return torch.cat([others, carry] if way.reverse else [carry, others], way.rows)


def chunks_first(x: Tensor, way: CarryExchange) -> Tensor:
    """(..., chunks, ...) without the dim of rows -> (chunks, ...)."""
    return x.movedim(way.dim, 0)


def chunk_rows(x: Tensor, way: CarryExchange) -> Tensor:
    """Undo `chunks_first`, as one row of every chunk: (chunks, ...) -> (..., chunks, 1, ...)."""
    return x.movedim(0, way.dim).unsqueeze(way.rows)


def last_rows(x: Tensor, way: CarryExchange) -> Tensor:
    """Each chunk's last row in scan order as a summary, (chunks, ...)."""
    return chunks_first(x.select(way.rows, 0 if way.reverse else -1), way)


def scan_chunks(
    x: Tensor, cuts: Tensor | None, first: Tensor | None, last: Tensor | None, job: ScanSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The scan in job.dtype; what is carried into the chunks; where segments begin in them (cut).

    The carry is None on one rank, the cut unless first and last were compared. Both are rows, (..., chunks, 1, ...).
    """
    op, exclusive, way, dtype, accumulate = job
    begins, options = None if cuts is None else segment_starts(cuts, way), (op, exclusive, way.reverse)
    if way.is_single:
        return sp.local_scan(x, begins, way.rows, *options, dtype, accumulate, False)[0], None, None
    # Not rounded before the carry is in: the sum may be small where both are large.
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
    """cuts once the first row of each chunk, in scan order, has been compared with the row before."""
    index, last = _row_indices(cuts, way), cuts.shape[way.rows] - 1
    return cuts | (cut & (index == (last if way.reverse else 0)))


def _row_indices(x: Tensor, way: CarryExchange) -> Tensor:
    """Of the rows, int64, broadcasts to x."""
    return column_along(torch.arange(x.shape[way.rows], device=x.device), way.rows, x.ndim)


def _carry_reach(begins: Tensor, cut: Tensor | None, way: CarryExchange) -> Tensor:
    """The rows that the chunk before reaches: does no segment begin between its end and the row?"""
    index, size = _row_indices(begins, way), begins.shape[way.rows]
    if way.reverse:
        reached = index > torch.where(begins, index, -1).amax(way.rows, keepdim=True)
    else:
        reached = index < torch.where(begins, index, size).amin(way.rows, keepdim=True)
    return reached if cut is None else reached & ~cut


def extremum_chunks(x: Tensor, op: str, way: CarryExchange) -> tuple[Tensor, Tensor, Tensor | None]:
    """The running extreme, its position, and the extreme carried into the chunks.

    The latter is None on one rank.
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
    """h in job.dtype; what is carried into the chunks, (..., chunks, 1, ...); what comes out of the last of all.

    initial: like h without chunks and rows; so is what comes out. The latter two are None on one rank.
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
