"""Describe the rows of a local tensor, as a span of six ints and as segments of consecutive rows.

    8 rows, zigzag over 2 ranks: rank 0 has the rows 0, 1, 6, 7
    span      [2, 2, 1, 0, 0, 8]
    segments  (Segment(first=0, offset=0, length=2), Segment(first=6, offset=2, length=2))

A span is six ints [n, folds, stride, shift, start, length]. With L local rows on a rank, r = (rank // stride
- shift) mod n and chunk = L // folds. Fold 0 has the positions [r * chunk, (r + 1) * chunk). Fold 1
(zigzag, folds == 2) has the positions [(2n - 1 - r) * chunk, (2n - r) * chunk). A row's index is its position
minus ``start``; rows whose index is outside [0, length) are padding.

Negative folds: the concatenated second chunks of the zigzag shards of -folds ranks. These are the last chunk of the
sequence, the one before it, and so on to the middle.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, frame_folds
from sp_compile.lowering.comm.communicator import current_communicator


class Segment(NamedTuple):
    """Consecutive local rows with consecutive indices; a plain shard has one, a zigzag shard two."""

    first: int  # index of the first row
    offset: int  # local offset of the first row
    length: int  # number of rows


# The valid rows of a local tensor in local order. They are contiguous, with padding at the ends, except for second
# chunks of several zigzag shards, which may have padding in the middle.
Rows = tuple[Segment, ...]

Span = list[int]  # the rows of a local tensor as six ints; see the module docstring


def full_span(length: int) -> Span:
    """Return the span (six ints that describe the rows of a tensor) of a sequence that is not sharded."""
    return [1, 1, 1, 0, 0, length]


def shard_spans(frame: FrameArg, n: int) -> list[Span]:
    """Return the span of each part of a sequence that is gathered in the order of the ranks.

    A contiguous frame has one part. A zigzag frame has two, which are gathered separately: the first chunks of all
    ranks, and their second chunks, whose order in the sequence is reversed (a negative number of folds).
    """
    start, length = frame[2], frame[3]
    folds_of_parts = (1, -n)[: frame_folds(frame)]
    # The rows of a part are no longer split over ranks: n = 1, stride = 1 and shift = 0.
    return [[1, folds, 1, 0, start, length] for folds in folds_of_parts]


def shard_span(frame: FrameArg, n: int, stride: int = 1, shift: int = 0) -> Span:
    """Return the span of a rank's shard, or of the shard that it has received in a ring.

    A span is equal on all ranks: [n // stride, chunks per rank, stride, shift, first valid position, number of valid
    positions].

    Args:
        frame: Placement of the sequence dim.
        n: The number of ranks.
        stride: The number of ranks of a neighborhood: consecutive ranks that split the heads and have the same rows.
        shift: The number of ring steps by which the shard has moved.
    """
    start, length = frame[2], frame[3]
    return [n // stride, frame_folds(frame), stride, shift, start, length]


def local_valid_rows(span: Sequence[int], local_length: int, group: str) -> Rows:
    """Return the valid rows of this rank's tensor, as segments of consecutive rows.

    Args:
        span: The span of the tensor, which is equal on all ranks.
        local_length: The number of local rows.
        group: The process group, whose rank is read only if the sequence is sharded.
    """
    n, stride = int(span[0]), int(span[2])
    # `stride` consecutive ranks have the same rows, and `span_rows` takes the index of such a neighborhood.
    neighborhood = current_communicator().rank(group) // stride if n > 1 else 0
    return span_rows(span, local_length, neighborhood)


def span_rows(span: Sequence[int], local_length: int, rank: int) -> Rows:
    """Return the valid rows of a rank's tensor, as segments of consecutive rows in local order.

    8 rows, zigzag over 2 ranks, have the span [2, 2, 1, 0, 0, 8]. Rank 0 has the rows 0, 1, 6 and 7:
    (Segment(first=0, offset=0, length=2), Segment(first=6, offset=2, length=2)).

    Args:
        span: [n, folds, stride, shift, start, length]: folds chunks on each of n ranks, of a sequence with `length`
            valid positions from `start` on. Negative folds: the second chunks of -folds zigzag ranks, gathered.
        local_length: The number of local rows.
        rank: The rank, or the index of its neighborhood, rank // stride, see `shard_span`.
    """
    n, folds, _, shift, start, length = (int(x) for x in span)
    owner = (rank - shift) % n  # in a ring, a shard has moved `shift` ranks from its owner
    chunk_rows = local_length // abs(folds)
    # The index of each local chunk in the sequence. The second chunks of 4 zigzag ranks (folds -4) are 7, 6, 5, 4.
    chunks = (owner, 2 * n - 1 - owner)[:folds] if folds > 0 else range(-2 * folds - 1, -folds - 1, -1)
    segments = []
    for fold, chunk in enumerate(chunks):
        first = chunk * chunk_rows - start
        low, high = max(first, 0), min(first + chunk_rows, length)
        if low < high:
            segments.append(Segment(low, fold * chunk_rows + low - first, high - low))
    return _join_segments(segments)


def _join_segments(segments: Iterable[Segment]) -> Rows:
    """Return the segments with those joined that are consecutive both in the sequence and in local order.

    An example are the two chunks of the last zigzag rank.
    """
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last and (last.first + last.length, last.offset + last.length) == (segment.first, segment.offset):
            joined[-1] = last._replace(length=last.length + segment.length)
        else:
            joined.append(segment)
    return tuple(joined)


def sort_by_index(rows: Rows) -> Rows:
    """Return the rows as segments of a tensor that has the same rows in the order of the sequence, without padding.

    It has fewer segments: those of consecutive ranks are joined. The pairs that attend are counted for it, since their
    number does not depend on the order of the rows.
    """
    ordered = sorted(rows)  # by `first`, the index of the first row
    offsets = accumulate((segment.length for segment in ordered), initial=0)
    return _join_segments(segment._replace(offset=offset) for segment, offset in zip(ordered, offsets))


def valid_extent(rows: Rows) -> tuple[int, int]:
    """Return the local offsets [low, high) from the first to the last valid row; (0, 0) without valid rows."""
    return (rows[0].offset, rows[-1].offset + rows[-1].length) if rows else (0, 0)


def index_intervals(rows: Rows, low: int, high: int) -> list[tuple[int, int]]:
    """Return the sequence indices of the local rows [low, high), as intervals (first, last), both inclusive.

    They are in local order, one for each segment of consecutive rows.
    """
    intervals = []
    for index, offset, length in rows:
        first, last = max(low, offset), min(high, offset + length) - 1  # local rows of the segment in [low, high)
        if first <= last:
            index_of_row_0 = index - offset  # of this segment, if it began at local row 0
            intervals.append((index_of_row_0 + first, index_of_row_0 + last))
    return intervals


def row_indices(rows: Rows, low: int, high: int, device: torch.device) -> Tensor:
    """Return the sequence indices of the local rows [low, high), as int64 (high - low,).

    Predicates read them as q or k.
    """
    parts = [torch.arange(first, last + 1, device=device) for first, last in index_intervals(rows, low, high)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_rows(x: Tensor, dim: int, rows: Rows, low: int, high: int) -> Tensor:
    """Return the entries of an unsharded mask or vector x for some local rows; a view if they are consecutive.

    Args:
        x: An unsharded tensor, indexed by the rows' indices.
        dim: The dim of the sequence.
        rows: The valid local rows.
        low: The first local row.
        high: The end of the local rows, exclusive.
    """
    parts = [x.narrow(dim, first, last + 1 - first) for first, last in index_intervals(rows, low, high)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def index_boundaries(rows: Rows) -> list[int]:
    """Return the local offsets at which the second and later segments begin, where plans cut blocks."""
    return [second.offset for _, second in pairwise(rows)]
