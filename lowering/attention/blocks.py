"""Which blocks of (queries x keys) must be computed, and how: few large ones, and never a mask of S x S.

The plan is pure Python over run-time numbers, so it is made once for all layers, forward and backward: over spans,
which tell the rows that local tensors hold, and over runs of vectors, whose bounds on every stretch can be compared.

A span is six ints [n, folds, stride, shift, start, length]. With L local rows on a rank, r = (rank // stride
- shift) mod n and chunk = L // folds: fold 0 holds the positions [r * chunk, (r + 1) * chunk) and fold 1
(zigzag, folds == 2) the positions [(2n - 1 - r) * chunk, (2n - r) * chunk). A row's index is its position
minus ``start``; rows whose index lies outside [0, length) are padding.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.communicator import current
from sp_compile.lowering.frames import FrameArg, folds_of

from . import predicate as language
from .predicate import Verdict, is_of_query


class Runs(NamedTuple):
    """A (batch, S) vector: its least and greatest value over the batch, constant from start to start."""

    batch: int
    starts: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]


def runs_of(x: Tensor) -> Runs:
    """The runs of an int or bool vector (B, S), both >= 1. Reads values: on a GPU this waits for them."""
    values = x.to(torch.int64)
    ends = torch.stack([values.amin(0), values.amax(0)])
    changes = (ends[:, 1:] != ends[:, :-1]).any(0).nonzero().squeeze(1) + 1
    starts = torch.cat([changes.new_zeros(1), changes])
    table = torch.cat([starts[None], ends[:, starts]]).tolist()
    return Runs(x.shape[0], *(tuple(row) for row in table))


class RunBounds:
    """The bounds of a vector on any stretch, in the time of a binary search."""

    def __init__(self, runs: Runs) -> None:
        self.batch = runs.batch
        self._starts = runs.starts
        self._lows = _levels(runs.lows, min)
        self._highs = _levels(runs.highs, max)

    def over(self, first: int, last: int) -> tuple[int, int]:
        """The inclusive bounds of the values at the indices [first, last]."""
        i, j = bisect_right(self._starts, first) - 1, bisect_right(self._starts, last)
        power = (j - i).bit_length() - 1
        lows, highs, other = self._lows[power], self._highs[power], j - (1 << power)
        return min(lows[i], lows[other]), max(highs[i], highs[other])

    def change_near(self, wanted: int) -> list[int]:
        """The places next to ``wanted`` on either side where the bounds change."""
        at = bisect_left(self._starts, wanted)
        return list(self._starts[max(at - 1, 0) : at + 1])


def _levels(values: tuple[int, ...], pick: Callable[[int, int], int]) -> list[tuple[int, ...]]:
    """Level p holds ``pick`` of every 2 ** p neighbours."""
    levels = [values]
    while (step := 1 << (len(levels) - 1)) < len(levels[-1]):
        levels.append(tuple(map(pick, levels[-1], levels[-1][step:])))
    return levels


class Segment(NamedTuple):
    """Neighbouring rows with neighbouring indices."""

    first: int
    """The index of the first row."""
    offset: int
    length: int


Rows = tuple[Segment, ...]
"""The valid rows of a local tensor in local order. They neighbour each other: padding is at the ends."""

Span = list[int]


def whole(length: int) -> Span:
    """The span of a sequence that is not cut."""
    return [1, 1, 1, 0, 0, length]


def span(frame: FrameArg, n: int, stride: int = 1, shift: int = 0) -> Span:
    """The span of a frame's shard over n ranks, or over the n // stride neighbourhoods of a hybrid."""
    return [n // stride, folds_of(frame), stride, shift, frame[2], frame[3]]


def valid_rows(span: Sequence[int], local_length: int, group: str) -> Rows:
    """The rows that this rank of ``group`` holds; it is asked for its rank only if the sequence is cut."""
    n, folds, stride, shift, start, length = (int(x) for x in span)
    r = (current().rank(group) // stride - shift) % n if n > 1 else 0
    chunk = local_length // folds
    firsts = (r * chunk, (2 * n - 1 - r) * chunk)[:folds]
    cut = [_cut(first - start, fold * chunk, chunk, length) for fold, first in enumerate(firsts)]
    return _joined([segment for segment in cut if segment.length > 0])


def _cut(index: int, offset: int, rows: int, length: int) -> Segment:
    low, high = max(index, 0), min(index + rows, length)
    return Segment(low, offset + low - index, high - low)


def _joined(segments: list[Segment]) -> Rows:
    """One segment where the second follows on the first in index and offset."""
    if len(segments) == 2:
        before, after = segments
        if before.first + before.length == after.first:
            return (Segment(before.first, before.offset, before.length + after.length),)
    return tuple(segments)


def extent(rows: Rows) -> tuple[int, int]:
    """The local offsets [low, high) of the valid rows."""
    return (rows[0].offset, rows[-1].offset + rows[-1].length) if rows else (0, 0)


def intervals(rows: Rows, low: int, high: int) -> list[tuple[int, int]]:
    """The indices of the local rows [low, high) as intervals [first, last], in local order."""
    found = []
    for index, offset, length in rows:
        first, last = max(low, offset), min(high, offset + length) - 1
        if first <= last:
            found.append((index + first - offset, index + last - offset))
    return found


def indices(rows: Rows, low: int, high: int, device: torch.device) -> Tensor:
    """The indices of the local rows [low, high): int64 (high - low)."""
    parts = [torch.arange(a, b + 1, device=device) for a, b in intervals(rows, low, high)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def take(x: Tensor, dim: int, rows: Rows, low: int, high: int) -> Tensor:
    """The entries of a whole x that belong to the local rows [low, high); a view if they neighbour."""
    parts = [x.narrow(dim, a, b + 1 - a) for a, b in intervals(rows, low, high)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def boundaries(rows: Rows) -> list[int]:
    """The local offsets at which the index jumps."""
    return [second.offset for _, second in pairwise(rows)]


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
                rest = self._undecided(q, part)
                yield Block(*_sized(q), *_sized(part), Kind.MASKED if rest else Kind.FULL, rest)

    def _tight(self, q: Range, k: Range) -> tuple[Range, Range]:
        """q and k without the rows at their ends that have no pair; both are empty or none."""
        while True:
            fewer_k = _hull(k, partial(self._verdict, q))
            fewer_q = _hull(q, partial(self._verdict, k=fewer_k))
            if (fewer_q, fewer_k) == (q, k):
                return q, k
            q, k = fewer_q, fewer_k

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
        if q[1] - q[0] < 2 or not any(is_of_query(name) for c in left for name in language.symbols(c)):
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
