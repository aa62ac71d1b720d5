"""Scan the chunks of a rank with the carries from other ranks: values only, no derivatives.

    2 ranks, sum of [1 2 3 4]    local scans [1 3] and [3 7]; carries 0 and 3; results [1 3] and [6 10]

Tensors are chunked: dim `exchange.dim` counts the chunks (one, or two in a zigzag frame), the next dim their rows.

    cuts    bool, like x but with one row more: True between two rows, in index order, where a segment ends and another
            begins. Both ends of a chunk count; an end that is not compared with the next chunk yet is False.
            Other dims may be 1.
    first, last     the segment ids at the ends of each chunk in index order, (..., chunks, 1, ...), if not compared yet

The carry is added as ordinary pointwise operations, which a compiler fuses into the consumers of the result.
"""

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
    """Return True for rows at which a segment begins in scan order, from (..., chunks, rows + 1, ...) cuts.

    Cut i is the boundary before row i in index order. A row begins a segment if the boundary before it in scan order is
    a cut. For row i that is cut i, and cut i + 1 in a reverse scan.
    """
    return cuts.narrow(exchange.rows, int(exchange.reverse), cuts.shape[exchange.rows] - 1)


def shift_rows(x: Tensor, carry: Tensor, exchange: CarryExchange) -> Tensor:
    """Return the previous row of each row in scan order, y_(i-1) for each y_i, as derivatives read it.

    The row before the first of a chunk is its `carry`, (..., chunks, 1, ...).
    """
    previous = x.narrow(exchange.rows, int(exchange.reverse), x.shape[exchange.rows] - 1)
    return torch.cat([previous, carry] if exchange.reverse else [carry, previous], exchange.rows)


