"""Assign chunks of a sequence to ranks so that all ranks attend to a similar number of pairs.

    work of 8 chunks   40 30 20 10 | 1 1 1 1        two ranks, four chunks each
    contiguous        100          | 4              rank 0 has 1.92 times the mean
    balanced           40 10 1 1   | 30 20 1 1      by decreasing work, each to the rank with the least work that has
                                                    capacity; then the busiest rank exchanges chunks if it has too much

Work is the number of attending pairs; the load of a rank is the work of its chunks, and imbalance the largest load
over the mean. Every rank has the same number of rows as in contiguous shards: its run of the new order. Chunks at both
ends of the sequence may be fixed, that is, not moved: where it is padded, and where values of the program are shorter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .pieces import Ints

BALANCE_TOLERANCE = 1.05  # maximum work of the busiest rank over the mean that counts as balanced
# Limits of the number of chunks per rank. A rank has at most MAX_CHUNKS chunks, and more than MIN_CHUNKS only if they
# have at least CHUNK_ROWS rows.
MAX_CHUNKS, CHUNK_ROWS, MIN_CHUNKS = 64, 128, 4
CHUNK_COUNTS = (*range(2, 16), 16, 24, 32, 48, MAX_CHUNKS)  # numbers of chunks per rank to try, in this order

# Number of least busy ranks that are candidates for an exchange; maximum number of exchanges per rank.
EXCHANGE_PARTNERS, MAX_EXCHANGES = 8, 4

# A function from sorted positions to the work of all queries before each of them
WorkBefore = Callable[[Sequence[int]], Sequence[int]]


class ChunkOrder(NamedTuple):
    """The chunks of a sequence, in the order in which ranks store them."""

    firsts: Ints  # position of each chunk's first row
    lengths: Ints  # number of rows of each chunk
    imbalance: float  # work of the busiest rank over the mean
    contiguous_imbalance: float  # the same ratio for contiguous shards

    @property
    def offsets(self) -> Ints:
        """Return where each chunk begins in the new order: the rows of all chunks before it."""
        return np.cumsum(self.lengths) - self.lengths

    def encode(self, n: int) -> Ints:
        """Return firsts and lengths as int64 (2, max_chunk_count(n)), padded with zeros.

        An operator returns it, whose shape must not depend on the number of chunks.
        """
        encoded = np.zeros((2, max_chunk_count(n)), np.int64)
        encoded[:, : len(self.firsts)] = self.firsts, self.lengths
        return encoded

    @staticmethod
    def of(encoded: Ints) -> ChunkOrder:
        """Return the order of a result of `encode`. Its imbalances are unknown and set to 1."""
        firsts, lengths = encoded[:, encoded[1] > 0]  # without the padding, whose lengths are 0
        return ChunkOrder(firsts, lengths, imbalance=1.0, contiguous_imbalance=1.0)


def max_chunk_count(n: int) -> int:
    """Return the maximum number of chunks of n ranks, including one fixed chunk at each end."""
    return n * MAX_CHUNKS + 2


class _EvenChunks(NamedTuple):
    """Chunks that cut each rank's run of rows equally, so that exchanges preserve the number of rows."""

    edges: Ints  # positions of the chunks' edges, (chunks + 1,); chunk i is [edges[i], edges[i + 1])
    works: np.ndarray  # work of each chunk, float64 (chunks,)
    is_large: np.ndarray  # whether a chunk has one more row than others, bool (chunks,)
    is_fixed: np.ndarray  # whether a chunk is not moved, bool (chunks,)

    def min_imbalance(self, n: int) -> float:
        """Return a lower bound of the imbalance over n ranks: one of them has the chunk with the most work."""
        total = self.works.sum()
        return n * float(self.works.max() / total) if total else 0.0


