"""Define the elements of a plan: blocks, packed calls, and runs that become either.

A run is a tile whose pairs are known: queries, keys and a window. For a kernel that supports windows it is one call, or
a part of one; for other kernels it is full, causal or masked blocks.
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
    """Kind of a block: the form of its mask."""

    FULL = "full"  # all pairs attend
    CAUSAL = "causal"  # square; the i-th query attends to the first i + 1 keys
    BAND = "band"  # the pairs of a window attend
    PACKED = "packed"  # A call for packed sequences
    MASKED = "masked"  # conditions are evaluated for each pair


class Window(NamedTuple):
    """Numbers of keys that a query sees before and after its own position; None for no limit.

    The last query and the last key have the same position, from which kernels count.
    """

    left: int | None = None  # number of keys before the query's position
    right: int | None = None  # number of keys after the query's position


FULL_WINDOW, CAUSAL_WINDOW, SELF_WINDOW = Window(), Window(None, 0), Window(0, 0)


class Block(NamedTuple):
    """A block of local query rows x local key rows.

    The pairs attend for which all ``conditions`` hold; the window determines the pairs of a BAND, in which every query
    has a key and every key a query.
    """

    q_off: int  # offset of the first query row
    q_len: int  # number of query rows
    k_off: int  # offset of the first key row
    k_len: int  # number of key rows
    kind: Kind  # form of the mask
    conditions: tuple[str, ...] = ()  # predicates that must be evaluated for each pair
    window: Window = FULL_WINDOW  # window of a BAND

    @property
    def query_rows(self) -> tuple[int, int]:
        """Return the query rows as (offset, length)."""
        return self.q_off, self.q_len

    @property
    def key_rows(self) -> tuple[int, int]:
        """Return the key rows as (offset, length)."""
        return self.k_off, self.k_len


class PackedCall(NamedTuple):
    """Arguments (cu_seqlens) of one kernel call for packed sequences with one window.

    The queries [queries[i], queries[i + 1]) attend to the keys [keys[i], keys[i + 1]) within the window. Rows between
    two sequences are sequences of their own that have only queries or only keys.
    """

    window: Window  # window of all sequences
    queries: tuple[int, ...]  # boundaries of the sequences' query rows
    keys: tuple[int, ...]  # boundaries of the sequences' key rows
    kind: Kind = Kind.PACKED  # always PACKED

    @property
    def query_rows(self) -> tuple[int, int]:
        """Return the query rows of all sequences as (offset, length)."""
        return as_offset_length((self.queries[0], self.queries[-1]))

    @property
    def key_rows(self) -> tuple[int, int]:
        """Return the key rows of all sequences as (offset, length)."""
        return as_offset_length((self.keys[0], self.keys[-1]))

    def runs(self) -> list[AttendedRun]:
        """Return the sequences that have both queries and keys."""
        sides = zip(pairwise(self.queries), pairwise(self.keys))
        return [AttendedRun(q, k, self.window) for q, k in sides if q[0] < q[1] and k[0] < k[1]]

    @property
    def square(self) -> bool:
        """Return True if each sequence has the same number of queries and keys."""
        return all(run.q[1] - run.q[0] == run.k[1] - run.k[0] for run in self.runs())


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Kernel calls of one attention: one per block, or packed calls and one per other block.

    Each attendable pair is in exactly one of ``blocks``, and in exactly one of ``packed`` and ``others``. ``blocks``
    work with every kernel: none is a BAND. Blocks with the same ``q_off`` are consecutive and have the same ``q_len``;
    other blocks share no query, except for keys after padding. ``packed`` and ``others`` are for kernels that support
    windows.
    """

    packed: tuple[PackedCall, ...] = ()  # calls for packed sequences
    others: tuple[Block, ...] = ()  # blocks that are in no packed call
    cover: Callable[[], Iterable[Block]] = tuple  # create ``blocks``

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks, created on first use, because a window has many."""
        return tuple(self.cover())


class AttendedRun(NamedTuple):
    """Queries and keys that attend to each other within a window; each of them has a partner."""

    q: Range  # query rows
    k: Range  # key rows
    window: Window  # window of the queries

    def can_use_window(self, window: Window) -> bool:
        """Return True if the same pairs attend in another window that kernels support (`supports_window`)."""
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
    """Return the pairs of a tile as runs; None if only the predicate determines them."""
    if not tile.left:
        return [AttendedRun(tile.q, tile.k, FULL_WINDOW)]
    if tile.band is None:
        return None
    return _band_runs(tile.q, tile.k, *tile.band)


def _band_runs(q: Range, k: Range, lower: int, upper: int) -> list[AttendedRun]:
    """Return the pairs with lower <= key - query <= upper, relative to the first key and query, as runs."""
    rows, keys = q[1] - q[0], k[1] - k[0]
    # The queries that have a key, and the keys that have a query.
    first, end = max(0, -upper), min(rows, keys - lower)
    if first >= end or lower > upper:
        return []
    low, high = max(0, first + lower), min(keys, end + upper)
    q, k = (q[0] + first, q[0] + end), (k[0] + low, k[0] + high)
    n, m = end - first, high - low
    lower, upper = lower + first - low, upper + first - low
    left, right = None if lower <= 1 - n else m - n - lower, None if upper >= m - 1 else upper - (m - n)
    window = Window(left, right)
    if n <= m + 1 or supports_window(window, n, m):
        return [AttendedRun(q, k, window)]
    # Queries that see the first key; those that see neither or both ends; those that see the last key.
    last, no_first = 0 if right is None else n - 1 - right, n if left is None else n - m + left + 1
    cuts = sorted({0, n, *(cut for cut in (last, no_first) if 0 < cut < n)})
    return [run for a, b in pairwise(cuts) for run in _band_runs((q[0] + a, q[0] + b), k, lower + a, upper + a)]


def supports_window(window: Window, queries: int, keys: int) -> bool:
    """Return True if FlashAttention applies a window correctly to at least two more queries than keys.

    FlashAttention counts from the last key, and clips the right side to ``keys``. The first queries of more queries
    than keys then see too few keys, or, without a left limit, too many.

    Args:
        window: The window.
        queries: The number of queries.
        keys: The number of keys, at most queries - 2.
    """
    left, right = window
    if left is not None:
        return right is not None and right < keys
    return right is None or right < keys or right >= queries - 1


def split_run(run: AttendedRun) -> list[AttendedRun]:
    """Split off the queries that see all keys.

    The remaining run is causal, and can share a call with others.
    """
    left, right = run.window
    if left is not None or not right:
        return [run]
    every = run.q[1] - right
    return [AttendedRun((run.q[0], every), run.k, CAUSAL_WINDOW), AttendedRun((every, run.q[1]), run.k, FULL_WINDOW)]


def part_runs(tile: CellPair) -> list[AttendedRun] | None:
    """Return the runs of a tile's parts, or of the tile without parts; None if one is unknown."""
    found = list[AttendedRun]()
    for part in tile.parts or (tile,):
        known = tile_runs(part)
        if known is None:
            return None
        found += known
    return found