def chunks_first(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Move the dim of chunks of summaries, which have no dim of rows, first: (..., chunks, ...) -> (chunks, ...)."""
    return x.movedim(exchange.dim, 0)


def chunk_rows(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Undo `chunks_first`, and add a dim of one row to each chunk: (chunks, ...) -> (..., chunks, 1, ...)."""
    return x.movedim(0, exchange.dim).unsqueeze(exchange.rows)


def last_rows(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Return the last row of each chunk in scan order as a summary, (chunks, ...)."""
    return chunks_first(x.select(exchange.rows, 0 if exchange.reverse else -1), exchange)


def scan_chunks(
    x: Tensor, cuts: Tensor | None, first: Tensor | None, last: Tensor | None, spec: ScanSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the scan of x in spec.dtype, the carries into the chunks, and the cuts at their first rows.

    Args:
        x: The chunks of this rank, (..., chunks, rows, ...).
        cuts: Where segments end and begin (see the module); None without segments.
        first: The segment id at the first row of each chunk, if it is to be compared with that of the chunk before.
        last: The segment id at the last row of each chunk.
        spec: The options.

    Returns:
        The carries, (..., chunks, 1, ...), are None on one rank. The cuts, of the same form, are True if the first row
        of a chunk in scan order begins a segment. They are None without `first` and `last`.
    """
    op, exclusive, exchange, dtype, accumulate = spec
    begins = None if cuts is None else segment_starts(cuts, exchange)
    options = op, exclusive, exchange.reverse
    if exchange.is_single:
        needs_total = False  # no other rank takes it
        return sp.local_scan(x, begins, exchange.rows, *options, dtype, accumulate, needs_total)[0], None, None
    # The local scan is not rounded before the carry is added: the sum of both may be small where both are large.
    out, total = sp.local_scan(x, begins, exchange.rows, *options, accumulate, accumulate)
    total, stops = chunks_first(total, exchange), None
    if cuts is not None and begins is not None:
        ends_at_last = last_rows(cuts, exchange)  # a segment ends at the chunk's last row: its total is not carried on
        total = total.masked_fill(ends_at_last, MONOIDS[op].identity(accumulate))
        # Chunks whose carry goes no further, since a segment begins in them or ends at their last row.
        stops = chunks_first(begins.any(exchange.rows), exchange) | ends_at_last
    first, last = (last, first) if exchange.reverse else (first, last)  # in scan order
    # Ids have one row per chunk: `last_rows` returns it, without the dim of rows.
    ends = None if first is None or last is None else (last_rows(first, exchange), last_rows(last, exchange))
    carry, cut = scan_carry(total, stops, ends, op, exchange)
    carry = chunk_rows(carry, exchange)
    cut = None if cut is None else chunk_rows(cut, exchange)
    carried = MONOIDS[op].combine(carry, out)
    if begins is not None:
        carried = torch.where(_is_reached(begins, cut, exchange), carried, out)
    return carried.to(dtype), carry, cut


def join_boundaries(cuts: Tensor, cut: Tensor, exchange: CarryExchange) -> Tensor:
    """Return `cuts` with the cuts at the first rows of chunks set to True where `cut` is True.

    The forward has computed `cut` by comparing the chunks of all ranks; a backward needs all cuts in one tensor.

    Args:
        cuts: (..., chunks, rows + 1, ...), True between two rows where one segment ends and another begins.
        cut: (..., chunks, 1, ...), True if the first row of a chunk in scan order begins a segment.
        exchange: The direction and the exchange.
    """
    first_boundary = cuts.shape[exchange.rows] - 1 if exchange.reverse else 0
    return cuts | (cut & (_indices_in_chunk(cuts, exchange) == first_boundary))


def _indices_in_chunk(x: Tensor, exchange: CarryExchange) -> Tensor:
    """Return the indices of the rows within their chunk, int64, with the number of dims of x."""
    return column_along(torch.arange(x.shape[exchange.rows], device=x.device), exchange.rows, x.ndim)


def _is_reached(begins: Tensor, cut: Tensor | None, exchange: CarryExchange) -> Tensor:
    """Return True for rows to which the carry is added: no segment begins from the chunk's first row to the row.

    Args:
        begins: Rows at which a segment begins.
        cut: True if the first row of the chunk in scan order (the last one in reverse) begins a segment, in addition
            to `begins`; None if it does not.
        exchange: The direction and the exchange.
    """
    index, size = _indices_in_chunk(begins, exchange), begins.shape[exchange.rows]
    if exchange.reverse:
        reached = index > torch.where(begins, index, -1).amax(exchange.rows, keepdim=True)
    else:
        reached = index < torch.where(begins, index, size).amin(exchange.rows, keepdim=True)
    return reached if cut is None else reached & ~cut


def extremum_chunks(x: Tensor, op: str, exchange: CarryExchange) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the running max or min, its position in the sequence, and the extreme carried into each chunk.

    The carried extreme is (..., chunks, 1, ...), and None on one rank.
    """
    best, index = sp.local_extremes(x, None, exchange.rows, op, exchange.reverse)  # in each chunk; no segments (None)
    if exchange.is_single:
        return best, index, None
    first_positions = exchange.chunk_indices(x.device) * x.shape[exchange.rows]  # of the first row of each chunk
    index = index + column_along(first_positions, exchange.dim, x.ndim)
    carry = extremes_carry(last_rows(best, exchange), last_rows(index, exchange), op, exchange)
    carried_best, carried_index = (chunk_rows(part, exchange) for part in carry)
    best, index = select_combine(op)((carried_best, carried_index), (best, index))
    return best, index, carried_best


def recurrence_chunks(
    a: Tensor, b: Tensor, initial: Tensor | None, spec: RecurrenceSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h_i = a_i * h_(i-1) + b_i in spec.dtype, the carries into the chunks, and the state after the last chunk.

    If spec.lagged, the factor applies after the sum: h_i = s_(i-1) + b_i with s_i = a_i * h_i. The carries are
    (..., chunks, 1, ...). `initial` and the final state are like h without chunks and rows. On one rank both the
    carries and the final state are None. The final state is None also if the exchange is in steps from rank to rank,
    since only the last rank then computes it.
    """
    first_states, carry, final = _exchange_states(a, b, initial, spec)
    lagged, exchange, dtype, accumulate = spec
    h = sp.local_linear_scan(a, b, first_states, exchange.rows, exchange.reverse, lagged, dtype, accumulate)
    return h, carry, final


def recurrence_grads(
    a: Tensor, grad: Tensor, h: Tensor, before: Tensor, spec: RecurrenceSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients w and da of ``sp::local_linear_scan_grads``, and the state of w after the last chunk.

    They are those of `recurrence_chunks` for h, without lag. Not differentiable.

    Args:
        a: The factors.
        grad: The cotangent of h.
        h: The result of the recurrence.
        before: The states before the chunks, (..., chunks, 1, ...).
        spec: Options of w: a lagged recurrence in the direction opposite to that of h.
    """
    first_states, _, final = _exchange_states(a, grad, None, spec)
    _, exchange, dtype, accumulate = spec
    w, da = sp.local_linear_scan_grads(
        a, grad, first_states, h, before.squeeze(exchange.rows), exchange.rows, exchange.reverse, dtype, accumulate
    )
    return w, da, final


def _exchange_states(
    a: Tensor, b: Tensor, initial: Tensor | None, spec: RecurrenceSpec
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the states before the chunks, (..., chunks, ...), and the last two results of `recurrence_chunks`."""
    lagged, exchange, _, accumulate = spec
    if exchange.is_single:
        return None if initial is None else initial.unsqueeze(exchange.dim), None, None
    totals = sp.local_linear_total(a, b, exchange.rows, exchange.reverse, lagged, accumulate)
    factor, state = (chunks_first(x, exchange) for x in totals)
    carry, final = recurrence_carry(factor, state, initial, exchange)
    return carry.movedim(0, exchange.dim), chunk_rows(carry, exchange), final
