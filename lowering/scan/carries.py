"""Compute the carries between the chunks of a sharded sequence, from a summary of each chunk.

A chunk is the shard of a rank, or half of it in a zigzag frame. Its summary is the result of its local scan: the total
of a scan, the affine map of a recurrence, or the running extreme. The carry into a chunk combines the summaries of all
earlier chunks in scan order.

    "gather"   one all-gather; every rank scans the n (or 2n) summaries: (n - 1) * C bytes, C of a rank
    "steps"    ceil(log2 n) shifts, step k to the rank 2^k later: at most ceil(log2 n) * C bytes

Summaries have shape (folds, ...), in the order of the chunks of this rank. Nothing here is differentiable, except
where a docstring declares it. A segment is a run of rows with one id; nothing is carried from a segment into the next.
A stop marks a chunk in which a segment begins. A monoid is an operation with a neutral element (``monoids.py``).

``sp::to_bytes`` and ``sp::from_bytes`` pack values of several dtypes into one buffer, so that one collective exchanges
them. They are opaque, because the code that a compiler generates for reinterpreted bytes depends on their alignment.
They are not differentiable.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import column_along, to_sequence_order
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.communicator import current_communicator, from_sendable, to_sendable
from sp_compile.lowering.torch_compat import pytree

from .monoids import MONOIDS, Combine, Pair, compose_affine, segment_combine, select_combine

sp = torch.ops.sp


class CarryExchange(NamedTuple):
    """Direction of a scan, the ranks that share its rows, and the exchange of carries."""

    dim: int  # the dim of the chunks; their rows are in dim + 1
    reverse: bool  # the scan starts at the last row
    n: int = 1  # number of ranks
    folds: int = 1  # number of chunks of a rank
    method: str = "gather"  # "gather" or "steps"
    group: str = ""  # name of the process group

    @property
    def rows(self) -> int:
        """Return the dim of the rows."""
        return self.dim + 1

    @property
    def is_single(self) -> bool:
        """Return True if a single rank has all chunks."""
        return self.n == 1

    @property
    def backward(self) -> CarryExchange:
        """Return the exchange of a scan in the opposite direction, which a backward runs."""
        return self._replace(reverse=not self.reverse)

    @property
    def frame(self) -> list[int]:
        """Return the frame of a sequence with one row per chunk, as which summaries are gathered and reordered."""
        chunks = self.n * self.folds
        return [1, chunks, 0, chunks, self.folds]

    def chunk_indices(self, device: torch.device) -> Tensor:
        """Return the indices of the chunks of this rank in the sequence, int64 (folds,), read at run time."""
        rank = sp.rank(self.group, device)
        return torch.stack([rank, 2 * self.n - 1 - rank][: self.folds])

    def scan_positions(self, device: torch.device) -> Tensor:
        """Return the positions of the chunks of this rank in scan order, the last first if reverse: int64 (folds,)."""
        indices = self.chunk_indices(device)
        return self.n * self.folds - 1 - indices if self.reverse else indices


def scan_carry(
    total: Tensor, stops: Tensor | None, ends: Pair | None, op: str, exchange: CarryExchange
) -> tuple[Tensor, Tensor | None]:
    """Return the carry of a scan into the chunks of this rank, and whether a segment begins at their first rows.

    Args:
        total: (folds, ...), the total of the last segment of each chunk.
        stops: bool, broadcasts to total; True if a segment begins in the chunk; None without segments.
        ends: The first and the last segment id of each chunk in scan order, shaped like stops, which are compared here
            between chunks. None if `stops` considers the boundaries of chunks already.
        op: The name of the monoid.
        exchange: The direction and the exchange.

    Returns:
        The carry, like total, and `cut`: a bool tensor like stops, True if the first row of the chunk begins a segment;
        None without ends.
    """
    if exchange.method == "steps":
        return _scan_in_steps(total, stops, ends, op, exchange)
    positions, cut = exchange.scan_positions(total.device), None
    if stops is None:
        (total,) = gather_parts([total], exchange)
    elif ends is None:
        total, stops = gather_parts([total, stops], exchange)
    else:
        total, stops, first, last = gather_parts([total, stops, *ends], exchange)
        # True for chunks whose first row begins a segment: its id differs from the last id of the previous chunk.
        cuts = torch.cat([torch.ones_like(stops[:1]), first[1:] != last[:-1]])
        stops, cut = stops | cuts, cuts.index_select(0, positions)
    dtype = total.dtype
    # An inclusive scan along dim 0 of the summaries, which are in scan order already. The arguments after `op`:
    # exclusive, reverse, the dtypes of the result and of sums, and total (not needed).
    sums, _ = sp.local_scan(total, stops, 0, op, False, False, dtype, dtype, False)
    return _select_carries(sums, MONOIDS[op].identity(dtype), positions), cut


def extremes_carry(value: Tensor, index: Tensor, op: str, exchange: CarryExchange) -> Pair:
    """Return the running max or min of all rows before the chunks of this rank, and its index.

    Args:
        value: (folds, ...), the extreme of each chunk.
        index: (folds, ...), int64, its position.
        op: "max" or "min".
        exchange: The direction and the exchange.

    Returns:
        Tensors like value and index.
    """
    identity = MONOIDS[op].identity(value.dtype)
    if exchange.method == "steps":
        no_rows = torch.full_like(value, identity), torch.zeros_like(index)
        return _exclusive_combine((value, index), no_rows, select_combine(op), exchange)
    value, index = gather_parts([value, index], exchange)
    # The running extreme of all chunks up to each one, and the number of the chunk that has it.
    best, best_chunk = sp.local_extremes(value, None, 0, op, False)  # no segments, along dim 0, not reversed
    positions = exchange.scan_positions(value.device)
    return _select_carries(best, identity, positions), _select_carries(index.gather(0, best_chunk), 0, positions)


def recurrence_carry(
    factor: Tensor, state: Tensor, initial: Tensor | None, exchange: CarryExchange
) -> tuple[Tensor, Tensor | None]:
    """Return the carry of a recurrence into the chunks of this rank, and the state after the last chunk.

    A chunk maps the state h before it to factor * h + state.

    Args:
        factor: (folds, ...), of the map of each chunk.
        state: (folds, ...), of the same map.
        initial: (...), the state before the first chunk; zeros if None.
        exchange: The direction and the exchange.

    Returns:
        The carry, (folds, ...), and the final state, (...). The final state is None with "steps", because only
        the last rank could compute it.
    """
    first = state.new_zeros(state.shape[1:]) if initial is None else initial.to(state.dtype)
    if exchange.method == "steps":
        no_change = torch.ones_like(factor), torch.zeros_like(state)
        a, b = _exclusive_combine((factor, state), no_change, compose_affine, exchange)
        return torch.addcmul(b, a, first), None
    factor, state = gather_parts([factor, state], exchange)
    # Along dim 0, from the first chunk on (no `reverse`, not `lagged`).
    states = sp.local_linear_scan(factor, state, first, 0, False, False, state.dtype, state.dtype)
    carries = torch.cat([first[None], states[:-1]])
    return carries.index_select(0, exchange.scan_positions(state.device)), states[-1]


def previous_ends(ends: Tensor, first: Tensor, exchange: CarryExchange) -> Tensor:
    """Return, for each chunk of this rank, the end of the chunk before it: (folds, ...).

    The end of a chunk is the result of the scan at its last row in scan order. Differentiable, for second derivatives.

    Args:
        ends: (folds, ...), the ends of the chunks of this rank.
        first: (...), the value before the first chunk.
        exchange: The direction and the exchange.
    """
    (first,) = sp.reduce_grad([first], "reduce", exchange.n, exchange.group)  # each rank has a term of its gradient
    rows = sp.all_gather(ends, 0, exchange.frame, exchange.n, exchange.group)
    rows = rows.flip(0) if exchange.reverse else rows
    return torch.cat([first[None], rows[:-1]]).index_select(0, exchange.scan_positions(ends.device))


def last_end(ends: Tensor, exchange: CarryExchange) -> Tensor:
    """Return the end (...) of the last chunk of the scan, on every rank. Differentiable.

    Args:
        ends: (folds, ...), the results of the scan at the last row of each chunk of this rank, in scan order.
        exchange: The direction and the exchange.
    """
    rows = sp.unshard(ends, 0, exchange.frame, exchange.n, exchange.group)
    return rows[0] if exchange.reverse else rows[-1]


def gather_parts(parts: list[Tensor], exchange: CarryExchange) -> list[Tensor]:
    """Gather several tensors of summaries, (folds, ...), by one all-gather.

    Returns the summaries of all chunks in scan order, (n * folds, ...), for each tensor.
    """
    sent = parts[0] if len(parts) == 1 else sp.to_bytes(parts)
    gathered = current_communicator().all_gather(sent, exchange.n, exchange.group)
    rows = to_sequence_order(gathered, exchange.frame, exchange.n)
    rows = rows.flip(0) if exchange.reverse else rows
    return [rows] if len(parts) == 1 else sp.from_bytes(rows, parts)


def _select_carries(inclusive: Tensor, identity: float, positions: Tensor) -> Tensor:
    """Return the carries into the chunks of this rank, from the scan of the summaries of all chunks.

    Args:
        inclusive: (n * folds, ...), the combination of all summaries up to each chunk, in scan order.
        identity: The carry into the first chunk.
        positions: (folds,), positions of the chunks of this rank in scan order.
    """
    first = torch.full_like(inclusive[:1], identity)
    return torch.cat([first, inclusive[:-1]]).index_select(0, positions)


def _scan_in_steps(
    total: Tensor, stops: Tensor | None, ends: Pair | None, op: str, exchange: CarryExchange
) -> tuple[Tensor, Tensor | None]:
    """Implement `scan_carry` by shifts between ranks; each rank has one chunk.

    The results are the carry and, with `ends` (first and last segment id), whether this chunk begins a segment.
    """
    combine: Combine = MONOIDS[op].combine
    empty = torch.full_like(total, MONOIDS[op].identity(total.dtype))
    if stops is None:  # no segments
        return _exclusive_combine(total, empty, combine, exchange), None
    join = segment_combine(combine)  # combines pairs (stops, total)
    if ends is None:  # the stops include segments that begin at the first row of a chunk
        _, carry = _exclusive_combine((stops, total), (stops, empty), join, exchange)
        return carry, None

    def merge(left: Any, right: Any) -> Any:
        """Combine the states (stops, total, first id, last id) of two adjacent ranges of ranks.

        A segment begins between the ranges if the last id of the left differs from the first id of the right.
        """
        (left_stops, left_total, left_first, left_last), (stops, total, first, last) = left, right
        return *join((left_stops, left_total), (stops | (left_last != first), total)), left_first, last

    # Only the first rank receives the state before all ranks. Its stops and ids are placeholders, which are not used.
    no_ranks = stops, empty, *ends
    _, carry, _, previous_id = _exclusive_combine((stops, total, *ends), no_ranks, merge, exchange)
    is_first_rank = column_along(exchange.scan_positions(total.device) == 0, 0, previous_id.ndim)  # has no previous id
    return carry, (previous_id != ends[0]) | is_first_rank


def _exclusive_combine(state: Any, empty: Any, combine: Combine, exchange: CarryExchange) -> Any:
    """Return the combination of the states of all earlier ranks; `empty` on the first rank.

    Each iteration doubles the number of combined ranks. After that of step k, `carry` combines the 2k - 1 ranks before
    this one (or all, if there are fewer), and `state` these and this rank. On rank 3 of 4, `carry` is that of rank 2
    after step 1, and that of the ranks 0, 1 and 2 after step 2.

    Args:
        state: A pytree, the state of this rank.
        empty: A pytree like it, the state before all ranks.
        combine: An associative function of two states; the left one is of earlier ranks.
        exchange: The direction and the exchange.
    """
    position = exchange.scan_positions(pytree.tree_leaves(state)[0].device)
    carry, step = empty, 1
    while step < exchange.n:
        received = _shift_state(state, step, exchange)
        is_valid = position >= step  # the shift is cyclic: the first ranks receive unrelated states of the last ones
        combined = received if step == 1 else combine(received, carry)  # in the first step `carry` is empty
        carry = _select(is_valid, combined, carry)
        state = _select(is_valid, combine(received, state), state)
        step *= 2
    return carry


def _select(condition: Tensor, new: Any, old: Any) -> Any:
    """Return the tensors of the pytree `new` if the condition, bool (1,), is True, else those of `old`."""
    return pytree.tree_map(lambda x, y: torch.where(condition.view([1] * x.ndim), x, y), new, old)


def _shift_state(state: Any, step: int, exchange: CarryExchange) -> Any:
    """Return the state of the rank `step` before this one in scan order, by one cyclic shift."""
    leaves, tree = pytree.tree_flatten(state)
    sent = leaves[0] if len(leaves) == 1 else sp.to_bytes(leaves)
    route = routes.shift_route(exchange.group, -step if exchange.reverse else step)
    pending = current_communicator().start_shift(to_sendable(sent), route)
    received = from_sendable(current_communicator().wait(pending), sent)
    return pytree.tree_unflatten([received] if len(leaves) == 1 else sp.from_bytes(received, leaves), tree)


def _row_bytes(part: Tensor) -> int:
    """Return the bytes of one row of a tensor in the buffer of `to_bytes`."""
    return math.prod(part.shape[1:]) * part.element_size()  # Size.numel would make symbolic sizes constants


@opaque(
    "to_bytes(Tensor[] parts) -> Tensor",
    lambda parts: parts[0].new_empty((parts[0].shape[0], sum(map(_row_bytes, parts))), dtype=torch.uint8),
)
def to_bytes(parts: list[Tensor]) -> Tensor:
    """Pack the rows of tensors of any dtypes, to send them as one: (k, ...) each -> (k, bytes) uint8.

    Runs: views and one copy.
    """
    rows = [part.reshape(part.shape[0], math.prod(part.shape[1:])) for part in parts]
    no_bytes = parts[0].new_empty((parts[0].shape[0], 0), dtype=torch.uint8)  # the result if all parts are empty
    # A view in another dtype requires an aligned tensor, so a part of a larger buffer is copied first.
    return torch.cat([no_bytes, *(_align_rows(row).view(torch.uint8) for row in rows if row.numel())], 1)


@opaque(
    "from_bytes(Tensor message, Tensor[] parts) -> Tensor[]",
    lambda message, parts: [part.new_empty((message.shape[0], *part.shape[1:])) for part in parts],
)
def from_bytes(message: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Undo `to_bytes`: (m, bytes) uint8 -> tensors (m, ...).

    Args:
        message: (m, bytes), uint8.
        parts: The tensors before `to_bytes`, of which only the row shapes and the dtypes are used.
    """
    rows = message.split([_row_bytes(part) for part in parts], 1)
    shapes = [(message.shape[0], *part.shape[1:]) for part in parts]
    return [
        _align_rows(row).view(part.dtype).view(shape) if row.numel() else part.new_empty(shape)
        for row, part, shape in zip(rows, parts, shapes, strict=True)
    ]


def _align_rows(rows: Tensor) -> Tensor:
    """Return a contiguous copy of rows, aligned for a view in a dtype of another size."""
    return rows.clone(memory_format=torch.contiguous_format)
