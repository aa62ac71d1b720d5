"""Scan the chunks of a rank with the carries from other ranks: values only, no derivatives.

    2 ranks, sum of [1 2 3 4]    local scans [1 3] and [3 7]; carries 0 and 3; results [1 3] and [6 10]

Tensors are chunked: dim `exchange.dim` counts the chunks (one, or two in a zigzag frame), the next dim their rows.

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
    """Options of a scan."""

    op: str  # a key of `MONOIDS`
    exclusive: bool  # combine the rows before each, without the row
    exchange: CarryExchange  # direction of the scan, and exchange of carries
    dtype: torch.dtype  # of the result
    accumulate: torch.dtype  # dtype of the accumulation


class RecurrenceSpec(NamedTuple):
    """Options of a recurrence."""

    lagged: bool  # see ``sp::local_linear_scan``
    exchange: CarryExchange  # direction of the scan, and exchange of carries
    dtype: torch.dtype  # of the result
    accumulate: torch.dtype  # dtype of the accumulation


def segment_starts(cuts: Tensor, exchange: CarryExchange) -> Tensor:
    """Return True for rows at which a segment begins in scan order: cuts without the last boundary."""
    return cuts.narrow(exchange.rows, int(exchange.reverse), cuts.shape[exchange.rows] - 1)


def shift_rows(x: Tensor, carry: Tensor, exchange: CarryExchange) -> Tensor:
    """Return the previous row of each row in scan order: y_(i-1) for the derivatives of y_i.

    The row before a chunk's first is its `carry`, (..., chunks, 1, ...).
    """
    previous = x.narrow(exchange.rows, int(exchange.reverse), x.shape[exchange.rows] - 1)
    return torch.cat([previous, carry] if exchange.reverse else [carry, previous], exchange.rows)


def chunks_first(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Move the chunks first, as of summaries: (..., chunks, ...) without the dim of rows -> (chunks, ...)."""
    return x.movedim(exchange.dim, 0)


def chunk_rows(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Undo `chunks_first`, as one row of every chunk: (chunks, ...) -> (..., chunks, 1, ...)."""
    return x.movedim(0, exchange.dim).unsqueeze(exchange.rows)


def last_rows(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Return the last row of each chunk in scan order as a summary, (chunks, ...)."""
    return chunks_first(x.select(exchange.rows, 0 if exchange.reverse else -1), exchange)


def scan_chunks(
    x: Tensor, cuts: Tensor | None, first: Tensor | None, last: Tensor | None, spec: ScanSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the scan in spec.dtype, the carries, and whether a segment begins at each chunk's first row.

    The carry is None on one rank; the flag (cut) is None unless first and last were compared. Both are rows,
    (..., chunks, 1, ...).
    """
    op, exclusive, exchange, dtype, accumulate = spec
    begins, options = None if cuts is None else segment_starts(cuts, exchange), (op, exclusive, exchange.reverse)
    if exchange.is_single:
        return sp.local_scan(x, begins, exchange.rows, *options, dtype, accumulate, False)[0], None, None
    # Not rounded before the carry is added: the sum may be small where both are large.
    out, total = sp.local_scan(x, begins, exchange.rows, *options, accumulate, accumulate)
    # Summaries of the chunks: nothing leaves a chunk whose last row ends a segment, and nothing passes a stop.
    total, stops = chunks_first(total, exchange), None
    if cuts is not None and begins is not None:
        leaving = last_rows(cuts, exchange)
        total = total.masked_fill(leaving, MONOIDS[op].identity(accumulate))
        stops = chunks_first(begins.any(exchange.rows), exchange) | leaving
    first, last = (last, first) if exchange.reverse else (first, last)
    ends = None if first is None or last is None else (last_rows(first, exchange), last_rows(last, exchange))
    carry, cut = scan_carry(total, stops, ends, op, exchange)
    carry, cut = chunk_rows(carry, exchange), None if cut is None else chunk_rows(cut, exchange)
    carried = MONOIDS[op].combine(carry, out)
    if begins is not None:
        carried = torch.where(_is_reached(begins, cut, exchange), carried, out)
    return carried.to(dtype), carry, cut


def join_boundaries(cuts: Tensor, cut: Tensor, exchange: CarryExchange) -> Tensor:
    """Return cuts with a cut before each chunk's first row, in scan order, if `cut` is True for the chunk.

    A backward needs all cuts; the forward has compared the ends of chunks with those of other ranks.
    """
    first_row = cuts.shape[exchange.rows] - 1 if exchange.reverse else 0
    return cuts | (cut & (_row_indices(cuts, exchange) == first_row))


def _row_indices(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Return the indices of the rows within their chunk, int64, with the number of dims of x."""
    return column_along(torch.arange(x.shape[exchange.rows], device=x.device), exchange.rows, x.ndim)


def _is_reached(begins: Tensor, cut: Tensor | None, exchange: CarryExchange) -> Tensor:
    """Return True for rows that the carry reaches: no segment begins between the chunk start and the row."""
    index, size = _row_indices(begins, exchange), begins.shape[exchange.rows]
    if exchange.reverse:
        reached = index > torch.where(begins, index, -1).amax(exchange.rows, keepdim=True)
    else:
        reached = index < torch.where(begins, index, size).amin(exchange.rows, keepdim=True)
    return reached if cut is None else reached & ~cut


def extremum_chunks(x: Tensor, op: str, exchange: CarryExchange) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the running extreme, its position, and the extreme carried into the chunks.

    The carried extreme is None on one rank.
    """
    best, index = sp.local_extremes(x, None, exchange.rows, op, exchange.reverse)
    if exchange.is_single:
        return best, index, None
    first_rows = exchange.chunk_indices(x.device) * x.shape[exchange.rows]
    index = index + column_along(first_rows, exchange.dim, x.ndim)
    carry = extremes_carry(last_rows(best, exchange), last_rows(index, exchange), op, exchange)
    carried_best, carried_index = (chunk_rows(x, exchange) for x in carry)
    best, index = select_combine(op)((carried_best, carried_index), (best, index))
    return best, index, carried_best


def recurrence_chunks(
    a: Tensor, b: Tensor, initial: Tensor | None, spec: RecurrenceSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h in spec.dtype, the carries into the chunks, and the state after the last chunk.

    The carries are (..., chunks, 1, ...). `initial` and the final state are like h without chunks and rows. The carries
    and the final state are None on one rank.
    """
    lagged, exchange, dtype, accumulate = spec
    options = exchange.rows, exchange.reverse, lagged
    if exchange.is_single:
        first_state = None if initial is None else initial.unsqueeze(exchange.dim)
        return sp.local_linear_scan(a, b, first_state, *options, dtype, accumulate), None, None
    factor, state = (chunks_first(x, exchange) for x in sp.local_linear_total(a, b, *options, accumulate))
    carry, final = recurrence_carry(factor, state, initial, exchange)
    h = sp.local_linear_scan(a, b, carry.movedim(0, exchange.dim), *options, dtype, accumulate)
    return h, chunk_rows(carry, exchange), final
