"""Assign chunks of a sequence to ranks so that all ranks attend to a similar number of pairs.

    work of 8 chunks   40 30 20 10 | 1 1 1 1        two ranks, four chunks each
    contiguous        100          | 4              rank 0 has 1.92 times the mean
    balanced           40 10 1 1   | 30 20 1 1      by decreasing work, each to the rank with the least work that has
                                                    capacity; then the busiest rank exchanges chunks if it has too much

Every rank has the same number of rows as in contiguous shards: its run of the new order. Chunks at both ends of the
sequence may be fixed: where it is padded, and where values of the program are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .pieces import Ints

BALANCE_TOLERANCE = 1.05  # maximum work of the busiest rank over the mean that counts as balanced
# Limits of the number of chunks per rank. A rank has at most MAX_CHUNKS chunks, and more than MIN_CHUNKS only if they
# have at least CHUNK_ROWS rows.
MAX_CHUNKS, CHUNK_ROWS, MIN_CHUNKS = 64, 128, 4

# number of least busy ranks that are candidates for an exchange; maximum number of exchanges per rank
EXCHANGE_PARTNERS, MAX_EXCHANGES = 8, 4

# A function from sorted positions to the work of all queries before each of them
WorkBefore = Callable[[Sequence[int]], Sequence[int]]


class ChunkOrder(NamedTuple):
    """The chunks of a sequence, in the order in which ranks store them."""

    firsts: Ints  # position of each chunk's first row
    lengths: Ints  # number of rows of each chunk
    imbalance: float  # work of the busiest rank over the mean
    is_identity: float  # the same ratio for contiguous shards

    @property
    def offsets(self) -> Ints:
        """Return the offset of each chunk's first row in the new order."""
        return np.cumsum(self.lengths) - self.lengths

    def encode(self, n: int) -> Ints:
        """Encode firsts and lengths as (2, max_chunk_count(n)), padded with zeros."""
        out = np.zeros((2, max_chunk_count(n)), np.int64)
        out[:, : len(self.firsts)] = self.firsts, self.lengths
        return out

    @staticmethod
    def of(values: Ints) -> ChunkOrder:
        """Decode an order from `encode`; its imbalances are unknown and set to 1."""
        firsts, lengths = values[:, values[1] > 0]
        return ChunkOrder(firsts, lengths, 1.0, 1.0)


def max_chunk_count(n: int) -> int:
    """Return the maximum number of chunks of n ranks, including one fixed chunk at each end."""
    return n * max(MAX_CHUNKS, MIN_CHUNKS) + 2


class _EvenChunks(NamedTuple):
    """Chunks that cut each rank's run of rows equally, so that exchanges preserve the number of rows."""

    edges: Ints  # positions of the chunks' edges
    works: np.ndarray  # work of each chunk
    large: np.ndarray  # whether a chunk has one more row than others
    fixed: np.ndarray  # whether a chunk is not moved

    @property
    def min_rank_work(self) -> float:
        """Return a lower bound of the busiest rank's share of the work: the share of the heaviest chunk."""
        total = self.works.sum()
        return float(self.works.max() / total) if total else 0.0


