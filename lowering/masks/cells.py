"""Find tiles of a mask: rectangles of queries and keys with attending pairs, each planned as one.

A cell is a range of local rows with consecutive indices (positions in the sequence) in which every vector of the mask
is one line, or bounded by one (``pieces.py``). A query cell and a key cell meet if some of their pairs may attend. A
condition is linear if it compares a sum of query terms with a sum of key terms. Symbols are the inputs of a predicate.

    Eq(row0, col0) & (col1 <= row1), packed documents     a query cell is (a part of) a document, and meets the key
                                                          cell of the same document: a tile, full or causal, or none
    Ne(col0, 0) & (k <= q), padding at the end            one query cell, two key cells, of which one is met

All computation is on arrays over cells and over pairs of cells that may meet; the size of both is about the number of
documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from . import predicate as language
from .pieces import Flags, Ints, Pieces, sorted_unique
from .predicate import Linear, Verdict
from .spans import Rows

Range = tuple[int, int]  # local rows [low, high)
Band = tuple[int, int]  # minimum and maximum of the key's offset minus the query's, both inclusive


class Cells(NamedTuple):
    """Cells of the local queries or keys in order, cut where a vector's piece or a segment ends."""

    offsets: Ints  # local offset of each cell
    lengths: Ints  # number of rows of each cell
    lines: dict[str, tuple[Ints, Ints, Ints]]  # (lows, highs, slopes) of each symbol, relative to the cell's first row

    def bounds(self, i: int) -> dict[str, tuple[int, int]]:
        """Return the inclusive bounds of all symbols in cell i: a condition can be evaluated over them."""
        bounds = {}
        for name, (lows, highs, slopes) in self.lines.items():  # bounds at the first row of each cell, step per row
            rise = int(slopes[i] * (self.lengths[i] - 1))
            bounds[name] = int(lows[i]) + min(rise, 0), int(highs[i]) + max(rise, 0)
        return bounds


def cells_of(rows: Rows, vectors: Mapping[str, Pieces], index: str) -> Cells:
    """Return the cells of the local queries or keys: ranges of rows in which each vector is a line, or bounded by one.

    Rows are cut where a vector's piece begins, such as a document, and where their indices are not consecutive.

    Args:
        rows: The valid rows.
        vectors: The vectors that the predicate reads, by symbol.
        index: The symbol of a row's index, "q" or "k".
    """
    indices, offsets, lengths = [], [], []
    for first, offset, length in rows:
        starts = [np.array([first])]  # indices at which cells of this segment start
        for vector in vectors.values():
            low, high = np.searchsorted(vector.starts, (first + 1, first + length))
            starts.append(vector.starts[low:high])
        cell_starts = sorted_unique(np.concatenate(starts))
        indices.append(cell_starts)
        offsets.append(cell_starts - first + offset)
        lengths.append(np.append(cell_starts[1:], first + length) - cell_starts)
    first_indices = np.concatenate(indices)
    lines = {index: (first_indices, first_indices, np.ones_like(first_indices))}
    lines |= {name: vector.lines(first_indices) for name, vector in vectors.items()}
    return Cells(np.concatenate(offsets), np.concatenate(lengths), lines)


def valid_ranges(rows: Rows) -> list[Range]:
    """Return the valid rows as ranges of local rows: several if there is padding between them."""
    ranges: list[Range] = []
    for _, offset, length in rows:  # (index in the sequence, local offset, length)
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = ranges[-1][0], offset + length
        else:
            ranges.append((offset, offset + length))
    return ranges


def trim_range(rows: Range, verdict: Callable[[Range], Verdict]) -> Range:
    """Return ``rows`` without the rows at both ends that have no attending pair; an empty range if none has one.

    Args:
        rows: A range of queries or of keys.
        verdict: Returns False if no row of a range has an attending pair, else True or None.
    """
    if verdict(rows) is False:
        return rows[0], rows[0]
    first, last = _find_edge(rows, verdict, last=False), _find_edge(rows, verdict, last=True)
    return (first, last + 1) if first <= last else (rows[0], rows[0])


def _find_edge(rows: Range, verdict: Callable[[Range], Verdict], last: bool) -> int:
    """Return the first row, or with ``last`` the last one, that may have an attending pair, by bisection.

    If no row has one, the bisection ends at the opposite end of the rows: the first row is then after the last one.
    """
    low, high = rows
    while high - low > 1:
        middle = (low + high) // 2
        # The half in which to look first: if it may have an attending pair, the row is there.
        near, far = ((middle, high), (low, middle)) if last else ((low, middle), (middle, high))
        low, high = near if verdict(near) is not False else far
    return low


class _ConditionSide(NamedTuple):
    """One side of a linear condition in every cell."""

    lows: Ints  # lower bound in the cell
    highs: Ints  # upper bound in the cell
    firsts: Ints  # value at the first row, where it is known
    slopes: Ints  # step from each row to the next
    known: Flags  # whether the value is exactly a line


