"""``sp::assign_chunks``: the order in which ranks hold a sequence, from what the program's masks look up when it runs.

Work is the pairs that attend, by one plan of all queries and keys; `balance_chunks.py` assigns it. Equal
vectors give equal
order, so ranks that hold them whole need not ask each other.
"""

from __future__ import annotations

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
    behind: int = 0,
) -> ChunkOrder:
    """How `length` positions are dealt to n ranks, for attention by these predicates, each as often as its weight says.

    vectors: row<i> and col<i> of all predicates. sizes: their n<i>. stride: neighbours that share heads, so that each
    has all rows of them.
    """
    whole = (Segment(0, 0, length),)
    plans = [plan_blocks(predicate, whole, whole, sizes, vectors, vectors) for predicate in predicates]

    def work(rows: Sequence[int]) -> list[int]:
        parts = [[weight * pairs for pairs in count_pairs_before(one, rows)] for one, weight in zip(plans, weights)]
        return [sum(column) for column in zip([0] * len(rows), *parts)]  # of no attention, none

    found = assign_chunks(work, length, n // stride, stride * -(-length // n), front, behind)
    log.debug(
        "dealt %d positions in %d chunks to %d ranks: the busiest has %.3f times the mean of pairs, contiguous %.3f",
        *(length, len(found.firsts), n, found.imbalance, found.is_identity),
    )
    return found


def order_tensors(found: ChunkOrder, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions in the new order, and the places of all positions in it: int64 (length,) twice. Does not wait."""
    length, back = int(found.lengths.sum()), np.argsort(found.firsts)
    shifts, lengths = found.firsts - found.offsets, found.lengths
    host = torch.from_numpy(np.stack([shifts, lengths, -shifts[back], lengths[back]]))
    numbers = copy_async(host, device)
    places = torch.arange(length, device=device)
    order, inverse = (
        places + shift.repeat_interleave(count, output_size=length) for shift, count in numbers.view(2, 2, -1)
    )
    return order, inverse


def identity_order(length: int, n: int, device: torch.device) -> list[Tensor]:
    """(order, inverse, chunks) as of ``sp::assign_chunks``, of rows that keep their places."""
    found = ChunkOrder.of(np.array([[0], [length]]))
    return [*order_tensors(found, device), torch.from_numpy(found.to_words(n))]


def ordered_positions_table(found: ChunkOrder) -> Tensor:
    """The table (see `pieces.py`) of the positions in the new order."""
    alone = np.ones_like(found.firsts)
    table = np.stack([found.offsets, found.firsts, found.firsts, alone])
    return pad_table(_merge_continued(table), 1, int(found.lengths.sum()))


def reorder_table(vector: Pieces, found: ChunkOrder) -> Tensor:
    """The table of a vector whose values stand in the new order."""
    table = cut_pieces(vector.table, found.firsts)
    by_first = np.argsort(found.firsts)
    chunk = by_first[np.searchsorted(found.firsts[by_first], table[0], "right") - 1]
    table[0] += (found.offsets - found.firsts)[chunk]
    return pad_table(_merge_continued(table[:, np.argsort(table[0])]), vector.batch, vector.length)


def _merge_continued(table: Ints) -> Ints:
    """Without the pieces that go on with the line, or the bounds, of the one before them."""
    starts, lows, highs, slopes = table
    rise = slopes[:-1] * np.diff(starts)
    goes_on = (lows[1:] == lows[:-1] + rise) & (highs[1:] == highs[:-1] + rise) & (slopes[1:] == slopes[:-1])
    return table[:, np.append(True, ~goes_on)]


def fake_orders(length: Any, n: int, device: torch.device) -> list[Tensor]:
    """Stand-ins for (the order, its inverse, the chunks), on which all that dealt values need is told."""
    orders = [torch.empty([length], dtype=torch.int64, device=device) for _ in range(2)]
    return [*orders, torch.empty([2, max_chunk_count(n)], dtype=torch.int64, device="cpu")]


def _fake_tables(vectors: Sequence[Tensor], length: Any) -> list[Tensor]:
    lengths = [length, *2 * [x.shape[1] for x in vectors]]
    return [torch.empty([table_size(x)], dtype=torch.int64, device="cpu") for x in lengths]


def _fake_balanced(vectors: Sequence[Tensor], *given: Any) -> list[Tensor]:
    length, n, device = given[3], given[-3], given[-1]
    return [*fake_orders(length, n, device), *_fake_tables(vectors, length)]


def _ordered_tables(vectors: Sequence[Tensor], found: ChunkOrder, tables: Sequence[Tensor]) -> list[Tensor]:
    return [ordered_positions_table(found), *tables, *(reorder_table(Pieces.of(table), found) for table in tables)]


@opaque(
    "deal(Tensor[] vectors, str[] predicates, SymInt[] weights, SymInt[] sizes, SymInt length, SymInt[] front, "
    "SymInt[] behind, int n, int stride, Device device) -> Tensor[]",
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
    behind: Sequence[int],
    n: int,
    stride: int,
    device: torch.device,
) -> list[Tensor]:
    """Replicate -> Replicate: an order of `length` positions in which n equal runs of them have about as much work.

    stride: so many ranks in a row count as one, because they share heads.

    Shapes: int or bool (B, length) each -> int64 (length,), the positions in that order; (length,), the places of the
    positions in it; (2, chunks) on the CPU, the first position and the length of each run; and tables as of
    ``sp::balanced_tables``. The first max(front) and the last max(behind) positions keep their places.
    Bytes between ranks: none. Waits for the device once, if there are vectors on it.
    """
    tables = torch.ops.sp.pieces(vectors) if vectors else []
    pieces = tuple(map(Pieces.of, tables))
    numbers, ends = [tuple(map(int, x)) for x in (weights, sizes)], [max(map(int, x)) for x in (front, behind)]
    found = balance_rows(tuple(predicates), *numbers, pieces, int(length), n, stride, *ends)
    return [
        *order_tensors(found, device),
        torch.from_numpy(found.to_words(n)),
        *_ordered_tables(vectors, found, tables),
    ]


@opaque(
    "dealt_tables(Tensor[] vectors, Tensor chunks, SymInt length) -> Tensor[]",
    lambda vectors, _, length: _fake_tables(vectors, length),
    replays=False,
)
def balanced_tables(vectors: Sequence[Tensor], chunks: Tensor, length: int) -> list[Tensor]:
    """Replicate -> Replicate: what masks look up where another graph has dealt the rows.

    Shapes: int or bool (B, length) each, chunks as ``sp::assign_chunks`` returns them -> tables as of
    ``sp::pieces``, on the
    CPU: of the positions in the order, of each vector as it is, and of each vector in the order. Bytes between ranks:
    none. Waits for the device once, if there are vectors on it.
    """
    tables = torch.ops.sp.pieces(vectors) if vectors else []
    return _ordered_tables(vectors, ChunkOrder.of(chunks.numpy()), tables)
