"""Compute the load-balanced order of a sequence's rows at run time, and permute mask vectors to it.

The work is the number of attending pairs, from one plan of all queries and keys; `balance_chunks.py` assigns it to
ranks. Equal vectors give equal orders, so ranks with replicated vectors need no communication.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sp_compile.lowering.base.library import opaque

from .balance_chunks import ChunkOrder, assign_chunks, max_chunk_count
from .block_plan import plan_blocks
from .blocks import count_pairs_before
from .pieces import Ints, Pieces, copy_async, cut_pieces, pad_table, table_size
from .spans import Segment

log = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def balance_rows(
    predicates: tuple[str, ...],
    weights: tuple[int, ...],
    sizes: tuple[int, ...],
    vectors: tuple[Pieces, ...],
    length: int,
    n: int,
    stride: int = 1,
    front: int = 0,
    back: int = 0,
) -> ChunkOrder:
    """Return an order of the sequence in which n ranks, each with a run of it, attend to similar numbers of pairs.

    The number of pairs is planned from the mask predicates and bounds of the vectors that they read.

    Args:
        predicates: The mask predicates.
        weights: The number of attentions with each predicate.
        sizes: The values n<i> of all predicates.
        vectors: The tables of the vectors row<i> and col<i> of all predicates.
        length: The number of positions.
        n: The number of ranks.
        stride: The number of adjacent ranks that split the heads: each computes the rows of all of them.
        front: The number of positions at the beginning that are not moved.
        back: The number of positions at the end that are not moved.

    Returns:
        The order of chunks.
    """
    all_rows = (Segment(0, 0, length),)
    plans = [plan_blocks(predicate, all_rows, all_rows, sizes, vectors, vectors) for predicate in predicates]

    def work_before(positions: Sequence[int]) -> list[int]:
        """Return the work before each of these positions: the pairs of the queries before it, weighted by plan."""
        totals = [0] * len(positions)
        for plan, weight in zip(plans, weights):
            totals = [total + weight * pairs for total, pairs in zip(totals, count_pairs_before(plan, positions))]
        return totals

    # Ranks that split the heads count as one, with the rows of all of them.
    num_runs, rows_per_run = n // stride, stride * -(-length // n)
    order = assign_chunks(work_before, length, num_runs, rows_per_run, front, back)
    log.debug(
        "balanced %d positions in %d chunks over %d ranks: maximum over mean of pairs is %.3f, contiguous %.3f",
        *(length, len(order.firsts), n, order.imbalance, order.contiguous_imbalance),
    )
    return order


def order_tensors(order: ChunkOrder, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions in the new order, and the inverse permutation, int64 (length,) each on the device.

    Does not synchronize with the device.

    Args:
        order: The order of chunks.
        device: The device of the results.
    """
    length, by_position = int(order.lengths.sum()), np.argsort(order.firsts)
    shifts, lengths = order.firsts - order.offsets, order.lengths
    # In a chunk, a position is its place in the order plus a shift. The order 4 5 0 1 2 3 has two chunks, with the
    # shifts 4 and -2. Send the shifts and the lengths of the chunks: in the new order, and for the inverse in the order
    # of positions, with opposite signs.
    host = torch.from_numpy(np.stack([shifts, lengths, -shifts[by_position], lengths[by_position]]))
    index = torch.arange(length, device=device)
    sent = copy_async(host, device).view(2, 2, -1)  # (order or inverse, shifts or lengths, chunk)
    positions, inverse = (
        index + chunk_shifts.repeat_interleave(chunk_lengths, output_size=length)
        for chunk_shifts, chunk_lengths in sent
    )
    return positions, inverse


def identity_order(length: int, n: int, device: torch.device) -> list[Tensor]:
    """Return (order, inverse, encoded chunks), as `balanced_rows` does, of a sequence whose rows are not moved."""
    order = ChunkOrder.of(np.array([[0], [length]]))  # one chunk: its first position and its length
    return [*order_tensors(order, device), torch.from_numpy(order.encode(n))]


def ordered_positions_table(order: ChunkOrder) -> Tensor:
    """Return a table, as of ``sp::pieces``, of the vector of positions in the new order.

    A predicate reads this vector in place of q or k, the index of a row. Each chunk is a piece: from its offset in the
    order on, the values ascend by 1 from its first position.
    """
    slopes = np.ones_like(order.firsts)
    # Rows of a table: first row of each piece, lower and upper bound of the value there (equal here), step per row.
    table = np.stack([order.offsets, order.firsts, order.firsts, slopes])
    return pad_table(_merge_continued(table), 1, int(order.lengths.sum()))


def reorder_table(vector: Pieces, order: ChunkOrder) -> Tensor:
    """Return the table of a vector whose values are permuted to the new order, computed from the vector's table.

    A table describes a vector in pieces, from their first positions on (``sp::pieces``). Pieces are cut at the
    boundaries of chunks, and move with their chunks.
    """
    table = cut_pieces(vector.table, order.firsts)
    by_position = np.argsort(order.firsts)
    # The chunk that contains each piece, as its index in `order`. Its first position is moved to its offset.
    chunks = by_position[np.searchsorted(order.firsts[by_position], table[0], "right") - 1]
    table[0] += (order.offsets - order.firsts)[chunks]
    return pad_table(_merge_continued(table[:, np.argsort(table[0])]), vector.batch, vector.length)


