"""Deals the chunks of a sequence to ranks, so that all of them attend to about as many pairs.

    work of 8 chunks   40 30 20 10 | 1 1 1 1        two ranks, four chunks each
    contiguous        100          | 4              rank 0 has 1.92 times the mean
    dealt              40 10 1 1   | 30 20 1 1      by work, each to the rank that has least and still has room; then
                                                    the busiest exchanges chunks with others, if it has too much

Every rank holds as many rows as without: its run of the sequence's new order. Chunks at either end of the sequence may
have to keep their place: where it is padded, and where values of the program are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .pieces import Ints

BALANCE_TOLERANCE = 1.05
"""The work of the busiest rank over the mean from which on nothing is cut further."""
MAX_CHUNKS, CHUNK_ROWS, MIN_CHUNKS = 64, 128, 4
"""A rank has at most MOST_CHUNKS chunks, and more than FEW_CHUNKS only if they have at least so many rows."""

EXCHANGE_PARTNERS, MAX_EXCHANGES = 8, 4
"""How many of the ranks with least work a chunk may be exchanged with, and how often, for each rank."""

WorkBefore = Callable[[Sequence[int]], Sequence[int]]
"""The work of all queries before each of these positions, which are in order."""


class ChunkOrder(NamedTuple):
    """The chunks in the order in which ranks hold them; all together they are the sequence."""

    firsts: Ints
    """The position of each chunk's first row."""
    lengths: Ints
    imbalance: float
    """The work of the busiest rank over the mean."""
    is_identity: float
    """The same of contiguous shards."""

    @property
    def offsets(self) -> Ints:
        """The place of each chunk's first row in the new order."""
        return np.cumsum(self.lengths) - self.lengths

    def to_words(self, n: int) -> Ints:
        """(2, most_chunks(n)) for n ranks: firsts and lengths, zeros behind them."""
        out = np.zeros((2, max_chunk_count(n)), np.int64)
        out[:, : len(self.firsts)] = self.firsts, self.lengths
        return out

    @staticmethod
    def of(words: Ints) -> ChunkOrder:
        """Those that `words` tells; nobody knows their work any more."""
        firsts, lengths = words[:, words[1] > 0]
        return ChunkOrder(firsts, lengths, 1.0, 1.0)


def max_chunk_count(n: int) -> int:
    """As many as n ranks can hold, and one at either end that keeps its place."""
    return n * max(MAX_CHUNKS, MIN_CHUNKS) + 2


class _EvenChunks(NamedTuple):
    """Each rank's run of rows cut in the same way, so that a rank takes as many of each size as it gives."""

    edges: Ints
    works: np.ndarray
    large: np.ndarray
    """Which chunks have one row more."""
    fixed: np.ndarray
    """Which keep their place."""

    @property
    def min_rank_work(self) -> float:
        """In no order has a rank less of all work: the heaviest chunk."""
        total = self.works.sum()
        return float(self.works.max() / total) if total else 0.0


