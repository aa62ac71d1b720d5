"""Plan the blocks of (queries x keys) to compute: few large ones, never a mask of S x S.

    k <= q on 8 x 8 rows, one rank          one CAUSAL block
    the same, rank 1 of 2, all keys         a FULL block of 4 x 4 and a CAUSAL one of 4 x 4

The plan is pure Python over run-time numbers, and is computed once for all layers, forward and backward. If the pieces
of the mask vectors determine which cells meet (packed documents), its time grows with their number (``cells.py``).
Otherwise rows x keys are halved as long as that saves work: bounds of the symbols decide a part, True or False.

    q, k        ranges [low, high) of local query and key rows; the index of a row is its position in the sequence
    segment     local rows with consecutive indices (``spans.py``); a zigzag shard has two
    vector      values per query or key that the predicate reads, such as document numbers, in pieces (``pieces.py``)
    condition   one operand of the predicate's "and"; undecided where it does not hold for all pairs
    tile, run   a rectangle that is planned as one; the pairs of a tile that a window determines (``blocks.py``)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice, pairwise
from typing import Any

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
    has_masked,
    need_no_windows,
    packed_calls,
    part_runs,
    run_blocks,
    split_run,
    tile_runs,
)
from .cells import MAX_PARTS, Band, CellGrid, CellPair, Range, cells_of, valid_ranges, without_padding
from .pieces import Pieces
from .predicate import Verdict, is_query_symbol
from .spans import Rows, index_boundaries, index_intervals, valid_extent

TILE_ROWS = 128  # tiles with fewer query rows than twice this are not cut to skip keys; keys are skipped in such units
MIN_CUT_SAVING = 0.9  # cut a tile, or skip keys inside it, if at most this share of its work remains
MAX_MASK_ELEMENTS = 1 << 22  # maximum number of elements of a block's mask; larger tiles are cut

Vectors = tuple[Pieces, ...]
# A tile, and a function that creates its blocks; kernels that support windows and packed sequences do not call it.
TileBlocks = tuple[CellPair, Callable[[], Iterable[Block]]]


@lru_cache(maxsize=1024)
def plan_blocks(
    predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...] = (), rows: Vectors = (), cols: Vectors = ()
) -> BlockPlan:
    """Return the plan of local queries and keys.

    Args:
        predicate: The mask predicate.
        q_rows: The valid local query rows.
        k_rows: The valid local key rows.
        sizes: The values n<i> of the predicate.
        rows: The vectors row<i>.
        cols: The vectors col<i>.

    Raises:
        SpError: If the predicate reads a symbol without a value.
    """
    if not q_rows or not k_rows:
        return BlockPlan()
    return _Planner(predicate, q_rows, k_rows, sizes, rows, cols).plan()


def tiles_by_position(predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...] = ()) -> BlockPlan:
    """Return a small plan for a predicate that reads no vectors, with which FLOP counters count pairs."""
    if not q_rows or not k_rows:
        return BlockPlan()
    planner = _Planner(predicate, q_rows, k_rows, sizes, (), ())
    first_blocks = tuple(islice(planner.all_blocks(), MAX_PARTS + 1))
    if len(first_blocks) <= MAX_PARTS and not has_masked(first_blocks):
        return BlockPlan(others=first_blocks)
    bands = planner.band_blocks()
    if bands:
        return BlockPlan(others=bands)
    conditions = language.split_conjuncts(predicate)
    return BlockPlan(others=tuple(Block.of(q, k, Kind.MASKED, conditions) for q, k in planner.split_at_padding()))


def count_decided_pairs(blocks: Sequence[Block], limit: int, *args: Any) -> tuple[float, list[tuple[float, Block]]]:
    """Count the attending pairs of masked blocks as far as bounds decide whole blocks.

    Undecided blocks are halved, round by round, down to TILE_ROWS x TILE_ROWS, which are evaluated pair by pair.

    Args:
        blocks: Masked blocks.
        limit: The maximum number of blocks that a round examines. Of more, every k-th one is examined, with k times
            the weight.
        *args: The arguments of `plan_blocks`.

    Returns:
        The number of attending pairs in decided blocks, and the undecided blocks of at most TILE_ROWS x TILE_ROWS with
        their weights: the number of blocks that each represents (1 without sampling).
    """
    planner, attending_pairs, undecided = _Planner(*args), 0.0, list[tuple[float, Block]]()
    remaining, weight = list(blocks), 1.0
    while remaining:
        samples = remaining[:: -(-len(remaining) // limit)]
        weight, remaining = weight * len(remaining) / len(samples), []
        for block in samples:
            verdict = planner.verdict(block.query_range, block.key_range)
            if verdict:
                attending_pairs += weight * block.q_len * block.k_len
            elif verdict is None and max(block.q_len, block.k_len) <= TILE_ROWS:
                undecided.append((weight, block))
            elif verdict is None:
                remaining += _halve_block(block)
    return attending_pairs, undecided


def _halve_block(block: Block) -> list[Block]:
    """Halve an undecided block across its longer side: bounds may decide a half."""
    q, k = block.query_range, block.key_range
    if block.q_len >= block.k_len:
        cut = q[0] + block.q_len // 2
        halves = [((q[0], cut), k), ((cut, q[1]), k)]
    else:
        cut = k[0] + block.k_len // 2
        halves = [(q, (k[0], cut)), (q, (cut, k[1]))]
    return [Block.of(*half, block.kind, block.conditions) for half in halves]


class _Planner:
    """Planner of one attention call. Arguments as of `plan_blocks`."""

    def __init__(
        self, predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...], rows: Vectors, cols: Vectors
    ) -> None:
        self._conditions = language.split_conjuncts(predicate)
        self._linears = {text: language.as_linear(text, sizes) for text in self._conditions}
        self._q_rows, self._k_rows = q_rows, k_rows
        self._key_ranges = valid_ranges(k_rows)  # keys between padding
        # Vectors that the predicate reads, and bounds of the sizes, by symbol.
        symbols = language.predicate_symbols(predicate)
        self._row_vectors = {f"row{i}": vector for i, vector in enumerate(rows) if f"row{i}" in symbols}
        self._col_vectors = {f"col{i}": vector for i, vector in enumerate(cols) if f"col{i}" in symbols}
        self._sizes = {f"n{i}": (size, size) for i, size in enumerate(sizes)}
        language.check_known(predicate, {"q", "k", *self._row_vectors, *self._col_vectors, *self._sizes})

    def plan(self) -> BlockPlan:
        """Return the plan: by cells, if vectors are read and their cells meet few others."""
        tiles = self._nonempty_tiles() if self._row_vectors or self._col_vectors else None
        if tiles is None:
            all_blocks = tuple(self.all_blocks())
            # Many or masked blocks, as those of a window, are bands where possible.
            is_costly = len(all_blocks) > MAX_PARTS or has_masked(all_blocks)
            return BlockPlan((), (self.band_blocks() if is_costly else None) or all_blocks, lambda: all_blocks)
        # For kernels that support windows: runs, and blocks whose pairs no run describes. For others: `tile_blocks`.
        runs, others, tile_blocks = list[AttendedRun](), list[Block](), list[TileBlocks]()
        for tile in tiles:
            known_runs = _known_runs(tile)
            if known_runs is not None:
                known_runs = [piece for run in known_runs for piece in split_run(run)]
                tile_blocks.append((tile, partial(self._run_blocks, tile, known_runs)))
                runs += known_runs
                continue
            blocks = tuple(self._cover_tile(tile))
            tile_blocks.append((tile, partial(tuple, blocks)))
            window_runs = part_runs(tile) if has_masked(blocks) else None
            if window_runs is None:
                others += map(as_band, blocks)
            else:
                runs += window_runs
        create_blocks = partial(self._merge_tiles, tile_blocks)
        if len(runs) == 1 and not others and self._covers_all(runs[0]):
            return BlockPlan((), (block_of(runs[0]),), create_blocks)
        return BlockPlan(tuple(packed_calls(runs)), tuple(others), create_blocks)

    def all_blocks(self) -> Iterator[Block]:
        """Yield the blocks of all rows and keys."""
        for q, k in self.split_at_padding():
            yield from self.cover(q, k)

    def split_at_padding(self) -> Iterator[tuple[Range, Range]]:
        """Return all rows and keys as ranges, without the padding between them."""
        return ((valid_extent(self._q_rows), keys) for keys in self._key_ranges)

    def band_blocks(self) -> tuple[Block, ...] | None:
        """Return one block, with any window, per run; None if only the predicate determines a tile's pairs."""
        tiles = self._nonempty_tiles()
        runs_of_tiles = None if tiles is None else [part_runs(tile) for tile in tiles]
        if runs_of_tiles is None or None in runs_of_tiles:
            return None
        return tuple(block_of(run) for runs in runs_of_tiles for run in runs or ())

    def _covers_all(self, run: AttendedRun) -> bool:
        """Return True if the run has all rows: its shape is constant, so a shape-specific kernel may run it."""
        return (run.q, run.k) == (valid_extent(self._q_rows), valid_extent(self._k_rows))

    def _nonempty_tiles(self) -> list[CellPair] | None:
        """Return the tiles of cells that meet, without padding; None if cells meet too many others."""
        q, k = cells_of(self._q_rows, self._row_vectors, "q"), cells_of(self._k_rows, self._col_vectors, "k")
        linears = [self._linears[c] for c in self._conditions]
        tiles = CellGrid(self._conditions, linears, q, k, self._sizes).tiles()
        if tiles is None or len(self._key_ranges) == 1:
            return tiles
        return [part for tile in tiles for part in without_padding(tile, self._key_ranges)]

    def _run_blocks(self, tile: CellPair, runs: list[AttendedRun]) -> Sequence[Block]:
        """Return the blocks, for kernels without windows, of a tile that consists of these runs."""
        if runs and all(run.window in (FULL_WINDOW, CAUSAL_WINDOW) for run in runs):
            return [block for run in runs for block in run_blocks(run, tile.undecided)]
        return self._cover_tile(tile)

    def _cover_tile(self, tile: CellPair) -> list[Block]:
        """Return blocks without windows of a tile: one MASKED block if it is small, else strips or halves."""
        if max(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]) < 2 * TILE_ROWS:
            return [Block.of(tile.q, tile.k, Kind.MASKED, tile.undecided)]
        if tile.band is not None:
            return self._band_strips(tile.q, tile.k, tile.band, tile.undecided)
        return list(self.cover(tile.q, tile.k))

    def _band_strips(self, q: Range, k: Range, band: Band, undecided: tuple[str, ...]) -> list[Block]:
        """Cut a band into strips of queries: a masked triangle, keys that all queries see, and a causal block.

        A window over packed documents has tens of thousands of strips, so the loop avoids function calls.
        """
        lower, upper = band
        rows, keys, q_off, k_off = q[1] - q[0], k[1] - k[0], q[0], k[0]
        width = min(upper, keys) - max(lower, -rows) + 1  # keys of a query
        max_height = math.isqrt(MAX_MASK_ELEMENTS // self._mask_batch(undecided))
        height = min(max(width // 4 // TILE_ROWS, 1) * TILE_ROWS, max_height)
        end = min(rows, keys - lower)
        blocks = list[Block]()
        for first in range(max(0, -upper), end, height):
            size = height if first + height < end else end - first
            # Keys [low, full_begin) are a masked triangle, [full_begin, full_end) full, and [full_end, high) causal.
            low, full_end = first + lower, first + upper
            high, full_begin = full_end + size, low + size - 1
            low, full_begin = low if low > 0 else 0, full_begin if full_begin > 0 else 0
            high, full_end = high if high < keys else keys, full_end if full_end < keys else keys
            if width < 4 * TILE_ROWS or full_begin >= full_end:
                blocks.append(Block(q_off + first, size, k_off + low, high - low, Kind.MASKED, undecided))
                continue
            if low < full_begin:
                blocks.append(Block(q_off + first, size, k_off + low, full_begin - low, Kind.MASKED, undecided))
            blocks.append(Block(q_off + first, size, k_off + full_begin, full_end - full_begin, Kind.FULL))
            if full_end < high:
                kind = Kind.CAUSAL if high - full_end == size else Kind.MASKED
                blocks.append(Block(q_off + first, size, k_off + full_end, high - full_end, kind, undecided))
        return blocks

    def _merge_tiles(self, tile_blocks: list[TileBlocks]) -> Iterator[Block]:
        """Yield the blocks of all tiles; merge adjacent small tiles into one masked block to save calls."""
        groups = list[list[TileBlocks]]()
        for tile, create_blocks in tile_blocks:
            if groups and self._can_merge(groups[-1][0][0], groups[-1][-1][0], tile):
                groups[-1].append((tile, create_blocks))
            else:
                groups.append([(tile, create_blocks)])
        for group in groups:
            (first, create_blocks), (last, _) = group[0], group[-1]
            if len(group) == 1:
                yield from create_blocks()
            else:
                yield Block.of((first.q[0], last.q[1]), (first.k[0], last.k[1]), Kind.MASKED, self._conditions)

    def _can_merge(self, first: CellPair, last: CellPair, tile: CellPair) -> bool:
        """Return True if a block from the tile ``first`` to ``last`` may also contain the next tile."""
        if any(last.k[1] <= end <= tile.k[0] for _, end in self._key_ranges):
            return False  # padding is between them
        follows = last.q[1] == tile.q[0] and last.k[1] <= tile.k[0]
        return follows and tile.q[1] - first.q[0] <= TILE_ROWS and tile.k[1] - first.k[0] <= 2 * TILE_ROWS

    def cover(self, q: Range, k: Range) -> Iterator[Block]:
        """Yield the blocks of the pairs q x k, by the first of these ways that applies.

        All pairs are undecided by one causal condition; all but one segment of the keys are full; a cut of the queries
        saves work; otherwise one block, without keys that no query sees.
        """
        q, k = self._trim(q, k)
        if q[0] == q[1]:
            return
        undecided = self._undecided_conditions(q, k)
        segments = index_intervals(self._k_rows, *k)
        ascends = all(before[0] < after[0] for before, after in pairwise(segments))
        shift = self._causal_shift(q, k, undecided[0]) if len(undecided) == 1 and ascends else None
        if shift is not None:
            yield from self._cover_causal(q, k, shift, undecided)
            return
        blocks = self._cover_one_segment(q, k) if undecided and not ascends else []
        if blocks:
            yield from blocks
            return
        cut = self._best_cut(q, k, undecided) if undecided else None
        if cut is not None:
            yield from self.cover((q[0], cut), k)
            yield from self.cover((cut, q[1]), k)
            return
        for part in self._skip_unneeded(q, k, undecided):
            conditions = self._undecided_conditions(q, part)
            yield Block.of(q, part, Kind.MASKED if conditions else Kind.FULL, conditions)

    def _trim(self, q: Range, k: Range) -> tuple[Range, Range]:
        """Remove rows without attending pairs from the ends of q and k; both or neither become empty."""
        while True:
            fewer_k = _trim_part(k, partial(self.verdict, q))
            fewer_q = _trim_part(q, partial(self.verdict, k=fewer_k))
            if (fewer_q, fewer_k) == (q, k):
                return q, k
            q, k = fewer_q, fewer_k

    def _causal_shift(self, q: Range, k: Range, condition: str) -> int | None:
        """Return c if the condition is ``k <= q + c`` in all segments, by the same c, else None."""
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
                shifts.add(of_key[0] - of_query[0] + -(query_value + key_value + linear.constant) // key_slope)
        return shifts.pop() if len(shifts) == 1 else None

    def _cover_causal(self, q: Range, k: Range, shift: int, undecided: tuple[str, ...]) -> Iterator[Block]:
        """Yield FULL and CAUSAL blocks of ``k <= q + shift``, where every query has a key and vice versa."""
        if shift == 0 and index_intervals(self._q_rows, *q) == index_intervals(self._k_rows, *k):
            yield Block.of(q, k, Kind.CAUSAL, undecided)  # the same indices, in any number of segments
            return
        for cut in self._cut_causal(q, k, shift):
            if q[0] < cut < q[1]:
                yield from self.cover((q[0], cut), k)
                yield from self.cover((cut, q[1]), k)
                return
        # One segment of queries, the last of which sees the last key: a rectangle and a triangle.
        yield from run_blocks(AttendedRun(q, k, CAUSAL_WINDOW), undecided)

    def _cover_one_segment(self, q: Range, k: Range) -> list[Block]:
        """Return blocks if all queries see every key segment but one, in which they need one block; else []."""
        boundaries = [offset for offset in index_boundaries(self._k_rows) if k[0] < offset < k[1]]
        segments = pairwise([k[0], *boundaries, k[1]])
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
        """Yield where to cut: rows without exactly one key more than the previous row; some may be outside q."""
        yield from index_boundaries(self._q_rows)
        (first_index, _), *_ = index_intervals(self._q_rows, *q)
        segments = index_intervals(self._k_rows, *k)
        end = segments[-1][1] + 1
        for index in [end, *(start for start, _ in segments[1:])]:
            yield q[0] + index - shift - first_index

    def _best_cut(self, q: Range, k: Range, undecided: tuple[str, ...]) -> int | None:
        """Return the row at which to cut q: the mask is too large, or halves have less work; None to keep q."""
        symbols = {name for condition in undecided for name in language.predicate_symbols(condition)}
        if q[1] - q[0] < 2 or not any(map(is_query_symbol, symbols)):
            return None
        cut = self._middle_cut(q)
        if self._mask_batch(undecided) * (q[1] - q[0]) * (k[1] - k[0]) > MAX_MASK_ELEMENTS:
            return cut
        if q[1] - q[0] < 2 * TILE_ROWS:
            return None
        halves_work = self._needed_pairs((q[0], cut), k) + self._needed_pairs((cut, q[1]), k)
        return cut if halves_work <= MIN_CUT_SAVING * self._needed_pairs(q, k) else None

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
        """Return the number of batch entries of the mask of these conditions."""
        vectors = self._row_vectors | self._col_vectors
        symbols = {name for condition in conditions for name in language.predicate_symbols(condition)}
        return max((vectors[name].batch for name in symbols & vectors.keys()), default=1)

    def _needed_pairs(self, q: Range, k: Range) -> int:
        """Return the work of q: its number of rows times that of the keys to which it may attend."""
        return (q[1] - q[0]) * sum(high - low for low, high in self._attended_parts(q, k))

    def _skip_unneeded(self, q: Range, k: Range, undecided: tuple[str, ...]) -> list[Range]:
        """Return the parts of k to which q may attend if that saves much of k, else [k]: few calls are faster."""
        parts = self._attended_parts(q, k) if undecided else [k]
        return parts if sum(high - low for low, high in parts) <= MIN_CUT_SAVING * (k[1] - k[0]) else [k]

    def _attended_parts(self, q: Range, k: Range) -> list[Range]:
        """Return the parts of k to which q may attend, in units of about TILE_ROWS."""
        verdict = self.verdict(q, k)
        if verdict is False:
            return []
        if verdict or k[1] - k[0] <= TILE_ROWS:
            return [k]
        middle = (k[0] + k[1]) // 2
        before, after = self._attended_parts(q, (k[0], middle)), self._attended_parts(q, (middle, k[1]))
        if before and after and before[-1][1] == after[0][0]:
            return [*before[:-1], (before[-1][0], after[0][1]), *after[1:]]
        return before + after

    def _undecided_conditions(self, q: Range, k: Range) -> tuple[str, ...]:
        """Return the conditions that do not hold for all pairs, which a block of q x k must evaluate."""
        boxes = list(self._index_boxes(q, k))
        return tuple(
            condition
            for condition in self._conditions
            if not all(language.evaluate_over(condition, box) for box in boxes)
        )

    def verdict(self, q: Range, k: Range) -> Verdict:
        """Return True if all pairs of q x k attend, False if none does or there is none, None if unknown."""
        verdicts = {self._box_verdict(box) for box in self._index_boxes(q, k)} or {False}
        return verdicts.pop() if len(verdicts) == 1 else None

    def _box_verdict(self, box: dict[str, tuple[int, int]]) -> Verdict:
        """Return the verdict of all conditions together for symbols within the bounds of `_index_boxes`."""
        result: Verdict = True
        for condition in self._conditions:
            verdict = language.evaluate_over(condition, box)
            if verdict is False:
                return False
            result = result and verdict
        return result

    def _index_boxes(self, q: Range, k: Range) -> Iterator[dict[str, tuple[int, int]]]:
        """Yield the inclusive bounds of all symbols for each pair of a query and a key segment in q x k.

        Rows [low, high) of several segments, as in zigzag order, are several intervals of indices, each with its own
        bounds, which are closer. `verdict` evaluates the conditions over them.
        """
        keys = [
            {"k": ends} | {name: x.bounds_over(*ends) for name, x in self._col_vectors.items()}
            for ends in index_intervals(self._k_rows, *k)
        ]
        for ends in index_intervals(self._q_rows, *q):
            query = self._sizes | {"q": ends} | {name: x.bounds_over(*ends) for name, x in self._row_vectors.items()}
            yield from (query | key for key in keys)


def _known_runs(tile: CellPair) -> list[AttendedRun] | None:
    """Return the runs of a tile, or those of its parts if they need no windows; None if neither is known."""
    runs = tile_runs(tile)
    if runs is None and tile.parts:
        runs_of_parts = part_runs(tile)
        return runs_of_parts if runs_of_parts is not None and need_no_windows(runs_of_parts) else None
    return runs


def _linear_side(
    terms: Sequence[tuple[str, int]], index: str, vectors: Mapping[str, Pieces], first: int, last: int
) -> tuple[int, int] | None:
    """Return one side of a linear condition as (value at index first, slope); None if it is not one line."""
    value = slope = 0
    for name, factor in terms:
        line = (first, 1) if name == index else vectors[name].line(first, last)
        if line is None:
            return None
        value, slope = value + factor * line[0], slope + factor * line[1]
    return value, slope


def _trim_part(part: Range, verdict: Callable[[Range], Verdict]) -> Range:
    """Remove the rows without attending pairs, by their verdict, from the ends of ``part``."""
    if verdict(part) is False:
        return part[0], part[0]
    first, last = _find_edge(part, verdict, last=False), _find_edge(part, verdict, last=True)
    return (first, last + 1) if first <= last else (part[0], part[0])


def _find_edge(part: Range, verdict: Callable[[Range], Verdict], last: bool) -> int:
    """Return the first or last row that may have a pair, by bisection; without any, first exceeds last."""
    low, high = part
    while high - low > 1:
        middle = (low + high) // 2
        near, far = ((middle, high), (low, middle)) if last else ((low, middle), (middle, high))
        low, high = near if verdict(near) is not False else far
    return low
