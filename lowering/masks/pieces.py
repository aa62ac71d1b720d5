"""What masks look up, as lines: a vector is cut where it is not affine in the position, and its pieces are few.

    documents  0 0 0 1 1 1 1 2 2     3 pieces, of slope 0
    positions  0 1 2 0 1 2 3 0 1     3 pieces, of slope 1
    arange                           1 piece

A piece that starts at position s and has (low, high, slope) says that the value at p, in every batch entry, is at
least low + slope * (p - s) and at most high + slope * (p - s): it is known where low == high. Data without lines is
only bounded, cell by cell, so that a table is a fraction of its vector and plans cost what they are worth.

``sp::pieces`` brings vectors to the host and finds their pieces. It is all that waits for the device: a graph has one
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

CELL, MAX_PIECES = 256, 32
"""Where more than MOST_PIECES start in a cell of CELL positions, one piece that bounds their values stands for them."""
FAR_VALUE = 1 << 58
"""Values from here on tell nothing, so that sums of a few of them are still int64."""
_SCAN_CHUNK = 1 << 15  # positions that are compared at a time, in a cache
_HEADER = 5  # pieces, batch, length, and 16 bytes that tell tables apart


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a (batch, length) vector. Equal where the tables are, which costs a comparison of two digests."""

    digest: tuple[int, int]
    batch: int
    length: int
    starts: Ints
    lows: Ints
    highs: Ints
    slopes: Ints

    @staticmethod
    def of(table: Tensor) -> Pieces:
        """Those that a table of ``sp::pieces`` holds, which are not copied."""
        words = table.numpy()
        count, batch, length, *digest = words[:_HEADER].tolist()
        return Pieces((digest[0], digest[1]), batch, length, *words[_HEADER : _HEADER + 4 * count].reshape(4, count))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def table(self) -> Ints:
        """(4, pieces): starts, lows, highs, slopes."""
        return np.stack([self.starts, self.lows, self.highs, self.slopes])

    def lines(self, at: Ints) -> tuple[Ints, Ints, Ints]:
        """(lows, highs, slopes) from these positions on, as far as their pieces go."""
        piece = np.searchsorted(self.starts, at, "right") - 1
        rise = self.slopes[piece] * (at - self.starts[piece])
        return self.lows[piece] + rise, self.highs[piece] + rise, self.slopes[piece]

    def line(self, first: int, last: int) -> tuple[int, int] | None:
        """(the value at `first`, slope) of a stretch that is one known line; None of any other."""
        i = bisect_right(self._starts_array, first) - 1
        if (i + 1 < len(self._starts_array) and self._starts_array[i + 1] <= last) or self.lows[i] != self.highs[i]:
            return None
        slope = int(self.slopes[i])
        return int(self.lows[i]) + slope * (first - self._starts_array[i]), slope

    def bounds_over(self, first: int, last: int) -> tuple[int, int]:
        """The inclusive bounds of the values at the positions [first, last], in the time of a binary search."""
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
        """The starts next to ``wanted`` on either side."""
        at = bisect_left(self._starts_array, wanted)
        return self._starts_array[max(at - 1, 0) : at + 1]

    @cached_property
    def _starts_array(self) -> list[int]:
        return self.starts.tolist()

    @cached_property
    def _bound_levels(self) -> list[list[tuple[int, int]]]:
        """Level p holds the bounds of every 2 ** p neighbouring pieces."""
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
    """The int64 words of a table for so many positions: 0.14 a position, and 41."""
    return _HEADER + 4 * (MAX_PIECES + 1) * (length // CELL + 1)


def _fake_pieces(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty([table_size(x.shape[1])], dtype=torch.int64, device="cpu") for x in vectors]


@opaque("pieces(Tensor[] vectors) -> Tensor[]", _fake_pieces, replays=False)
def pieces(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Replicate -> Replicate, on the CPU: for each vector a table of its pieces, all for one wait for the device.

    Shapes: int or bool (B, S) each, on any device -> int64 (table_size(S),) each, as long as S alone tells; the rest
    of it is zeros. Bytes between ranks: none.
    """
    return [_html_table(x.to(torch.int64).numpy()) for x in _copy_to_host(vectors)]


def _copy_to_host(vectors: Sequence[Tensor]) -> list[Tensor]:
    """All copies are on their way before the one wait."""
    copies = [x.detach().to("cpu", non_blocking=True) for x in vectors]
    for device in {x.device for x in vectors if x.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def copy_async(host: Tensor, device: torch.device) -> Tensor:
    """What the host has, on a device; the host goes on before it has arrived."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def _html_table(values: Ints) -> Tensor:
    batch, length = values.shape
    return pad_table(_fit_pieces(values) if values.size else np.empty((4, 0), np.int64), batch, length)


def pad_table(found: Ints, batch: int, length: int) -> Tensor:
    """A table of ``sp::pieces`` from (4, pieces): starts, lows, highs, slopes."""
    words = np.zeros(table_size(length), np.int64)  # the system hands out zeros page by page, when they are touched
    if found.size:
        found = _coarsen(found, length)
        end = _HEADER + found.size
        words[_HEADER:end] = found.ravel()
        words[:3] = found.shape[1], batch, length
        digest = hashlib.blake2b(words[:end].tobytes(), digest_size=16).digest()
        words[3:_HEADER] = np.frombuffer(digest, np.int64)
    return torch.from_numpy(words)


def _fit_pieces(values: Ints) -> Ints:
    """(4, pieces): starts, lows, highs, slopes. Greedy, so that no table of lines is shorter."""
    length = values.shape[1]
    # Stretches of one step: the i-th has the positions starts[i] to ends[i], and each shares one with the next.
    starts = np.concatenate([[0], _slope_changes(values)])
    ends = np.append(starts[1:], length - 1)
    number, long = np.arange(len(starts)), ends - starts > 1
    last_long = np.maximum.accumulate(np.where(long, number, -1))
    # Of short ones in a row every second is a piece of two; one behind a long one is the jump to the next piece.
    taken = (number - last_long) % 2 == (last_long < 0)
    starts = (starts + np.append(False, taken[:-1]))[taken]
    if not taken[-1]:
        starts = np.append(starts, length - 1)
    ends = np.append(starts[1:], length) - 1
    starts[1:] -= _continues_line(values, starts, ends)
    ends = np.append(starts[1:], length) - 1
    first, last = values[:, starts], values[:, ends]
    slopes = np.where(ends > starts, values[:, np.minimum(starts + 1, length - 1)] - first, 0)
    return np.stack([starts, *_batch_bounds(first, last, slopes, ends - starts)])


def _continues_line(values: Ints, starts: Ints, ends: Ints) -> Flags:
    """Of each piece but the last: is its last position on the line of the next one, and that one with it the longer?

    The number of a document of one token is on a line with that of the next document's first, which is not what it is.
    """
    spans = ends - starts
    here, there = ends[:-1], starts[1:]
    behind = values[:, np.minimum(there + 1, values.shape[1] - 1)]
    bent = values[:, there] - values[:, here] != behind - values[:, there]
    return (spans[1:] >= spans[:-1]) & (spans[:-1] > 0) & ~bent.any(0)


def _slope_changes(values: Ints) -> Ints:
    """The positions p > 0 from which the step to the next value is not that which leads to p, in any batch entry."""
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
    """The values of x in order, each once; np.unique hashes, which takes 20 times as long."""
    ordered = np.sort(x)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]


def _batch_bounds(first: Ints, last: Ints, slopes: Ints, spans: Ints) -> tuple[Ints, Ints, Ints]:
    """(lows, highs, slopes) over the batch: lines of one slope, or bounds where slopes differ or ints may wrap."""
    alike = (slopes == slopes[:1]).all(0)
    lows = np.where(alike, first.min(0), np.minimum(first, last).min(0))
    highs = np.where(alike, first.max(0), np.maximum(first, last).max(0))
    sizes = np.abs(np.stack([first, last, slopes * 1.0 * spans], dtype=np.float64)).max((0, 1))
    wild = sizes >= FAR_VALUE
    known = np.where(alike & ~wild, slopes[0], 0)
    return np.where(wild, -FAR_VALUE, lows), np.where(wild, FAR_VALUE, highs), known


def _piece_extremes(table: Ints, length: int) -> tuple[Ints, Ints]:
    """The least and the greatest value of each piece."""
    starts, lows, highs, slopes = table
    rise = slopes * (np.append(starts[1:], length) - 1 - starts)
    return lows + np.minimum(rise, 0), highs + np.maximum(rise, 0)


def _coarsen(table: Ints, length: int) -> Ints:
    """One piece, which only bounds, for each cell of too many; those that say the same as their neighbour go."""
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
    """The pieces, (4, pieces), cut at these positions too."""
    starts, lows, highs, slopes = table
    places = sorted_unique(np.concatenate([starts, at]))
    piece = np.searchsorted(starts, places, "right") - 1
    rise = slopes[piece] * (places - starts[piece])
    return np.stack([places, lows[piece] + rise, highs[piece] + rise, slopes[piece]])
