"""Plan the blocks of (queries x keys) to compute: few large ones, never a mask of S x S.

The plan is pure Python over run-time numbers: spans, which describe the rows of local tensors, and pieces of vectors.
It is computed once for all layers, forward and backward. If the pieces determine which cells meet (packed documents),
its time grows with their number (``cells.py``). Otherwise rows x keys are halved as long as that saves work, with the
bounds of the vectors over every part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    as_offset_length,
    block_of,
    has_masked,
    packed_calls,
    part_runs,
    run_blocks,
    separate_runs,
    split_run,
    tile_runs,
)
from .cells import MAX_PARTS, Band, CellGrid, CellPair, Range, cells_of, valid_segments, without_padding
from .pieces import Pieces
from .predicate import Verdict, is_query_symbol
from .spans import Rows, index_boundaries, index_intervals, valid_extent

TILE_ROWS = 128  # tiles with fewer query rows than twice this are not cut to skip keys; keys are skipped in such units
MIN_CUT_SAVING = 0.9  # cut a tile, or skip keys inside it, if at most this share of its work remains
MAX_MASK_ELEMENTS = 1 << 22  # maximum number of elements of a block's mask; larger tiles are cut

# A function that creates the blocks of a tile; kernels that support windows and packed sequences do not call it
Blocks = Callable[[], Sequence[Block]]


@lru_cache(maxsize=1024)
def plan_blocks(
    predicate: str,
    q_rows: Rows,
    k_rows: Rows,
    sizes: tuple[int, ...] = (),
    rows: tuple[Pieces, ...] = (),
    cols: tuple[Pieces, ...] = (),
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
    """Return a plan for a predicate that reads no vectors, faster than `plan_blocks`.

    It has a few blocks, or bands, or one MASKED block of all rows and keys.
    """
    if not q_rows or not k_rows:
        return BlockPlan()
    planner = _Planner(predicate, q_rows, k_rows, sizes, (), ())
    seen = tuple(islice(planner.all_blocks(), MAX_PARTS + 1))
    if len(seen) <= MAX_PARTS and not has_masked(seen):
        return BlockPlan(others=seen)
    conditions = language.split_conjuncts(predicate)
    every = [
        Block(*as_offset_length(q), *as_offset_length(k), Kind.MASKED, conditions)
        for q, k in planner.split_at_padding()
    ]
    return BlockPlan(others=planner.band_blocks() or tuple(every))


def settle_blocks(blocks: Sequence[Block], limit: int, *args: Any) -> tuple[float, list[tuple[float, Block]]]:
    """Count the attending pairs of masked blocks from bounds, and return the undecided parts.

    Args:
        blocks: Masked blocks.
        limit: The maximum number of undecided blocks per step; of more, a sample is used.
        *args: The arguments of `plan_blocks`.

    Returns:
        The number of pairs, and undecided blocks of at most TILE_ROWS x TILE_ROWS with their weights: the number of
        blocks that each represents (1 without sampling).
    """
    planner, known, left, weight = _Planner(*args), 0.0, list[tuple[float, Block]](), 1.0
    parts = list(blocks)
    while parts:
        samples = parts[:: -(-len(parts) // limit)]
        weight, parts = weight * len(parts) / len(samples), []
        for block in samples:
            q, k = (block.q_off, block.q_off + block.q_len), (block.k_off, block.k_off + block.k_len)
            verdict = planner.verdict(q, k)
            if verdict:
                known += weight * block.q_len * block.k_len
            elif verdict is None and max(block.q_len, block.k_len) <= TILE_ROWS:
                left.append((weight, block))
            elif verdict is None:
                parts += _split_longer_side(block)
    return known, left


def _split_longer_side(block: Block) -> list[Block]:
    """Halve a block across its longer side."""
    if block.q_len >= block.k_len:
        rows = block.q_len // 2
        rest = block._replace(q_off=block.q_off + rows, q_len=block.q_len - rows)
        return [block._replace(q_len=rows), rest]
    keys = block.k_len // 2
    return [block._replace(k_len=keys), block._replace(k_off=block.k_off + keys, k_len=block.k_len - keys)]


class _Planner:
    """Planner of one attention call."""

    def __init__(
        self,
        predicate: str,
        q_rows: Rows,
        k_rows: Rows,
        sizes: tuple[int, ...],
        rows: tuple[Pieces, ...],
        cols: tuple[Pieces, ...],
    ) -> None:
        self._conditions = language.split_conjuncts(predicate)
        self._linears = {text: language.as_linear(text, sizes) for text in self._conditions}
        self._q_rows, self._k_rows = q_rows, k_rows
        self._between = valid_segments(k_rows)  # keys between padding
        read = language.predicate_symbols(predicate)
        self._rows = {name: x for i, x in enumerate(rows) if (name := f"row{i}") in read}
        self._cols = {name: x for i, x in enumerate(cols) if (name := f"col{i}") in read}
        batches = {name: x.batch for name, x in {**self._rows, **self._cols}.items()}
        read_by = {c: language.predicate_symbols(c) & batches.keys() for c in self._conditions}
        self._batches = {c: max(map(batches.__getitem__, names), default=1) for c, names in read_by.items()}
        self._fixed = {f"n{i}": (size, size) for i, size in enumerate(sizes)}
        language.check_known(predicate, {"q", "k", *self._rows, *self._cols, *self._fixed})

    def plan(self) -> BlockPlan:
        """Return the plan: by cells, if vectors are read and their cells meet few others."""
        tiles = self._nonempty_tiles() if self._rows or self._cols else None
        if tiles is None:
            every = tuple(self.all_blocks())
            return BlockPlan((), self.packed_calls(iter(every)), lambda: every)
        runs, others, parts = list[AttendedRun](), list[Block](), list[tuple[CellPair, Blocks]]()
        for tile in tiles:
            known = tile_runs(tile)
            if known is None and tile.parts:
                known = separate_runs(part_runs(tile))
            if known is not None:
                known = [one for run in known for one in split_run(run)]
                parts.append((tile, partial(self._run_blocks, tile, known)))
            else:
                blocks = self._cover_tile(tile)
                parts.append((tile, partial(tuple, blocks)))
                known = part_runs(tile) if has_masked(blocks) else None
                others += map(as_band, blocks if known is None else ())
            runs += known or ()
        if len(runs) == 1 and not others and self._covers_all(runs[0]):
            return BlockPlan((), (block_of(runs[0]),), partial(self._merge_tiles, parts))
        return BlockPlan(tuple(packed_calls(runs)), tuple(others), partial(self._merge_tiles, parts))

    def all_blocks(self) -> Iterator[Block]:
        """Yield the blocks of all rows and keys."""
        for q, k in self.split_at_padding():
            yield from self.cover(q, k)

    def split_at_padding(self) -> Iterator[tuple[Range, Range]]:
        """Return all rows and keys as ranges, without the padding between them."""
        return ((valid_extent(self._q_rows), keys) for keys in self._between)

    def packed_calls(self, every: Iterator[Block]) -> tuple[Block, ...]:
        """Return bands instead of masks at window edges or many blocks: one per pair of index ranges.

        The number of a window's blocks grows with the length; only enough blocks to detect a window are created.
        """
        seen = list[Block]()
        for block in every:
            seen.append(block)
            if len(seen) > MAX_PARTS or has_masked(seen):
                return self.band_blocks() or (*seen, *every)
        return tuple(seen)

    def band_blocks(self) -> tuple[Block, ...] | None:
        """Return one block per run of queries and keys; None if a tile has undetermined pairs."""
        tiles = self._nonempty_tiles()
        if tiles is None:
            return None
        runs = list[AttendedRun]()
        for tile in tiles:
            known = part_runs(tile)
            if known is None:
                return None
            runs += known
        return tuple(map(block_of, runs))

    def _covers_all(self, run: AttendedRun) -> bool:
        """Return True if the run has all rows, a constant shape that suits shape-specific kernels."""
        return (run.q, run.k) == (valid_extent(self._q_rows), valid_extent(self._k_rows))

    def _nonempty_tiles(self) -> list[CellPair] | None:
        """Return the tiles of cells that meet, without padding; None if cells meet too many others."""
        q, k = cells_of(self._q_rows, self._rows, "q"), cells_of(self._k_rows, self._cols, "k")
        linears = [self._linears[c] for c in self._conditions]
        tiles = CellGrid(self._conditions, linears, q, k, self._fixed).tiles()
        if tiles is None or len(self._between) == 1:
            return tiles
        return [part for tile in tiles for part in without_padding(tile, self._between)]

    def _run_blocks(self, tile: CellPair, runs: list[AttendedRun]) -> Sequence[Block]:
        """Return the blocks of a tile that consists of these runs."""
        if runs and all(run.window in (FULL_WINDOW, CAUSAL_WINDOW) for run in runs):
            return [block for run in runs for block in run_blocks(run, tile.left)]
        return self._cover_tile(tile)

    def _cover_tile(self, tile: CellPair) -> list[Block]:
        """Return the blocks of a tile whose pairs only the predicate determines."""
        if max(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]) < 2 * TILE_ROWS:
            return [Block(*as_offset_length(tile.q), *as_offset_length(tile.k), Kind.MASKED, tile.left)]
        if tile.band is not None:
            return self._band_strips(tile.q, tile.k, tile.band, tile.left)
        return list(self.cover(tile.q, tile.k))

    def _band_strips(self, q: Range, k: Range, band: Band, left: tuple[str, ...]) -> list[Block]:
        """Cut a band into strips of queries: a masked triangle, keys that all queries see, and a causal block.

        A window over packed documents has ten thousands of strips, so the loop avoids function calls.
        """
        lower, upper = band
        rows, keys, q_off, k_off = q[1] - q[0], k[1] - k[0], q[0], k[0]
        width = min(upper, keys) - max(lower, -rows) + 1
        height = min(max(width // 4 // TILE_ROWS, 1) * TILE_ROWS, math.isqrt(MAX_MASK_ELEMENTS // self._batch(left)))
        end = min(rows, keys - lower)
        found = list[Block]()
        for first in range(max(0, -upper), end, height):
            size = height if first + height < end else end - first
            low, last = first + lower, first + upper
            high, every = last + size, low + size - 1
            low, every = low if low > 0 else 0, every if every > 0 else 0
            high, last = high if high < keys else keys, last if last < keys else keys
            if width < 4 * TILE_ROWS or every >= last:
                found.append(Block(q_off + first, size, k_off + low, high - low, Kind.MASKED, left))
                continue
            if low < every:
                found.append(Block(q_off + first, size, k_off + low, every - low, Kind.MASKED, left))
            found.append(Block(q_off + first, size, k_off + every, last - every, Kind.FULL))
            if last < high:
                kind = Kind.CAUSAL if high - last == size else Kind.MASKED
                found.append(Block(q_off + first, size, k_off + last, high - last, kind, left))
        return found

    def _merge_tiles(self, parts: list[tuple[CellPair, Blocks]]) -> Iterator[Block]:
        """Yield the blocks of all tiles; merge adjacent small tiles into one masked block to save calls."""
        groups, ends = list[list[tuple[CellPair, Blocks]]](), [high for _, high in self._between]
        for part in parts:
            if groups and _can_merge(groups[-1][0][0], groups[-1][-1][0], part[0], ends):
                groups[-1].append(part)
            else:
                groups.append([part])
        for group in groups:
            if len(group) == 1:
                yield from group[0][1]()
            else:
                first, last = group[0][0], group[-1][0]
                q, k = (first.q[0], last.q[1]), (first.k[0], last.k[1])
                yield Block(*as_offset_length(q), *as_offset_length(k), Kind.MASKED, self._conditions)

    def cover(self, q: Range, k: Range) -> Iterator[Block]:
        """Yield the blocks of the pairs q x k."""
        q, k = self._trim(q, k)
        if q[0] == q[1]:
            return
        left = self._undecided_conditions(q, k)
        ascends = all(a < b for (a, _), (b, _) in pairwise(index_intervals(self._k_rows, *k)))
        shift = self._causal_shift(q, k, left[0]) if len(left) == 1 and ascends else None
        if shift is not None:
            yield from self._cover_causal(q, k, shift, left)
        elif left and not ascends and (blocks := self._single_partial_stretch(q, k)):
            yield from blocks
        elif left and (cut := self._best_cut(q, k, left)):
            yield from self.cover((q[0], cut), k)
            yield from self.cover((cut, q[1]), k)
        else:
            for part in self._skip_unneeded(q, k, left):
                rest = self._undecided_conditions(q, part)
                yield Block(*as_offset_length(q), *as_offset_length(part), Kind.MASKED if rest else Kind.FULL, rest)

    def _trim(self, q: Range, k: Range) -> tuple[Range, Range]:
        """Remove rows without pairs from the ends of q and k; both results are empty or neither is."""
        while True:
            fewer_k = _trim_part(k, partial(self.verdict, q))
            fewer_q = _trim_part(q, partial(self.verdict, k=fewer_k))
            if (fewer_q, fewer_k) == (q, k):
                return q, k
            q, k = fewer_q, fewer_k

    def _causal_shift(self, q: Range, k: Range, condition: str) -> int | None:
        """Return c if the condition is ``k <= q + c`` for these indices, else None."""
        one = self._linears[condition]
        if one is None or one.relation != "<=":
            return None
        shifts = set[int | None]()
        for of_query in index_intervals(self._q_rows, *q):
            row = _linear_side(one.of_query, "q", self._rows, *of_query)
            for of_key in index_intervals(self._k_rows, *k):
                key = _linear_side(one.of_key, "k", self._cols, *of_key)
                if row is None or key is None or key[1] <= 0 or row[1] != -key[1]:
                    return None
                shifts.add(of_key[0] - of_query[0] + -(row[0] + key[0] + one.constant) // key[1])
        return shifts.pop() if len(shifts) == 1 else None

    def _cover_causal(self, q: Range, k: Range, shift: int, left: tuple[str, ...]) -> Iterator[Block]:
        """Yield rectangles and triangles of ``k <= q + shift``, where every query has a key and vice versa."""
        if shift == 0 and index_intervals(self._q_rows, *q) == index_intervals(self._k_rows, *k):
            yield Block(
                *as_offset_length(q), *as_offset_length(k), Kind.CAUSAL, left
            )  # the same indices, in any number of segments
            return
        for cut in self._cut_causal(q, k, shift):
            if q[0] < cut < q[1]:
                yield from self.cover((q[0], cut), k)
                yield from self.cover((cut, q[1]), k)
                return
        # One segment of queries, the last of which sees the last key: a rectangle and a triangle.
        edge = k[1] - (q[1] - q[0])
        if k[0] < edge:
            yield Block(*as_offset_length(q), *as_offset_length((k[0], edge)), Kind.FULL)
        yield Block(*as_offset_length(q), *as_offset_length((edge, k[1])), Kind.CAUSAL, left)

    def _single_partial_stretch(self, q: Range, k: Range) -> list[Block]:
        """Return blocks if all queries see every key segment but one, in which they need one block; else []."""
        parts = list(pairwise([k[0], *(at for at in index_boundaries(self._k_rows) if k[0] < at < k[1]), k[1]]))
        others = [part for part in parts if not self.verdict(q, part)]
        if len(others) != 1:
            return []
        (other,) = others
        blocks = list(self.cover(q, other))
        if [block.query_rows for block in blocks] != [as_offset_length(q)]:
            return []
        seen = [part for part in ((k[0], other[0]), (other[1], k[1])) if part[0] < part[1]]
        return blocks + [Block(*as_offset_length(q), *as_offset_length(part), Kind.FULL) for part in seen]

    def _cut_causal(self, q: Range, k: Range, shift: int) -> Iterator[int]:
        """Yield the rows that do not have exactly one key more than the previous row."""
        yield from index_boundaries(self._q_rows)
        first, _ = index_intervals(self._q_rows, *q)[0]
        stretches = index_intervals(self._k_rows, *k)
        for index in [stretches[-1][1] + 1, *(start for start, _ in stretches[1:])]:
            yield q[0] + index - shift - first

    def _best_cut(self, q: Range, k: Range, left: tuple[str, ...]) -> int | None:
        """Return the row at which to cut a tile: its mask is too large, or its halves have less work."""
        if q[1] - q[0] < 2 or not any(is_query_symbol(name) for c in left for name in language.predicate_symbols(c)):
            return None
        cut = self._middle_cut(q)
        if self._mask_elements(q, k, left) > MAX_MASK_ELEMENTS:
            return cut
        if q[1] - q[0] < 2 * TILE_ROWS:
            return None
        halves = self._needed_keys((q[0], cut), k) + self._needed_keys((cut, q[1]), k)
        return cut if halves <= MIN_CUT_SAVING * self._needed_keys(q, k) else None

    def _middle_cut(self, q: Range) -> int:
        """Return a row near the middle, preferably where a vector's piece or a segment of rows begins."""
        low, high = q
        middle, slack = (low + high) // 2, (high - low) // 4
        places = list(index_boundaries(self._q_rows))
        for segment in self._q_rows:
            wanted = middle - segment.offset + segment.first
            for pieces in self._rows.values():
                places += [at - segment.first + segment.offset for at in pieces.nearest_starts(wanted)]
        near = [at for at in places if middle - slack <= at <= middle + slack and low < at < high]
        return min(near, key=lambda at: abs(at - middle), default=middle)

    def _mask_elements(self, q: Range, k: Range, left: tuple[str, ...]) -> int:
        return self._batch(left) * (q[1] - q[0]) * (k[1] - k[0])

    def _batch(self, left: tuple[str, ...]) -> int:
        return max((self._batches[c] for c in left), default=1)

    def _needed_keys(self, q: Range, k: Range) -> int:
        return (q[1] - q[0]) * sum(high - low for low, high in self._attended_parts(q, k))

    def _skip_unneeded(self, q: Range, k: Range, left: tuple[str, ...]) -> list[Range]:
        """Return the required parts of k if much of it is not required, else [k]."""
        parts = self._attended_parts(q, k) if left else [k]
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
        """Return the conditions that do not hold for all pairs."""
        boxes = list(self._index_boxes(q, k))
        return tuple(c for c in self._conditions if not all(language.evaluate_over(c, box) for box in boxes))

    def verdict(self, q: Range, k: Range) -> Verdict:
        """Return the verdict of all conditions for all pairs; False if there is no pair."""
        verdicts = {self._box_verdict(box) for box in self._index_boxes(q, k)} or {False}
        return verdicts.pop() if len(verdicts) == 1 else None

    def _box_verdict(self, box: dict[str, tuple[int, int]]) -> Verdict:
        result: Verdict = True
        for condition in self._conditions:
            verdict = language.evaluate_over(condition, box)
            if verdict is False:
                return False
            result = result and verdict
        return result

    def _index_boxes(self, q: Range, k: Range) -> Iterator[dict[str, tuple[int, int]]]:
        """Yield the bounds of all symbols for each pair of query and key segments."""
        keys = [
            {"k": ends} | {name: pieces.bounds_over(*ends) for name, pieces in self._cols.items()}
            for ends in index_intervals(self._k_rows, *k)
        ]
        for ends in index_intervals(self._q_rows, *q):
            at = self._fixed | {"q": ends} | {name: pieces.bounds_over(*ends) for name, pieces in self._rows.items()}
            yield from (at | key for key in keys)


