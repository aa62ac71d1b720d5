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
    CAUSAL,
    FULL,
    Block,
    BlockPlan,
    Kind,
    Run,
    any_masked,
    apart,
    block_of,
    blocks_of,
    of_any_shape,
    packed_calls,
    runs_of,
    runs_of_parts,
    sized,
    split,
)
from .cells import MOST_PARTS, Band, CellPair, MeetingCells, Range, cells_of, unbroken, without_padding
from .pieces import Pieces
from .predicate import Verdict, is_of_query
from .spans import Rows, boundaries, extent, intervals

TILE = 128
"""Query rows below which a tile is not cut for the sake of skipped keys; keys are skipped in such units."""
WORTH_CUTTING = 0.9
"""Cut a tile, or skip keys inside it, when at most this share of its work is left."""
MASK_ELEMENTS = 1 << 22
"""The largest mask of a block; beyond it the tile is cut."""

Blocks = Callable[[], Sequence[Block]]
"""Those of a tile, made when they are asked for: kernels that know windows and many sequences need none."""


@lru_cache(maxsize=1024)
def plan(
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
    seen = tuple(islice(planner.every(), MOST_PARTS + 1))
    if len(seen) <= MOST_PARTS and not any_masked(seen):
        return BlockPlan(others=seen)
    conditions = language.conjuncts(predicate)
    every = [Block(*sized(q), *sized(k), Kind.MASKED, conditions) for q, k in planner.between_padding()]
    return BlockPlan(others=planner.bands() or tuple(every))


def settled(blocks: Sequence[Block], most: int, *looked_up: Any) -> tuple[float, list[tuple[float, Block]]]:
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
            elif verdict is None and max(block.q_len, block.k_len) <= TILE:
                left.append((weight, block))
            elif verdict is None:
                parts += _halves(block)
    return known, left


def _halves(block: Block) -> list[Block]:
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
        self._conditions = language.conjuncts(predicate)
        self._linears = {text: language.linear(text, sizes) for text in self._conditions}
        self._q_rows, self._k_rows = q_rows, k_rows
        self._between = unbroken(k_rows)  # padding
        read = language.symbols(predicate)
        self._rows = {name: x for i, x in enumerate(rows) if (name := f"row{i}") in read}
        self._cols = {name: x for i, x in enumerate(cols) if (name := f"col{i}") in read}
        batches = {name: x.batch for name, x in {**self._rows, **self._cols}.items()}
        read_by = {c: language.symbols(c) & batches.keys() for c in self._conditions}
        self._batches = {c: max(map(batches.__getitem__, names), default=1) for c, names in read_by.items()}
        self._fixed = {f"n{i}": (size, size) for i, size in enumerate(sizes)}
        language.check_known(predicate, {"q", "k", *self._rows, *self._cols, *self._fixed})

    def plan(self) -> BlockPlan:
        """By cells, if vectors are looked up and their cells meet few others."""
        tiles = self._tiles() if self._rows or self._cols else None
        if tiles is None:
            every = tuple(self.every())
            return BlockPlan((), self.calls(iter(every)), lambda: every)
        runs, others, parts = list[Run](), list[Block](), list[tuple[CellPair, Blocks]]()
        for tile in tiles:
            known = runs_of(tile)
            if known is None and tile.parts:
                known = apart(runs_of_parts(tile))
            if known is not None:
                known = [one for run in known for one in split(run)]
                parts.append((tile, partial(self._known, tile, known)))
            else:
                blocks = self._cover_tile(tile)
                parts.append((tile, partial(tuple, blocks)))
                known = runs_of_parts(tile) if any_masked(blocks) else None
                others += map(of_any_shape, blocks if known is None else ())
            runs += known or ()
        if len(runs) == 1 and not others and self._is_all(runs[0]):
            return BlockPlan((), (block_of(runs[0]),), partial(self._together, parts))
        return BlockPlan(tuple(packed_calls(runs)), tuple(others), partial(self._together, parts))

    def every(self) -> Iterator[Block]:
        """The blocks of all rows and keys."""
        for q, k in self.between_padding():
            yield from self.cover(q, k)

    def between_padding(self) -> Iterator[tuple[Range, Range]]:
        """All rows and keys, but for padding between them."""
        return ((extent(self._q_rows), keys) for keys in self._between)

    def calls(self, every: Iterator[Block]) -> tuple[Block, ...]:
        """Instead of masks at the edges of windows, or many blocks: one for each two stretches of indices.

        Of a window the blocks grow with the length; no more of them are looked at than tell what it is.
        """
        seen = list[Block]()
        for block in every:
            seen.append(block)
            if len(seen) > MOST_PARTS or any_masked(seen):
                return self.bands() or (*seen, *every)
        return tuple(seen)

    def bands(self) -> tuple[Block, ...] | None:
        tiles = self._tiles()
        if tiles is None:
            return None
        runs = list[Run]()
        for tile in tiles:
            known = runs_of_parts(tile)
            if known is None:
                return None
            runs += known
        return tuple(map(block_of, runs))

    def _is_all(self, run: Run) -> bool:
        """Whether these are all rows, which are as many each time. Kernels that are built for a shape are worth it."""
        return (run.q, run.k) == (extent(self._q_rows), extent(self._k_rows))

    def _tiles(self) -> list[CellPair] | None:
        q, k = cells_of(self._q_rows, self._rows, "q"), cells_of(self._k_rows, self._cols, "k")
        linears = [self._linears[c] for c in self._conditions]
        tiles = MeetingCells(self._conditions, linears, q, k, self._fixed).tiles()
        if tiles is None or len(self._between) == 1:
            return tiles
        return [part for tile in tiles for part in without_padding(tile, self._between)]

    def _known(self, tile: CellPair, runs: list[Run]) -> Sequence[Block]:
        """The blocks of a tile that is these runs."""
        if runs and all(run.window in (FULL, CAUSAL) for run in runs):
            return [block for run in runs for block in blocks_of(run, tile.left)]
        return self._cover_tile(tile)

    def _cover_tile(self, tile: CellPair) -> list[Block]:
        """The blocks of a tile whose pairs only the predicate knows."""
        if max(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]) < 2 * TILE:
            return [Block(*sized(tile.q), *sized(tile.k), Kind.MASKED, tile.left)]
        if tile.band is not None:
            return self._banded(tile.q, tile.k, tile.band, tile.left)
        return list(self.cover(tile.q, tile.k))

    def _banded(self, q: Range, k: Range, band: Band, left: tuple[str, ...]) -> list[Block]:
        """A band in strips of queries: each a triangle to be masked, keys that all of them see, and a causal one.

        Of a window over packed documents there are ten thousand: no calls but those that make them.
        """
        lower, upper = band
        rows, keys, q_off, k_off = q[1] - q[0], k[1] - k[0], q[0], k[0]
        width = min(upper, keys) - max(lower, -rows) + 1
        height = min(max(width // 4 // TILE, 1) * TILE, math.isqrt(MASK_ELEMENTS // self._batch(left)))
        end = min(rows, keys - lower)
        found = list[Block]()
        for first in range(max(0, -upper), end, height):
            size = height if first + height < end else end - first
            low, last = first + lower, first + upper
            high, every = last + size, low + size - 1
            low, every = low if low > 0 else 0, every if every > 0 else 0
            high, last = high if high < keys else keys, last if last < keys else keys
            if width < 4 * TILE or every >= last:
                found.append(Block(q_off + first, size, k_off + low, high - low, Kind.MASKED, left))
                continue
            if low < every:
                found.append(Block(q_off + first, size, k_off + low, every - low, Kind.MASKED, left))
            found.append(Block(q_off + first, size, k_off + every, last - every, Kind.FULL))
            if last < high:
                kind = Kind.CAUSAL if high - last == size else Kind.MASKED
                found.append(Block(q_off + first, size, k_off + last, high - last, kind, left))
        return found

    def _together(self, parts: list[tuple[CellPair, Blocks]]) -> Iterator[Block]:
        """The blocks of all tiles: one for neighbours of a few rows, masked, because a call takes time as well."""
        groups, ends = list[list[tuple[CellPair, Blocks]]](), [high for _, high in self._between]
        for part in parts:
            if groups and _close(groups[-1][0][0], groups[-1][-1][0], part[0], ends):
                groups[-1].append(part)
            else:
                groups.append([part])
        for group in groups:
            if len(group) == 1:
                yield from group[0][1]()
            else:
                first, last = group[0][0], group[-1][0]
                q, k = (first.q[0], last.q[1]), (first.k[0], last.k[1])
                yield Block(*sized(q), *sized(k), Kind.MASKED, self._conditions)

    def cover(self, q: Range, k: Range) -> Iterator[Block]:
        """The blocks of the pairs q x k."""
        q, k = self._tight(q, k)
        if q[0] == q[1]:
            return
        left = self._undecided(q, k)
        ascends = all(a < b for (a, _), (b, _) in pairwise(intervals(self._k_rows, *k)))
        shift = self._shift(q, k, left[0]) if len(left) == 1 and ascends else None
        if shift is not None:
            yield from self._causal(q, k, shift, left)
        elif left and not ascends and (blocks := self._seen_but_one(q, k)):
            yield from blocks
        elif left and (cut := self._worth_cutting(q, k, left)):
            yield from self.cover((q[0], cut), k)
            yield from self.cover((cut, q[1]), k)
        else:
            for part in self._skipping(q, k, left):
                rest = self._undecided(q, part)
                yield Block(*sized(q), *sized(part), Kind.MASKED if rest else Kind.FULL, rest)

    def _tight(self, q: Range, k: Range) -> tuple[Range, Range]:
        """q and k without the rows at their ends that have no pair; both are empty or none."""
        while True:
            fewer_k = _hull(k, partial(self.verdict, q))
            fewer_q = _hull(q, partial(self.verdict, k=fewer_k))
            if (fewer_q, fewer_k) == (q, k):
                return q, k
            q, k = fewer_q, fewer_k

    def _shift(self, q: Range, k: Range, condition: str) -> int | None:
        """The c of a condition that says ``k <= q + c`` of these indices; None for every other one."""
        one = self._linears[condition]
        if one is None or one.relation != "<=":
            return None
        shifts = set[int | None]()
        for of_query in intervals(self._q_rows, *q):
            row = _line(one.of_query, "q", self._rows, *of_query)
            for of_key in intervals(self._k_rows, *k):
                key = _line(one.of_key, "k", self._cols, *of_key)
                if row is None or key is None or key[1] <= 0 or row[1] != -key[1]:
                    return None
                shifts.add(of_key[0] - of_query[0] + -(row[0] + key[0] + one.constant) // key[1])
        return shifts.pop() if len(shifts) == 1 else None

    def _causal(self, q: Range, k: Range, shift: int, left: tuple[str, ...]) -> Iterator[Block]:
        """k <= q + shift, where every row of q has a key and every key a row: rectangles and triangles."""
        if shift == 0 and intervals(self._q_rows, *q) == intervals(self._k_rows, *k):
            yield Block(*sized(q), *sized(k), Kind.CAUSAL, left)  # the same indices, however many runs they are
            return
        for cut in self._causal_cuts(q, k, shift):
            if q[0] < cut < q[1]:
                yield from self.cover((q[0], cut), k)
                yield from self.cover((cut, q[1]), k)
                return
        # One segment of queries, the last of them sees the last key: the rest of a rectangle is a triangle.
        edge = k[1] - (q[1] - q[0])
        if k[0] < edge:
            yield Block(*sized(q), *sized((k[0], edge)), Kind.FULL)
        yield Block(*sized(q), *sized((edge, k[1])), Kind.CAUSAL, left)

    def _seen_but_one(self, q: Range, k: Range) -> list[Block]:
        """Where all queries see every stretch of keys but one, of which they take one block; empty of all else."""
        parts = list(pairwise([k[0], *(at for at in boundaries(self._k_rows) if k[0] < at < k[1]), k[1]]))
        others = [part for part in parts if not self.verdict(q, part)]
        if len(others) != 1:
            return []
        (other,) = others
        blocks = list(self.cover(q, other))
        if [block.query_rows for block in blocks] != [sized(q)]:
            return []
        seen = [part for part in ((k[0], other[0]), (other[1], k[1])) if part[0] < part[1]]
        return blocks + [Block(*sized(q), *sized(part), Kind.FULL) for part in seen]

    def _causal_cuts(self, q: Range, k: Range, shift: int) -> Iterator[int]:
        """Where a row's keys are not one more than those of the row before."""
        yield from boundaries(self._q_rows)
        first, _ = intervals(self._q_rows, *q)[0]
        stretches = intervals(self._k_rows, *k)
        for index in [stretches[-1][1] + 1, *(start for start, _ in stretches[1:])]:
            yield q[0] + index - shift - first

    def _worth_cutting(self, q: Range, k: Range, left: tuple[str, ...]) -> int | None:
        """The row at which to cut a tile whose mask is too large, or whose halves have less to compute."""
        if q[1] - q[0] < 2 or not any(is_of_query(name) for c in left for name in language.symbols(c)):
            return None
        cut = self._cut(q)
        if self._mask_elements(q, k, left) > MASK_ELEMENTS:
            return cut
        if q[1] - q[0] < 2 * TILE:
            return None
        halves = self._needed((q[0], cut), k) + self._needed((cut, q[1]), k)
        return cut if halves <= WORTH_CUTTING * self._needed(q, k) else None

    def _cut(self, q: Range) -> int:
        """A middle row: where a vector's value or the order of rows changes, if that is anywhere near."""
        low, high = q
        middle, slack = (low + high) // 2, (high - low) // 4
        places = list(boundaries(self._q_rows))
        for segment in self._q_rows:
            wanted = middle - segment.offset + segment.first
            for pieces in self._rows.values():
                places += [at - segment.first + segment.offset for at in pieces.change_near(wanted)]
        near = [at for at in places if middle - slack <= at <= middle + slack and low < at < high]
        return min(near, key=lambda at: abs(at - middle), default=middle)

    def _mask_elements(self, q: Range, k: Range, left: tuple[str, ...]) -> int:
        return self._batch(left) * (q[1] - q[0]) * (k[1] - k[0])

    def _batch(self, left: tuple[str, ...]) -> int:
        return max((self._batches[c] for c in left), default=1)

    def _needed(self, q: Range, k: Range) -> int:
        return (q[1] - q[0]) * sum(high - low for low, high in self._parts(q, k))

    def _skipping(self, q: Range, k: Range, left: tuple[str, ...]) -> list[Range]:
        """k, or the parts of it that are needed when much of it is not."""
        parts = self._parts(q, k) if left else [k]
        return parts if sum(high - low for low, high in parts) <= WORTH_CUTTING * (k[1] - k[0]) else [k]

    def _parts(self, q: Range, k: Range) -> list[Range]:
        """The parts of k to which q may attend, in units of about TILE."""
        verdict = self.verdict(q, k)
        if verdict is False:
            return []
        if verdict or k[1] - k[0] <= TILE:
            return [k]
        middle = (k[0] + k[1]) // 2
        before, after = self._parts(q, (k[0], middle)), self._parts(q, (middle, k[1]))
        if before and after and before[-1][1] == after[0][0]:
            return [*before[:-1], (before[-1][0], after[0][1]), *after[1:]]
        return before + after

    def _undecided(self, q: Range, k: Range) -> tuple[str, ...]:
        """The conditions that do not hold for all pairs."""
        boxes = list(self._boxes(q, k))
        return tuple(c for c in self._conditions if not all(language.over(c, box) for box in boxes))

    def verdict(self, q: Range, k: Range) -> Verdict:
        """Of all conditions for all pairs; False if there is no pair."""
        verdicts = {self._of_box(box) for box in self._boxes(q, k)} or {False}
        return verdicts.pop() if len(verdicts) == 1 else None

    def _of_box(self, box: dict[str, tuple[int, int]]) -> Verdict:
        result: Verdict = True
        for condition in self._conditions:
            verdict = language.over(condition, box)
            if verdict is False:
                return False
            result = result and verdict
        return result

    def _boxes(self, q: Range, k: Range) -> Iterator[dict[str, tuple[int, int]]]:
        """The bounds of all symbols, for each stretch of query indices and each of key indices."""
        keys = [
            {"k": ends} | {name: pieces.over(*ends) for name, pieces in self._cols.items()}
            for ends in intervals(self._k_rows, *k)
        ]
        for ends in intervals(self._q_rows, *q):
            at = self._fixed | {"q": ends} | {name: pieces.over(*ends) for name, pieces in self._rows.items()}
            yield from (at | key for key in keys)


def _close(first: CellPair, before: CellPair, tile: CellPair, ends: Sequence[int]) -> bool:
    """May a block that begins with `first` and ends with `before`, which neighbours the tile, hold the tile too?

    ends: the keys behind which there is padding.
    """
    if any(before.k[1] <= end <= tile.k[0] for end in ends):
        return False
    follows = before.q[1] == tile.q[0] and before.k[1] <= tile.k[0]
    return follows and tile.q[1] - first.q[0] <= TILE and tile.k[1] - first.k[0] <= 2 * TILE


def _line(terms: Sequence[tuple[str, int]], index: str, vectors: Mapping[str, Pieces], first: int, last: int) -> Any:
    """(the value at the index `first`, slope) of one side of a linear condition, if it is a line to `last`; or None."""
    lines = [(first, 1) if name == index else vectors[name].line(first, last) for name, _ in terms]
    if None in lines:
        return None
    return tuple(sum(c * x for (_, c), x in zip(terms, parts)) for parts in zip(*lines)) if lines else (0, 0)


def _hull(part: Range, verdict: Callable[[Range], Verdict]) -> Range:
    """The rows of ``part`` without those at its ends that have no pair."""
    if verdict(part) is False:
        return part[0], part[0]
    first, last = _edge(part, verdict, last=False), _edge(part, verdict, last=True)
    return (first, last + 1) if first <= last else (part[0], part[0])


def _edge(part: Range, verdict: Callable[[Range], Verdict], last: bool) -> int:
    """The first or last row that may have a pair, by bisection; never too far in, and past each other if none has."""
    low, high = part
    while high - low > 1:
        middle = (low + high) // 2
        near, far = ((middle, high), (low, middle)) if last else ((low, middle), (middle, high))
        low, high = near if verdict(near) is not False else far
    return low
