"""Find the blocks (queries x keys) of one attention, in which pairs attend: the planner of ``block_plan.py``.

    q, k        ranges [low, high) of local query and key rows; the index of a row is its position in the sequence
    segment     local rows with consecutive indices (``spans.py``); a zigzag shard has two
    vector      values per query or key that the predicate reads, such as document numbers, in pieces (``pieces.py``)
    condition   one operand of the predicate's "and"; undecided where it does not hold for all pairs
    tile, run   a rectangle that is planned as one; the pairs of a tile that a window determines (``blocks.py``)

A plan has blocks for kernels that support windows, and other blocks for kernels that do not.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from . import predicate as language
from .blocks import (
    CAUSAL_WINDOW,
    FULL_WINDOW,
    AttendedRun,
    Block,
    BlockPlan,
    Kind,
    as_band,
    block_of,
    can_run_without_windows,
    has_masked,
    packed_calls,
    part_runs,
    run_blocks,
    split_run,
    tile_runs,
)
from .cells import MAX_PARTS, Band, CellGrid, CellPair, Range, cells_of, trim_range, valid_ranges, without_padding
from .pieces import Pieces
from .predicate import Verdict, is_query_symbol
from .spans import Rows, index_boundaries, index_intervals, valid_extent

TILE_ROWS = 128  # tiles with fewer query rows than twice this are not cut to skip keys; keys are skipped in such units
MAX_REMAINING_SHARE = 0.9  # cut a tile, or skip keys inside it, if at most this share of its work remains
MAX_MASK_ELEMENTS = 1 << 22  # maximum number of elements of a block's mask; larger tiles are cut

Vectors = tuple[Pieces, ...]
# A tile, and a function that creates its blocks; kernels that support windows and packed sequences do not call it.
TileBlocks = tuple[CellPair, Callable[[], Iterable[Block]]]


class BlockPlanner:
    """Planner of one attention call."""

    def __init__(
        self, predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...], rows: Vectors, cols: Vectors
    ) -> None:
        """Parse the predicate, which may read these vectors and sizes. Arguments: see `plan_blocks`.

        Raises:
            SpError: If the predicate reads a symbol without a value.
        """
        self._conditions = language.split_conjuncts(predicate)
        # Each condition as a linear inequality of q and k, such as k - q <= 0; None for one that is not linear.
        self._linears = {text: language.as_linear(text, sizes) for text in self._conditions}
        self._q_rows, self._k_rows = q_rows, k_rows
        self._key_ranges = valid_ranges(k_rows)  # several if there is padding between keys
        # Vectors that the predicate reads, and (minimum, maximum) of the sizes, by symbol.
        symbols = language.predicate_symbols(predicate)
        self._row_vectors = {f"row{i}": vector for i, vector in enumerate(rows) if f"row{i}" in symbols}
        self._col_vectors = {f"col{i}": vector for i, vector in enumerate(cols) if f"col{i}" in symbols}
        self._sizes = {f"n{i}": (size, size) for i, size in enumerate(sizes)}
        language.check_known(predicate, {"q", "k", *self._row_vectors, *self._col_vectors, *self._sizes})

    def plan(self) -> BlockPlan:
        """Return the plan of the attention.

        If the predicate reads vectors, such as document numbers, it is planned in tiles: rectangles in which a query
        piece of the vectors meets a key piece. Without vectors, or if pieces meet too many others, queries x keys are
        halved until bounds decide the parts (`cover`).
        """
        tiles = self._nonempty_tiles() if self._row_vectors or self._col_vectors else None
        if tiles is not None:
            return self._plan_tiles(tiles)
        all_blocks = tuple(self.all_blocks())
        # Many or masked blocks, as those of a window, become bands if possible, for kernels with windows.
        is_costly = len(all_blocks) > MAX_PARTS or has_masked(all_blocks)
        bands = self.band_blocks() if is_costly else None
        # `others` are for kernels with windows, `create_blocks` is for kernels without.
        return BlockPlan(others=bands or all_blocks, create_blocks=lambda: all_blocks)

    def _plan_tiles(self, tiles: Sequence[CellPair]) -> BlockPlan:
        """Return the plan of an attention whose attending pairs are in these tiles (rectangles of queries and keys).

        It has two forms. For kernels that support windows: runs (rectangles with a window), which are packed into few
        calls, and the blocks of tiles that runs do not describe. For other kernels: functions that create the blocks of
        each tile, since they are not needed if the first form is used.
        """
        runs, others, tile_blocks = list[AttendedRun](), list[Block](), list[TileBlocks]()
        for tile in tiles:
            known_runs = _known_runs(tile)  # None unless runs describe the tile with and without windows
            if known_runs is not None:
                known_runs = [piece for run in known_runs for piece in split_run(run)]
                tile_blocks.append((tile, partial(self._run_blocks, tile, known_runs)))
                runs += known_runs
                continue
            blocks = tuple(self._cover_tile(tile))
            tile_blocks.append((tile, partial(tuple, blocks)))
            # For kernels with windows: if each part of the tile has one, its runs replace all blocks of the tile.
            window_runs = part_runs(tile) if has_masked(blocks) else None
            if window_runs is None:
                others += map(as_band, blocks)
            else:
                runs += window_runs
        create_blocks = partial(self._merge_tiles, tile_blocks)
        if len(runs) == 1 and not others and self._is_full_run(runs[0]):  # of a constant shape, for any kernel
            return BlockPlan(others=(block_of(runs[0]),), create_blocks=create_blocks)
        return BlockPlan(packed=tuple(packed_calls(runs)), others=tuple(others), create_blocks=create_blocks)

    def all_blocks(self) -> Iterator[Block]:
        """Yield the blocks of all queries x all keys, for kernels without windows."""
        for q, k in self.split_at_padding():
            yield from self.cover(q, k)

    def split_at_padding(self) -> Iterator[tuple[Range, Range]]:
        """Return (queries, keys) for each range of valid keys: padding may be between two ranges."""
        return ((valid_extent(self._q_rows), keys) for keys in self._key_ranges)

    def band_blocks(self) -> tuple[Block, ...] | None:
        """Return one block for each run (rectangle with a window) of the mask, for kernels with windows.

        None if the pairs of some part of the mask are not those of a window, or if there would be too many tiles.
        """
        tiles = self._nonempty_tiles()
        if tiles is None:
            return None
        runs = list[AttendedRun]()
        for tile in tiles:
            known_runs = part_runs(tile)
            if known_runs is None:
                return None
            runs += known_runs
        return tuple(map(block_of, runs))

    def _is_full_run(self, run: AttendedRun) -> bool:
        """Return True if the run has all valid queries and keys.

        Its shape is then the same in every call, so that a kernel that is built for each shape may run it.
        """
        return (run.q, run.k) == (valid_extent(self._q_rows), valid_extent(self._k_rows))

    def _nonempty_tiles(self) -> list[CellPair] | None:
        """Return the tiles: rectangles in which pairs may attend, cut where a vector's piece (a cell) ends.

        They contain no padding. None if cells meet too many others.
        """
        q, k = cells_of(self._q_rows, self._row_vectors, "q"), cells_of(self._k_rows, self._col_vectors, "k")
        linears = [self._linears[c] for c in self._conditions]
        tiles = CellGrid(self._conditions, linears, q, k, self._sizes).tiles()
        if tiles is None or len(self._key_ranges) == 1:  # one range: no padding is between valid keys
            return tiles
        return [part for tile in tiles for part in without_padding(tile, self._key_ranges)]

    def _run_blocks(self, tile: CellPair, runs: list[AttendedRun]) -> Sequence[Block]:
        """Return the blocks of a tile that consists of these runs, for kernels without windows."""
        if runs and all(run.window in (FULL_WINDOW, CAUSAL_WINDOW) for run in runs):
            return [block for run in runs for block in run_blocks(run, tile.undecided)]
        return self._cover_tile(tile)

    def _cover_tile(self, tile: CellPair) -> list[Block]:
        """Return the blocks of a tile (a rectangle of queries and keys), for kernels without windows.

        It is one MASKED block if it is small, strips of a band (lower <= key - query <= upper), or else covered like a
        call of its own, which may divide its queries again.
        """
        if max(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]) < 2 * TILE_ROWS:
            return [Block.of(tile.q, tile.k, Kind.MASKED, tile.undecided)]
        if tile.band is not None:
            return self._band_strips(tile.q, tile.k, tile.band, tile.undecided)
        return list(self.cover(tile.q, tile.k))

    def _band_strips(self, q: Range, k: Range, band: Band, undecided: tuple[str, ...]) -> list[Block]:
        """Return the blocks of the pairs with band[0] <= key - query <= band[1], counted from the first of q and k.

        Queries are cut into strips. The keys of a strip are a masked triangle, keys of all its queries, and a causal
        block; or one masked block in a narrow band. A window over packed documents has tens of thousands of
        strips, so the loop avoids function calls. Masked and causal blocks evaluate the `undecided` conditions.

        In the band (-4, 0), the queries 10, 11 and 12 attend to the keys 6 to 10, 7 to 11 and 8 to 12. As a strip they
        have a masked block of the keys [6, 8), a full one of [8, 10), and a causal one of [10, 13), which is square.
        """
        lower, upper = band
        rows, keys, q_off, k_off = q[1] - q[0], k[1] - k[0], q[0], k[0]
        width = min(upper, keys) - max(lower, -rows) + 1  # maximum number of keys of a query
        # A strip has a quarter of the width, in units of TILE_ROWS, so that most of its keys are full. Its masks have
        # about height * height elements for each entry of their batch.
        max_height = math.isqrt(MAX_MASK_ELEMENTS // self._mask_batch(undecided))
        height = min(max(width // 4 // TILE_ROWS, 1) * TILE_ROWS, max_height)
        end = min(rows, keys - lower)  # later queries attend to no key
        blocks = list[Block]()
        for first in range(max(0, -upper), end, height):
            size = height if first + height < end else end - first
            # Keys [low, full_begin) are a masked triangle, [full_begin, full_end) full, and [full_end, high) causal.
            low, full_end = first + lower, first + upper
            high, full_begin = full_end + size, low + size - 1
            # Clip them to the keys [0, keys).
            low, full_begin = low if low > 0 else 0, full_begin if full_begin > 0 else 0
            high, full_end = high if high < keys else keys, full_end if full_end < keys else keys
            if width < 4 * TILE_ROWS or full_begin >= full_end:
                blocks.append(Block(q_off + first, size, k_off + low, high - low, Kind.MASKED, undecided))
                continue
            if low < full_begin:
                blocks.append(Block(q_off + first, size, k_off + low, full_begin - low, Kind.MASKED, undecided))
            blocks.append(Block(q_off + first, size, k_off + full_begin, full_end - full_begin, Kind.FULL))
            if full_end < high:
                kind = Kind.CAUSAL if high - full_end == size else Kind.MASKED  # not square if keys were clipped
                blocks.append(Block(q_off + first, size, k_off + full_end, high - full_end, kind, undecided))
        return blocks

    def _merge_tiles(self, tile_blocks: list[TileBlocks]) -> Iterator[Block]:
        """Yield the blocks of all tiles, with adjacent small tiles as one masked block to save kernel calls.

        `tile_blocks` has each tile, with a function that creates its blocks.
        """
        groups = list[list[TileBlocks]]()
        for tile, create_blocks in tile_blocks:
            group = groups[-1] if groups else []
            if group and self._can_merge(first=group[0][0], last=group[-1][0], tile=tile):
                group.append((tile, create_blocks))
            else:
                groups.append([(tile, create_blocks)])
        for group in groups:
            (first, create_blocks), (last, _) = group[0], group[-1]
            if len(group) == 1:
                yield from create_blocks()
            else:  # the rectangle around the tiles, in all of which no condition is known to hold
                yield Block.of((first.q[0], last.q[1]), (first.k[0], last.k[1]), Kind.MASKED, self._conditions)

    def _can_merge(self, first: CellPair, last: CellPair, tile: CellPair) -> bool:
        """Return True if a small block may contain the tiles from ``first`` to ``last`` and the next one, ``tile``."""
        if any(last.k[1] <= end <= tile.k[0] for _, end in self._key_ranges):
            return False  # padding is between the tiles
        follows = last.q[1] == tile.q[0] and last.k[1] <= tile.k[0]
        return follows and tile.q[1] - first.q[0] <= TILE_ROWS and tile.k[1] - first.k[0] <= 2 * TILE_ROWS

    def cover(self, q: Range, k: Range) -> Iterator[Block]:
        """Yield the blocks of the pairs q x k, for kernels without windows.

        Queries and keys at the ends that have no attending pair are removed. Then the first case that applies is used:

            only one condition is undecided, and it is causal     FULL and CAUSAL blocks
            all queries attend to all keys outside one segment    FULL blocks, and the blocks of that segment
            two parts of the queries have less work together      the blocks of each part
            otherwise                                             one block, or few blocks that skip unneeded keys
        """
        q, k = self._trim(q, k)
        if q[0] == q[1]:
            return
        undecided = self._undecided_conditions(q, k)  # conditions that do not hold for all pairs
        segments = index_intervals(self._k_rows, *k)
        ascends = all(before[0] < after[0] for before, after in pairwise(segments))  # keys in sequence order
        # The c of a causal condition k <= q + c, or None.
        shift = self._causal_shift(q, k, undecided[0]) if len(undecided) == 1 and ascends else None
        if shift is not None:
            yield from self._cover_causal(q, k, shift, undecided)
            return
        # Second chunks of several zigzag shards are stored in reversed order. A causal mask then cuts through one of
        # these segments; all queries attend to the others, or none does.
        blocks = self._cover_one_segment(q, k) if undecided and not ascends else []
        if blocks:
            yield from blocks
            return
        # The query that begins the second of two parts with less work together; None if there are no such parts.
        cut = self._best_cut(q, k, undecided) if undecided else None
        if cut is not None:
            yield from self.cover((q[0], cut), k)
            yield from self.cover((cut, q[1]), k)
            return
        for part in self._skip_unneeded(q, k, undecided):
            conditions = self._undecided_conditions(q, part)
            yield Block.of(q, part, Kind.MASKED if conditions else Kind.FULL, conditions)

    def _trim(self, q: Range, k: Range) -> tuple[Range, Range]:
        """Return q and k without the rows at their ends that have no attending pair; both empty without any pair."""
        while True:
            trimmed_k = trim_range(k, partial(self.verdict, q))
            trimmed_q = trim_range(q, partial(self.verdict, k=trimmed_k))
            if (trimmed_q, trimmed_k) == (q, k):
                return q, k
            q, k = trimmed_q, trimmed_k

    def _causal_shift(self, q: Range, k: Range, condition: str) -> int | None:
        """Return c if the condition is ``k <= q + c`` in all segments (consecutive rows) of q and k, else None.

        In each segment, both sides of a linear condition must be lines of opposite slopes. Then c follows from their
        values at the first rows.
        """
        linear = self._linears[condition]
        if linear is None or linear.relation != "<=":
            return None
        shifts = set[int]()
        for of_query in index_intervals(self._q_rows, *q):
            query_line = _linear_side(linear.of_query, "q", self._row_vectors, *of_query)
            for of_key in index_intervals(self._k_rows, *k):
                key_line = _linear_side(linear.of_key, "k", self._col_vectors, *of_key)
                if query_line is None or key_line is None:
                    return None
                (query_value, query_slope), (key_value, key_slope) = query_line, key_line
                if key_slope <= 0 or query_slope != -key_slope:
                    return None
                # The condition is query_side + key_side + constant <= 0, such as -q + k - 3 <= 0. With i and j counted
                # from the first query and key it is key_slope * (j - i) + first_sum <= 0. The indices are
                # k = of_key[0] + j and q = of_query[0] + i.
                first_sum = query_value + key_value + linear.constant
                max_difference = -first_sum // key_slope  # of j - i
                shifts.add(of_key[0] - of_query[0] + max_difference)
        return shifts.pop() if len(shifts) == 1 else None

    def _cover_causal(self, q: Range, k: Range, shift: int, undecided: tuple[str, ...]) -> Iterator[Block]:
        """Yield the FULL and CAUSAL blocks of the pairs with ``k <= q + shift``, in terms of indices.

        q and k are trimmed: every query attends to a key, and a query attends to every key. Queries are cut into parts
        in which each query attends to exactly one key more than the query before it.
        """
        if shift == 0 and index_intervals(self._q_rows, *q) == index_intervals(self._k_rows, *k):
            yield Block.of(q, k, Kind.CAUSAL, undecided)  # the same indices, in any number of segments
            return
        for cut in self._cut_causal(q, k, shift):
            if q[0] < cut < q[1]:
                yield from self.cover((q[0], cut), k)
                yield from self.cover((cut, q[1]), k)
                return
        # One segment of queries, the last of which attends to the last key: a rectangle and a triangle.
        yield from run_blocks(AttendedRun(q, k, CAUSAL_WINDOW), undecided)

    def _cover_one_segment(self, q: Range, k: Range) -> list[Block]:
        """Return the blocks of q x k if all queries attend to all keys outside one segment (consecutive rows), else [].

        Each of them has all queries. Returns [], too, if the keys of that segment need several blocks of queries.
        """
        boundaries = [offset for offset in index_boundaries(self._k_rows) if k[0] < offset < k[1]]
        segments = pairwise([k[0], *boundaries, k[1]])
        # A verdict is True only if all queries attend to all keys of the segment.
        partial_segments = [segment for segment in segments if not self.verdict(q, segment)]
        if len(partial_segments) != 1:
            return []
        (low, high), *_ = partial_segments
        blocks = list(self.cover(q, (low, high)))
        if [block.query_range for block in blocks] != [q]:
            return []
        full_ranges = [keys for keys in ((k[0], low), (high, k[1])) if keys[0] < keys[1]]
        return blocks + [Block.of(q, keys, Kind.FULL) for keys in full_ranges]

    def _cut_causal(self, q: Range, k: Range, shift: int) -> Iterator[int]:
        """Yield the rows at which to cut q for `_cover_causal`; some may be outside q.

        They are the rows that do not attend to exactly one key more than the previous row: the first row of each query
        segment, the row after the first one with all keys, and the first row that attends to a further key segment.
        Indices are positions in the sequence; rows are local.
        """
        # The caller uses the first of these rows that is inside q. Those that are computed from the first segment of q
        # are therefore used only if q has one segment.
        yield from index_boundaries(self._q_rows)
        (first_index, _), *_ = index_intervals(self._q_rows, *q)
        key_segments = index_intervals(self._k_rows, *k)  # (first index, last index) of each
        after_keys = key_segments[-1][1] + 1
        for key_index in [after_keys, *(first for first, _ in key_segments[1:])]:
            query_index = key_index - shift  # the first query that attends to this key
            yield q[0] + query_index - first_index

    def _best_cut(self, q: Range, k: Range, undecided: tuple[str, ...]) -> int | None:
        """Return the row at which to cut q, near its middle; None to keep q.

        It is cut if the mask of its block would be too large, or if both parts together have clearly less work.
        """
        symbols = {name for condition in undecided for name in language.predicate_symbols(condition)}
        if q[1] - q[0] < 2 or not any(map(is_query_symbol, symbols)):  # all queries attend to the same keys
            return None
        cut = self._middle_cut(q)
        if self._mask_batch(undecided) * (q[1] - q[0]) * (k[1] - k[0]) > MAX_MASK_ELEMENTS:
            return cut
        if q[1] - q[0] < 2 * TILE_ROWS:
            return None
        halves_work = self._needed_pairs((q[0], cut), k) + self._needed_pairs((cut, q[1]), k)
        return cut if halves_work <= MAX_REMAINING_SHARE * self._needed_pairs(q, k) else None

    def _middle_cut(self, q: Range) -> int:
        """Return a row to cut q near its middle, preferably where a vector's piece or a segment begins."""
        low, high = q
        middle, slack = (low + high) // 2, (high - low) // 4
        candidates = list(index_boundaries(self._q_rows))
        for segment in self._q_rows:
            shift = segment.offset - segment.first  # from the index of a row to its local offset
            for vector in self._row_vectors.values():
                candidates += [start + shift for start in vector.nearest_starts(middle - shift)]
        near = [row for row in candidates if low < row < high and abs(row - middle) <= slack]
        return min(near, key=lambda row: abs(row - middle), default=middle)

    def _mask_batch(self, conditions: tuple[str, ...]) -> int:
        """Return the batch size of the mask of these conditions: 1 unless they read a vector (B, S) with B > 1."""
        vectors = self._row_vectors | self._col_vectors
        symbols = {name for condition in conditions for name in language.predicate_symbols(condition)}
        return max((vectors[name].batch for name in symbols & vectors.keys()), default=1)

    def _needed_pairs(self, q: Range, k: Range) -> int:
        """Return the work of q: its number of rows times that of the keys to which it may attend."""
        return (q[1] - q[0]) * sum(high - low for low, high in self._attended_parts(q, k))

    def _skip_unneeded(self, q: Range, k: Range, undecided: tuple[str, ...]) -> list[Range]:
        """Return the parts of k to which q may attend if they are clearly fewer keys than k; else [k].

        Each part is a kernel call, so that skipping few keys would not be faster.
        """
        parts = self._attended_parts(q, k) if undecided else [k]
        return parts if sum(high - low for low, high in parts) <= MAX_REMAINING_SHARE * (k[1] - k[0]) else [k]

    def _attended_parts(self, q: Range, k: Range) -> list[Range]:
        """Return the parts of k to which q may attend, by halving k down to about TILE_ROWS keys; parts are joined."""
        verdict = self.verdict(q, k)
        if verdict is False:
            return []
        if verdict or k[1] - k[0] <= TILE_ROWS:
            return [k]
        middle = (k[0] + k[1]) // 2
        before = self._attended_parts(q, (k[0], middle))
        after = self._attended_parts(q, (middle, k[1]))
        if before and after and before[-1][1] == after[0][0]:  # adjacent parts are one
            return [*before[:-1], (before[-1][0], after[0][1]), *after[1:]]
        return before + after

    def _undecided_conditions(self, q: Range, k: Range) -> tuple[str, ...]:
        """Return the conditions that do not hold for all pairs, which a block of q x k must evaluate."""
        boxes = list(self._index_boxes(q, k))
        return tuple(c for c in self._conditions if not all(language.evaluate_over(c, box) for box in boxes))

    def verdict(self, q: Range, k: Range) -> Verdict:
        """Return True if all pairs of q x k attend, False if none does or there is none, None if unknown."""
        verdicts = {self._box_verdict(box) for box in self._index_boxes(q, k)}
        if not verdicts:
            return False
        return verdicts.pop() if len(verdicts) == 1 else None

    def _box_verdict(self, box: dict[str, tuple[int, int]]) -> Verdict:
        """Return the verdict of all conditions together if the value of each symbol is within its bounds (a box).

        True if all conditions hold for all such values, False if one of them never holds, None if unknown.
        """
        result: Verdict = True
        for condition in self._conditions:
            verdict = language.evaluate_over(condition, box)
            if verdict is False:
                return False
            result = result and verdict  # None once a verdict was None
        return result

    def _index_boxes(self, q: Range, k: Range) -> Iterator[dict[str, tuple[int, int]]]:
        """Yield a box for each pair of a query segment and a key segment: {symbol: (minimum, maximum)}, both inclusive.

        `verdict` evaluates the conditions over these bounds. Rows of several segments, as in zigzag order, have
        distant indices, for which common bounds would be wide.
        """
        keys = [
            {"k": ends} | {name: x.bounds_over(*ends) for name, x in self._col_vectors.items()}
            for ends in index_intervals(self._k_rows, *k)  # (first index, last index) of each segment
        ]
        for ends in index_intervals(self._q_rows, *q):
            query = self._sizes | {"q": ends} | {name: x.bounds_over(*ends) for name, x in self._row_vectors.items()}
            yield from (query | key for key in keys)


