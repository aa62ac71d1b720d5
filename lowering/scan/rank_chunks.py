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

from .carries import ExchangeWay, carry_of_extremes, carry_of_recurrence, carry_of_scan
from .monoids import MONOIDS, selecting

sp = torch.ops.sp


class ScanJob(NamedTuple):
    """What a scan is asked for. dtype: of the result."""

    op: str
    exclusive: bool
    way: ExchangeWay
    dtype: torch.dtype
    accumulate: torch.dtype


class Recurrence(NamedTuple):
    """What a recurrence is asked for; see ``sp::local_linear_scan``."""

    lagged: bool
    way: ExchangeWay
    dtype: torch.dtype
    accumulate: torch.dtype


def starts(cuts: Tensor, way: ExchangeWay) -> Tensor:
    """Does a segment begin at the row, in scan order? cuts without the row behind the last one."""
    return cuts.narrow(way.rows, int(way.reverse), cuts.shape[way.rows] - 1)


def before(x: Tensor, carry: Tensor, way: ExchangeWay) -> Tensor:
    """At each row what stands at the row before, in scan order: `carry` (..., chunks, 1, ...) at a chunk's first."""
    others = x.narrow(way.rows, int(way.reverse), x.shape[way.rows] - 1)
    return torch.cat([others, carry] if way.reverse else [carry, others], way.rows)


def each_chunk(x: Tensor, way: ExchangeWay) -> Tensor:
    """(..., chunks, ...) without the dim of rows -> (chunks, ...)."""
    return x.movedim(way.dim, 0)


def row(x: Tensor, way: ExchangeWay) -> Tensor:
    """Undo `each_chunk`, as one row of every chunk: (chunks, ...) -> (..., chunks, 1, ...)."""
    return x.movedim(0, way.dim).unsqueeze(way.rows)


def end(x: Tensor, way: ExchangeWay) -> Tensor:
    """Each chunk's last row in scan order as a summary, (chunks, ...)."""
    return each_chunk(x.select(way.rows, 0 if way.reverse else -1), way)


def scanned(
    x: Tensor, cuts: Tensor | None, first: Tensor | None, last: Tensor | None, job: ScanJob
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The scan in job.dtype; what is carried into the chunks; where segments begin in them (cut).

    The carry is None on one rank, the cut unless first and last were compared. Both are rows, (..., chunks, 1, ...).
    """
    op, exclusive, way, dtype, accumulate = job
    begins, options = None if cuts is None else starts(cuts, way), (op, exclusive, way.reverse)
    if way.alone:
        return sp.local_scan(x, begins, way.rows, *options, dtype, accumulate, False)[0], None, None
    # Not rounded before the carry is in: the sum may be small where both are large.
    out, total = sp.local_scan(x, begins, way.rows, *options, accumulate, accumulate)
    total, stops = each_chunk(total, way), None
    if cuts is not None and begins is not None:
        leaving = end(cuts, way)
        total = total.masked_fill(leaving, MONOIDS[op].identity(accumulate))
        stops = each_chunk(begins.any(way.rows), way) | leaving
    first, last = (last, first) if way.reverse else (first, last)
    ends = None if first is None or last is None else (end(first, way), end(last, way))
    carry, cut = carry_of_scan(total, stops, ends, op, way)
    carry, cut = row(carry, way), None if cut is None else row(cut, way)
    both = MONOIDS[op].combine(carry, out)
    if begins is not None:
        both = torch.where(_unbroken(begins, cut, way), both, out)
    return both.to(dtype), carry, cut


def met(cuts: Tensor, cut: Tensor, way: ExchangeWay) -> Tensor:
    """cuts once the first row of each chunk, in scan order, has been compared with the row before."""
    index, last = _index(cuts, way), cuts.shape[way.rows] - 1
    return cuts | (cut & (index == (last if way.reverse else 0)))


def _index(x: Tensor, way: ExchangeWay) -> Tensor:
    """Of the rows, int64, broadcasts to x."""
    return column_along(torch.arange(x.shape[way.rows], device=x.device), way.rows, x.ndim)


def _unbroken(begins: Tensor, cut: Tensor | None, way: ExchangeWay) -> Tensor:
    """The rows that the chunk before reaches: does no segment begin between its end and the row?"""
    index, size = _index(begins, way), begins.shape[way.rows]
    if way.reverse:
        reached = index > torch.where(begins, index, -1).amax(way.rows, keepdim=True)
    else:
        reached = index < torch.where(begins, index, size).amin(way.rows, keepdim=True)
    return reached if cut is None else reached & ~cut


def selected(x: Tensor, op: str, way: ExchangeWay) -> tuple[Tensor, Tensor, Tensor | None]:
    """The running extreme, its position, and the extreme carried into the chunks.

    The latter is None on one rank.
    """
    best, index = sp.local_extremes(x, None, way.rows, op, way.reverse)
    if way.alone:
        return best, index, None
    first = way.own(x.device) * x.shape[way.rows]
    index = index + column_along(first, way.dim, x.ndim)
    carry = carry_of_extremes(end(best, way), end(index, way), op, way)
    value, position = (row(x, way) for x in carry)
    best, index = selecting(op)((value, position), (best, index))
    return best, index, value


def recurred(
    a: Tensor, b: Tensor, initial: Tensor | None, job: Recurrence
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h in job.dtype; what is carried into the chunks, (..., chunks, 1, ...); what comes out of the last of all.

    initial: like h without chunks and rows; so is what comes out. The latter two are None on one rank.
    """
    lagged, way, dtype, accumulate = job
    options = way.rows, way.reverse, lagged
    if way.alone:
        given = None if initial is None else initial.unsqueeze(way.dim)
        return sp.local_linear_scan(a, b, given, *options, dtype, accumulate), None, None
    factor, state = (each_chunk(x, way) for x in sp.local_linear_total(a, b, *options, accumulate))
    carry, final = carry_of_recurrence(factor, state, initial, way)
    h = sp.local_linear_scan(a, b, carry.movedim(0, way.dim), *options, dtype, accumulate)
    return h, row(carry, way), final
