"""Find tiles of cells: rows and keys in which every vector is one line, evaluated together.

    Eq(row0, col0) & (col1 <= row1), packed documents     a query cell is (a part of) a document, and meets the key
                                                          cell of the same document: a tile, full or causal, or none
    Ne(col0, 0) & (k <= q), padding at the end            one query cell, two key cells, of which one is met

All computation is on arrays over cells and over pairs of cells that may meet; the size of both is about the number of
documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from . import predicate as language
from .pieces import Flags, Ints, Pieces, sorted_unique
from .predicate import Linear
from .spans import Rows

Range = tuple[int, int]  # local rows [low, high)
Band = tuple[int, int]  # minimum and maximum of the key's offset minus the query's, both inclusive


class Cells(NamedTuple):
    """Cells of local rows in order, cut where a vector's piece ends or the index is not consecutive."""

    offsets: Ints  # local offset of each cell
    lengths: Ints  # number of rows of each cell
    lines: dict[str, tuple[Ints, Ints, Ints]]  # (lows, highs, slopes) of each symbol, relative to the cell's first row

    def bounds(self, i: int) -> dict[str, tuple[int, int]]:
        """Return the inclusive bounds of all symbols in one cell."""
        found = {}
        for name, (lows, highs, slopes) in self.lines.items():
            rise = int(slopes[i] * (self.lengths[i] - 1))
            found[name] = int(lows[i]) + min(rise, 0), int(highs[i]) + max(rise, 0)
        return found


def cells_of(rows: Rows, vectors: Mapping[str, Pieces], index: str) -> Cells:
    """Return all cells of a local tensor.

    Args:
        rows: The valid rows.
        vectors: The vectors that the predicate reads, by symbol.
        index: The symbol of a row's index.
    """
    firsts, offsets, lengths = [], [], []
    for first, offset, length in rows:
        inside = [p.starts[slice(*np.searchsorted(p.starts, (first + 1, first + length)))] for p in vectors.values()]
        starts = sorted_unique(np.concatenate([np.array([first]), *inside]))
        firsts.append(starts)
        offsets.append(starts - first + offset)
        lengths.append(np.append(starts[1:], first + length) - starts)
    at = np.concatenate(firsts)
    lines = {index: (at, at, np.ones_like(at))} | {name: p.lines(at) for name, p in vectors.items()}
    return Cells(np.concatenate(offsets), np.concatenate(lengths), lines)


def valid_segments(rows: Rows) -> list[Range]:
    """Return the ranges of local rows between padding."""
    cuts = [i for i, (a, b) in enumerate(pairwise(rows), 1) if a.offset + a.length < b.offset]
    groups = [rows[a:b] for a, b in pairwise([0, *cuts, len(rows)])] if rows else []
    return [(group[0].offset, group[-1].offset + group[-1].length) for group in groups]


class _ConditionSide(NamedTuple):
    """One side of a linear condition in every cell."""

    lows: Ints  # lower bound in the cell
    highs: Ints  # upper bound in the cell
    firsts: Ints  # value at the first row, where it is known
    slopes: Ints  # step from each row to the next
    known: Flags  # whether the value is exactly a line


def _sum_linear_terms(cells: Cells, terms: Sequence[tuple[str, int]]) -> _ConditionSide:
    """Return the sum of the terms in every cell."""
    zeros = np.zeros_like(cells.offsets)
    lows, highs, slopes = zeros, zeros, zeros
    for name, factor in terms:
        low, high, slope = (factor * x for x in cells.lines[name])
        lows, highs, slopes = lows + np.minimum(low, high), highs + np.maximum(low, high), slopes + slope
    rise = slopes * (cells.lengths - 1)
    return _ConditionSide(lows + np.minimum(rise, 0), highs + np.maximum(rise, 0), lows, slopes, lows == highs)


class CellPair(NamedTuple):
    """Cells of local queries and keys that meet."""

    q: Range  # query rows
    k: Range  # key rows
    left: tuple[str, ...] = ()  # conditions that do not hold for all pairs
    # the i-th query attends exactly to the keys from i + band[0] to i + band[1]; None if unknown
    band: Band | None = None
    parts: tuple[CellPair, ...] = ()  # the pairs of which it consists, if there are several and few (see MAX_PARTS)