def _merge_continued(table: Ints) -> Ints:
    """Return a table (4, pieces) without the pieces that continue the previous piece.

    Cuts at the boundaries of chunks create such pieces. A piece bounds a vector from the row `start` on: at row i, the
    value is from low + slope * (i - start) to high + slope * (i - start).
    """
    starts, lows, highs, slopes = table
    rise = slopes[:-1] * np.diff(starts)  # of each piece's bounds, up to the start of the next one
    continues = (lows[1:] == lows[:-1] + rise) & (highs[1:] == highs[:-1] + rise) & (slopes[1:] == slopes[:-1])
    return table[:, np.append(True, ~continues)]


def fake_orders(length: Any, n: int, device: torch.device) -> list[Tensor]:
    """Return fake tensors (order, inverse, encoded chunks), the first results of `balanced_rows`.

    Args:
        length: The number of positions.
        n: The number of ranks.
        device: The device of the orders; chunks are on the CPU.
    """
    orders = [torch.empty([length], dtype=torch.int64, device=device) for _ in range(2)]
    return [*orders, torch.empty([2, max_chunk_count(n)], dtype=torch.int64, device="cpu")]


def _fake_tables(vectors: Sequence[Tensor], length: Any) -> list[Tensor]:
    """Return fake results of `_ordered_tables`: the table of the positions, and two tables for each vector."""
    lengths = [length, *2 * [x.shape[1] for x in vectors]]
    return [torch.empty([table_size(x)], dtype=torch.int64, device="cpu") for x in lengths]


def _fake_balanced(vectors: Sequence[Tensor], *others: Any) -> list[Tensor]:
    """Return fake results of `balanced_rows`, whose arguments these are."""
    _predicates, _weights, _sizes, length, _front, _back, n, _stride, device = others
    return [*fake_orders(length, n, device), *_fake_tables(vectors, length)]


def _ordered_tables(tables: Sequence[Tensor], order: ChunkOrder) -> list[Tensor]:
    """Return the tables of the positions in the order, of each vector, and of each vector permuted to the order."""
    return [ordered_positions_table(order), *tables, *(reorder_table(Pieces.of(table), order) for table in tables)]


@opaque(
    "balance_rows(Tensor[] vectors, str[] predicates, SymInt[] weights, SymInt[] sizes, SymInt length, SymInt[] front, "
    "SymInt[] back, int n, int stride, Device device) -> Tensor[]",
    _fake_balanced,
    replays=False,
)
def balanced_rows(
    vectors: Sequence[Tensor],
    predicates: Sequence[str],
    weights: Sequence[int],
    sizes: Sequence[int],
    length: int,
    front: Sequence[int],
    back: Sequence[int],
    n: int,
    stride: int,
    device: torch.device,
) -> list[Tensor]:
    """Compute an order of the sequence in which n equal runs have similar work: numbers of pairs that attend.

    It is computed from replicated vectors, so that all ranks get the same order without communication. The first
    max(front) and the last max(back) positions are not moved.

    Args:
        vectors: int or bool (B, length) each, replicated.
        predicates: The mask predicates.
        weights: The number of attentions with each predicate.
        sizes: The values n<i> of all predicates.
        length: The number of positions.
        front: Numbers of positions at the beginning that are not moved.
        back: Numbers of positions at the end that are not moved.
        n: The number of ranks.
        stride: The number of consecutive ranks that count as one because they split the heads.
        device: The device of the results.

    Returns:
        The positions in the order, int64 (length,); the inverse, int64 (length,); (2, chunks) on the CPU, the first
        position and the length of each chunk; and the results of `balanced_tables`.

    Bytes: none. Synchronizes once if vectors are on the device.
    """
    tables = torch.ops.sp.pieces(vectors) if vectors else []
    order = balance_rows(
        tuple(predicates), tuple(map(int, weights)), tuple(map(int, sizes)), tuple(map(Pieces.of, tables)),
        int(length), n, stride, max(map(int, front)), max(map(int, back)),
    )  # fmt: skip
    return [*order_tensors(order, device), torch.from_numpy(order.encode(n)), *_ordered_tables(tables, order)]


@opaque(
    "balance_tables(Tensor[] vectors, Tensor chunks, SymInt length) -> Tensor[]",
    lambda vectors, _, length: _fake_tables(vectors, length),
    replays=False,
)
def balanced_tables(vectors: Sequence[Tensor], chunks: Tensor, length: int) -> list[Tensor]:
    """Compute the tables of mask vectors for an order that another graph has computed.

    Args:
        vectors: int or bool (B, length) each, replicated.
        chunks: (2, chunks) on the CPU, the first position and the length of each chunk of the order.
        length: The number of positions.

    Returns:
        Tables as of ``sp::pieces``, on the CPU: of the positions in the order, of each vector, and of each vector
        permuted to the order.

    Bytes: none. Synchronizes once if vectors are on the device.
    """
    tables = torch.ops.sp.pieces(vectors) if vectors else []
    return _ordered_tables(tables, ChunkOrder.of(chunks.numpy()))
