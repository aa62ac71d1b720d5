"""Measure how evenly layouts split the pairs of packed documents over ranks, and how many remote keys a rank needs."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from sp_compile.lowering.masks.balance_chunks import ChunkOrder
from sp_compile.lowering.masks.balance_rows import balance_rows, order_tensors, reorder_table
from sp_compile.lowering.masks.block_plan import plan_blocks
from sp_compile.lowering.masks.blocks import count_pairs_before
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.spans import Rows, Segment, span_rows

KEY_BYTES = 2 * 8 * 128 * 2
"""Of a token's keys and values: 8 heads of 128 dims in bf16."""
DEFAULT_CHUNKS, EXAMPLE_ROWS = 8, 512
"""MagiAttention's default number of chunks per rank, and the tokens of a chunk in its examples."""
PREDICATE = "Eq(row0, col0) & (col1 <= row1)"


def pieces_of(x: Tensor) -> Pieces:
    """The pieces of an int or bool vector (B, S)."""
    return Pieces.of(torch.ops.sp.pieces([x])[0])


def lengths_of(kind: str, documents: int) -> Tensor:
    """Return the lengths of documents, before they are scaled to the number of tokens."""
    drawn = torch.rand(documents, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "log-normal":
        return (1.5 * torch.special.ndtri(drawn.clamp(1e-9, 1 - 1e-9))).exp()
    if kind == "uniform":
        return drawn
    return torch.cat([drawn[:-1], drawn[:-1].sum()[None]])  # the last is as long as all others together


KINDS = ("log-normal", "uniform", "one long")


def packed(tokens: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(number of the document, position in it), (1, tokens) each."""
    ends = (lengths.cumsum(0) / lengths.sum() * tokens).long()
    ends[-1] = tokens
    at = torch.arange(tokens)
    number = torch.bucketize(at, ends, right=True)
    return number[None], (at - torch.cat([ends.new_zeros(1), ends[:-1]])[number])[None]


def zigzag(tokens: int, n: int) -> Tensor:
    """Return the positions of the ranks' rows, rank by rank."""
    chunks = torch.arange(tokens).view(2 * n, -1)
    return torch.cat([torch.cat([chunks[r], chunks[2 * n - 1 - r]]) for r in range(n)])


def needed(number: Tensor, position: Tensor, order: Tensor, n: int) -> int:
    """Return the largest number of keys of other ranks that the queries of any rank attend to."""
    most = 0
    for rows in order.view(n, -1):
        last = torch.zeros(int(number.max()) + 1, dtype=torch.int64)
        last.scatter_reduce_(0, number[rows], position[rows] + 1, "amax")
        most = max(most, int(last.sum()) - len(rows))
    return most


def calls(vectors: Sequence[Pieces], gathered: Sequence[Pieces], tokens: int, n: int, folds: int) -> tuple[int, int]:
    """Return the most kernel calls of a rank for the keys of one rank (a ring), and for all keys; 8 ranks are sampled.

    Args:
        vectors: In the order of the layout.
        gathered: In the order of the sequence, in which keys are gathered.
        tokens: Length of the sequence.
        n: Number of ranks.
        folds: Chunks per rank of the layout.
    """

    def most(queries: Rows, keys: Iterable[Rows], looked_up: Sequence[Pieces]) -> int:
        made = [plan_blocks(PREDICATE, queries, rows, (), tuple(vectors), tuple(looked_up)) for rows in keys]
        return max(len(one.packed) + len(one.others) for one in made)

    every = [span_rows([n, folds, 1, 0, 0, tokens], tokens // n, rank) for rank in range(n)]
    sampled, full = every[:: max(n // 8, 1)], [(Segment(0, 0, tokens),)]
    return max(most(rows, every, vectors) for rows in sampled), max(most(rows, full, gathered) for rows in sampled)


def stretches(order: Tensor, n: int) -> float:
    """Return the average number of contiguous stretches of the sequence per rank."""
    return float((order.view(n, -1).diff() != 1).sum() + n) / n


def balance_by_heap(predicate: str, vectors: tuple[Pieces, ...], length: int, n: int, chunks: int) -> ChunkOrder:
    """Return an order of `length` positions in which each of n ranks has `chunks` chunks; they divide the length.

    The algorithm of MagiAttention (arXiv 2505.13211; `MinHeapDispatchAlg` of SandAI-org/MagiAttention at 2c641357),
    implemented again: chunks of one size are assigned in descending order of their pairs. Each goes to the rank with
    the fewest pairs, among the ranks with fewer than `chunks` chunks.
    """
    whole, rows = (Segment(0, 0, length),), length // (n * chunks)
    before = count_pairs_before(
        plan_blocks(predicate, whole, whole, (), vectors, vectors), [*range(0, length + 1, rows)]
    )
    works = [high - low for low, high in pairwise(before)]
    ranks, own = [(0, rank) for rank in range(n)], [list[int]() for _ in range(n)]
    for chunk in sorted(range(len(works)), key=works.__getitem__, reverse=True):
        load, rank = heapq.heappop(ranks)
        own[rank].append(chunk)
        if len(own[rank]) < chunks:
            heapq.heappush(ranks, (load + works[chunk], rank))
    loads = [sum(works[chunk] for chunk in mine) for mine in own]
    firsts = rows * np.array([chunk for mine in own for chunk in sorted(mine)])
    imbalance = max(loads) * n / sum(loads)
    return ChunkOrder(firsts, np.full_like(firsts, rows), imbalance, imbalance)


def ways(vectors: tuple[Pieces, ...], tokens: int, n: int) -> dict[str, Callable[[], ChunkOrder]]:
    """Return the orders to compare: balanced rows, and a heap with several numbers of chunks per rank."""
    ours = partial(balance_rows, (PREDICATE,), (1,), (), vectors, tokens, n)
    found = {"balanced": ours}
    for chunks in sorted({round(len(ours().firsts) / n), DEFAULT_CHUNKS, tokens // n // EXAMPLE_ROWS}):
        if tokens % (n * chunks) == 0:
            found[f"heap, {chunks} chunks"] = partial(balance_by_heap, PREDICATE, vectors, tokens, n, chunks)
    return found


def timed(way: Callable[[], ChunkOrder]) -> tuple[ChunkOrder, float]:
    """Return the order, and the least CPU time in ms of three runs, which include the plan of all pairs."""
    least = inf
    for _ in range(3):
        balance_rows.cache_clear()
        plan_blocks.cache_clear()
        start = time.process_time()
        made = way()
        least = min(least, 1e3 * (time.process_time() - start))
    return made, least


def balance(tokens: int, documents: int, ranks: list[int]) -> Table:
    """Return a table of the largest work of a rank over the mean, for each layout of packed causal documents.

    "heap" is MagiAttention's order, see `balance_by_heap`.
    """
    names = (
        "documents",
        "ranks",
        "layout",
        "work / mean",
        "stretches a rank",
        "MB it needs",
        "MB a ring brings",
        "calls a step",
        "over all keys",
        "ms",
    )
    table = Table(*names, title=f"{documents} documents in {tokens} tokens, causal")
    for kind in KINDS:
        vectors = packed(tokens, lengths_of(kind, documents))
        number, position = (x[0] for x in vectors)
        found = tuple(map(pieces_of, vectors))
        for n in ranks:
            layouts = {
                "contiguous": (torch.arange(tokens), 0.0, calls(found, found, tokens, n, 1)),
                "zigzag": (zigzag(tokens, n), 0.0, calls(found, found, tokens, n, 2)),
            }
            for name, way in ways(found, tokens, n).items():
                made, ms = timed(way)
                moved = tuple(Pieces.of(reorder_table(one, made)) for one in found)
                layouts[name] = order_tensors(made, torch.device("cpu"))[0], ms, calls(moved, found, tokens, n, 1)
            for layout, (order, taken, kernels) in layouts.items():
                loads = (position[order] + 1).view(n, -1).sum(1).double()
                keys = needed(number, position, order, n), tokens // n * (n - 1)
                megabytes = [f"{KEY_BYTES * x / 1e6:.0f}" for x in keys]
                row = f"{loads.max() / loads.mean():.3f}", f"{stretches(order, n):.3g}", *megabytes, *map(str, kernels)
                table.add_row(kind, str(n), layout, *row, f"{taken:.0f}" if taken else "")
    return table
