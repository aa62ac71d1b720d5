"""Which blocks of (queries x keys) must be computed, and how: few large ones, and never a mask of S x S.

The plan is pure Python over run-time numbers, so it is made once for all layers, forward and backward: over spans,
which tell the rows that local tensors hold, and over pieces of vectors. Where the pieces tell who meets whom (packed
documents), its time grows with their number (``cells.py``); in all else rows x keys are cut in halves as long as that
saves work, with the bounds of the vectors on every stretch.
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
    block_of,
    has_masked,
    is_nonempty,
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

TILE_ROWS = 128
"""Query rows below which a tile is not cut for the sake of skipped keys; keys are skipped in such units."""
MIN_CUT_SAVING = 0.9
"""Cut a tile, or skip keys inside it, when at most this share of its work is left."""
MAX_MASK_ELEMENTS = 1 << 22
"""The largest mask of a block; beyond it the tile is cut."""

Blocks = Callable[[], Sequence[Block]]
"""Those of a tile, made when they are asked for: kernels that know windows and many sequences need none."""


@lru_cache(maxsize=1024)
def plan_blocks(
    predicate: str,
    q_rows: Rows,
    k_rows: Rows,
    sizes: tuple[int, ...] = (),
    rows: tuple[Pieces, ...] = (),
    cols: tuple[Pieces, ...] = (),
) -> BlockPlan:
    """The plan of local queries and keys. SpError without ``rows`` and ``cols`` for a predicate that reads them."""
    if not q_rows or not k_rows:
        return BlockPlan()
    return _Planner(predicate, q_rows, k_rows, sizes, rows, cols).plan()


def tiles_by_position(predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...] = ()) -> BlockPlan:
    """What a predicate that reads no vectors leaves, in less time than its blocks: few of them, or bands, or a MASKED
    one of all rows and keys."""
    if not q_rows or not k_rows:
        return BlockPlan()
    planner = _Planner(predicate, q_rows, k_rows, sizes, (), ())
    seen = tuple(islice(planner.all_blocks(), MAX_PARTS + 1))
    if len(seen) <= MAX_PARTS and not has_masked(seen):
        return BlockPlan(others=seen)
    conditions = language.split_conjuncts(predicate)
    every = [Block(*is_nonempty(q), *is_nonempty(k), Kind.MASKED, conditions) for q, k in planner.split_at_padding()]
    return BlockPlan(others=planner.band_blocks() or tuple(every))


def settle_blocks(blocks: Sequence[Block], most: int, *looked_up: Any) -> tuple[float, list[tuple[float, Block]]]:
    """How many pairs of masked blocks attend as bounds tell, and blocks of those of which only the predicate knows.

    They are at most TILE x TILE. Each comes with how many of its like it stands for: 1, where there are at most `most`
    undecided ones of any size. looked_up: what the plan was made of.
    """
    planner, known, left, weight = _Planner(*looked_up), 0.0, list[tuple[float, Block]](), 1.0
    parts = list(blocks)
    while parts:
        kept = parts[:: -(-len(parts) // most)]
        weight, parts = weight * len(parts) / len(kept), []
        for block in kept:
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
    """Across the longer side."""
    if block.q_len >= block.k_len:
        rows = block.q_len // 2
        rest = block._replace(q_off=block.q_off + rows, q_len=block.q_len - rows)
        return [block._replace(q_len=rows), rest]
    keys = block.k_len // 2
    return [block._replace(k_len=keys), block._replace(k_off=block.k_off + keys, k_len=block.k_len - keys)]


class _Planner:
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
        self._between = valid_segments(k_rows)  # padding
        read = language.predicate_symbols(predicate)
        self._rows = {name: x for i, x in enumerate(rows) if (name := f"row{i}") in read}
        self._cols = {name: x for i, x in enumerate(cols) if (name := f"col{i}") in read}
        batches = {name: x.batch for name, x in {**self._rows, **self._cols}.items()}
        read_by = {c: language.predicate_symbols(c) & batches.keys() for c in self._conditions}
        self._batches = {c: max(map(batches.__getitem__, names), default=1) for c, names in read_by.items()}
        self._fixed = {f"n{i}": (size, size) for i, size in enumerate(sizes)}
        language.check_known(predicate, {"q", "k", *self._rows, *self._cols, *self._fixed})

    def plan(self) -> BlockPlan:
        """By cells, if vectors are looked up and their cells meet few others."""
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
        """The blocks of all rows and keys."""
        for q, k in self.split_at_padding():
            yield from self.cover(q, k)

    def split_at_padding(self) -> Iterator[tuple[Range, Range]]:
        """All rows and keys, but for padding between them."""
        return ((valid_extent(self._q_rows), keys) for keys in self._between)

    def packed_calls(self, every: Iterator[Block]) -> tuple[Block, ...]:
        """Instead of masks at the edges of windows, or many blocks: one for each two stretches of indices.

        Of a window the blocks grow with the length; no more of them are looked at than tell what it is.
        """
        seen = list[Block]()
        for block in every:
            seen.append(block)
            if len(seen) > MAX_PARTS or has_masked(seen):
                return self.band_blocks() or (*seen, *every)
        return tuple(seen)

    def band_blocks(self) -> tuple[Block, ...] | None:
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
        """Whether these are all rows, which are as many each time. Kernels that are built for a shape are worth it."""
        return (run.q, run.k) == (valid_extent(self._q_rows), valid_extent(self._k_rows))

    def _nonempty_tiles(self) -> list[CellPair] | None:
        q, k = cells_of(self._q_rows, self._rows, "q"), cells_of(self._k_rows, self._cols, "k")
        linears = [self._linears[c] for c in self._conditions]
        tiles = CellGrid(self._conditions, linears, q, k, self._fixed).tiles()
        if tiles is None or len(self._between) == 1:
            return tiles
        return [part for tile in tiles for part in without_padding(tile, self._between)]

    def _run_blocks(self, tile: CellPair, runs: list[AttendedRun]) -> Sequence[Block]:
        """The blocks of a tile that is these runs."""
        if runs and all(run.window in (FULL_WINDOW, CAUSAL_WINDOW) for run in runs):
            return [block for run in runs for block in run_blocks(run, tile.left)]
        return self._cover_tile(tile)

    def _cover_tile(self, tile: CellPair) -> list[Block]:
        """The blocks of a tile whose pairs only the predicate knows."""
        if max(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]) < 2 * TILE_ROWS:
            return [Block(*is_nonempty(tile.q), *is_nonempty(tile.k), Kind.MASKED, tile.left)]
        if tile.band is not None:
            return self._band_strips(tile.q, tile.k, tile.band, tile.left)
        return list(self.cover(tile.q, tile.k))

    def _band_strips(self, q: Range, k: Range, band: Band, left: tuple[str, ...]) -> list[Block]:
        """A band in strips of queries: each a triangle to be masked, keys that all of them see, and a causal one.

        Of a window over packed documents there are ten thousand: no calls but those that make them.
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
        """The blocks of all tiles: one for neighbours of a few rows, masked, because a call takes time as well."""
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
                yield Block(*is_nonempty(q), *is_nonempty(k), Kind.MASKED, self._conditions)

    def cover(self, q: Range, k: Range) -> Iterator[Block]:
        """The blocks of the pairs q x k."""
        q, k = self._trim(q, k)
        if q[0] == q[1]:
            return
        left = self._undecided_conditions(q, k)
        ascends = all(a < b for (a, _), (b, _) in pairwise(index_intervals(self._k_rows, *k)))
        shift = self._causal_shift(q, k, left[0]) if len(left) == 1 and ascends else None
        if shift is not None:
            yield from self._is_causal(q, k, shift, left)
        elif left and not ascends and (blocks := self._single_partial_stretch(q, k)):
            yield from blocks
        elif left and (cut := self._best_cut(q, k, left)):
            yield from self.cover((q[0], cut), k)
            yield from self.cover((cut, q[1]), k)
        else:
            for part in self._skip_unneeded(q, k, left):
                rest = self._undecided_conditions(q, part)
                yield Block(*is_nonempty(q), *is_nonempty(part), Kind.MASKED if rest else Kind.FULL, rest)

    def _trim(self, q: Range, k: Range) -> tuple[Range, Range]:
        """q and k without the rows at their ends that have no pair; both are empty or none."""
        while True:
            fewer_k = _trim_part(k, partial(self.verdict, q))
            fewer_q = _trim_part(q, partial(self.verdict, k=fewer_k))
            if (fewer_q, fewer_k) == (q, k):
                return q, k
            q, k = fewer_q, fewer_k

    def _causal_shift(self, q: Range, k: Range, condition: str) -> int | None:
        """The c of a condition that says ``k <= q + c`` of these indices; None for every other one."""
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

    def _is_causal(self, q: Range, k: Range, shift: int, left: tuple[str, ...]) -> Iterator[Block]:
        """k <= q + shift, where every row of q has a key and every key a row: rectangles and triangles."""
        if shift == 0 and index_intervals(self._q_rows, *q) == index_intervals(self._k_rows, *k):
            yield Block(
                *is_nonempty(q), *is_nonempty(k), Kind.CAUSAL, left
            )  # the same indices, however many runs they are
            return
        for cut in self._cut_causal(q, k, shift):
            if q[0] < cut < q[1]:
                yield from self.cover((q[0], cut), k)
                yield from self.cover((cut, q[1]), k)
                return
        # One segment of queries, the last of them sees the last key: the rest of a rectangle is a triangle.
        edge = k[1] - (q[1] - q[0])
        if k[0] < edge:
            yield Block(*is_nonempty(q), *is_nonempty((k[0], edge)), Kind.FULL)
        yield Block(*is_nonempty(q), *is_nonempty((edge, k[1])), Kind.CAUSAL, left)

    def _single_partial_stretch(self, q: Range, k: Range) -> list[Block]:
        """Where all queries see every stretch of keys but one, of which they take one block; empty of all else."""
        parts = list(pairwise([k[0], *(at for at in index_boundaries(self._k_rows) if k[0] < at < k[1]), k[1]]))
        others = [part for part in parts if not self.verdict(q, part)]
        if len(others) != 1:
            return []
        (other,) = others
        blocks = list(self.cover(q, other))
        if [block.query_rows for block in blocks] != [is_nonempty(q)]:
            return []
        seen = [part for part in ((k[0], other[0]), (other[1], k[1])) if part[0] < part[1]]
        return blocks + [Block(*is_nonempty(q), *is_nonempty(part), Kind.FULL) for part in seen]

    def _cut_causal(self, q: Range, k: Range, shift: int) -> Iterator[int]:
        """Where a row's keys are not one more than those of the row before."""
        yield from index_boundaries(self._q_rows)
        first, _ = index_intervals(self._q_rows, *q)[0]
        stretches = index_intervals(self._k_rows, *k)
        for index in [stretches[-1][1] + 1, *(start for start, _ in stretches[1:])]:
            yield q[0] + index - shift - first

    def _best_cut(self, q: Range, k: Range, left: tuple[str, ...]) -> int | None:
        """The row at which to cut a tile whose mask is too large, or whose halves have less to compute."""
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
        """A middle row: where a vector's value or the order of rows changes, if that is anywhere near."""
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
        """k, or the parts of it that are needed when much of it is not."""
        parts = self._attended_parts(q, k) if left else [k]
        return parts if sum(high - low for low, high in parts) <= MIN_CUT_SAVING * (k[1] - k[0]) else [k]

    def _attended_parts(self, q: Range, k: Range) -> list[Range]:
        """The parts of k to which q may attend, in units of about TILE."""
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
        """The conditions that do not hold for all pairs."""
        boxes = list(self._index_boxes(q, k))
        return tuple(c for c in self._conditions if not all(language.evaluate_over(c, box) for box in boxes))

    def verdict(self, q: Range, k: Range) -> Verdict:
        """Of all conditions for all pairs; False if there is no pair."""
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
        """The bounds of all symbols, for each stretch of query indices and each of key indices."""
        keys = [
            {"k": ends} | {name: pieces.bounds_over(*ends) for name, pieces in self._cols.items()}
            for ends in index_intervals(self._k_rows, *k)
        ]
        for ends in index_intervals(self._q_rows, *q):
            at = self._fixed | {"q": ends} | {name: pieces.bounds_over(*ends) for name, pieces in self._rows.items()}
            yield from (at | key for key in keys)