def _known_runs(tile: CellPair) -> list[AttendedRun] | None:
    """Return the runs (rectangles with a window) whose pairs are those that attend in a tile; None if unknown.

    They are runs of the tile as a whole, or else of its parts (`CellPair.parts`) if these are FULL and CAUSAL blocks.
    """
    runs = tile_runs(tile)
    if runs is None and tile.parts:
        runs_of_parts = part_runs(tile)
        return runs_of_parts if runs_of_parts is not None and can_run_without_windows(runs_of_parts) else None
    return runs


def _linear_side(
    terms: Sequence[tuple[str, int]], index: str, vectors: Mapping[str, Pieces], first: int, last: int
) -> tuple[int, int] | None:
    """Return one side of a linear condition on the indices [first, last] as a line: (value at ``first``, slope).

    None if a vector is not one known line there.

    Args:
        terms: The terms (symbol, factor) of this side.
        index: The symbol of the index, "q" or "k", whose slope is 1.
        vectors: Tables of the vectors, by symbol.
        first: First index.
        last: Last index, inclusive.
    """
    value = slope = 0
    for name, factor in terms:
        line = (first, 1) if name == index else vectors[name].line(first, last)
        if line is None:
            return None
        value, slope = value + factor * line[0], slope + factor * line[1]
    return value, slope
