"""Which blocks of (queries x keys) must be computed, and how: few large ones, and never a mask of S x S.

The plan is pure Python over the run-time numbers of ``spans.py`` and ``runs.py``, so it is made once for all
layers, forward and backward.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache, partial
from typing import NamedTuple

from .. import predicate as language
from ..algebra import Verdict, is_of_query
from .runs import RunBounds, Runs
from .spans import Rows, boundaries, extent, intervals

TILE = 128
"""Query rows below which a tile is not cut for the sake of skipped keys; keys are skipped in such units."""
WORTH = 0.9
"""Cut a tile, or skip keys inside it, when at most this share of its work is left."""
MASK_ELEMENTS = 1 << 22
"""The largest mask of a block; beyond it the tile is cut."""


class Kind(Enum):
    FULL = "full"
    CAUSAL = "causal"
    MASKED = "masked"


class Block(NamedTuple):
    """Local query rows x local key rows. FULL: all pairs attend. CAUSAL: square, the i-th query attends to the
    first i + 1 keys. MASKED: any other case. The pairs attend for which all ``conditions`` hold."""

    q_off: int
    q_len: int
    k_off: int
    k_len: int
    kind: Kind
    conditions: tuple[str, ...] = ()


def work(blocks: tuple[Block, ...]) -> float:
    """Computed pairs, in which a CAUSAL block counts half."""
    return sum(b.q_len * b.k_len * (0.5 if b.kind is Kind.CAUSAL else 1) for b in blocks)


@lru_cache(maxsize=1024)
def plan(
    predicate: str,
    q_rows: Rows,
    k_rows: Rows,
    sizes: tuple[int, ...] = (),
    rows: tuple[Runs, ...] = (),
    cols: tuple[Runs, ...] = (),
) -> tuple[Block, ...]:
    """The blocks, each attendable pair in exactly one of them.

    Blocks with the same ``q_off`` follow each other and have the same ``q_len``; all others have no query in
    common. Without ``rows`` and ``cols`` for a predicate that reads them SpError is raised.
    """
    if not q_rows or not k_rows:
        return ()
    return tuple(_Planner(predicate, q_rows, k_rows, sizes, rows, cols).cover(extent(q_rows), extent(k_rows)))


Range = tuple[int, int]
"""Local rows [low, high)."""


class _Planner:
    def __init__(
        self,
        predicate: str,
        q_rows: Rows,
        k_rows: Rows,
        sizes: tuple[int, ...],
        rows: tuple[Runs, ...],
        cols: tuple[Runs, ...],
    ) -> None:
        self._conditions = language.conjuncts(predicate)
        self._q_rows, self._k_rows, self._sizes = q_rows, k_rows, sizes
        self._rows = {f"row{i}": RunBounds(runs) for i, runs in enumerate(rows)}
        self._cols = {f"col{i}": RunBounds(runs) for i, runs in enumerate(cols)}
        self._fixed = {f"n{i}": (size, size) for i, size in enumerate(sizes)}
        language.check_known(predicate, {"q", "k", *self._rows, *self._cols, *self._fixed})

    def cover(self, q: Range, k: Range) -> Iterator[Block]:
        """The blocks of the pairs q x k."""
        q, k = self._tight(q, k)
        if q[0] == q[1]:
            return
        left = self._undecided(q, k)
        shift = language.causal_shift(left[0], self._sizes) if len(left) == 1 else None
        if shift is not None:
            yield from self._causal(q, k, shift, left)
        elif left and (cut := self._worth_cutting(q, k, left)):
            yield from self.cover((q[0], cut), k)
            yield from self.cover((cut, q[1]), k)
        else:
            for part in self._skipping(q, k, left):
                yield self._block(q, part)

    def _tight(self, q: Range, k: Range) -> tuple[Range, Range]:
        """q and k without the rows at their ends that have no pair; both are empty or none."""
        while True:
            fewer_k = _hull(k, partial(self._verdict, q))
            fewer_q = _hull(q, partial(self._verdict_of_queries, fewer_k))
            if (fewer_q, fewer_k) == (q, k):
                return q, k
            q, k = fewer_q, fewer_k

    def _block(self, q: Range, k: Range) -> Block:
        left = self._undecided(q, k)
        return Block(*_sized(q), *_sized(k), Kind.MASKED if left else Kind.FULL, left)

    def _causal(self, q: Range, k: Range, shift: int, left: tuple[str, ...]) -> Iterator[Block]:
        """k <= q + shift, where every row of q has a key and every key a row: rectangles and triangles."""
        for cut in self._causal_cuts(q, k, shift):
            if q[0] < cut < q[1]:
                yield from self.cover((q[0], cut), k)
                yield from self.cover((cut, q[1]), k)
                return
        # One segment of queries, the last of them sees the last key: the rest of a rectangle is a triangle.
        edge = k[1] - (q[1] - q[0])
        if k[0] < edge:
            yield Block(*_sized(q), *_sized((k[0], edge)), Kind.FULL)
        yield Block(*_sized(q), *_sized((edge, k[1])), Kind.CAUSAL, left)

    def _causal_cuts(self, q: Range, k: Range, shift: int) -> Iterator[int]:
        """Where a row's keys are not one more than those of the row before."""
        yield from boundaries(self._q_rows)
        first, _ = intervals(self._q_rows, *q)[0]
        stretches = intervals(self._k_rows, *k)
        for index in [stretches[-1][1] + 1, *(start for start, _ in stretches[1:])]:
            yield q[0] + index - shift - first

    def _worth_cutting(self, q: Range, k: Range, left: tuple[str, ...]) -> int | None:
        """The row at which to cut a tile whose mask is too large, or whose halves have less to compute."""
        if q[1] - q[0] < 2 or not any(_reads_query(condition) for condition in left):
            return None
        cut = self._cut(q)
        if self._mask_elements(q, k, left) > MASK_ELEMENTS:
            return cut
        if q[1] - q[0] < 2 * TILE:
            return None
        halves = self._needed((q[0], cut), k) + self._needed((cut, q[1]), k)
        return cut if halves <= WORTH * self._needed(q, k) else None

    def _cut(self, q: Range) -> int:
        """A middle row: where a vector's value or the order of rows changes, if that is anywhere near."""
        low, high = q
        middle, slack = (low + high) // 2, (high - low) // 4
        places = list(boundaries(self._q_rows))
        for segment in self._q_rows:
            wanted = middle - segment.offset + segment.first
            for runs in self._rows.values():
                places += [at - segment.first + segment.offset for at in runs.change_near(wanted)]
        near = [at for at in places if middle - slack <= at <= middle + slack and low < at < high]
        return min(near, key=lambda at: abs(at - middle), default=middle)

    def _mask_elements(self, q: Range, k: Range, left: tuple[str, ...]) -> int:
        vectors = {**self._rows, **self._cols}
        batch = max((vectors[s].batch for c in left for s in language.symbols(c) if s in vectors), default=1)
        return batch * (q[1] - q[0]) * (k[1] - k[0])

    def _needed(self, q: Range, k: Range) -> int:
        return (q[1] - q[0]) * sum(high - low for low, high in self._parts(q, k))

    def _skipping(self, q: Range, k: Range, left: tuple[str, ...]) -> list[Range]:
        """k, or the parts of it that are needed when much of it is not."""
        parts = self._parts(q, k) if left else [k]
        return parts if sum(high - low for low, high in parts) <= WORTH * (k[1] - k[0]) else [k]

    def _parts(self, q: Range, k: Range) -> list[Range]:
        """The parts of k to which q may attend, in units of about TILE."""
        verdict = self._verdict(q, k)
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

    def _verdict(self, q: Range, k: Range) -> Verdict:
        """Of all conditions for all pairs; False if there is no pair."""
        verdicts = {self._of_box(box) for box in self._boxes(q, k)} or {False}
        return verdicts.pop() if len(verdicts) == 1 else None

    def _verdict_of_queries(self, k: Range, q: Range) -> Verdict:
        return self._verdict(q, k)

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
            {"k": ends} | {name: runs.over(*ends) for name, runs in self._cols.items()}
            for ends in intervals(self._k_rows, *k)
        ]
        for ends in intervals(self._q_rows, *q):
            at = self._fixed | {"q": ends} | {name: runs.over(*ends) for name, runs in self._rows.items()}
            yield from (at | key for key in keys)


def _sized(part: Range) -> tuple[int, int]:
    return part[0], part[1] - part[0]


def _reads_query(condition: str) -> bool:
    return any(map(is_of_query, language.symbols(condition)))


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