def assign_chunks(work: WorkBefore, length: int, n: int, rows: int, front: int = 0, back: int = 0) -> ChunkOrder:
    """Assign positions to n ranks in chunks.

    Tries increasing numbers of chunks per rank until the busiest rank has at most BALANCE_TOLERANCE times the mean
    work; otherwise uses the best order.

    Args:
        work: A function that returns the work before positions.
        length: The number of positions.
        n: The number of ranks.
        rows: The number of rows of each rank; the last one may have fewer positions.
        front: The number of positions at the beginning that are not moved.
        back: The number of positions at the end that are not moved.

    Returns:
        The order of chunks.
    """

    def cut(chunks: int) -> _EvenChunks:
        """Cut each rank's rows into this number of chunks."""
        sizes = np.array([rows // chunks + (i < rows % chunks) for i in range(chunks)])
        edges = np.minimum(np.append(0, np.cumsum(np.tile(sizes, n))), n * rows)
        works = np.diff(np.array(work([min(int(edge), length) for edge in edges]), np.float64))
        fixed = (edges[:-1] < front) | (edges[1:] > length - back)
        return _EvenChunks(edges, works, np.tile(np.arange(chunks) < rows % chunks, n), fixed)

    best = contiguous = _assign_cut(cut(1), length, n)
    coarse = []  # no order of these is balanced
    for chunks in _chunk_counts(min(rows, MAX_CHUNKS, max(rows // CHUNK_ROWS, MIN_CHUNKS))):
        if best.imbalance <= BALANCE_TOLERANCE:
            break
        current = cut(chunks)
        if n * current.min_rank_work > BALANCE_TOLERANCE:
            coarse.append(current)
        else:
            best = min(best, _assign_cut(current, length, n), key=_order_imbalance)
    for current in reversed(coarse):
        if BALANCE_TOLERANCE < best.imbalance > n * current.min_rank_work:
            best = min(best, _assign_cut(current, length, n), key=_order_imbalance)
    return best._replace(is_identity=contiguous.imbalance)


def _order_imbalance(order: ChunkOrder) -> float:
    return order.imbalance


def _chunk_counts(most: int) -> Iterator[int]:
    """Yield the numbers of chunks per rank to try: 2, 3, 4, ... 16, 24, 32, 48, 64, ..."""
    yield from range(2, min(16, most + 1))
    number = 16
    while number <= most:
        yield number
        if number * 3 // 2 <= most:
            yield number * 3 // 2
        number *= 2


def _assign_cut(cut: _EvenChunks, length: int, n: int) -> ChunkOrder:
    """Return the order of these chunks and its imbalance."""
    owners = _assign_owners(cut, n)
    edges = cut.edges
    order = np.lexsort((edges[:-1], owners))
    ends = np.minimum(edges[1:], length)
    firsts, lengths = edges[:-1][order], np.maximum(ends - edges[:-1], 0)[order]
    loads = np.bincount(owners, cut.works, n)
    nonempty = lengths > 0
    imbalance = float(loads.max() / loads.mean()) if loads.any() else 1.0
    return ChunkOrder(firsts[nonempty], lengths[nonempty], imbalance, imbalance)


def _assign_owners(cut: _EvenChunks, n: int) -> Ints:
    """Return the owner of each chunk.

    Chunks are assigned by decreasing work to the rank with the least work that has capacity for a chunk of that size.
    """
    works, large, fixed = cut.works, cut.large, cut.fixed
    chunks = len(works) // n
    own = np.repeat(np.arange(n), chunks)
    owners = np.where(fixed, own, -1)
    loads = np.bincount(own[fixed], works[fixed], n)
    free_slots = [np.bincount(own[(large == kind) & ~fixed], minlength=n) for kind in (False, True)]
    for chunk in np.argsort(-works, kind="stable"):
        if fixed[chunk]:
            continue
        free = free_slots[int(large[chunk])]
        least = np.where(free > 0, loads, np.inf)
        rank = least.argmin()
        owners[chunk] = rank
        loads[rank] += works[chunk]
        free[rank] -= 1
    _exchange_chunk(cut, owners, loads)
    return owners


def _exchange_chunk(cut: _EvenChunks, owners: Ints, loads: np.ndarray) -> None:
    """Exchange chunks of the busiest rank for lighter ones of ranks with little work while that helps."""
    enough = BALANCE_TOLERANCE * loads.mean()
    for _ in range(MAX_EXCHANGES * len(loads)):
        busiest = loads.argmax()
        if loads[busiest] <= enough:
            return
        lightest = np.argsort(loads, kind="stable")[:EXCHANGE_PARTNERS]
        from_chunks = np.flatnonzero((owners == busiest) & ~cut.fixed)
        to_chunks = np.flatnonzero(np.isin(owners, lightest) & (owners != busiest) & ~cut.fixed)
        if not len(from_chunks) or not len(to_chunks):
            return
        moved = cut.works[from_chunks][:, None] - cut.works[to_chunks]
        after = np.maximum(loads[busiest] - moved, loads[owners[to_chunks]] + moved)
        after[cut.large[from_chunks][:, None] != cut.large[to_chunks]] = np.inf
        i, j = np.unravel_index(after.argmin(), after.shape)
        if after[i, j] >= loads[busiest]:
            return
        partner = owners[to_chunks[j]]
        loads[busiest] -= moved[i, j]
        loads[partner] += moved[i, j]
        owners[from_chunks[i]], owners[to_chunks[j]] = partner, busiest
