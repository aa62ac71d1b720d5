"""Which rows of a sequence a local tensor holds.

A span is six ints [n, folds, stride, shift, start, length]. With L local rows on a rank, r = (rank // stride
- shift) mod n and chunk = L // folds: fold 0 holds the positions [r * chunk, (r + 1) * chunk) and fold 1
(zigzag, folds == 2) the positions [(2n - 1 - r) * chunk, (2n - r) * chunk). A row's index is its position
minus ``start``; rows whose index lies outside [0, length) are padding.

Negative folds: the second chunks of so many zigzag shards, one behind the other, those of -folds ranks: the last
chunk of the sequence, the one before it, and so on to the middle.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, frame_folds
from sp_compile.lowering.comm.communicator import current_communicator


class Segment(NamedTuple):
    """Neighbouring rows with neighbouring indices."""

    first: int
    """The index of the first row."""
    offset: int
    length: int


Rows = tuple[Segment, ...]
"""The valid rows of a local tensor in local order. They neighbour each other: padding is at the ends, but of second
chunks of several zigzag shards, where it may lie in the middle."""

Span = list[int]


def full_span(length: int) -> Span:
    """The span of a sequence that is not cut."""
    return [1, 1, 1, 0, 0, length]


def shard_spans(frame: FrameArg, n: int) -> list[Span]:
    """Of the shards of n ranks one behind the other; of a zigzag frame, of their first chunks and of their second."""
    ends = [frame[2], frame[3]]
    return [[1, folds, 1, 0, *ends] for folds in (1, -n)[: frame_folds(frame)]]


def shard_span(frame: FrameArg, n: int, stride: int = 1, shift: int = 0) -> Span:
    """The span of a frame's shard over n ranks, or over the n // stride neighbourhoods of a hybrid."""
    return [n // stride, frame_folds(frame), stride, shift, frame[2], frame[3]]


def local_valid_rows(span: Sequence[int], local_length: int, group: str) -> Rows:
    """The rows that this rank of ``group`` holds; it is asked for its rank only if the sequence is cut."""
    n, _, stride, *_ = (int(x) for x in span)
    return span_rows(span, local_length, current_communicator().rank(group) // stride if n > 1 else 0)


def span_rows(span: Sequence[int], local_length: int, place: int) -> Rows:
    """The rows that a rank holds. place: its number, or that of its neighbourhood."""
    n, folds, _, shift, start, length = (int(x) for x in span)
    r = (place - shift) % n
    chunk = local_length // abs(folds)
    places = (r, 2 * n - 1 - r)[:folds] if folds > 0 else range(-2 * folds - 1, -folds - 1, -1)
    firsts = [place * chunk for place in places]
    cut = [_cut_segment(first - start, fold * chunk, chunk, length) for fold, first in enumerate(firsts)]
    return _join_segments([segment for segment in cut if segment.length > 0])


def _cut_segment(index: int, offset: int, rows: int, length: int) -> Segment:
    low, high = max(index, 0), min(index + rows, length)
    return Segment(low, offset + low - index, high - low)


def _join_segments(segments: Iterable[Segment]) -> Rows:
    """One segment where the next follows on one in index and offset."""
    found: list[Segment] = []
    for one in segments:
        if found and (found[-1].first + found[-1].length, found[-1].offset + found[-1].length) == one[:2]:
            found[-1] = found[-1]._replace(length=found[-1].length + one.length)
        else:
            found.append(one)
    return tuple(found)


def sort_by_index(rows: Rows) -> Rows:
    """As many rows of the same indices, in the order of these and without padding: in as few segments as can be."""
    ordered = sorted(rows)
    offsets = accumulate((one.length for one in ordered), initial=0)
    return _join_segments(one._replace(offset=offset) for one, offset in zip(ordered, offsets))


def valid_extent(rows: Rows) -> tuple[int, int]:
    """The local offsets [low, high) from the first valid row to the last."""
    return (rows[0].offset, rows[-1].offset + rows[-1].length) if rows else (0, 0)


def index_intervals(rows: Rows, low: int, high: int) -> list[tuple[int, int]]:
    """The indices of the local rows [low, high) as intervals [first, last], in local order."""
    found = []
    for index, offset, length in rows:
        first, last = max(low, offset), min(high, offset + length) - 1
        if first <= last:
            found.append((index + first - offset, index + last - offset))
    return found


def row_indices(rows: Rows, low: int, high: int, device: torch.device) -> Tensor:
    """The indices of the local rows [low, high): int64 (high - low)."""
    parts = [torch.arange(a, b + 1, device=device) for a, b in index_intervals(rows, low, high)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_rows(x: Tensor, dim: int, rows: Rows, low: int, high: int) -> Tensor:
    """The entries of a whole x that belong to the local rows [low, high); a view if they neighbour."""
    parts = [x.narrow(dim, a, b + 1 - a) for a, b in index_intervals(rows, low, high)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def index_boundaries(rows: Rows) -> list[int]:
    """The local offsets at which the index jumps."""
    return [second.offset for _, second in pairwise(rows)]