# Maximum number of parts of a tile, unless parts have at least LONG_ROWS queries on average. Four parts are two query
# ranges and two key ranges: a rank's share of the zigzag layout. Longer parts occur as a document's share of the
# balanced layout.
MAX_PARTS, LONG_ROWS = 4, 128
MAX_CELL_PAIRS = 8  # pairs of cells are not examined if cells meet more than this number of others on average


class CellGrid:
    """Pairs of cells that meet under the conditions of one predicate."""

    def __init__(
        self,
        conditions: Sequence[str],
        linears: Sequence[Linear | None],
        q: Cells,
        k: Cells,
        fixed: Mapping[str, Range],
    ) -> None:
        """Evaluate the linear conditions in every cell.

        Args:
            conditions: The conditions of the predicate.
            linears: Each condition in linear form; None if it is not linear.
            q: The query cells.
            k: The key cells.
            fixed: The bounds of the predicate's sizes.
        """
        self._conditions, self._linears, self._fixed, self._q, self._k = conditions, linears, fixed, q, k
        self._sums = [
            None if one is None else (_sum_linear_terms(q, one.of_query), _sum_linear_terms(k, one.of_key))
            for one in linears
        ]

    def tiles(self) -> list[CellPair] | None:
        """Return tiles, sorted by queries, that contain each attendable pair once.

        Queries that meet one key cell form a tile with it. Adjacent queries that meet several form one tile together,
        with all keys between the first and the last of these, in which every condition remains.

        Returns:
            The tiles; None if cells meet too many others.
        """
        met = self._meeting_pairs()
        if met is None:
            return None
        rows, keys = met
        possible, unsure = np.ones(len(rows), np.bool_), []
        for c in range(len(self._conditions)):
            every, some = self._verdicts(c, rows, keys)
            possible &= some
            unsure.append(~every)
        rows, keys, left = rows[possible], keys[possible], np.stack(unsure)[:, possible]
        return self._join_pairs(rows, keys, left)

    def _meeting_pairs(self) -> tuple[Ints, Ints] | None:
        """Return candidate pairs of cells (queries, keys), sorted by queries; None if there are too many.

        All pairs that meet are among them. An equation limits the candidates if there is one.
        """
        n, m = len(self._q.offsets), len(self._k.offsets)
        most, best = MAX_CELL_PAIRS * (n + m), None
        if n * m <= most:
            return np.repeat(np.arange(n), m), np.tile(np.arange(m), n)
        for one, sums in zip(self._linears, self._sums):
            if one is None or sums is None or one.relation != "==":
                continue
            of_query, of_key = sums
            lows, highs = -of_key.highs - one.constant, -of_key.lows - one.constant
            order = np.argsort(lows, kind="stable")
            first = np.searchsorted(np.maximum.accumulate(highs[order]), of_query.lows, "left")
            counts = np.maximum(np.searchsorted(lows[order], of_query.highs, "right") - first, 0)
            if counts.sum() <= most:
                most, best = int(counts.sum()), (order, first, counts)
        if best is None:
            return None
        order, first, counts = best
        begins = np.cumsum(counts) - counts
        return np.repeat(np.arange(n), counts), order[np.arange(counts.sum()) + np.repeat(first - begins, counts)]

    def _verdicts(self, c: int, rows: Ints, keys: Ints) -> tuple[Flags, Flags]:
        """Return two flags per pair of cells: the condition holds for all pairs; it may hold for some."""
        one, sums = self._linears[c], self._sums[c]
        if one is None or sums is None:
            text, q, k = self._conditions[c], self._q, self._k
            found = [
                language.evaluate_over(text, {**self._fixed, **q.bounds(i), **k.bounds(j)}) for i, j in zip(rows, keys)
            ]
            flags = (np.array([x is wanted for x in found], np.bool_) for wanted in (True, False))
            return next(flags), ~next(flags)
        low = sums[0].lows[rows] + sums[1].lows[keys] + one.constant
        high = sums[0].highs[rows] + sums[1].highs[keys] + one.constant
        if one.relation == "<=":
            return high <= 0, low <= 0
        zero, never = (low == 0) & (high == 0), (low > 0) | (high < 0)
        return (zero, ~never) if one.relation == "==" else (never, ~zero)

    def _join_pairs(self, rows: Ints, keys: Ints, left: Flags) -> list[CellPair]:
        """Join the pairs of cells that meet into tiles, sorted by queries."""
        bands, unsure = self._bands(rows, keys, left), left.T.tolist()
        lows = self._k.offsets[keys]
        stretches = list(zip(lows.tolist(), (lows + self._k.lengths[keys]).tolist()))
        begins = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])) if len(rows) else rows
        ends, cells = np.append(begins[1:], len(rows)).tolist(), rows[begins]
        starts = self._q.offsets[cells]
        queries = zip(starts.tolist(), (starts + self._q.lengths[cells]).tolist())
        tiles, several = list[CellPair](), False  # whether the last tile's queries meet several key cells
        for q, begin, end in zip(queries, begins.tolist(), ends):
            met = [
                CellPair(q, stretches[i], tuple(compress(self._conditions, unsure[i])), bands[i])
                for i in range(begin, end)
            ]
            if met[1:]:
                met = list(_merge_cells(met))
            if len(met) == 1:
                tiles.append(met[0])
                several = False
                continue
            parts = tuple(met)
            if several and tiles[-1].q[1] == q[0]:
                before = tiles.pop()
                q, met = (before.q[0], q[1]), [before, *met]
                parts = (*before.parts, *parts) if before.parts else ()
            k = min(pair.k[0] for pair in met), max(pair.k[1] for pair in met)
            tiles.append(CellPair(q, k, tuple(self._conditions), None, _keep_few_parts(parts)))
            several = True
        return tiles

    def _bands(self, rows: Ints, keys: Ints, left: Flags) -> list[Band | None]:
        """Return the band of each pair of cells; None if it does not cover all conditions."""
        lower, upper, every = -self._q.lengths[rows], self._k.lengths[keys], np.ones(len(rows), np.bool_)
        for c, (one, sums) in enumerate(zip(self._linears, self._sums)):
            if one is None or sums is None or one.relation not in ("<=", "=="):
                every &= ~left[c]
                continue
            of_query, of_key = sums
            step = of_key.slopes[keys]
            known = of_query.known[rows] & of_key.known[keys] & (step != 0) & (of_query.slopes[rows] == -step)
            firsts = np.where(known, of_query.firsts[rows] + of_key.firsts[keys] + one.constant, 0)
            zero, size = -firsts * np.sign(step), np.where(known, np.abs(step), 1)  # where the sum is 0: zero / size
            bounds, equal = left[c] & known, one.relation == "=="
            upper = np.where(bounds & (equal | (step > 0)), np.minimum(upper, zero // size), upper)
            lower = np.where(bounds & (equal | (step < 0)), np.maximum(lower, -(-zero // size)), lower)
            every &= known | ~left[c]
        return [band if known else None for band, known in zip(zip(lower.tolist(), upper.tolist()), every.tolist())]


def without_padding(tile: CellPair, between: Sequence[Range]) -> Iterator[CellPair]:
    """Yield the parts of a tile inside these key ranges."""
    for low, high in between:
        k = max(low, tile.k[0]), min(high, tile.k[1])
        if k == tile.k:
            yield tile
        elif k[0] < k[1]:
            parts = tuple(part for part in tile.parts if low <= part.k[0] < high)
            if len(parts) == 1:
                yield parts[0]
            elif parts or not tile.parts:
                yield CellPair(tile.q, k, tile.left, None, parts)


def _merge_cells(met: list[CellPair]) -> Iterator[CellPair]:
    """Merge adjacent key cells that some queries see in full."""
    before = met[0]
    for pair in met[1:]:
        if before.left or pair.left or before.k[1] != pair.k[0]:
            yield before
            before = pair
        else:
            before = before._replace(k=(before.k[0], pair.k[1]), band=None)
    yield before


def _keep_few_parts(parts: tuple[CellPair, ...]) -> tuple[CellPair, ...]:
    """Return the parts if they are few or long, else ()."""
    rows = sum(pair.q[1] - pair.q[0] for pair in parts)
    return parts if rows >= len(parts) * LONG_ROWS or len(parts) <= MAX_PARTS else ()
