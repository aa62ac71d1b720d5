"""What a plan is made of: blocks, calls for many sequences, and runs of queries and keys that become either.

A run is all that a tile says whose pairs are known: queries, keys, and how far a query sees. On a kernel that knows
windows it is one call, or a part of one; on any other, blocks that are full, causal or masked.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from .cells import LONG_ROWS, CellPair, Range


class Kind(Enum):
    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"
    PACKED = "packed"
    MASKED = "masked"


class Window(NamedTuple):
    """How many keys a query sees before and behind the one of its own place, None for all. The last query and the last
    key are of the same place, which is where kernels count from."""

    left: int | None = None
    right: int | None = None


FULL_WINDOW, CAUSAL_WINDOW, SELF_WINDOW = Window(), Window(None, 0), Window(0, 0)


class Block(NamedTuple):
    """Local query rows x local key rows. FULL: all pairs attend. CAUSAL: square, the i-th query attends to the
    first i + 1 keys. BAND: those of a window, in which every query has a key and every key a query. MASKED: any other
    case. The pairs attend for which all ``conditions`` hold, of those of a BAND no more is said than its window."""

    q_off: int
    q_len: int
    k_off: int
    k_len: int
    kind: Kind
    conditions: tuple[str, ...] = ()
    window: Window = FULL_WINDOW

    @property
    def query_rows(self) -> tuple[int, int]:
        """(offset, length)"""
        return self.q_off, self.q_len

    @property
    def key_rows(self) -> tuple[int, int]:
        """(offset, length)"""
        return self.k_off, self.k_len


class PackedCall(NamedTuple):
    """What one call of a kernel for many sequences takes (its cu_seqlens), all with one window.

    The queries [queries[i], queries[i + 1]) attend to the keys [keys[i], keys[i + 1]), as far as the window lets them.
    Rows that lie between two sequences are some of their own, without the others.
    """

    window: Window
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    kind: Kind = Kind.PACKED

    @property
    def query_rows(self) -> tuple[int, int]:
        """(offset, length) of all sequences together."""
        return is_nonempty((self.queries[0], self.queries[-1]))

    @property
    def key_rows(self) -> tuple[int, int]:
        """(offset, length) of all sequences together."""
        return is_nonempty((self.keys[0], self.keys[-1]))

    def runs(self) -> list[AttendedRun]:
        """Its sequences, without those that have only queries or only keys."""
        sides = zip(pairwise(self.queries), pairwise(self.keys))
        return [AttendedRun(q, k, self.window) for q, k in sides if q[0] < q[1] and k[0] < k[1]]

    @property
    def square(self) -> bool:
        """Whether each of its sequences has as many queries as keys."""
        return all(run.q[1] - run.q[0] == run.k[1] - run.k[0] for run in self.runs())


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Which kernel calls there are: one a block, or one for many sequences and one for each of the other blocks.

    Each attendable pair is in exactly one of ``blocks``, and in exactly one of ``packed`` and ``others``. ``blocks``
    ask nothing of kernels: none is a BAND, and those with the same ``q_off`` follow each other and have the same
    ``q_len``; all others have no query in common, but for those of keys behind padding. ``packed`` and ``others`` are
    for kernels that know windows.
    """

    packed: tuple[PackedCall, ...] = ()
    others: tuple[Block, ...] = ()
    cover: Callable[[], Iterable[Block]] = tuple
    """Makes ``blocks``."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Made when first asked for: of a window there are many."""
        return tuple(self.cover())


class AttendedRun(NamedTuple):
    """Queries and keys that attend to each other within a window; none of them is without any."""

    q: Range
    k: Range
    window: Window

    def can_use_window(self, window: Window) -> bool:
        """Whether the same pairs attend in another window, for a kernel as well (`supports_window`)."""
        if window == self.window:
            return True
        if self.q[1] - self.q[0] > self.k[1] - self.k[0] + 1:
            return False
        left = window.left == self.window.left or (
            self.window.left is None and window.left is not None and window.left >= self.k[1] - self.k[0] - 1
        )
        return left and (
            window.right == self.window.right
            or (self.window.right is None and window.right is not None and window.right >= self.q[1] - self.q[0] - 1)
        )


def tile_runs(tile: CellPair) -> list[AttendedRun] | None:
    """The pairs of a tile, if it has any; None if only the predicate knows them."""
    if not tile.left:
        return [AttendedRun(tile.q, tile.k, FULL_WINDOW)]
    if tile.band is None:
        return None
    return _band_runs(tile.q, tile.k, *tile.band)


