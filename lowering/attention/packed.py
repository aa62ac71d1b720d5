"""Prepare packed kernel calls (varlen attention): boundaries, packed rows, padded log-sum-exps (lse).

FlashAttention treats rows between two sequences as sequences of their own that attend to nothing. Memory-efficient
attention allocates memory for every sequence as for the longest, and its backward divides by the number of queries. It
gets only sequences that have both queries and keys; if there are other rows between them, the rows are copied:

    rows    a a a . . b c c        packed    a a a b c c        lse    a a a * | b * * * | c c * *

If one sequence is many times as long as the others, much of that memory is wasted. Sequences are therefore split by
length into several calls (``split_by_length``).

    sequence       consecutive queries that attend to consecutive keys only, such as a document
    run            the same as ranges of rows, with the window of the call (`AttendedRun`)
    side           the queries, or the keys, of all sequences of a call
    all rows       the rows of a side, batch entries concatenated, including rows ("." above) of no sequence
    packed rows    those of them that belong to a sequence, concatenated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sp_compile.lowering.masks.blocks import AttendedRun, PackedCall, merge_runs
from sp_compile.lowering.masks.pieces import Ints

MAX_CALLS = 3  # the usual maximum number of calls of one attention; see `split_by_length`
# Minimum ratio of allocated to used rows that justifies a further call: for fewer than MAX_CALLS calls, and otherwise.
MIN_SAVING, MAX_PADDING = 2, 8
UNSPLIT_BYTES = 64 << 20  # allocations up to this size (bytes) are not split
MAX_SEQUENCES = (1 << 16) - 1  # the maximum number of sequences of one call: the size of a CUDA grid dim
ROW_ALIGNMENT = 32  # memory-efficient attention pads log-sum-exps to a multiple of this number of rows


class SequenceSide(NamedTuple):
    """One side (queries or keys) of the sequences of a packed call, on the host."""

    # int32 (2, sequences + 1). For the rows a a a . . b c c: [0, 3, 4, 6], the boundaries of a, b and c in the packed
    # rows (cu_seqlens), and [0, 5, 6, 8], the first row of each in all rows, then the number of these
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
        """Return the ends of the sequences in the packed rows, from 0 on (cu_seqlens): int32 (sequences + 1,)."""
        return self.table[0]

    @property
    def max_length(self) -> int:
        """Return the number of rows of the longest sequence."""
        return self.side.max_length

    def _repeat_per_row(self, numbers: Tensor) -> Tensor:
        """Repeat the number of each sequence for each of its rows: (sequences,) to (total,)."""
        return numbers.repeat_interleave(self.ends.diff(), output_size=self.side.total)

    @cached_property
    def _packed_positions(self) -> Tensor:
        """Return the index of each packed row (a row of a sequence) among all rows: int64 (total,)."""
        # The first row of each sequence among all rows, minus that among the packed rows.
        shifts = self.table[1, :-1] - self.ends[:-1]
        return torch.arange(self.side.total, device=self.table.device) + self._repeat_per_row(shifts)

    @cached_property
    def _padded_positions(self) -> tuple[Tensor, slice, Tensor]:
        """Return an index of a tensor (sequences, heads, max_length) that selects the packed rows, as (total, heads).

        It consists of the sequence of each row, all heads, and the row within its sequence.
        """
        sequence = self._repeat_per_row(torch.arange(len(self.ends) - 1, device=self.table.device))
        return sequence, slice(None), torch.arange(self.side.total, device=self.table.device) - self.ends[sequence]

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows of x (B, S, ...) that belong to sequences, as (1, total, ...); a view if all rows do."""
        rows = x.flatten(0, 1)
        return (rows.index_select(0, self._packed_positions) if self.side.is_scattered else rows)[None]

    def unpack(self, x: Tensor, batch: int, fill: float = 0.0) -> Tensor:
        """Undo `pack`: (1, total, ...) to (B, S, ...), with ``fill`` in rows that belong to no sequence."""
        rows = x[0]
        if self.side.is_scattered:
            rows = x.new_full((self.size, *x.shape[2:]), fill).index_copy_(0, self._packed_positions, rows)
        return rows.unflatten(0, (batch, -1))

    def pad_per_sequence(self, x: Tensor) -> Tensor:
        """Pad an lse (1, total, H) to (sequences, H, max_length rounded up to ROW_ALIGNMENT) with +inf.

        Memory-efficient attention stores log-sum-exps in this form.
        """
        padded_length = self.max_length + -self.max_length % ROW_ALIGNMENT
        padded = x.new_full((len(self.ends) - 1, x.shape[2], padded_length), torch.inf)
        padded[self._padded_positions] = x[0]
        return padded

    def unpad_per_sequence(self, x: Tensor) -> Tensor:
        """Undo `pad_per_sequence` for an lse that the kernel returned: (sequences, H, length) to (1, total, H)."""
        return x[self._padded_positions][None]