def _can_merge(first: CellPair, before: CellPair, tile: CellPair, ends: Sequence[int]) -> bool:
    """May a block that begins with `first` and ends with `before`, which neighbours the tile, hold the tile too?

    ends: the keys behind which there is padding.
    """
    if any(before.k[1] <= end <= tile.k[0] for end in ends):
        return False
    follows = before.q[1] == tile.q[0] and before.k[1] <= tile.k[0]
    return follows and tile.q[1] - first.q[0] <= TILE_ROWS and tile.k[1] - first.k[0] <= 2 * TILE_ROWS


def _linear_side(
    terms: Sequence[tuple[str, int]], index: str, vectors: Mapping[str, Pieces], first: int, last: int
) -> Any:
    """(the value at the index `first`, slope) of one side of a linear condition, if it is a line to `last`; or None."""
    lines = [(first, 1) if name == index else vectors[name].line(first, last) for name, _ in terms]
    if None in lines:
        return None
    return tuple(sum(c * x for (_, c), x in zip(terms, parts)) for parts in zip(*lines)) if lines else (0, 0)


def _trim_part(part: Range, verdict: Callable[[Range], Verdict]) -> Range:
    """The rows of ``part`` without those at its ends that have no pair."""
    if verdict(part) is False:
        return part[0], part[0]
    first, last = _find_edge(part, verdict, last=False), _find_edge(part, verdict, last=True)
    return (first, last + 1) if first <= last else (part[0], part[0])


def _find_edge(part: Range, verdict: Callable[[Range], Verdict], last: bool) -> int:
    """The first or last row that may have a pair, by bisection; never too far in, and past each other if none has."""
    low, high = part
    while high - low > 1:
        middle = (low + high) // 2
        near, far = ((middle, high), (low, middle)) if last else ((low, middle), (middle, high))
        low, high = near if verdict(near) is not False else far
    return low
