"""Prepare the sequences of a packed kernel call: boundaries, packed rows and padded log-sum-exps.

FlashAttention treats rows between two sequences as sequences of their own that attend to nothing. Memory-efficient
attention allocates memory for every sequence as for the longest, and its backward divides by the number of queries. It
gets only sequences that have both queries and keys; if there are other rows between them, the rows are copied:

    rows    a a a . . b c c        packed    a a a b c c        lse    a a a * | b * * * | c c * *

If one sequence is many times as long as the others, much of that memory is wasted. Sequences are therefore split by
length into several calls (``split_by_length``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sp_compile.lowering.masks.blocks import AttendedRun, PackedCall, merge_runs
from sp_compile.lowering.masks.pieces import Ints

MAX_CALLS = 3  # the usual maximum number of calls of one attention; see `split_by_length`
# minimum ratio of allocated to used rows for a further call, below and from MAX_CALLS calls on
MIN_SAVING, MAX_PADDING = 2, 8
UNSPLIT_BYTES = 64 << 20  # allocations up to this size (bytes) are not split
MAX_SEQUENCES = (1 << 16) - 1  # the maximum number of sequences of one call: the size of a CUDA grid dim
ROW_ALIGNMENT = 32  # memory-efficient attention pads log-sum-exps to a multiple of this number of rows


class SequenceSide(NamedTuple):
    """The sequences of the queries or of the keys of a call, on the host."""

    # int32 (2, sequences + 1): each sequence's end in the packed rows, from 0 on; and its first row in all rows
    table: Tensor
    is_scattered: bool  # whether there are rows between sequences that belong to none
    total: int  # number of rows of all sequences
    max_length: int  # number of rows of the longest sequence


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The queries or keys of a call on its device, with the rows of all batch entries concatenated."""

    table: Tensor  # `SequenceSide.table` on the device
    side: SequenceSide  # sequences of this side, on the host
    size: int  # number of all rows, including rows that belong to no sequence

    @property
    def ends(self) -> Tensor:
        """Return the ends of the sequences in the packed rows: int32 (sequences + 1,), contiguous."""
        return self.table[0]

    @property
    def max_length(self) -> int:
        """Return the number of rows of the longest sequence."""
        return self.side.max_length

    def _repeat_per_row(self, numbers: Tensor) -> Tensor:
        """Repeat a number of each sequence for each of its rows."""
        return numbers.repeat_interleave(self.ends.diff(), output_size=self.side.total)

    @cached_property
    def _packed_positions(self) -> Tensor:
        """Return the position of each packed row in all rows: int64 (total,)."""
        shifts = self.table[1, :-1] - self.ends[:-1]
        return torch.arange(self.side.total, device=self.table.device) + self._repeat_per_row(shifts)

    @cached_property
    def _padded_positions(self) -> tuple[Tensor, slice, Tensor]:
        """Return the indices of the packed rows in (sequences, heads, max_length)."""
        sequence = self._repeat_per_row(torch.arange(len(self.ends) - 1, device=self.table.device))
        return sequence, slice(None), torch.arange(self.side.total, device=self.table.device) - self.ends[sequence]

    def pack(self, x: Tensor) -> Tensor:
        """Pack (B, S, ...) to (1, total, ...); a view if every row belongs to a sequence."""
        rows = x.flatten(0, 1)
        return (rows.index_select(0, self._packed_positions) if self.side.is_scattered else rows)[None]

    def unpack(self, x: Tensor, batch: int, other: float = 0.0) -> Tensor:
        """Undo `pack`; rows that belong to no sequence are filled with ``other``."""
        rows = x[0]
        if self.side.is_scattered:
            rows = x.new_full((self.size, *x.shape[2:]), other).index_copy_(0, self._packed_positions, rows)
        return rows.unflatten(0, (batch, -1))

    def pad_per_sequence(self, x: Tensor) -> Tensor:
        """Pad (1, total, H) to (sequences, H, max_length rounded up to ROW_ALIGNMENT) with +inf."""
        longest = self.max_length + -self.max_length % ROW_ALIGNMENT
        padded = x.new_full((len(self.ends) - 1, x.shape[2], longest), torch.inf)
        padded[self._padded_positions] = x[0]
        return padded

    def unpad_per_sequence(self, x: Tensor) -> Tensor:
        """Undo `pad_per_sequence`."""
        return x[self._padded_positions][None]


class PackedSequences(NamedTuple):
    """The queries and keys of a PACKED call."""

    queries: PackedRows  # query rows
    keys: PackedRows  # key rows

    @staticmethod
    def of(call: PackedCall, batch: int, device: torch.device, unpadded: bool) -> PackedSequences:
        """Create both sides from a call with asynchronous copies to the device.

        Args:
            call: The packed call.
            batch: The batch size.
            device: The device of the tables.
            unpadded: Leave out rows that belong to no sequence, and sequences without queries or without keys.
        """
        pinned = device.type == "cuda"
        sides = _packed_sides(call, batch, unpadded, pinned)
        rows = call.query_rows[1] * batch, call.key_rows[1] * batch
        queries, keys = (
            PackedRows(side.table.to(device, non_blocking=True), side, size) for side, size in zip(sides, rows)
        )
        return PackedSequences(queries, keys)


