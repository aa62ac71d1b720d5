"""The sequences that one call of a kernel takes: where they end, and how their rows get there and back.

FlashAttention takes rows that lie between two sequences as some of their own, which see nothing. Memory-efficient
attention has memory as for the longest for every sequence, and its backward divides by the number of queries. It gets
sequences that have both alone, and their rows are copied if there are others between them:

    rows    a a a . . b c c        packed    a a a b c c        lse    a a a * | b * * * | c c * *

Much of that memory is wasted where one sequence is many times as long as the others, so they go by their length into
several calls (``split_by_length``).
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

MAX_CALLS = 3
"""As many as one attention may take."""
MIN_SAVING, MAX_PADDING = 2, 8
"""Memory for so many times the rows is not worth another call; for more than TOO_MUCH times, a fourth one is."""
UNSPLIT_BYTES = 64 << 20
"""What is not much, however few the rows."""
MAX_SEQUENCES = (1 << 16) - 1
"""Of one call: the size of a dim of CUDA's grids, of which sequences are one."""
ROW_ALIGNMENT = 32
"""To which multiple memory-efficient attention pads log-sum-exps."""


class SequenceSide(NamedTuple):
    """Stretches of the queries, or of the keys; on the host."""

    table: Tensor
    """int32 (2, sequences + 1): where each ends in the packed rows, from 0 on; and where it begins in all rows."""
    is_scattered: bool
    """Whether rows lie between them that are of none."""
    total: int
    """The rows of all."""
    max_length: int
    """The rows of the longest."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """One side of a call, on its device. Rows are those of all batch entries, one behind the other."""

    table: Tensor
    side: SequenceSide
    size: int
    """All rows, those of no sequence too."""

    @property
    def ends(self) -> Tensor:
        """int32 (sequences + 1,), contiguous."""
        return self.table[0]

    @property
    def max_length(self) -> int:
        return self.side.max_length

    def _repeat_per_row(self, numbers: Tensor) -> Tensor:
        """A number of each sequence, at each of its rows."""
        return numbers.repeat_interleave(self.ends.diff(), output_size=self.side.total)

    @cached_property
    def _packed_positions(self) -> Tensor:
        """int64 (total,): where the packed rows lie in all rows."""
        shifts = self.table[1, :-1] - self.ends[:-1]
        return torch.arange(self.side.total, device=self.table.device) + self._repeat_per_row(shifts)

    @cached_property
    def _padded_positions(self) -> tuple[Tensor, slice, Tensor]:
        """Of the packed rows in (sequences, heads, most)."""
        sequence = self._repeat_per_row(torch.arange(len(self.ends) - 1, device=self.table.device))
        return sequence, slice(None), torch.arange(self.side.total, device=self.table.device) - self.ends[sequence]

    def pack(self, x: Tensor) -> Tensor:
        """(B, S, ...) -> (1, total, ...): a view if the sequences are all rows, and they lie one behind the other."""
        rows = x.flatten(0, 1)
        return (rows.index_select(0, self._packed_positions) if self.side.is_scattered else rows)[None]

    def unpack(self, x: Tensor, batch: int, other: float = 0.0) -> Tensor:
        """Undo `packed`. other: what rows of no sequence get."""
        rows = x[0]
        if self.side.is_scattered:
            rows = x.new_full((self.size, *x.shape[2:]), other).index_copy_(0, self._packed_positions, rows)
        return rows.unflatten(0, (batch, -1))

    def pad_per_sequence(self, x: Tensor) -> Tensor:
        """(1, total, H) -> (sequences, H, most), padded to a multiple of ALIGNED, with +inf where no row is."""
        longest = self.max_length + -self.max_length % ROW_ALIGNMENT
        padded = x.new_full((len(self.ends) - 1, x.shape[2], longest), torch.inf)
        padded[self._padded_positions] = x[0]
        return padded

    def unpad_per_sequence(self, x: Tensor) -> Tensor:
        """Undo `pad_per_sequence`."""
        return x[self._padded_positions][None]


class PackedSequences(NamedTuple):
    """Both sides of a PACKED call."""

    queries: PackedRows
    keys: PackedRows

    @staticmethod
    def of(call: PackedCall, batch: int, device: torch.device, alone: bool) -> PackedSequences:
        """The device gets the numbers when it comes to it; the host goes on. alone: without what is of no sequence."""
        pinned = device.type == "cuda"
        sides = _packed_sides(call, batch, alone, pinned)
        rows = call.query_rows[1] * batch, call.key_rows[1] * batch
        queries, keys = (
            PackedRows(side.table.to(device, non_blocking=True), side, size) for side, size in zip(sides, rows)
        )
        return PackedSequences(queries, keys)


@lru_cache(maxsize=256)
def _packed_sides(call: PackedCall, batch: int, alone: bool, pinned: bool) -> tuple[SequenceSide, SequenceSide]:
    """Kept, so that a copy on its way still finds them."""
    if alone:
        runs = call.runs()
        sides = [[run.q for run in runs], [run.k for run in runs]]
    else:
        sides = [list(pairwise(call.queries)), list(pairwise(call.keys))]
    queries, keys = (
        _packed_side(np.array(side), batch, rows, pinned) for side, rows in zip(sides, (call.query_rows, call.key_rows))
    )
    return queries, keys


def _packed_side(stretches: Ints, batch: int, rows: tuple[int, int], pinned: bool) -> SequenceSide:
    """stretches: (sequences, 2)."""
    offset, length = rows
    begins = (np.arange(batch)[:, None] * length + (stretches[:, 0] - offset)).ravel()
    ends = np.append(0, np.cumsum(np.tile(stretches[:, 1] - stretches[:, 0], batch)))
    host = torch.from_numpy(np.stack([ends, np.append(begins, batch * length)]).astype(np.int32))
    total, most = int(ends[-1]), int((stretches[:, 1] - stretches[:, 0]).max())
    return SequenceSide(host.pin_memory() if pinned else host, total < batch * length, total, most)


def split_by_length(
    calls: tuple[PackedCall, ...], batch: int, row_bytes: int | None, besides: int = 0
) -> tuple[PackedCall, ...]:
    """The same sequences in calls that a grid has room for, and memory.

    row_bytes: of a query, for a kernel that has as much memory for each sequence as for the longest of its call. Calls
    are cut then where sequences differ much, into at most MOST_CALLS as long as none of them needs memory for more than
    TOO_MUCH times as many rows as there are. besides: how many others there are.
    """
    if row_bytes is None and all(batch * len(call.queries) <= MAX_SEQUENCES for call in calls):
        return calls
    return _split_by_length(calls, batch, row_bytes, besides)


@lru_cache(maxsize=256)
def _split_by_length(
    calls: tuple[PackedCall, ...], batch: int, row_bytes: int | None, besides: int
) -> tuple[PackedCall, ...]:
    most = MAX_SEQUENCES // batch
    if row_bytes is None:
        most //= 3  # either side may have rows between two sequences
    parts = [part for call in calls for part in _split_runs(call.runs(), max(1, most))]
    rows = sum(int(_padded_lengths(part).sum()) for part in parts)
    while parts and row_bytes is not None:
        largest = max(parts, key=_max_padded_rows)
        enough = MIN_SAVING if len(parts) + besides < MAX_CALLS else MAX_PADDING
        if _max_padded_rows(largest) <= max(enough * rows, UNSPLIT_BYTES // (batch * row_bytes)):
            break
        at = parts.index(largest)
        parts[at : at + 1] = _split_long_short(largest)
    return tuple(merge_runs(part, part[0].window) for part in parts)


def _split_runs(runs: Sequence[AttendedRun], most: int) -> list[Sequence[AttendedRun]]:
    return [runs[first : first + most] for first in range(0, len(runs), most)]


def _padded_lengths(runs: Sequence[AttendedRun]) -> Ints:
    """Of the queries, as they are padded."""
    lengths = np.array([run.q[1] - run.q[0] for run in runs])
    return lengths + -lengths % ROW_ALIGNMENT


def _max_padded_rows(runs: Sequence[AttendedRun]) -> int:
    """Query rows for which one call has memory."""
    return len(runs) * int(_padded_lengths(runs).max())


def _split_long_short(runs: Sequence[AttendedRun]) -> list[Sequence[AttendedRun]]:
    """Two parts that need the least memory together. What is padded is not all of one length."""
    lengths = _padded_lengths(runs)
    falling = -np.sort(-lengths)
    longer = np.arange(1, len(runs))
    first = 1 + int(np.argmin(longer * falling[0] + (len(runs) - longer) * falling[1:]))
    is_long = lengths > falling[first]
    return [[run for run, long in zip(runs, is_long) if bool(long) is wanted] for wanted in (True, False)]