def _sum_linear_terms(cells: Cells, terms: Sequence[tuple[str, int]]) -> _ConditionSide:
    """Return the sum of (symbol, factor) terms, one side of a linear condition, in every cell.

    A cell is a range of rows in which each symbol is a line, or bounded by one. The result has the bounds of the sum in
    each cell, its value at the first row and its step per row, and whether these two are exact.
    """
    zeros = np.zeros_like(cells.offsets)
    lows, highs, slopes = zeros, zeros, zeros  # bounds at the first row of each cell, and the step per row
    for name, factor in terms:
        low, high, slope = (factor * x for x in cells.lines[name])  # a negative factor exchanges the bounds
        lows, highs, slopes = lows + np.minimum(low, high), highs + np.maximum(low, high), slopes + slope
    rise = slopes * (cells.lengths - 1)
    lowest, highest = lows + np.minimum(rise, 0), highs + np.maximum(rise, 0)
    return _ConditionSide(lowest, highest, firsts=lows, slopes=slopes, known=lows == highs)


class _LinearSums(NamedTuple):
    """A linear condition and both of its sides in every cell, for verdicts and bands as arrays."""

    linear: Linear  # the condition
    of_query: _ConditionSide  # its query terms, in every query cell
    of_key: _ConditionSide  # its key terms, in every key cell


class _OverlappingKeys(NamedTuple):
    """Key cells that may satisfy an equation with each query cell i: order[firsts[i] : firsts[i] + counts[i]]."""

    order: Ints  # numbers of all key cells, sorted by their values
    firsts: Ints  # position in `order` of the first key cell, for each query cell
    counts: Ints  # number of key cells, for each query cell


def _overlapping_keys(sums: _LinearSums) -> _OverlappingKeys:
    """Return the key cells that may satisfy an equation with each query cell, since their bounds overlap.

    The equation is of_query + of_key + constant == 0. For `Eq(row0, col0)`, of_query is a document number, and the
    bounds of a key cell are those of its document number.
    """
    # The values of of_query that satisfy the equation with a key cell are in [lows, highs].
    lows, highs = -sums.of_key.highs - sums.linear.constant, -sums.of_key.lows - sums.linear.constant
    order = np.argsort(lows, kind="stable")
    # Two ranges overlap if each begins before the other one ends. In this order, the lows ascend, and so does the
    # running maximum of the highs, so that both conditions can be found by bisection. It may add key cells that do not
    # overlap, never omit one.
    firsts = np.searchsorted(np.maximum.accumulate(highs[order]), sums.of_query.lows, "left")
    ends = np.searchsorted(lows[order], sums.of_query.highs, "right")
    return _OverlappingKeys(order, firsts, np.maximum(ends - firsts, 0))