def _band_runs(q: Range, k: Range, lower: int, upper: int) -> list[AttendedRun]:
    """The pairs with lower <= key - query <= upper, both counted from their beginnings."""
    rows, keys = q[1] - q[0], k[1] - k[0]
    # The queries that have a key, and of the keys those that have a query.
    first, behind = max(0, -upper), min(rows, keys - lower)
    if first >= behind or lower > upper:
        return []
    low, high = max(0, first + lower), min(keys, behind + upper)
    q, k = (q[0] + first, q[0] + behind), (k[0] + low, k[0] + high)
    n, m = behind - first, high - low
    lower, upper = lower + first - low, upper + first - low
    left, right = None if lower <= 1 - n else m - n - lower, None if upper >= m - 1 else upper - (m - n)
    window = Window(left, right)
    if n <= m + 1 or supports_window(window, n, m):
        return [AttendedRun(q, k, window)]
    # The queries that see the first key, those that see neither, or both, and those that see the last.
    last, no_first = 0 if right is None else n - 1 - right, n if left is None else n - m + left + 1
    cuts = sorted({0, n, *(cut for cut in (last, no_first) if 0 < cut < n)})
    return [run for a, b in pairwise(cuts) for run in _band_runs((q[0] + a, q[0] + b), k, lower + a, upper + a)]


def supports_window(window: Window, queries: int, keys: int) -> bool:
    """Whether FlashAttention takes a window of more queries than keys, by two at least, for what it is.

    It counts from the last key, and takes a right side of all keys or more for `keys`. The first of more queries than
    keys then see too few keys, or, without a left side, too many.
    """
    left, right = window
    if left is not None:
        return right is not None and right < keys
    return right is None or right < keys or right >= queries - 1


def split_run(run: AttendedRun) -> list[AttendedRun]:
    """Queries behind the first that sees all keys by themselves: what is left is causal, and one call with others."""
    left, right = run.window
    if left is not None or not right:
        return [run]
    every = run.q[1] - right
    return [AttendedRun((run.q[0], every), run.k, CAUSAL_WINDOW), AttendedRun((every, run.q[1]), run.k, FULL_WINDOW)]


def part_runs(tile: CellPair) -> list[AttendedRun] | None:
    """The runs of a tile's parts, or of itself if it has none; None if one of them is not known."""
    found = list[AttendedRun]()
    for part in tile.parts or (tile,):
        known = tile_runs(part)
        if known is None:
            return None
        found += known
    return found


def separate_runs(runs: list[AttendedRun] | None) -> list[AttendedRun] | None:
    """The runs of several cells as they are; None unless each is full or causal, and they share all queries or none."""
    if runs is None or any(run.window not in (FULL_WINDOW, CAUSAL_WINDOW) for run in runs):
        return None
    queries = list(dict.fromkeys(run.q for run in runs))
    return runs if all(a[1] <= b[0] for a, b in pairwise(queries)) else None


def has_masked(blocks: Sequence[Block]) -> bool:
    return any(block.kind is Kind.MASKED for block in blocks)


def block_of(run: AttendedRun) -> Block:
    """One block, whatever its window."""
    square = run.q[1] - run.q[0] == run.k[1] - run.k[0]
    kind = (
        Kind.FULL if run.window == FULL_WINDOW else Kind.CAUSAL if run.window == CAUSAL_WINDOW and square else Kind.BAND
    )
    return Block(*is_nonempty(run.q), *is_nonempty(run.k), kind, window=run.window)


def as_band(block: Block) -> Block:
    """The same as a BAND: documents tell its shape, which is another each time, and some kernels are built for one."""
    if block.kind is Kind.MASKED:
        return block
    return block._replace(
        kind=Kind.BAND, conditions=(), window=FULL_WINDOW if block.kind is Kind.FULL else CAUSAL_WINDOW
    )


def run_blocks(run: AttendedRun, left: tuple[str, ...]) -> Iterator[Block]:
    """Without a band."""
    if run.window == FULL_WINDOW:
        yield Block(*is_nonempty(run.q), *is_nonempty(run.k), Kind.FULL)
        return
    edge = run.k[1] - (run.q[1] - run.q[0])
    if run.k[0] < edge:
        yield Block(*is_nonempty(run.q), *is_nonempty((run.k[0], edge)), Kind.FULL)
    yield Block(*is_nonempty(run.q), *is_nonempty((edge, run.k[1])), Kind.CAUSAL, left)


def packed_calls(runs: Sequence[AttendedRun]) -> list[PackedCall]:
    """The runs of each window, in few calls."""
    runs = [one for run in runs for one in _split_single_rows(run)]
    own: dict[Window, list[AttendedRun]] = {}
    for run in runs:
        own.setdefault(run.window, []).append(run)
    windows = sorted(own, key=lambda window: window.count(None))  # the widest last
    narrowest: dict[Window, list[AttendedRun]] = {window: [] for window in windows}
    for run in runs:
        narrowest[next(window for window in windows if run.can_use_window(window))].append(run)
    calls = [_group_calls(own)] if own == narrowest else [_group_calls(narrowest), _group_calls(own)]
    return min(calls, key=len)