def _can_merge(first: CellPair, before: CellPair, tile: CellPair, ends: Sequence[int]) -> bool:
    """Return True if a block from ``first`` to ``before`` may also contain the next tile.

    ends: ends of key ranges that are followed by padding.
    """
    if any(before.k[1] <= end <= tile.k[0] for end in ends):
        return False
    follows = before.q[1] == tile.q[0] and before.k[1] <= tile.k[0]
    return follows and tile.q[1] - first.q[0] <= TILE_ROWS and tile.k[1] - first.k[0] <= 2 * TILE_ROWS


def _linear_side(
    terms: Sequence[tuple[str, int]], index: str, vectors: Mapping[str, Pieces], first: int, last: int
) -> Any:
    """Return one side of a linear condition as (value at index ``first``, slope), or None.

    None if it is not a line from ``first`` to ``last``.
    """
    lines = [(first, 1) if name == index else vectors[name].line(first, last) for name, _ in terms]
    if None in lines:
        return None
    return tuple(sum(c * x for (_, c), x in zip(terms, parts)) for parts in zip(*lines)) if lines else (0, 0)


def _trim_part(part: Range, verdict: Callable[[Range], Verdict]) -> Range:
    """Remove the rows without pairs from the ends of ``part``."""
    if verdict(part) is False:
        return part[0], part[0]
    first, last = _find_edge(part, verdict, last=False), _find_edge(part, verdict, last=True)
    return (first, last + 1) if first <= last else (part[0], part[0])


def _find_edge(part: Range, verdict: Callable[[Range], Verdict], last: bool) -> int:
    """Return the first or last row that may have a pair, by bisection.

    The result never excludes a row with a pair; the first row is after the last one if there is none.
    """
    low, high = part
    while high - low > 1:
        middle = (low + high) // 2
        near, far = ((middle, high), (low, middle)) if last else ((low, middle), (middle, high))
        low, high = near if verdict(near) is not False else far
    return low
