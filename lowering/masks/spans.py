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
    """Return the span of a sequence that is not sharded."""
    return [1, 1, 1, 0, 0, length]


def shard_spans(frame: FrameArg, n: int) -> list[Span]:
    """Return the span of each part of a sequence that is gathered in the order of the ranks.

    A contiguous frame has one part. A zigzag frame has two, which are gathered separately: the first chunks of all
    ranks, and their second chunks.
    """
    start, length = frame[2], frame[3]
    return [[1, folds, 1, 0, start, length] for folds in (1, -n)[: frame_folds(frame)]]


def shard_span(frame: FrameArg, n: int, stride: int = 1, shift: int = 0) -> Span:
    """Return the span of a rank's shard, or of the one that it has received by a ring.

    Args:
        frame: Placement of the sequence dim.
        n: The number of ranks.
        stride: The number of ranks of a neighborhood: consecutive ranks that split the heads and have the same rows.
        shift: The number of ring steps by which the shard has moved.
    """
    return [n // stride, frame_folds(frame), stride, shift, frame[2], frame[3]]


def local_valid_rows(span: Sequence[int], local_length: int, group: str) -> Rows:
    """Return the valid rows of this rank.

    Args:
        span: The span of the tensor.
        local_length: The number of local rows.
        group: The process group, whose rank is read only if the sequence is sharded.
    """
    n, stride = int(span[0]), int(span[2])
    return span_rows(span, local_length, current_communicator().rank(group) // stride if n > 1 else 0)


def span_rows(span: Sequence[int], local_length: int, rank: int) -> Rows:
    """Return the valid rows of a local tensor.

    Args:
        span: The span.
        local_length: The number of local rows.
        rank: The rank, or the index of its neighborhood, rank // stride, see `shard_span`.
    """
    n, folds, _, shift, start, length = (int(x) for x in span)
    r = (rank - shift) % n
    chunk_rows = local_length // abs(folds)
    # The position of each local chunk in the sequence, in units of chunks.
    chunks = (r, 2 * n - 1 - r)[:folds] if folds > 0 else range(-2 * folds - 1, -folds - 1, -1)
    segments = []
    for fold, chunk in enumerate(chunks):
        first = chunk * chunk_rows - start
        low, high = max(first, 0), min(first + chunk_rows, length)
        if low < high:
            segments.append(Segment(low, fold * chunk_rows + low - first, high - low))
    return _join_segments(segments)


def _join_segments(segments: Iterable[Segment]) -> Rows:
    """Join segments whose indices and offsets are consecutive, such as the last zigzag rank's."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else Segment(-1, -1, 0)
        if (last.first + last.length, last.offset + last.length) == (segment.first, segment.offset):
            joined[-1] = last._replace(length=last.length + segment.length)
        else:
            joined.append(segment)
    return tuple(joined)


def sort_by_index(rows: Rows) -> Rows:
    """Return rows with the same indices, sorted and without padding: a form in which to count pairs."""
    ordered = sorted(rows)
    offsets = accumulate((segment.length for segment in ordered), initial=0)
    return _join_segments(segment._replace(offset=offset) for segment, offset in zip(ordered, offsets))


def valid_extent(rows: Rows) -> tuple[int, int]:
    """Return the local offsets [low, high) of all valid rows and of padding between them."""
    return (rows[0].offset, rows[-1].offset + rows[-1].length) if rows else (0, 0)


def index_intervals(rows: Rows, low: int, high: int) -> list[tuple[int, int]]:
    """Return the indices of the local rows [low, high) as intervals [first, last], in local order."""
    intervals = []
    for index, offset, length in rows:
        first, last = max(low, offset), min(high, offset + length) - 1  # local rows of the segment in [low, high)
        if first <= last:
            intervals.append((index + first - offset, index + last - offset))
    return intervals


def row_indices(rows: Rows, low: int, high: int, device: torch.device) -> Tensor:
    """Return the indices of the local rows [low, high), the values of ``q`` or ``k``: int64 (high - low,)."""
    parts = [torch.arange(first, last + 1, device=device) for first, last in index_intervals(rows, low, high)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_rows(x: Tensor, dim: int, rows: Rows, low: int, high: int) -> Tensor:
    """Return the entries of an unsharded x, a mask or a vector, for some local rows; a view if contiguous.

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
    """Return the local offsets at which a new segment begins, so that plans can cut there."""
    return [second.offset for _, second in pairwise(rows)]