class PackedSequences(NamedTuple):
    """Both sides of a PACKED call, on its device, as kernels read them."""

    queries: PackedRows  # query rows
    keys: PackedRows  # key rows

    @staticmethod
    def of(call: PackedCall, batch: int, device: torch.device, drop_gaps: bool) -> PackedSequences:
        """Return the queries and keys of a packed call, whose tables are copied to the device asynchronously.

        Args:
            call: The packed call.
            batch: The batch size.
            device: The device of the tables.
            drop_gaps: Leave out rows that belong to no sequence, and sequences without queries or without keys, for a
                kernel that accepts no empty sequence. `PackedRows.size` counts these rows, too: it is the number of
                rows of q, or of k and v.
        """
        sides = _packed_sides(call, batch, drop_gaps, pinned=device.type == "cuda")
        tables = [side.table.to(device, non_blocking=True) for side in sides]
        # A range of rows is (first row, number of rows) in a batch entry.
        (_, num_queries), (_, num_keys) = call.query_rows, call.key_rows
        return PackedSequences(*map(PackedRows, tables, sides, (num_queries * batch, num_keys * batch)))


@lru_cache(maxsize=256)
def _packed_sides(call: PackedCall, batch: int, drop_gaps: bool, pinned: bool) -> tuple[SequenceSide, SequenceSide]:
    """Return the query side and the key side of the sequences of a call, on the host.

    With ``drop_gaps`` they have only sequences that have both queries and keys. Otherwise rows between two sequences
    are sequences of their own, which attend to nothing. The cache keeps the memory while it is copied to the device.
    """
    if drop_gaps:
        runs = call.runs()
        queries, keys = [run.q for run in runs], [run.k for run in runs]
    else:
        queries, keys = list(pairwise(call.queries)), list(pairwise(call.keys))
    query_side = _packed_side(np.array(queries), batch, call.query_rows, pinned)
    return query_side, _packed_side(np.array(keys), batch, call.key_rows, pinned)


def _packed_side(bounds: Ints, batch: int, rows: tuple[int, int], pinned: bool) -> SequenceSide:
    """Return one side (queries or keys) of a call for all batch entries, from its sequences in one batch entry.

    Args:
        bounds: (sequences, 2), first row and end of each sequence of a batch entry.
        batch: Number of batch entries, which have the same sequences.
        rows: (offset, length) of the rows of a batch entry.
        pinned: Whether to use pinned host memory.
    """
    (offset, length), lengths = rows, bounds[:, 1] - bounds[:, 0]
    # For the rows a a a . . b c c of one batch entry, `begins` is [0, 5, 6], the first row of each sequence among all
    # rows, and `ends` is [0, 3, 4, 6], the boundaries in the packed rows (cu_seqlens). The table has both as rows of
    # equal length: the number of all rows, 8, follows `begins`.
    begins = (np.arange(batch)[:, None] * length + (bounds[:, 0] - offset)).ravel()
    ends = np.append(0, np.cumsum(np.tile(lengths, batch)))
    host = torch.from_numpy(np.stack([ends, np.append(begins, batch * length)]).astype(np.int32))
    table, total = host.pin_memory() if pinned else host, int(ends[-1])
    return SequenceSide(table, is_scattered=total < batch * length, total=total, max_length=int(lengths.max()))


