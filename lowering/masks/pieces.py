"""Represent mask vectors as few pieces, in each of which the vector is affine in the position.

    documents  0 0 0 1 1 1 1 2 2     3 pieces, of slope 0
    positions  0 1 2 0 1 2 3 0 1     3 pieces, of slope 1
    arange                           1 piece

A piece that starts at position s with (low, high, slope) means: the value at p, in every batch entry, is at least
low + slope * (p - s) and at most high + slope * (p - s). The value is known where low == high. Irregular data is only
bounded, by one piece for each cell of CELL positions, so that a table is a fraction of its vector and plans stay cheap.
A table is the starts, lows, highs and slopes of all pieces, (4, pieces). Positions [first, last] are inclusive.

``sp::pieces`` copies vectors to the host and computes their pieces. It is the only synchronization: a graph has one
such call at its beginning, and every attention reads the tables.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
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

# If more than MAX_PIECES start in a cell of CELL positions, one piece that bounds their values replaces them.
CELL, MAX_PIECES = 256, 32
FAR_VALUE = 1 << 58  # values from this magnitude on are treated as unknown, so that sums of a few values fit int64
_HEADER = 5  # number of pieces, batch, length, and a digest of 16 bytes


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a (batch, length) vector; keys of cached plans, compared by the digests of tables."""

    digest: tuple[int, int]  # digest of the table
    batch: int  # number of batch entries
    length: int  # number of positions
    starts: Ints  # first position of each piece
    lows: Ints  # lower bound at the first position
    highs: Ints  # upper bound at the first position
    slopes: Ints  # step from each position to the next

    @staticmethod
    def of(table: Tensor) -> Pieces:
        """Return the pieces in a padded table, a result of ``sp::pieces``, without a copy.

        The table has a header (number of pieces, batch, length, digest), then starts, lows, highs and slopes.
        """
        numbers = table.numpy()
        count, batch, length, *digest = numbers[:_HEADER].tolist()
        lines = numbers[_HEADER : _HEADER + 4 * count].reshape(4, count)
        return Pieces((digest[0], digest[1]), batch, length, *lines)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def table(self) -> Ints:
        """Return starts, lows, highs and slopes of all pieces as one array (4, pieces)."""
        return np.stack([self.starts, self.lows, self.highs, self.slopes])

    def lines(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (lows, highs, slopes) at these positions: bounds of the value, and its step to the next position.

        They are those of the piece that contains the position, and valid until its end.
        """
        return _lines_at((self.starts, self.lows, self.highs, self.slopes), positions)

    def line(self, first: int, last: int) -> tuple[int, int] | None:
        """Return (value at ``first``, slope) if the values at the positions [first, last] are one line, else None.

        None, too, if only bounds of these values are known.
        """
        i = bisect_right(self._start_list, first) - 1
        if bisect_right(self._start_list, last) - 1 != i or self.lows[i] != self.highs[i]:
            return None
        slope = int(self.slopes[i])
        return int(self.lows[i]) + slope * (first - self._start_list[i]), slope

    def bounds_over(self, first: int, last: int) -> tuple[int, int]:
        """Return bounds of the values at the positions [first, last]: the minimum and maximum, as far as known."""
        starts = self._start_list
        i, j = bisect_right(starts, first) - 1, bisect_right(starts, last) - 1
        if i == j:
            return self._bounds_within(i, first, last)
        # The parts of the first and of the last piece, then all pieces between them.
        bounds = [self._bounds_within(i, first, starts[i + 1] - 1), self._bounds_within(j, starts[j], last)]
        if i + 1 < j:
            # Two ranges of 2 ** power pieces, which may overlap, contain exactly these pieces.
            power = (j - i - 1).bit_length() - 1
            bounds += [self._bound_levels[power][i + 1], self._bound_levels[power][j - (1 << power)]]
        return min(low for low, _ in bounds), max(high for _, high in bounds)

    def nearest_starts(self, position: int) -> list[int]:
        """Return the nearest positions, at most two, at which a piece starts: before a position, and at or after it.

        A planner prefers to cut the rows there.
        """
        i = bisect_left(self._start_list, position)
        return self._start_list[max(i - 1, 0) : i + 1]

    @cached_property
    def _start_list(self) -> list[int]:
        """Return the first positions of all pieces as Python numbers, which `bisect` searches faster."""
        return self.starts.tolist()

    @cached_property
    def _bound_levels(self) -> list[list[tuple[int, int]]]:
        """Return a sparse table of the bounds of ranges of pieces, for `bounds_over`.

        Entry i of level p is (low, high) of the pieces i to i + 2 ** p - 1.
        """
        lows, highs = _piece_extremes(self.table, self.length)
        levels = []
        while True:
            levels.append(list(zip(lows.tolist(), highs.tolist())))
            step = 1 << (len(levels) - 1)
            if step >= len(lows):
                return levels
            lows, highs = np.minimum(lows[:-step], lows[step:]), np.maximum(highs[:-step], highs[step:])

    def _bounds_within(self, piece: int, first: int, last: int) -> tuple[int, int]:
        """Return the bounds of the values at the positions [first, last] inside of one piece."""
        slope, start = int(self.slopes[piece]), self._start_list[piece]
        rises = slope * (first - start), slope * (last - start)
        return int(self.lows[piece]) + min(rises), int(self.highs[piece]) + max(rises)


def table_size(length: Any) -> Any:
    """Return the number of int64 elements of a vector's padded table, about length / 2.

    It depends only on the length of the vector, as the shape of an operator's result must. At most MAX_PIECES + 1
    pieces start in each cell of CELL positions (see `_coarsen`), and each piece has 4 numbers.
    """
    return _HEADER + 4 * (MAX_PIECES + 1) * (length // CELL + 1)


def _fake_pieces(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return fake results of ``sp::pieces``: a table for each vector (B, S), whose size depends on S only."""
    return [x.new_empty([table_size(x.shape[1])], dtype=torch.int64, device="cpu") for x in vectors]


@opaque("pieces(Tensor[] vectors) -> Tensor[]", _fake_pieces, replays=False)
def pieces(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Compute a table of pieces for each vector that a mask reads, with one synchronization.

    In a piece, consecutive positions, the vector is a line (such as a document number, or a position) or is bounded by
    two lines. Plans of attention read the tables on the host.

    Args:
        vectors: int or bool (B, S) each, on any device, replicated.

    Returns:
        int64 (table_size(S),) each, on the CPU: the table (see `Pieces.of`), padded with zeros.

    Bytes: none.
    """
    tables = []
    for vector in _copy_to_host(vectors):
        values = vector.to(torch.int64).numpy()
        table = _fit_pieces(values) if values.size else np.empty((4, 0), np.int64)
        tables.append(pad_table(table, *values.shape))
    return tables


def _copy_to_host(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of all vectors on the host. They are copied asynchronously, with one synchronization at the end."""
    copies = [x.detach().to("cpu", non_blocking=True) for x in vectors]
    for device in {x.device for x in vectors if x.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
    return copies


def copy_async(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on a device, without synchronization: on a GPU it is copied from pinned memory."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def pad_table(table: Ints, batch: int, length: int) -> Tensor:
    """Return a table as ``sp::pieces`` does: a header, the pieces, and zeros up to `table_size` elements.

    The header has the number of pieces, batch, length and a digest, by which plans are cached. Where too many pieces
    start, they are replaced by bounds.

    Args:
        table: Starts, lows, highs and slopes, int64 (4, pieces).
        batch: The number of batch entries.
        length: The number of positions.
    """
    padded = np.zeros(table_size(length), np.int64)  # the system allocates zero pages on first access
    if table.size:
        table = _coarsen(table, length)
        end = _HEADER + table.size
        padded[_HEADER:end] = table.ravel()
        padded[:3] = table.shape[1], batch, length
        digest = hashlib.blake2b(padded[:end].tobytes(), digest_size=16).digest()
        padded[3:_HEADER] = np.frombuffer(digest, np.int64)
    return torch.from_numpy(padded)


def _fit_pieces(values: Ints) -> Ints:
    """Return the pieces of a vector, greedily from the first position on, which gives the fewest.

    In a piece, the values of every batch entry are a line. [0, 0, 0, 1, 1, 1, 1, 2, 2] has 3 pieces, of slope 0.

    Args:
        values: (batch, length), length at least 1.

    Returns:
        Starts, lows, highs and slopes, (4, pieces).
    """
    length = values.shape[1]
    starts = _line_starts(values)
    # Move the last position of a piece to the next one if it fits there better. [0, 0, 1, 2, 3] is split greedily into
    # [0, 0] and [1, 2, 3], which the second 0 continues with slope 1.
    ends = np.append(starts[1:], length) - 1
    starts[1:] -= _last_fits_next(values, starts, ends)  # True is 1
    ends = np.append(starts[1:], length) - 1
    first, last = values[:, starts], values[:, ends]
    # The difference of the first two values; 0 in a piece of one position.
    slopes = np.where(ends > starts, values[:, np.minimum(starts + 1, length - 1)] - first, 0)
    return np.stack([starts, *_batch_bounds(first, last, slopes, ends - starts)])


def _line_starts(values: Ints) -> Ints:
    """Return the first position of each line in vectors (batch, length), greedily from position 0 on.

    Runs are positions with equal steps, of which adjacent ones share a position: 0 0 0 1 2 3 has the runs [0, 2] and
    [2, 5]. The shared position belongs to the first line, so that the lines start at 0 and 3.
    """
    length, steps = values.shape[1], np.diff(values, axis=1)
    # Two runs share the position p if the step to p differs from the step to p + 1 in a batch entry.
    shared = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(0)) + 1
    starts = np.append(0, shared)  # of runs
    ends = np.append(starts[1:], length - 1)
    run_numbers, is_long = np.arange(len(starts)), ends - starts > 1
    last_long = np.maximum.accumulate(np.where(is_long, run_numbers, -1))  # number of the last long run, or -1
    # A run that becomes a line takes all its positions, so that the next run loses its first one. A long run (three or
    # more positions) then has at least two left: it is always a line. A short run (two positions) is a line only if the
    # run before it is not a line. So after a long run, or from the first run on, every second short run is a line.
    # 0 0 0 1 3 7 has the runs [0, 2], [2, 3], [3, 4] and [4, 5]: the first and the third are lines.
    runs_since_long = np.where(last_long >= 0, run_numbers - last_long, run_numbers)
    is_line = runs_since_long % 2 == 0
    loses_first = np.append(False, is_line[:-1])
    starts = (starts + loses_first)[is_line]
    return starts if is_line[-1] else np.append(starts, length - 1)  # the last position may be a line of its own


def _last_fits_next(values: Ints, starts: Ints, ends: Ints) -> Flags:
    """Return a flag for each piece but the last one: whether its last position fits the next piece better.

    It does if it is on the line of the next piece, and the next piece is not shorter. In the document numbers
    0 0 0 1 2 2 2, the pair (1, 2) is a line, too, but this 2 belongs to the next document. The only position of a piece
    is never moved.

    Args:
        values: The vectors, (batch, length).
        starts: First position of each piece.
        ends: Last position of each piece, inclusive.
    """
    spans = ends - starts
    last, next_first = ends[:-1], starts[1:]
    next_second = np.minimum(next_first + 1, values.shape[1] - 1)
    is_other_step = values[:, next_first] - values[:, last] != values[:, next_second] - values[:, next_first]
    return (spans[1:] >= spans[:-1]) & (spans[:-1] > 0) & ~is_other_step.any(0)


def sorted_unique(x: Ints) -> Ints:
    """Return the sorted unique values of x; np.unique hashes, which takes 20 times as long."""
    ordered = np.sort(x)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]


def _batch_bounds(first: Ints, last: Ints, slopes: Ints, spans: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (lows, highs, slopes) of pieces that are lines in each batch entry: bounds over all batch entries.

    If the slopes of the entries differ, the slope is 0 and the bounds are those of all values of the piece. If a value
    is too large for sums of int64, the slope is 0 and the bounds are -FAR_VALUE and FAR_VALUE.

    Args:
        first: (batch, pieces), the value at the first position of each piece.
        last: (batch, pieces), the value at its last position.
        slopes: (batch, pieces), the step of its values.
        spans: (pieces,), its last position minus its first.
    """
    same_slope = (slopes == slopes[:1]).all(0)
    lows = np.where(same_slope, first.min(0), np.minimum(first, last).min(0))
    highs = np.where(same_slope, first.max(0), np.maximum(first, last).max(0))
    # As floats, since the rise of a piece may not fit int64.
    sizes = np.abs(np.stack([first, last, slopes * 1.0 * spans], dtype=np.float64)).max((0, 1))
    too_large = sizes >= FAR_VALUE
    common_slopes = np.where(same_slope & ~too_large, slopes[0], 0)
    return np.where(too_large, -FAR_VALUE, lows), np.where(too_large, FAR_VALUE, highs), common_slopes


def _piece_extremes(table: Ints, length: int) -> tuple[Ints, Ints]:
    """Return the minimum and the maximum of each piece of a table, which are at one of its ends."""
    starts, lows, highs, slopes = table
    rise = slopes * (np.append(starts[1:], length) - 1 - starts)
    return lows + np.minimum(rise, 0), highs + np.maximum(rise, 0)


def _coarsen(table: Ints, length: int) -> Ints:
    """Return a table that fits `table_size` elements: at most MAX_PIECES + 1 pieces for every CELL positions.

    The pieces of a crowded cell (CELL positions in which more than MAX_PIECES pieces start) are replaced by one piece
    of slope 0 that bounds their values. Equal adjacent pieces are merged.

    Args:
        table: (4, pieces).
        length: The number of positions.
    """
    # A flag for each cell, and for one after the last, so that the end of each crowded cell is among the edges below.
    crowded = np.bincount(table[0] // CELL, minlength=length // CELL + 2) > MAX_PIECES
    if not crowded.any():
        return table
    # Cut the pieces at both ends of crowded cells: at the start of each cell that is crowded or follows a crowded one,
    # except 0, at which a piece starts in any case.
    edges = (np.flatnonzero(crowded[1:] | crowded[:-1]) + 1) * CELL
    table = cut_pieces(table, edges[edges < length])
    starts, lows, highs, slopes = table
    minima, maxima = _piece_extremes(table, length)
    # A group is a piece outside crowded cells, or all pieces of a crowded cell, the first of which starts with the
    # cell. Group i begins at piece groups[i].
    unchanged = ~crowded[starts // CELL]
    groups = np.flatnonzero(unchanged | (starts % CELL == 0))
    is_bounded = ~unchanged[groups]
    lows = np.where(is_bounded, np.minimum.reduceat(minima, groups), lows[groups])
    highs = np.where(is_bounded, np.maximum.reduceat(maxima, groups), highs[groups])
    slopes, starts = np.where(is_bounded, 0, slopes[groups]), starts[groups]
    lines = np.stack([lows, highs, slopes])
    # A constant piece like the one before it continues that piece.
    continues = (lines[:, 1:] == lines[:, :-1]).all(0) & (slopes[1:] == 0)
    return np.stack([starts, *lines])[:, np.append(True, ~continues)]


def cut_pieces(table: Ints, positions: Ints) -> Ints:
    """Return a table (4, pieces) of the same lines in which pieces start at these positions, too."""
    starts = sorted_unique(np.concatenate([table[0], positions]))
    return np.stack([starts, *_lines_at(table, starts)])


def _lines_at(table: Iterable[Ints], positions: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (lows, highs, slopes) at these positions, of the piece of the table (4, pieces) that contains each."""
    starts, lows, highs, slopes = table
    piece = np.searchsorted(starts, positions, "right") - 1
    rise = slopes[piece] * (positions - starts[piece])
    return lows[piece] + rise, highs[piece] + rise, slopes[piece]