class CellPair(NamedTuple):
    """Query and key rows that meet: a pair of cells, or a tile that joins several."""

    q: Range  # query rows
    k: Range  # key rows
    undecided: tuple[str, ...] = ()  # conditions that do not hold for all pairs
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
        """Evaluate both sides of the linear conditions in every cell, a range of queries or of keys.

        Args:
            conditions: The conditions of the predicate.
            linears: Each condition in linear form; None if it is not linear.
            q: The query cells.
            k: The key cells.
            fixed: The bounds of the predicate's sizes.
        """
        self._conditions, self._fixed, self._q, self._k = conditions, fixed, q, k
        self._sums = [
            linear and _LinearSums(linear, _sum_linear_terms(q, linear.of_query), _sum_linear_terms(k, linear.of_key))
            for linear in linears
        ]

    def tiles(self) -> list[CellPair] | None:
        """Return tiles (rectangles of queries and keys), sorted by queries, that contain each attending pair once.

        A query cell that meets one key cell, such as that of the same document, forms a tile with it. Adjacent query
        cells that meet several form one tile together, with all keys from the first to the last of these, in which
        every condition is evaluated.

        Returns:
            The tiles; None if cells meet too many others.
        """
        candidates = self._candidate_pairs()
        if candidates is None:
            return None
        rows, keys = candidates  # the number of the query cell and of the key cell of each pair of cells
        meets = np.ones(len(rows), np.bool_)  # pairs of cells in which every condition may hold
        # For each condition, the pairs in which it does not hold for all rows.
        undecided = np.zeros((len(self._conditions), len(rows)), np.bool_)
        for c in range(len(self._conditions)):
            always, sometimes = self._verdicts(c, rows, keys)
            meets &= sometimes
            undecided[c] = ~always
        return self._join_pairs(rows[meets], keys[meets], undecided[:, meets])

    def _candidate_pairs(self) -> tuple[Ints, Ints] | None:
        """Return the query cells and the key cells, by number, of pairs of cells that may meet, sorted by query cell.

        All pairs that meet are among them. If there are few cells, these are all pairs. Otherwise an equation of the
        predicate, such as that of document numbers, limits the key cells to those whose bounds overlap the bounds of a
        query cell; of several equations, the one with the fewest pairs is used. None if these are too many as well, or
        if there is no equation.
        """
        num_queries, num_keys = len(self._q.offsets), len(self._k.offsets)
        limit = MAX_CELL_PAIRS * (num_queries + num_keys)
        if num_queries * num_keys <= limit:
            return np.repeat(np.arange(num_queries), num_keys), np.tile(np.arange(num_keys), num_queries)
        equations = [sums for sums in self._sums if sums is not None and sums.linear.relation == "=="]
        candidates = [_overlapping_keys(sums) for sums in equations]
        # For query cell i, counts[i] key cells: order[firsts[i] : firsts[i] + counts[i]].
        fewest = min(candidates, key=lambda c: int(c.counts.sum()), default=None)
        if fewest is None or fewest.counts.sum() > limit:
            return None
        query_cells = np.repeat(np.arange(num_queries), fewest.counts)
        # The number of each pair among those of its query cell: 0, 1, .., counts[i] - 1.
        pairs_before = np.cumsum(fewest.counts) - fewest.counts
        numbers = np.arange(len(query_cells)) - np.repeat(pairs_before, fewest.counts)
        return query_cells, fewest.order[np.repeat(fewest.firsts, fewest.counts) + numbers]

    def _verdicts(self, c: int, rows: Ints, keys: Ints) -> tuple[Flags, Flags]:
        """Evaluate condition c for pairs of cells, from the bounds of its symbols in each cell.

        Args:
            c: The number of the condition.
            rows: The query cell of each pair.
            keys: The key cell of each pair.

        Returns:
            Two arrays with a flag per pair of cells: whether the condition holds for all (query, key) pairs in them,
            and whether it may hold for some.
        """
        sums = self._sums[c]
        if sums is None:  # not linear
            boxes = ({**self._fixed, **self._q.bounds(i), **self._k.bounds(j)} for i, j in zip(rows, keys))
            verdicts = [language.evaluate_over(self._conditions[c], box) for box in boxes]
            always = np.array([verdict is True for verdict in verdicts], np.bool_)
            return always, np.array([verdict is not False for verdict in verdicts], np.bool_)
        # A linear condition compares a sum, whose bounds these are, with 0.
        low = sums.of_query.lows[rows] + sums.of_key.lows[keys] + sums.linear.constant
        high = sums.of_query.highs[rows] + sums.of_key.highs[keys] + sums.linear.constant
        if sums.linear.relation == "<=":
            return high <= 0, low <= 0
        always_zero, never_zero = (low == 0) & (high == 0), (low > 0) | (high < 0)
        if sums.linear.relation == "==":
            return always_zero, ~never_zero
        return never_zero, ~always_zero  # the relation is "!="

    def _join_pairs(self, rows: Ints, keys: Ints, undecided: Flags) -> list[CellPair]:
        """Join the pairs of cells that meet into tiles, sorted by queries (see `tiles`).

        Args:
            rows: The query cell of each pair of cells, sorted.
            keys: The key cell of each pair of cells.
            undecided: Flags (conditions, pairs of cells): whether the condition may be False for some of their rows.
        """
        bands = self._bands(rows, keys, undecided)
        undecided_of_pair = undecided.T.tolist()  # for each pair of cells, a flag per condition
        key_lows = self._k.offsets[keys]
        key_ranges = list(zip(key_lows.tolist(), (key_lows + self._k.lengths[keys]).tolist()))
        # The pairs of cells [begins[i], ends[i]) have the same query cell: (0, 2) and (2, 3) for the rows 5, 5, 6.
        begins = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])) if len(rows) else rows  # none without pairs
        ends = np.append(begins[1:], len(rows)).tolist()
        query_cells = rows[begins]
        query_lows = self._q.offsets[query_cells]
        query_ranges = zip(query_lows.tolist(), (query_lows + self._q.lengths[query_cells]).tolist())
        tiles = list[CellPair]()
        is_last_joined = False  # whether the last tile has several key cells, so that the next one may join it
        for q, begin, end in zip(query_ranges, begins.tolist(), ends):
            pairs = [
                CellPair(q, key_ranges[i], tuple(compress(self._conditions, undecided_of_pair[i])), bands[i])
                for i in range(begin, end)
            ]
            pairs = list(_merge_cells(pairs)) if len(pairs) > 1 else pairs
            if len(pairs) == 1:
                tiles += pairs
                is_last_joined = False
                continue
            # The query cell meets several key cells. It joins the last tile if that ends here and was joined, too.
            parts = tuple(pairs)
            if is_last_joined and tiles[-1].q[1] == q[0]:
                previous = tiles.pop()
                q, pairs = (previous.q[0], q[1]), [previous, *pairs]
                # The last tile has no parts if they were too many: together with these they are too many, too.
                parts = (*previous.parts, *parts) if previous.parts else ()
            k = min(pair.k[0] for pair in pairs), max(pair.k[1] for pair in pairs)
            tiles.append(CellPair(q, k, tuple(self._conditions), band=None, parts=_keep_few_parts(parts)))
            is_last_joined = True
        return tiles

    def _bands(self, rows: Ints, keys: Ints, undecided: Flags) -> list[Band | None]:
        """Return the band of each pair of cells; None if the attending pairs are not those of a band.

        A band (lower, upper) means: the pairs with lower <= key - query <= upper attend, where query and key count from
        the first rows of the cells. A linear condition limits key - query if its sides are lines of opposite slopes in
        the cells. Example: `k <= q` for a query cell from index 4 on and a key cell from index 2 on is
        2 + key <= 4 + query, the band (-number of queries, 2). A side has in each cell the value `firsts` at the first
        row and the step `slopes` per row, if it is exactly a line there (`known`). Args: as of `_join_pairs`.
        """
        # Without conditions, all pairs attend: key - query is between these limits for any two rows of the cells.
        lower, upper = -self._q.lengths[rows], self._k.lengths[keys]
        covers_all = np.ones(len(rows), np.bool_)  # whether the band expresses all undecided conditions
        for c, sums in enumerate(self._sums):
            if sums is None or sums.linear.relation == "!=":
                covers_all &= ~undecided[c]
                continue
            of_query, of_key = sums.of_query, sums.of_key
            # The condition is first_sum + step * (key - query) <= 0, or == 0, where both sides are opposite lines; in
            # the example k - q <= 0, and -2 + (key - query) <= 0.
            step = of_key.slopes[keys]
            is_line = of_query.known[rows] & of_key.known[keys] & (step != 0) & (of_query.slopes[rows] == -step)
            first_sum = np.where(is_line, of_query.firsts[rows] + of_key.firsts[keys] + sums.linear.constant, 0)
            # The sum is 0 where key - query is -first_sum / step, written with a positive denominator.
            numerator, denominator = -first_sum * np.sign(step), np.where(is_line, np.abs(step), 1)
            floor, ceiling = numerator // denominator, -(-numerator // denominator)
            # An equation limits key - query on both sides, an inequality only from above (step > 0) or from below.
            limits = undecided[c] & is_line
            is_equation = sums.linear.relation == "=="
            upper = np.where(limits & (is_equation | (step > 0)), np.minimum(upper, floor), upper)
            lower = np.where(limits & (is_equation | (step < 0)), np.maximum(lower, ceiling), lower)
            covers_all &= is_line | ~undecided[c]
        bands = zip(lower.tolist(), upper.tolist())
        return [band if is_covered else None for band, is_covered in zip(bands, covers_all.tolist())]