@lru_cache(maxsize=256)
def _packed_sides(call: PackedCall, batch: int, unpadded: bool, pinned: bool) -> tuple[SequenceSide, SequenceSide]:
    """Return both sides of a call; cached, so that host memory outlives an asynchronous copy."""
    if unpadded:
        runs = call.runs()
        sides = [[run.q for run in runs], [run.k for run in runs]]
    else:
        sides = [list(pairwise(call.queries)), list(pairwise(call.keys))]
    queries, keys = (
        _packed_side(np.array(side), batch, rows, pinned) for side, rows in zip(sides, (call.query_rows, call.key_rows))
    )
    return queries, keys


def _packed_side(stretches: Ints, batch: int, rows: tuple[int, int], pinned: bool) -> SequenceSide:
    """Return one side from its sequences (sequences, 2) and its rows (offset, length)."""
    offset, length = rows
    begins = (np.arange(batch)[:, None] * length + (stretches[:, 0] - offset)).ravel()
    ends = np.append(0, np.cumsum(np.tile(stretches[:, 1] - stretches[:, 0], batch)))
    host = torch.from_numpy(np.stack([ends, np.append(begins, batch * length)]).astype(np.int32))
    total, most = int(ends[-1]), int((stretches[:, 1] - stretches[:, 0]).max())
    return SequenceSide(host.pin_memory() if pinned else host, total < batch * length, total, most)


def split_by_length(
    calls: tuple[PackedCall, ...], batch: int, row_bytes: int | None, other_sequences: int = 0
) -> tuple[PackedCall, ...]:
    """Split calls until they fit CUDA's grid and waste little memory.

    Args:
        calls: The packed calls.
        batch: The batch size.
        row_bytes: Bytes of a query row, for a kernel that allocates memory for each sequence as for the longest of its
            call; None for other kernels. Such calls are split where sequence lengths differ much, into at most
            MAX_CALLS unless a call still allocates more than MAX_PADDING times the number of rows.
        other_sequences: The number of other calls.

    Returns:
        Calls with the same sequences.
    """
    if row_bytes is None and all(batch * len(call.queries) <= MAX_SEQUENCES for call in calls):
        return calls
    return _split_by_length(calls, batch, row_bytes, other_sequences)


@lru_cache(maxsize=256)
def _split_by_length(
    calls: tuple[PackedCall, ...], batch: int, row_bytes: int | None, other_sequences: int
) -> tuple[PackedCall, ...]:
    most = MAX_SEQUENCES // batch
    if row_bytes is None:
        most //= 3  # both sides may have rows between two sequences
    parts = [part for call in calls for part in _split_runs(call.runs(), max(1, most))]
    rows = sum(int(_padded_lengths(part).sum()) for part in parts)
    while parts and row_bytes is not None:
        largest = max(parts, key=_max_padded_rows)
        enough = MIN_SAVING if len(parts) + other_sequences < MAX_CALLS else MAX_PADDING
        if _max_padded_rows(largest) <= max(enough * rows, UNSPLIT_BYTES // (batch * row_bytes)):
            break
        at = parts.index(largest)
        parts[at : at + 1] = _split_long_short(largest)
    return tuple(merge_runs(part, part[0].window) for part in parts)


def _split_runs(runs: Sequence[AttendedRun], most: int) -> list[Sequence[AttendedRun]]:
    return [runs[first : first + most] for first in range(0, len(runs), most)]


def _padded_lengths(runs: Sequence[AttendedRun]) -> Ints:
    """Return the number of query rows of each run, padded to ROW_ALIGNMENT."""
    lengths = np.array([run.q[1] - run.q[0] for run in runs])
    return lengths + -lengths % ROW_ALIGNMENT


def _max_padded_rows(runs: Sequence[AttendedRun]) -> int:
    """Return the number of query rows for which one call allocates memory."""
    return len(runs) * int(_padded_lengths(runs).max())


def _split_long_short(runs: Sequence[AttendedRun]) -> list[Sequence[AttendedRun]]:
    """Split runs of several lengths into two parts that need the least memory together."""
    lengths = _padded_lengths(runs)
    falling = -np.sort(-lengths)
    longer = np.arange(1, len(runs))
    first = 1 + int(np.argmin(longer * falling[0] + (len(runs) - longer) * falling[1:]))
    is_long = lengths > falling[first]
    return [[run for run, long in zip(runs, is_long) if bool(long) is wanted] for wanted in (True, False)]