def assign_chunks(work: WorkBefore, length: int, n: int, rows: int, front: int = 0, behind: int = 0) -> ChunkOrder:
    """`length` positions for n ranks of `rows` each, the last of which may hold fewer.

    The fewest chunks a rank, of the numbers that are tried, with which the busiest has at most EVEN_ENOUGH times the
    mean, or else the best there are.

    front, behind: how many positions at the beginning and at the end keep their place.
    """

    def cut(chunks: int) -> _EvenChunks:
        sizes = np.array([rows // chunks + (i < rows % chunks) for i in range(chunks)])
        edges = np.minimum(np.append(0, np.cumsum(np.tile(sizes, n))), n * rows)
        works = np.diff(np.array(work([min(int(edge), length) for edge in edges]), np.float64))
        fixed = (edges[:-1] < front) | (edges[1:] > length - behind)
        return _EvenChunks(edges, works, np.tile(np.arange(chunks) < rows % chunks, n), fixed)

    best = contiguous = _assign_cut(cut(1), length, n)
    coarse = []  # no order of these is even enough
    for chunks in _chunk_counts(min(rows, MAX_CHUNKS, max(rows // CHUNK_ROWS, MIN_CHUNKS))):
        if best.imbalance <= BALANCE_TOLERANCE:
            break
        made = cut(chunks)
        if n * made.min_rank_work > BALANCE_TOLERANCE:
            coarse.append(made)
        else:
            best = min(best, _assign_cut(made, length, n), key=_order_imbalance)
    for made in reversed(coarse):
        if BALANCE_TOLERANCE < best.imbalance > n * made.min_rank_work:
            best = min(best, _assign_cut(made, length, n), key=_order_imbalance)
    return best._replace(is_identity=contiguous.imbalance)


def _order_imbalance(order: ChunkOrder) -> float:
    return order.imbalance


def _chunk_counts(most: int) -> Iterator[int]:
    """2, 3, 4, ... 16, 24, 32, 48, 64, ... chunks a rank."""
    yield from range(2, min(16, most + 1))
    number = 16
    while number <= most:
        yield number
        if number * 3 // 2 <= most:
            yield number * 3 // 2
        number *= 2


def _assign_cut(cut: _EvenChunks, length: int, n: int) -> ChunkOrder:
    owners = _assign_owners(cut, n)
    edges = cut.edges
    order = np.lexsort((edges[:-1], owners))
    ends = np.minimum(edges[1:], length)
    firsts, lengths = edges[:-1][order], np.maximum(ends - edges[:-1], 0)[order]
    loads = np.bincount(owners, cut.works, n)
    kept = lengths > 0
    imbalance = float(loads.max() / loads.mean()) if loads.any() else 1.0
    return ChunkOrder(firsts[kept], lengths[kept], imbalance, imbalance)


def _assign_owners(cut: _EvenChunks, n: int) -> Ints:
    """Whose each chunk is: by work, each the rank's that has least and still has room for one of its size."""
    works, large, fixed = cut.works, cut.large, cut.fixed
    chunks = len(works) // n
    own = np.repeat(np.arange(n), chunks)
    owners = np.where(fixed, own, -1)
    loads = np.bincount(own[fixed], works[fixed], n)
    rooms = [np.bincount(own[(large == kind) & ~fixed], minlength=n) for kind in (False, True)]
    for chunk in np.argsort(-works, kind="stable"):
        if fixed[chunk]:
            continue
        room = rooms[int(large[chunk])]
        least = np.where(room > 0, loads, np.inf)
        rank = least.argmin()
        owners[chunk] = rank
        loads[rank] += works[chunk]
        room[rank] -= 1
    _exchange_chunk(cut, owners, loads)
    return owners


def _exchange_chunk(cut: _EvenChunks, owners: Ints, loads: np.ndarray) -> None:
    """The busiest rank exchanges a chunk for a lighter one of some rank with little work, as long as that helps."""
    enough = BALANCE_TOLERANCE * loads.mean()
    for _ in range(MAX_EXCHANGES * len(loads)):
        busiest = loads.argmax()
        if loads[busiest] <= enough:
            return
        lightest = np.argsort(loads, kind="stable")[:EXCHANGE_PARTNERS]
        mine = np.flatnonzero((owners == busiest) & ~cut.fixed)
        theirs = np.flatnonzero(np.isin(owners, lightest) & (owners != busiest) & ~cut.fixed)
        if not len(mine) or not len(theirs):
            return
        moved = cut.works[mine][:, None] - cut.works[theirs]
        after = np.maximum(loads[busiest] - moved, loads[owners[theirs]] + moved)
        after[cut.large[mine][:, None] != cut.large[theirs]] = np.inf
        i, j = np.unravel_index(after.argmin(), after.shape)
        if after[i, j] >= loads[busiest]:
            return
        partner = owners[theirs[j]]
        loads[busiest] -= moved[i, j]
        loads[partner] += moved[i, j]
        owners[mine[i]], owners[theirs[j]] = partner, busiest