def separate_runs(runs: list[AttendedRun] | None) -> list[AttendedRun] | None:
    """Return the runs of several cells unchanged if blocks without windows can compute them, else None.

    Each must be full or causal, and two runs must share all queries or none.
    """
    if runs is None or any(run.window not in (FULL_WINDOW, CAUSAL_WINDOW) for run in runs):
        return None
    queries = list(dict.fromkeys(run.q for run in runs))
    return runs if all(a[1] <= b[0] for a, b in pairwise(queries)) else None


def has_masked(blocks: Sequence[Block]) -> bool:
    """Return True if a block is MASKED."""
    return any(block.kind is Kind.MASKED for block in blocks)


def block_of(run: AttendedRun) -> Block:
    """Return a run as one block, with any window."""
    square = run.q[1] - run.q[0] == run.k[1] - run.k[0]
    kind = (
        Kind.FULL if run.window == FULL_WINDOW else Kind.CAUSAL if run.window == CAUSAL_WINDOW and square else Kind.BAND
    )
    return Block(*as_offset_length(run.q), *as_offset_length(run.k), kind, window=run.window)


def as_band(block: Block) -> Block:
    """Return a FULL or CAUSAL block as a BAND.

    Its shape depends on the documents and changes with each call, which is slow in kernels that are built per shape.
    """
    if block.kind is Kind.MASKED:
        return block
    return block._replace(
        kind=Kind.BAND, conditions=(), window=FULL_WINDOW if block.kind is Kind.FULL else CAUSAL_WINDOW
    )


def run_blocks(run: AttendedRun, left: tuple[str, ...]) -> Iterator[Block]:
    """Yield the FULL and CAUSAL blocks of a run."""
    if run.window == FULL_WINDOW:
        yield Block(*as_offset_length(run.q), *as_offset_length(run.k), Kind.FULL)
        return
    edge = run.k[1] - (run.q[1] - run.q[0])
    if run.k[0] < edge:
        yield Block(*as_offset_length(run.q), *as_offset_length((run.k[0], edge)), Kind.FULL)
    yield Block(*as_offset_length(run.q), *as_offset_length((edge, run.k[1])), Kind.CAUSAL, left)