def assign_chunks(work: WorkBefore, length: int, n: int, rows: int, front: int = 0, back: int = 0) -> ChunkOrder:
    """Assign positions of a sequence to n ranks in chunks, so that all ranks have similar work.

    Work is the number of pairs that attend. Tries increasing numbers of chunks per rank until the busiest rank has at
    most BALANCE_TOLERANCE times the mean work (the order is balanced); otherwise returns the best order. Numbers of
    chunks for which one chunk alone has more work than that are tried last.

    Args:
        work: A function from sorted positions to the work of all queries before each of them.
        length: The number of positions.
        n: The number of ranks.
        rows: The number of rows of each rank; the last one may have fewer positions.
        front: The number of positions at the beginning that are not moved.
        back: The number of positions at the end that are not moved.

    Returns:
        The order of chunks.
    """

    def cut(chunks: int) -> _EvenChunks:
        """Cut the contiguous shard of each rank into this number of chunks, whose lengths differ by at most one."""
        is_large = np.tile(np.arange(chunks) < rows % chunks, n)  # chunks with one row more than others
        edges = np.append(0, np.cumsum(rows // chunks + is_large))  # each of the n ranks has `rows` rows
        # `work` returns the work of all queries before each edge; the differences are the works of the chunks.
        works = np.diff(np.array(work([min(int(edge), length) for edge in edges]), np.float64))
        is_fixed = (edges[:-1] < front) | (edges[1:] > length - back)  # a part of the chunk must not be moved
        return _EvenChunks(edges, works, is_large, is_fixed)

    imbalance_of = operator.attrgetter("imbalance")
    best = contiguous = _order_chunks(cut(1), length, n)
    coarse_cuts = []  # cuts with a chunk that alone has too much work for a rank, so that no order is balanced
    max_chunks = min(rows, max(rows // CHUNK_ROWS, MIN_CHUNKS))
    for chunks in CHUNK_COUNTS:
        if best.imbalance <= BALANCE_TOLERANCE or chunks > max_chunks:
            break
        current = cut(chunks)
        if current.min_imbalance(n) > BALANCE_TOLERANCE:
            coarse_cuts.append(current)
        else:
            best = min(best, _order_chunks(current, length, n), key=imbalance_of)
    # If no order is balanced, that of a coarse cut may still be better than the best one so far.
    for current in reversed(coarse_cuts):
        if best.imbalance > BALANCE_TOLERANCE and best.imbalance > current.min_imbalance(n):
            best = min(best, _order_chunks(current, length, n), key=imbalance_of)
    return best._replace(contiguous_imbalance=contiguous.imbalance)


def _order_chunks(cut: _EvenChunks, length: int, n: int) -> ChunkOrder:
    """Return the order of these chunks in which ranks have similar work, with its imbalance.

    The last chunks may exceed the sequence of ``length`` positions: they are shortened, or left out if empty.
    """
    owners = _assign_owners(cut, n)
    starts, ends = cut.edges[:-1], np.minimum(cut.edges[1:], length)
    order = np.lexsort((starts, owners))  # by owner, then by position
    firsts, lengths = starts[order], np.maximum(ends - starts, 0)[order]
    loads = np.bincount(owners, cut.works, n)
    nonempty = lengths > 0
    imbalance = float(loads.max() / loads.mean()) if loads.any() else 1.0
    # For other cuts than the contiguous one, the caller replaces `contiguous_imbalance`.
    return ChunkOrder(firsts[nonempty], lengths[nonempty], imbalance, contiguous_imbalance=imbalance)


def _assign_owners(cut: _EvenChunks, n: int) -> Ints:
    """Return the rank that owns each chunk, int64 (chunks,).

    Chunks are assigned by decreasing work to the rank with the least work that has capacity for a chunk of that length:
    each rank gets the number of rows of its contiguous shard. Then the busiest rank exchanges chunks with others. Fixed
    chunks remain on their ranks.
    """
    works, is_large, is_fixed = cut.works, cut.is_large, cut.is_fixed
    contiguous_owners = np.repeat(np.arange(n), len(works) // n)
    owners = np.where(is_fixed, contiguous_owners, -1)
    loads = np.bincount(contiguous_owners[is_fixed], works[is_fixed], n)
    # The numbers of small and of large chunks that each rank still lacks.
    capacities = [np.bincount(contiguous_owners[(is_large == kind) & ~is_fixed], minlength=n) for kind in (False, True)]
    for chunk in np.argsort(-works, kind="stable"):
        if is_fixed[chunk]:
            continue
        capacity = capacities[int(is_large[chunk])]
        rank = np.where(capacity > 0, loads, np.inf).argmin()
        owners[chunk] = rank
        loads[rank] += works[chunk]
        capacity[rank] -= 1
    _exchange_chunks(cut, owners, loads)
    return owners


def _exchange_chunks(cut: _EvenChunks, owners: Ints, loads: np.ndarray) -> None:
    """Exchange single chunks of the busiest rank for lighter ones of less busy ranks, as long as that helps.

    Each step makes the exchange after which the larger load of both ranks is smallest.

    Args:
        cut: The chunks.
        owners: The rank of each chunk, (chunks,); changed in place.
        loads: The work of each rank, (n,); changed in place.
    """
    balanced_load = BALANCE_TOLERANCE * loads.mean()
    for _ in range(MAX_EXCHANGES * len(loads)):
        busiest = loads.argmax()
        if loads[busiest] <= balanced_load:
            return
        partners = np.argsort(loads, kind="stable")[:EXCHANGE_PARTNERS]
        own_chunks = np.flatnonzero((owners == busiest) & ~cut.is_fixed)
        partner_chunks = np.flatnonzero(np.isin(owners, partners) & (owners != busiest) & ~cut.is_fixed)
        if not len(own_chunks) or not len(partner_chunks):
            return
        # For each pair of chunks: the work that moves, and the larger load of both ranks after the exchange.
        moved = cut.works[own_chunks][:, None] - cut.works[partner_chunks]
        larger_load = np.maximum(loads[busiest] - moved, loads[owners[partner_chunks]] + moved)
        # Only chunks of equal lengths can be exchanged, since the ranks keep their numbers of rows.
        larger_load[cut.is_large[own_chunks][:, None] != cut.is_large[partner_chunks]] = np.inf
        i, j = np.unravel_index(larger_load.argmin(), larger_load.shape)
        if larger_load[i, j] >= loads[busiest]:
            return
        partner = owners[partner_chunks[j]]
        loads[busiest] -= moved[i, j]
        loads[partner] += moved[i, j]
        owners[own_chunks[i]], owners[partner_chunks[j]] = partner, busiest