def without_padding(tile: CellPair, key_ranges: Sequence[Range]) -> Iterator[CellPair]:
    """Yield a tile cut to each of these ranges of valid keys, since blocks must not contain padding keys.

    Each of `tile.parts` (the pairs of cells that attend) is in one range, since no cell has both valid and padding
    keys. Ranges without a part are omitted. A tile without a list of parts, such as one pair of cells, is only cut.
    """
    for low, high in key_ranges:
        k = max(low, tile.k[0]), min(high, tile.k[1])
        if k == tile.k:
            yield tile
            continue
        parts = tuple(part for part in tile.parts if low <= part.k[0] < high)
        if k[0] >= k[1] or (tile.parts and not parts):
            continue
        # The band counts keys from the first key of the tile, so it is not that of a part with fewer keys.
        yield parts[0] if len(parts) == 1 else CellPair(tile.q, k, tile.undecided, band=None, parts=parts)


def _merge_cells(pairs: list[CellPair]) -> Iterator[CellPair]:
    """Yield the pairs of one query cell; adjacent key cells to which all of its queries attend are joined."""
    previous = pairs[0]
    for pair in pairs[1:]:
        if previous.undecided or pair.undecided or previous.k[1] != pair.k[0]:
            yield previous
            previous = pair
        else:
            # The band of one key cell is not that of both.
            previous = previous._replace(k=(previous.k[0], pair.k[1]), band=None)
    yield previous


def _keep_few_parts(parts: tuple[CellPair, ...]) -> tuple[CellPair, ...]:
    """Return the parts of a tile (its pairs of cells) if they are few, or long on average; else ().

    A kernel would compute each part as a sequence, and many short sequences are slow.
    """
    rows = sum(pair.q[1] - pair.q[0] for pair in parts)
    return parts if rows >= len(parts) * LONG_ROWS or len(parts) <= MAX_PARTS else ()