def packed_calls(runs: Sequence[AttendedRun]) -> list[PackedCall]:
    """Return the runs of each window in few packed calls."""
    runs = [one for run in runs for one in _split_single_rows(run)]
    own: dict[Window, list[AttendedRun]] = {}
    for run in runs:
        own.setdefault(run.window, []).append(run)
    windows = sorted(own, key=lambda window: window.count(None))  # the widest windows last
    narrowest: dict[Window, list[AttendedRun]] = {window: [] for window in windows}
    for run in runs:
        narrowest[next(window for window in windows if run.can_use_window(window))].append(run)
    calls = [_group_calls(own)] if own == narrowest else [_group_calls(narrowest), _group_calls(own)]
    return min(calls, key=len)


def _split_single_rows(run: AttendedRun) -> list[AttendedRun]:
    """Split a short run whose queries see one key each into its rows, which fit any window."""
    rows = run.q[1] - run.q[0]
    if run.window != SELF_WINDOW or rows > LONG_ROWS or rows != run.k[1] - run.k[0]:
        return [run]
    return [
        AttendedRun((run.q[0] + i, run.q[0] + i + 1), (run.k[0] + i, run.k[0] + i + 1), FULL_WINDOW)
        for i in range(rows)
    ]


def _group_calls(of: Mapping[Window, Sequence[AttendedRun]]) -> list[PackedCall]:
    """Return the packed calls of the runs of each window."""
    return [merge_runs(runs, window) for window, same_window in of.items() for runs in _chain_runs(same_window)]


def _chain_runs(runs: Sequence[AttendedRun]) -> list[list[AttendedRun]]:
    """Group runs, sorted by queries, into few lists in which both queries and keys ascend.

    A document in both chunks of a rank is several runs. Without the grouping, all documents after it would need another
    call.
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
    """Merge runs with ascending queries and keys, which fit the window, into one packed call."""
    queries, keys = list[int](), list[int]()
    for run in runs:
        for q, k in ((run.q[0], keys[-1] if keys else run.k[0]), (run.q[0], run.k[0]), (run.q[1], run.k[1])):
            if not queries or (q, k) != (queries[-1], keys[-1]):
                queries.append(q)
                keys.append(k)
    return PackedCall(window, tuple(queries), tuple(keys))


def count_pairs(plan: BlockPlan) -> int:
    """Return the number of attending (query, key) pairs; all pairs of a MASKED block count."""
    return sum(_count_attended(run, run.q[1]) for run in _single_calls(plan))


def count_pairs_before(plan: BlockPlan, rows: Sequence[int]) -> list[int]:
    """Return, for each of these sorted query rows, the number of pairs of queries before it."""
    ended, inside = [0] * (len(rows) + 1), [0] * len(rows)
    for run in _single_calls(plan):
        begin, end = bisect_right(rows, run.q[0]), bisect_left(rows, run.q[1])
        for i in range(begin, end):
            inside[i] += _count_attended(run, rows[i])
        ended[end] += _count_attended(run, run.q[1])
    return [before + part for before, part in zip(accumulate(ended), inside)]


def _single_calls(plan: BlockPlan) -> Iterator[AttendedRun]:
    """Yield the blocks and the sequences of packed calls as runs; MASKED blocks count as full."""
    for b in plan.others:
        yield AttendedRun((b.q_off, b.q_off + b.q_len), (b.k_off, b.k_off + b.k_len), _block_window(b))
    for call in plan.packed:
        for q, k in zip(pairwise(call.queries), pairwise(call.keys)):
            yield AttendedRun(q, k, call.window)


def _block_window(block: Block) -> Window:
    return CAUSAL_WINDOW if block.kind is Kind.CAUSAL else block.window


def _count_attended(run: AttendedRun, row: int) -> int:
    """Count the pairs of a run's queries before ``row``; the window counts from the last query and key."""
    queries, keys, (left, right) = row - run.q[0], run.k[1] - run.k[0], run.window
    shift = keys - (run.q[1] - run.q[0])
    most = queries * keys if right is None else _count_reached(queries, keys, shift + right)
    return most if left is None else most - _count_reached(queries, keys, shift - left - 1)


def _count_reached(queries: int, keys: int, distance: int) -> int:
    """Count the pairs whose key index is at most the query index plus ``distance``."""

    def below(stop: int) -> int:  # the sum over x < stop of x, clamped to [0, keys]
        """Return the sum over x < stop of x, clamped to [0, keys]."""
        every = max(stop - keys, 0)
        return (max(stop, 0) - every) * (min(max(stop, 0), keys) - 1) // 2 + every * keys

    return below(queries + distance + 1) - below(distance + 1)


def as_offset_length(part: Range) -> tuple[int, int]:
    """Convert a range (low, high) to (offset, length)."""
    return part[0], part[1] - part[0]