def _split_single_rows(run: AttendedRun) -> list[AttendedRun]:
    """The queries of a few that see one key each by themselves: any window will do for them."""
    rows = run.q[1] - run.q[0]
    if run.window != SELF_WINDOW or rows > LONG_ROWS or rows != run.k[1] - run.k[0]:
        return [run]
    return [
        AttendedRun((run.q[0] + i, run.q[0] + i + 1), (run.k[0] + i, run.k[0] + i + 1), FULL_WINDOW)
        for i in range(rows)
    ]


def _group_calls(of: Mapping[Window, Sequence[AttendedRun]]) -> list[PackedCall]:
    return [merge_runs(runs, window) for window, alike in of.items() for runs in _chain_runs(alike)]


def _chain_runs(runs: Sequence[AttendedRun]) -> list[list[AttendedRun]]:
    """Runs in order of their queries, as few lists in which each follows on the one before it in keys as well.

    A document that lies in both of a rank's chunks is several runs, and all documents behind it would be a call more.
    """
    chains = list[list[AttendedRun]]()
    for run in runs:
        fitting = [chain for chain in chains if chain[-1].q[1] <= run.q[0] and chain[-1].k[1] <= run.k[0]]
        if fitting:
            max(fitting, key=lambda chain: chain[-1].k[1]).append(run)
        else:
            chains.append([run])
    return chains


def merge_runs(runs: Sequence[AttendedRun], window: Window) -> PackedCall:
    """Runs that this window fits, of which each follows on the one before it in queries and in keys."""
    queries, keys = list[int](), list[int]()
    for run in runs:
        for q, k in ((run.q[0], keys[-1] if keys else run.k[0]), (run.q[0], run.k[0]), (run.q[1], run.k[1])):
            if not queries or (q, k) != (queries[-1], keys[-1]):
                queries.append(q)
                keys.append(k)
    return PackedCall(window, tuple(queries), tuple(keys))


def count_pairs(plan: BlockPlan) -> int:
    """How many (query, key) pairs attend. All of a MASKED block count: only its predicate knows which do."""
    return sum(_count_attended(run, run.q[1]) for run in _single_calls(plan))


def count_pairs_before(plan: BlockPlan, rows: Sequence[int]) -> list[int]:
    """For each of these query rows, in order: how many pairs of `count_pairs` are of queries before it."""
    ended, inside = [0] * (len(rows) + 1), [0] * len(rows)
    for run in _single_calls(plan):
        begin, end = bisect_right(rows, run.q[0]), bisect_left(rows, run.q[1])
        for i in range(begin, end):
            inside[i] += _count_attended(run, rows[i])
        ended[end] += _count_attended(run, run.q[1])
    return [before + part for before, part in zip(accumulate(ended), inside)]


def _single_calls(plan: BlockPlan) -> Iterator[AttendedRun]:
    """The calls for one sequence each; of a MASKED one as if all pairs attended."""
    for b in plan.others:
        yield AttendedRun((b.q_off, b.q_off + b.q_len), (b.k_off, b.k_off + b.k_len), _block_window(b))
    for call in plan.packed:
        for q, k in zip(pairwise(call.queries), pairwise(call.keys)):
            yield AttendedRun(q, k, call.window)


def _block_window(block: Block) -> Window:
    return CAUSAL_WINDOW if block.kind is Kind.CAUSAL else block.window


def _count_attended(run: AttendedRun, row: int) -> int:
    """Pairs of the queries before the row, one of the run's; its window counts from the last query and key."""
    queries, keys, (left, right) = row - run.q[0], run.k[1] - run.k[0], run.window
    shift = keys - (run.q[1] - run.q[0])
    most = queries * keys if right is None else _count_reached(queries, keys, shift + right)
    return most if left is None else most - _count_reached(queries, keys, shift - left - 1)


def _count_reached(queries: int, keys: int, distance: int) -> int:
    """Pairs in which the key's number is at most the query's and so many more."""

    def below(stop: int) -> int:  # the sum over x < stop of x, but at least 0 and at most all keys
        every = max(stop - keys, 0)
        return (max(stop, 0) - every) * (min(max(stop, 0), keys) - 1) // 2 + every * keys

    return below(queries + distance + 1) - below(distance + 1)


def is_nonempty(part: Range) -> tuple[int, int]:
    return part[0], part[1] - part[0]
