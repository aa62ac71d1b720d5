"""Define the elements of a plan: blocks, packed calls, and runs that become either.

    the window k <= q, q - k < 3 over 9 rows    one run: q (0, 9), k (0, 9), Window(left=2, right=0)
    for a kernel that supports windows          one BAND block
    for other kernels                           MASKED blocks, or FULL and CAUSAL ones if the window has no left limit

A run is a rectangle of queries and keys with a window, which determines all pairs that attend. Several runs, such as
packed documents, are one packed call, in which each is a sequence: cu_seqlens has the boundaries. A tile is a rectangle
of the mask that is planned as one, with a band if the pairs are lower <= key - query <= upper (``cells.py``). Offsets
and ranges are of the rows of local tensors.
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
    PACKED = "packed"  # a call for packed sequences
    MASKED = "masked"  # conditions are evaluated for each pair


class Window(NamedTuple):
    """Numbers of keys that a query attends to before and after its own position; None for no limit.

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

    @staticmethod
    def of(q: Range, k: Range, kind: Kind, conditions: tuple[str, ...] = (), window: Window = FULL_WINDOW) -> Block:
        """Return the block of the query rows and key rows in these ranges [low, high)."""
        return Block(q[0], q[1] - q[0], k[0], k[1] - k[0], kind, conditions, window)

    @property
    def query_rows(self) -> tuple[int, int]:
        """Return the query rows as (offset, length)."""
        return self.q_off, self.q_len

    @property
    def key_rows(self) -> tuple[int, int]:
        """Return the key rows as (offset, length)."""
        return self.k_off, self.k_len

    @property
    def query_range(self) -> Range:
        """Return the query rows as [low, high)."""
        return self.q_off, self.q_off + self.q_len

    @property
    def key_range(self) -> Range:
        """Return the key rows as [low, high)."""
        return self.k_off, self.k_off + self.k_len


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
        return self.queries[0], self.queries[-1] - self.queries[0]

    @property
    def key_rows(self) -> tuple[int, int]:
        """Return the key rows of all sequences as (offset, length)."""
        return self.keys[0], self.keys[-1] - self.keys[0]

    def runs(self) -> list[AttendedRun]:
        """Return the sequences that have both queries and keys, as runs with the window of the call."""
        sides = zip(pairwise(self.queries), pairwise(self.keys))
        return [AttendedRun(q, k, self.window) for q, k in sides if q[0] < q[1] and k[0] < k[1]]

    @property
    def is_square(self) -> bool:
        """Return True if each sequence has equal numbers of queries and keys, as some kernels require."""
        return all(run.num_queries == run.num_keys for run in self.runs())


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
    create_blocks: Callable[[], Iterable[Block]] = tuple  # a function that returns ``blocks``

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks for kernels without windows, created on first use: a window has many of them."""
        return tuple(self.create_blocks())


class AttendedRun(NamedTuple):
    """Queries and keys that attend to each other within a window; each of them has a partner."""

    q: Range  # query rows
    k: Range  # key rows
    window: Window  # window of the queries

    @property
    def num_queries(self) -> int:
        """Return the number of query rows."""
        return self.q[1] - self.q[0]

    @property
    def num_keys(self) -> int:
        """Return the number of key rows."""
        return self.k[1] - self.k[0]

    def can_use_window(self, window: Window) -> bool:
        """Return True if the same pairs of the run attend in another window, so that it can join a call with it.

        In a document of 3 rows, a window with 2 or more keys to the left has the same effect as one without a left
        limit. False for at least two more queries than keys, for which kernels support only some windows
        (`can_apply_window`), unless it is the run's own window.
        """
        if window == self.window:
            return True
        if self.num_queries > self.num_keys + 1:
            return False
        left, right = self.window
        is_same_left = _has_same_effect(window.left, left, self.num_keys - 1)
        return is_same_left and _has_same_effect(window.right, right, self.num_queries - 1)


def _has_same_effect(limit: int | None, run_limit: int | None, farthest: int) -> bool:
    """Return True if a limit, the left or right one of a window, allows the same keys of a run as the run's own limit.

    Args:
        limit: Limit of another window; None for no limit.
        run_limit: Limit of the run's own window.
        farthest: Largest distance from a query of the run to a key on this side.
    """
    return limit == run_limit or (run_limit is None and limit is not None and limit >= farthest)


def tile_runs(tile: CellPair) -> list[AttendedRun] | None:
    """Return the attending pairs of a tile as runs (rectangles with a window); None if no window describes them.

    The band of a tile states that the pairs with band[0] <= key - query <= band[1] attend.
    """
    if not tile.undecided:  # no condition of the mask is open: all pairs attend
        return [AttendedRun(tile.q, tile.k, FULL_WINDOW)]
    return None if tile.band is None else _band_runs(tile.q, tile.k, *tile.band)


def _band_runs(q: Range, k: Range, lower: int, upper: int) -> list[AttendedRun]:
    """Return the pairs with lower <= key - query <= upper as runs: rectangles with a window.

    Keys and queries count from the first ones of their ranges. `k <= q` and `q - k < 3` on 9 x 9 rows (lower -2, upper
    0) is one run with Window(left=2, right=0). There are several if kernels do not support the window of one run.
    """
    if lower > upper:
        return []
    rows, keys = q[1] - q[0], k[1] - k[0]
    # Keep only the queries [first, end) that attend to a key, and the keys [low, high) to which a query attends.
    first, end = max(0, -upper), min(rows, keys - lower)
    if first >= end:
        return []
    low, high = max(0, first + lower), min(keys, end + upper)
    q, k = (q[0] + first, q[0] + end), (k[0] + low, k[0] + high)
    rows, keys = end - first, high - low
    lower, upper = lower + first - low, upper + first - low  # key - query of the new numbers: key - low, query - first
    # A window counts keys around the position of the query, and the last query has the position of the last key. Query
    # i has the position of key i + keys - rows, and attends to the keys from i + lower to i + upper. A limit is None if
    # it excludes no key.
    left = None if lower <= 1 - rows else keys - rows - lower
    right = None if upper >= keys - 1 else upper - (keys - rows)
    window = Window(left, right)
    # With at most one query more than keys, all queries have a key's position or the one before the first key.
    if rows <= keys + 1 or can_apply_window(window, rows, keys):
        return [AttendedRun(q, k, window)]
    # Cut at the first query that attends to the last key, and at the first one that does not attend to the first key:
    # the windows of the parts have fewer limits. For `k <= q`, `q - k <= 2` on 4 queries and 2 keys, cut at 1 and 3.
    first_at_last_key = 0 if right is None else rows - 1 - right
    first_without_first_key = rows if left is None else rows - keys + left + 1
    cuts = sorted({0, rows, *(cut for cut in (first_at_last_key, first_without_first_key) if 0 < cut < rows)})
    return [run for a, b in pairwise(cuts) for run in _band_runs((q[0] + a, q[0] + b), k, lower + a, upper + a)]


def can_apply_window(window: Window, queries: int, keys: int) -> bool:
    """Return True if FlashAttention applies a window correctly to at least two more queries than keys.

    A window counts from the end: the last query has the position of the last key, so the first queries are before the
    first key, at positions down to keys - queries. What FlashAttention does with a right limit:

        less than ``keys``                           it is applied as it is
        ``keys`` or more, or None, and a left limit  it becomes ``keys``: the first queries get too few keys
        ``keys`` or more, without a left limit       it becomes None: all queries get all keys, which is right only if
                                                     the limit excludes none, as 3 or more for 4 queries and 2 keys

    Args:
        window: The window.
        queries: The number of queries.
        keys: The number of keys, at most queries - 2.
    """
    left, right = window
    if right is not None and right < keys:
        return True
    return left is None and (right is None or right >= queries - 1)


def split_run(run: AttendedRun) -> list[AttendedRun]:
    """Return a run whose window has only a right limit above 0 as two runs: a causal and a full one.

    The last `right` queries attend to all keys. The two runs can share packed calls with other runs, and need only
    FULL and CAUSAL blocks. Other runs are returned unchanged.
    """
    left, right = run.window
    if left is not None or not right:
        return [run]
    # The causal run ends with the query whose right limit is exactly the last key. There is such a query, since a right
    # limit that excludes no key would be None.
    first_full = run.q[1] - right
    causal_run = AttendedRun((run.q[0], first_full), run.k, CAUSAL_WINDOW)
    return [causal_run, AttendedRun((first_full, run.q[1]), run.k, FULL_WINDOW)]


def part_runs(tile: CellPair) -> list[AttendedRun] | None:
    """Return the runs of all parts of a tile, or of a tile without parts; None if no window describes one of them."""
    runs = list[AttendedRun]()
    for part in tile.parts or (tile,):
        known_runs = tile_runs(part)
        if known_runs is None:
            return None
        runs += known_runs
    return runs


def can_run_without_windows(runs: Sequence[AttendedRun]) -> bool:
    """Return True if FULL and CAUSAL blocks, which all kernels support, can compute the runs.

    Each run must be full or causal. Two runs must have the same queries or share none, since the partial results of
    blocks with different numbers of queries are not merged (`BlockPlan`). Runs are in ascending order of their queries.
    """
    query_ranges = list(dict.fromkeys(run.q for run in runs))
    is_plain = all(run.window in (FULL_WINDOW, CAUSAL_WINDOW) for run in runs)
    return is_plain and all(before[1] <= after[0] for before, after in pairwise(query_ranges))


def halve_block(block: Block) -> list[Block]:
    """Return the two halves of a MASKED block, cut across its longer side; both have its conditions."""
    q, k = block.query_range, block.key_range
    if block.q_len >= block.k_len:
        cut = q[0] + block.q_len // 2
        halves = [((q[0], cut), k), ((cut, q[1]), k)]
    else:
        cut = k[0] + block.k_len // 2
        halves = [(q, (k[0], cut)), (q, (cut, k[1]))]
    return [Block.of(*half, block.kind, block.conditions) for half in halves]


def has_masked(blocks: Sequence[Block]) -> bool:
    """Return True if a block is MASKED: its predicate must be evaluated for each pair, so planners try windows."""
    return any(block.kind is Kind.MASKED for block in blocks)


def block_of(run: AttendedRun) -> Block:
    """Return a run as one block: FULL, CAUSAL, or for kernels that support its window a BAND."""
    if run.window == FULL_WINDOW:
        return Block.of(run.q, run.k, Kind.FULL)
    is_causal = run.window == CAUSAL_WINDOW and run.num_queries == run.num_keys
    return Block.of(run.q, run.k, Kind.CAUSAL if is_causal else Kind.BAND, window=run.window)


def as_band(block: Block) -> Block:
    """Return a FULL or CAUSAL block as a BAND, and a MASKED one unchanged.

    Planners call it for blocks of documents, whose shapes change with each call. FULL and CAUSAL kernels may be built
    per shape, which is slow then; kernels for a BAND are not.
    """
    if block.kind is Kind.MASKED:
        return block
    window = FULL_WINDOW if block.kind is Kind.FULL else CAUSAL_WINDOW
    return block._replace(kind=Kind.BAND, conditions=(), window=window)


def run_blocks(run: AttendedRun, conditions: tuple[str, ...]) -> Iterator[Block]:
    """Yield the FULL and CAUSAL blocks of a run whose window is full or causal, for kernels without windows.

    Args:
        run: The run.
        conditions: The conditions of a CAUSAL block, for kernels that evaluate them.
    """
    if run.window == FULL_WINDOW:
        yield Block.of(run.q, run.k, Kind.FULL)
        return
    square_begin = run.k[1] - run.num_queries  # all queries attend to the keys before it; those from it on are square
    if run.k[0] < square_begin:
        yield Block.of(run.q, (run.k[0], square_begin), Kind.FULL)
    yield Block.of(run.q, (square_begin, run.k[1]), Kind.CAUSAL, conditions)


def packed_calls(runs: Sequence[AttendedRun]) -> list[PackedCall]:
    """Return few packed calls (one kernel call for several sequences) that compute all runs.

    A call has one window for all of its sequences. Either each run keeps its own window, or each gets the narrowest
    window of all runs in which the same pairs attend; the choice with fewer calls is returned.
    """
    runs = [row_run for run in runs for row_run in _split_single_rows(run)]
    by_own_window: dict[Window, list[AttendedRun]] = {}
    for run in runs:
        by_own_window.setdefault(run.window, []).append(run)
    windows = sorted(by_own_window, key=lambda window: window.count(None))  # windows without limits last
    by_narrowest: dict[Window, list[AttendedRun]] = {window: [] for window in windows}
    for run in runs:
        narrowest = next(window for window in windows if run.can_use_window(window))
        by_narrowest[narrowest].append(run)
    if by_own_window == by_narrowest:
        return _group_calls(by_own_window)
    return min(_group_calls(by_narrowest), _group_calls(by_own_window), key=len)


def _split_single_rows(run: AttendedRun) -> list[AttendedRun]:
    """Return a run in which each query attends only to its own key, as in one-token documents, as runs of one row.

    Any window allows the only pair of a row, so that these runs can join a packed call with another window. A run of
    more than LONG_ROWS rows, which would be too many sequences, and other runs are returned unchanged.
    """
    rows = run.num_queries
    if run.window != SELF_WINDOW or rows > LONG_ROWS or rows != run.num_keys:
        return [run]
    pairs = zip(range(*run.q), range(*run.k))
    return [AttendedRun((query, query + 1), (key, key + 1), FULL_WINDOW) for query, key in pairs]


def _group_calls(runs_by_window: Mapping[Window, Sequence[AttendedRun]]) -> list[PackedCall]:
    """Return packed calls that compute all runs; the key of a dict entry is the window of the calls of its runs."""
    return [merge_runs(chain, window) for window, runs in runs_by_window.items() for chain in _chain_runs(runs)]


def _chain_runs(runs: Sequence[AttendedRun]) -> list[list[AttendedRun]]:
    """Group runs, sorted by queries, into few lists in which queries and keys ascend, one list per packed call.

    A document in both chunks of a zigzag rank is several runs, whose keys do not ascend. So that the runs after it can
    join an earlier list, all lists are candidates for a run, not only the list of the previous run.
    """
    chains = list[list[AttendedRun]]()
    for run in runs:
        fitting = [chain for chain in chains if chain[-1].q[1] <= run.q[0] and chain[-1].k[1] <= run.k[0]]
        if fitting:  # the list whose last key is the nearest, so that others remain open for runs with earlier keys
            max(fitting, key=lambda chain: chain[-1].k[1]).append(run)
        else:
            chains.append([run])
    return chains


def merge_runs(runs: Sequence[AttendedRun], window: Window) -> PackedCall:
    """Return one packed call with this window for runs whose queries and keys ascend: each is a sequence.

    Queries between two runs become a sequence without keys, and keys between them one without queries. The runs with
    queries 0 to 2 and keys 0 to 2, and queries 5 to 6 and keys 3 to 4, have the boundaries (0, 3, 5, 7) of queries and
    (0, 3, 3, 5) of keys.
    """
    boundaries = [(runs[0].q[0], runs[0].k[0])]  # (first query, first key) of each sequence, then the ends
    for run in runs:
        last_key = boundaries[-1][1]
        for boundary in ((run.q[0], last_key), (run.q[0], run.k[0]), (run.q[1], run.k[1])):
            if boundary != boundaries[-1]:
                boundaries.append(boundary)
    queries, keys = zip(*boundaries)
    return PackedCall(window, queries, keys)


def count_pairs(plan: BlockPlan) -> int:
    """Return the number of (query, key) pairs that attend, to count FLOPs; all pairs of a MASKED block count."""
    return sum(_count_attended(run, run.q[1]) for run in _plan_runs(plan))


def count_pairs_before(plan: BlockPlan, rows: Sequence[int]) -> list[int]:
    """Return the number of attending pairs of all queries before each of these sorted rows, to balance work."""
    # A run counts in two ways: for the rows inside of it, its pairs before the row; for all later rows, all its pairs.
    # The latter are added to the first row at or after its end, and accumulated over the rows at the end.
    inside_pairs, ended_pairs = [0] * len(rows), [0] * (len(rows) + 1)
    for run in _plan_runs(plan):
        begin, end = bisect_right(rows, run.q[0]), bisect_left(rows, run.q[1])
        for i in range(begin, end):
            inside_pairs[i] += _count_attended(run, rows[i])
        ended_pairs[end] += _count_attended(run, run.q[1])
    return [ended + inside for ended, inside in zip(accumulate(ended_pairs), inside_pairs)]


def _plan_runs(plan: BlockPlan) -> Iterator[AttendedRun]:
    """Yield the blocks and the sequences of packed calls of a plan as runs, to count pairs; MASKED blocks as full."""
    for block in plan.others:
        window = CAUSAL_WINDOW if block.kind is Kind.CAUSAL else block.window
        yield AttendedRun(block.query_range, block.key_range, window)
    for call in plan.packed:
        yield from call.runs()


def _count_attended(run: AttendedRun, row: int) -> int:
    """Return the number of pairs in a run's window whose query is before ``row``.

    They are the pairs within the right limit, without those beyond the left limit. The window counts from the position
    of the last query, which is that of the last key.
    """
    queries, keys, (left, right) = row - run.q[0], run.num_keys, run.window
    shift = keys - run.num_queries  # the key at the position of query i is i + shift
    allowed_right = queries * keys if right is None else _count_reached(queries, keys, shift + right)
    beyond_left = 0 if left is None else _count_reached(queries, keys, shift - left - 1)
    return allowed_right - beyond_left


def _count_reached(queries: int, keys: int, distance: int) -> int:
    """Return the number of pairs whose key index is at most the query index plus ``distance``.

    Query i has i + distance + 1 such keys, clamped to [0, keys].
    """

    def sum_clamped(stop: int) -> int:
        """Return the sum of all integers x < stop, each clamped to [0, keys]."""
        unclamped = min(max(stop, 0), keys)  # the summands 0, 1, .., unclamped - 1
        clamped = max(stop - keys, 0)  # the number of summands that count as ``keys``
        return unclamped * (unclamped - 1) // 2 + clamped * keys

    return sum_clamped(queries + distance + 1) - sum_clamped(distance + 1)