def split_by_length(
    calls: tuple[PackedCall, ...], batch: int, row_bytes: int | None, other_calls: int = 0
) -> tuple[PackedCall, ...]:
    """Split packed calls of one attention until they fit CUDA's grid and waste little memory.

    Args:
        calls: The packed calls.
        batch: The batch size.
        row_bytes: Bytes of a query row, for a kernel that allocates memory for each sequence as for the longest of its
            call; None for other kernels. Calls of such a kernel are split if sequence lengths differ much: into at most
            MAX_CALLS, or more if one of these would still allocate over MAX_PADDING times the rows in use.
        other_calls: The number of the attention's other kernel calls.

    Returns:
        Calls with the same sequences in total.
    """
    if row_bytes is None and all(batch * len(call.queries) <= MAX_SEQUENCES for call in calls):
        return calls
    return _split_by_length(calls, batch, row_bytes, other_calls)


@lru_cache(maxsize=256)
def _split_by_length(
    calls: tuple[PackedCall, ...], batch: int, row_bytes: int | None, other_calls: int
) -> tuple[PackedCall, ...]:
    """Return the calls of `split_by_length` if one may have to be split. Equal calls, as of each layer, are cached.

    With ``row_bytes`` (bytes of a query row) the kernel allocates memory for each sequence of a call as for the
    longest. The call that allocates the most is split into long and short sequences, until it allocates at most
    `max_ratio` times the rows in use, or few bytes. Without, as for FlashAttention, calls need only fit the grid.
    ``other_calls`` is the number of the attention's calls besides these, which limits the splits.
    """
    # Split calls into parts (lists of sequences) that fit CUDA's grid.
    max_runs = MAX_SEQUENCES // batch
    if row_bytes is None:
        max_runs //= 3  # for each run, up to 3 sequences: itself, and the queries and the keys before the next run
    parts: list[Sequence[AttendedRun]] = []
    for call in calls:
        runs, step = call.runs(), max(1, max_runs)
        parts += [runs[first : first + step] for first in range(0, len(runs), step)]
    # Split the part that allocates the most rows by length, while the padding is too large.
    rows = sum(int(_padded_lengths(part).sum()) for part in parts)
    while parts and row_bytes is not None:
        largest = max(range(len(parts)), key=lambda i: _allocated_rows(parts[i]))
        # A further call costs time. It is made if the part allocates more than this many times the rows in use.
        max_ratio = MIN_SAVING if len(parts) + other_calls < MAX_CALLS else MAX_PADDING
        if _allocated_rows(parts[largest]) <= max(max_ratio * rows, UNSPLIT_BYTES // (batch * row_bytes)):
            break
        parts[largest : largest + 1] = _split_long_short(parts[largest])
    return tuple(merge_runs(part, part[0].window) for part in parts)


def _padded_lengths(runs: Sequence[AttendedRun]) -> Ints:
    """Return the number of query rows of each run (sequence), rounded up to ROW_ALIGNMENT, as kernels allocate it."""
    lengths = np.array([run.q[1] - run.q[0] for run in runs])
    return lengths + -lengths % ROW_ALIGNMENT


def _allocated_rows(runs: Sequence[AttendedRun]) -> int:
    """Return the query rows for which one call allocates memory: the longest length for each of the sequences."""
    return len(runs) * int(_padded_lengths(runs).max())


def _split_long_short(runs: Sequence[AttendedRun]) -> list[Sequence[AttendedRun]]:
    """Split runs (sequences) into the long and the short ones, so that two calls allocate the least memory."""
    lengths = _padded_lengths(runs)
    descending = -np.sort(-lengths)
    # The memory for each possible number of long runs: a call allocates its longest length for each of its runs.
    num_long = np.arange(1, len(runs))
    memory = num_long * descending[0] + (len(runs) - num_long) * descending[1:]
    longest_short = descending[1 + int(np.argmin(memory))]
    is_long = lengths > longest_short
    return [list(compress(runs, is_long)), list(compress(runs, ~is_long))]
