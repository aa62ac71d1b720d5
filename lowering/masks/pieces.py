"""Represent mask vectors as few pieces, in each of which the vector is affine in the position.

    documents  0 0 0 1 1 1 1 2 2     3 pieces, of slope 0
    positions  0 1 2 0 1 2 3 0 1     3 pieces, of slope 1
    arange                           1 piece

A piece that starts at position s with (low, high, slope) means: the value at p, in every batch entry, is at least
low + slope * (p - s) and at most high + slope * (p - s). The value is known where low == high. Irregular data is only
bounded, cell by cell, so that a table is a fraction of its vector and plans stay cheap.

``sp::pieces`` copies vectors to the host and computes their pieces. It is the only synchronization: a graph has one
such call at its beginning, and every attention reads the tables.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sp_compile.lowering.base.library import opaque

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

# if more than MAX_PIECES start in a cell of CELL positions, one piece that bounds their values replaces them
CELL, MAX_PIECES = 256, 32
FAR_VALUE = 1 << 58  # values from this magnitude on are treated as unknown, so that sums of a few values fit int64
_SCAN_CHUNK = 1 << 15  # positions compared at a time, which fit a cache
_HEADER = 5  # number of pieces, batch, length, and a digest of 16 bytes


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a (batch, length) vector, compared by the digests of their tables."""

    digest: tuple[int, int]  # digest of the table
    batch: int  # number of batch entries
    length: int  # number of positions
    starts: Ints  # first position of each piece
    lows: Ints  # lower bound at the first position
    highs: Ints  # upper bound at the first position
    slopes: Ints  # step from each position to the next

    @staticmethod
    def of(table: Tensor) -> Pieces:
        """Return the pieces of a table of ``sp::pieces`` without a copy."""
        header = table.numpy()
        count, batch, length, *digest = header[:_HEADER].tolist()
        return Pieces((digest[0], digest[1]), batch, length, *header[_HEADER : _HEADER + 4 * count].reshape(4, count))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def table(self) -> Ints:
        """Return starts, lows, highs and slopes as (4, pieces)."""
        return np.stack([self.starts, self.lows, self.highs, self.slopes])

    def lines(self, at: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (lows, highs, slopes) at these positions, each valid to the end of its piece."""
        piece = np.searchsorted(self.starts, at, "right") - 1
        rise = self.slopes[piece] * (at - self.starts[piece])
        return self.lows[piece] + rise, self.highs[piece] + rise, self.slopes[piece]

    def line(self, first: int, last: int) -> tuple[int, int] | None:
        """Return (value at ``first``, slope) if [first, last] is one known line, else None."""
        i = bisect_right(self._starts_array, first) - 1
        if (i + 1 < len(self._starts_array) and self._starts_array[i + 1] <= last) or self.lows[i] != self.highs[i]:
            return None
        slope = int(self.slopes[i])
        return int(self.lows[i]) + slope * (first - self._starts_array[i]), slope

    def bounds_over(self, first: int, last: int) -> tuple[int, int]:
        """Return the inclusive bounds of the values at the positions [first, last], by binary search."""
        i, j = bisect_right(self._starts_array, first) - 1, bisect_right(self._starts_array, last) - 1
        if i == j:
            return self._bounds_within(i, first, last)
        parts = [
            self._bounds_within(i, first, self._starts_array[i + 1] - 1),
            self._bounds_within(j, self._starts_array[j], last),
        ]
        if i + 1 < j:
            power = (j - i - 1).bit_length() - 1
            parts += [self._bound_levels[power][at] for at in (i + 1, j - (1 << power))]
        return min(low for low, _ in parts), max(high for _, high in parts)

    def nearest_starts(self, wanted: int) -> list[int]:
        """Return the starts next to ``wanted`` on both sides."""
        at = bisect_left(self._starts_array, wanted)
        return self._starts_array[max(at - 1, 0) : at + 1]

    @cached_property
    def _starts_array(self) -> list[int]:
        return self.starts.tolist()

    @cached_property
    def _bound_levels(self) -> list[list[tuple[int, int]]]:
        """Return levels of bounds; level p has the bounds of every 2 ** p consecutive pieces."""
        lows, highs = _piece_extremes(self.table, self.length)
        levels = []
        while True:
            levels.append(list(zip(lows.tolist(), highs.tolist())))
            step = 1 << (len(levels) - 1)
            if step >= len(lows):
                return levels
            lows, highs = np.minimum(lows[:-step], lows[step:]), np.maximum(highs[:-step], highs[step:])

    def _bounds_within(self, piece: int, first: int, last: int) -> tuple[int, int]:
        slope, start = int(self.slopes[piece]), self._starts_array[piece]
        rises = slope * (first - start), slope * (last - start)
        return int(self.lows[piece]) + min(rises), int(self.highs[piece]) + max(rises)


def table_size(length: Any) -> Any:
    """Return the number of int64 elements of a table for ``length`` positions: 0.14 per position, plus 41."""
    return _HEADER + 4 * (MAX_PIECES + 1) * (length // CELL + 1)


def _fake_pieces(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty([table_size(x.shape[1])], dtype=torch.int64, device="cpu") for x in vectors]


@opaque("pieces(Tensor[] vectors) -> Tensor[]", _fake_pieces, replays=False)
def pieces(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Compute a table of pieces for each replicated vector, with one synchronization.

    Args:
        vectors: int or bool (B, S) each, on any device, replicated.

    Returns:
        int64 (table_size(S),) each, on the CPU; the size depends on S only, and the rest is zeros.

    Bytes: none.
    """
    return [_html_table(x.to(torch.int64).numpy()) for x in _copy_to_host(vectors)]


def _copy_to_host(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host asynchronously, then synchronize once."""
    copies = [x.detach().to("cpu", non_blocking=True) for x in vectors]
    for device in {x.device for x in vectors if x.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def copy_async(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without synchronization."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def _html_table(values: Ints) -> Tensor:
    batch, length = values.shape
    return pad_table(_fit_pieces(values) if values.size else np.empty((4, 0), np.int64), batch, length)


def pad_table(found: Ints, batch: int, length: int) -> Tensor:
    """Return the table of ``sp::pieces`` from pieces.

    Args:
        found: Starts, lows, highs and slopes, int64 (4, pieces).
        batch: The number of batch entries.
        length: The number of positions.
    """
    table = np.zeros(table_size(length), np.int64)  # the system allocates zero pages on first access
    if found.size:
        found = _coarsen(found, length)
        end = _HEADER + found.size
        table[_HEADER:end] = found.ravel()
        table[:3] = found.shape[1], batch, length
        digest = hashlib.blake2b(table[:end].tobytes(), digest_size=16).digest()
        table[3:_HEADER] = np.frombuffer(digest, np.int64)
    return torch.from_numpy(table)


def _fit_pieces(values: Ints) -> Ints:
    """Fit pieces (4, pieces): starts, lows, highs, slopes. Greedy, which is optimal for lines."""
    length = values.shape[1]
    # Runs of one step: the i-th has the positions starts[i] to ends[i]; adjacent runs share one position.
    starts = np.concatenate([[0], _slope_changes(values)])
    ends = np.append(starts[1:], length - 1)
    number, long = np.arange(len(starts)), ends - starts > 1
    last_long = np.maximum.accumulate(np.where(long, number, -1))
    # Of consecutive short runs every second is a piece of two; a short run after a long one is the jump to the next.
    chosen = (number - last_long) % 2 == (last_long < 0)
    starts = (starts + np.append(False, chosen[:-1]))[chosen]
    if not chosen[-1]:
        starts = np.append(starts, length - 1)
    ends = np.append(starts[1:], length) - 1
    starts[1:] -= _continues_line(values, starts, ends)
    ends = np.append(starts[1:], length) - 1
    first, last = values[:, starts], values[:, ends]
    slopes = np.where(ends > starts, values[:, np.minimum(starts + 1, length - 1)] - first, 0)
    return np.stack([starts, *_batch_bounds(first, last, slopes, ends - starts)])


def _continues_line(values: Ints, starts: Ints, ends: Ints) -> Flags:
    """Return, for each piece but the last, whether its last position fits the next piece's line better.

    It does if it is on that line and the next piece is then the longer one. The number of a one-token document is on a
    line with the first position of the next document, to which it does not belong.
    """
    spans = ends - starts
    here, there = ends[:-1], starts[1:]
    next_values = values[:, np.minimum(there + 1, values.shape[1] - 1)]
    bent = values[:, there] - values[:, here] != next_values - values[:, there]
    return (spans[1:] >= spans[:-1]) & (spans[:-1] > 0) & ~bent.any(0)


def _slope_changes(values: Ints) -> Ints:
    """Return the positions p > 0 where the step changes in any batch entry."""
    found = []
    for row in values:
        steps, differ = np.empty(_SCAN_CHUNK + 1, np.int64), np.empty(_SCAN_CHUNK, np.bool_)
        for low in range(0, len(row) - 2, _SCAN_CHUNK):
            part = row[low : low + _SCAN_CHUNK + 2]
            here, bent = steps[: len(part) - 1], differ[: len(part) - 2]
            np.subtract(part[1:], part[:-1], out=here)
            np.not_equal(here[1:], here[:-1], out=bent)
            if bent.any():
                found.append(np.flatnonzero(bent) + (low + 1))
    if len(values) > 1 and found:
        return sorted_unique(np.concatenate(found))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def sorted_unique(x: Ints) -> Ints:
    """Return the sorted unique values of x; np.unique hashes, which takes 20 times as long."""
    ordered = np.sort(x)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]


def _batch_bounds(first: Ints, last: Ints, slopes: Ints, spans: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (lows, highs, slopes) over the batch.

    Lines of one slope, or bounds where slopes differ or integers may overflow.
    """
    same_slope = (slopes == slopes[:1]).all(0)
    lows = np.where(same_slope, first.min(0), np.minimum(first, last).min(0))
    highs = np.where(same_slope, first.max(0), np.maximum(first, last).max(0))
    sizes = np.abs(np.stack([first, last, slopes * 1.0 * spans], dtype=np.float64)).max((0, 1))
    wild = sizes >= FAR_VALUE
    known = np.where(same_slope & ~wild, slopes[0], 0)
    return np.where(wild, -FAR_VALUE, lows), np.where(wild, FAR_VALUE, highs), known


def _piece_extremes(table: Ints, length: int) -> tuple[Ints, Ints]:
    """Return the minimum and maximum value of each piece."""
    starts, lows, highs, slopes = table
    rise = slopes * (np.append(starts[1:], length) - 1 - starts)
    return lows + np.minimum(rise, 0), highs + np.maximum(rise, 0)


def _coarsen(table: Ints, length: int) -> Ints:
    """Replace the pieces of crowded cells by one bounding piece each, and merge equal neighbors."""
    busy = np.bincount(table[0] // CELL, minlength=length // CELL + 2) > MAX_PIECES
    if not busy.any():
        return table
    edges = np.flatnonzero(busy[1:] | busy[:-1]) + 1
    edges = np.append(edges, 0) * CELL
    table = cut_pieces(table, edges[edges < length])
    starts, lows, highs, slopes = table
    least, greatest = _piece_extremes(table, length)
    own = ~busy[starts // CELL]
    group = np.flatnonzero(own | (starts % CELL == 0))
    bounded = ~own[group]
    lows = np.where(bounded, np.minimum.reduceat(least, group), lows[group])
    highs = np.where(bounded, np.maximum.reduceat(greatest, group), highs[group])
    slopes, starts = np.where(bounded, 0, slopes[group]), starts[group]
    line = np.stack([lows, highs, slopes])
    same = (line[:, 1:] == line[:, :-1]).all(0) & (slopes[1:] == 0)
    return np.stack([starts, *line])[:, np.append(True, ~same)]


def cut_pieces(table: Ints, at: Ints) -> Ints:
    """Cut the pieces (4, pieces) at these positions too."""
    starts, lows, highs, slopes = table
    places = sorted_unique(np.concatenate([starts, at]))
    piece = np.searchsorted(starts, places, "right") - 1
    rise = slopes[piece] * (places - starts[piece])
    return np.stack([places, lows[piece] + rise, highs[piece] + rise, slopes[piece]])
