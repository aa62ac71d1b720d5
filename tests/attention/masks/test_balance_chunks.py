"""Chunks assigned to ranks: a permutation of all positions, fixed ends, balanced work, reordered tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention.attending import packed, pieces_of

from sp_compile.lowering.masks.balance_chunks import assign_chunks
from sp_compile.lowering.masks.balance_rows import balance_rows, order_tensors, ordered_positions_table, reorder_table
from sp_compile.lowering.masks.block_plan import plan_blocks
from sp_compile.lowering.masks.blocks import count_pairs, count_pairs_before
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.predicate import evaluate_mask
from sp_compile.lowering.masks.spans import Segment, span_rows

DOCUMENTS = "Eq(row0, col0) & (k <= q)"


def vector(lengths: list[int]) -> Pieces:
    return pieces_of(packed(lengths)[0])


def lengths_of(spread: float, count: int, tokens: int) -> list[int]:
    """Log-normal ones, `tokens` in all."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul(spread).exp()
    ends = (drawn.cumsum(0) / drawn.sum() * tokens).long()
    ends[-1] = tokens
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 6),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_an_order_of_all_positions(lengths: list[int], n: int, ends: tuple[int, int]) -> None:
    """Every position occurs once; both ends stay in place; all runs have the same length."""
    length = sum(lengths)
    front, back = (min(end, length) for end in ends)
    found = balance_rows((DOCUMENTS,), (1,), (), (vector(lengths),), length, n, 1, front, back)
    order, inverse = order_tensors(found, torch.device("cpu"))
    assert torch.equal(order[inverse], torch.arange(length))
    assert torch.equal(inverse[order], torch.arange(length))
    assert torch.equal(order[:front], torch.arange(front))
    assert torch.equal(order[length - back :], torch.arange(length - back, length))
    assert all(rows.diff().gt(0).all() for rows in order.split(-(-length // n))), "a rank's rows are not in order"
    x = torch.randint(0, 3, (2, length), generator=torch.Generator().manual_seed(length))
    for table, wanted in (
        (ordered_positions_table(found), order[None]),
        (reorder_table(pieces_of(x), found), x[:, order]),
    ):
        low, high, _ = Pieces.of(table).lines(np.arange(length))
        assert ((low <= wanted.numpy()) & (wanted.numpy() <= high)).all()


def test_tables_in_the_order_know_as_much() -> None:
    """Positions have one line per chunk; documents have the same lines as a scan over all values finds."""
    length, n = 1 << 13, 4
    documents = packed(lengths_of(1.0, 12, length))
    v = [pieces_of(x) for x in documents]
    found = balance_rows(("Eq(row0, col0) & (col1 <= row1)",), (1,), (), (v[0], v[1]), length, n)
    order, _ = order_tensors(found, torch.device("cpu"))
    assert len(found.firsts) > n
    for table, values in [(ordered_positions_table(found), order[None])] + [
        (reorder_table(p, found), x[:, order]) for p, x in zip(v, documents)
    ]:
        mine, theirs = Pieces.of(table), pieces_of(values)
        assert len(mine.starts) <= len(theirs.starts) + 2
        low, high, _ = mine.lines(np.arange(length))
        assert torch.equal(torch.from_numpy(low)[None], values)
        assert (low == high).all()


@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("count", [1, 30, pytest.param(300, marks=pytest.mark.slow)])
def test_work_is_even(spread: float, count: int, n: int) -> None:
    """Count the pairs that the mask allows on each rank."""
    length = 1 << 17
    lengths = lengths_of(spread, count, length)
    found = balance_rows((DOCUMENTS,), (1,), (), (vector(lengths),), length, n)
    order, _ = order_tensors(found, torch.device("cpu"))
    pairs = packed(lengths)[1][0] + 1  # a query sees the tokens of its document up to itself
    loads = pairs[order].view(n, -1).sum(1).double()
    assert loads.max() / loads.mean() <= 1.05
    assert loads.max() / loads.mean() == pytest.approx(found.imbalance, rel=1e-3)  # of tiny documents it counts all


def test_no_more_chunks_than_needed() -> None:
    """Nothing to balance: none. Causal alone: the two of zigzag."""
    for predicate, chunks in ("", 1), ("k <= q", 2):
        found = balance_rows((predicate,), (1,), (), (), 1 << 12, 8)
        assert len(found.firsts) <= 8 * chunks
        assert found.imbalance <= 1.001


def test_chunks_are_exchanged_where_assigning_them_by_work_is_uneven() -> None:
    """Assignment by work only gives 8 + 5 + 4 + 2 and 7 + 6 + 2 + 2; coarser chunks are not more even."""
    works = [8, 7, 6, 5, 4, 2, 2, 2]
    found = assign_chunks(lambda rows: [sum(works[:row]) for row in rows], 8, 2, 4)
    loads = [sum(works[first] for first in mine) for mine in found.firsts.reshape(2, 4)]
    assert loads == [18, 18]
    assert found.imbalance == 1.0


@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("count", [100, 1000])
def test_one_chunk_fewer_would_leave_too_much(count: int, n: int) -> None:
    """On the rank that has the heaviest one."""
    length = 1 << 18
    v = vector(lengths_of(1.5, count, length))
    found = balance_rows((DOCUMENTS,), (1,), (), (v,), length, n)
    chunks = len(found.firsts) // n
    assert 1 < chunks < 16
    whole = (Segment(0, 0, length),)
    made = plan_blocks(DOCUMENTS, whole, whole, (), (v,), (v,))
    size, more = divmod(length // n, chunks - 1)
    edges = np.cumsum([0, *n * [*more * [size + 1], *(chunks - 1 - more) * [size]]])
    works = np.diff(count_pairs_before(made, edges.tolist()))
    assert found.imbalance <= 1.05
    assert works.max() * n > 1.05 * works.sum()


def test_several_masks_count_by_their_weights() -> None:
    """Documents in most layers, all that is past in a few."""
    v = vector(lengths_of(1.0, 20, 1 << 12))
    found = balance_rows((DOCUMENTS, "k <= q"), (5, 1), (), (v,), 1 << 12, 4)
    order, _ = order_tensors(found, torch.device("cpu"))
    index = torch.arange(1 << 12)
    loads = torch.zeros(4, dtype=torch.double)
    for rank, rows in enumerate(order.chunk(4)):
        values = {
            "q": rows[:, None],
            "k": index,
            "row0": v.lines(rows.numpy())[0][:, None],
            "col0": v.lines(index.numpy())[0],
        }
        values = {name: torch.as_tensor(x) for name, x in values.items()}
        for predicate, weight in (DOCUMENTS, 5), ("k <= q", 1):
            loads[rank] += weight * torch.as_tensor(evaluate_mask(predicate, values)).sum()
    assert loads.max() / loads.mean() == pytest.approx(found.imbalance, rel=1e-3)  # of tiny documents it counts all
    assert found.imbalance <= 1.05


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_a_balanced_document_is_few_calls(spread: float, stride: int) -> None:
    """Queries and keys of one rank, or of two that share heads, in balanced order: few calls, no masked block."""
    length, n = 1 << 15, 8
    v = [pieces_of(x) for x in packed(lengths_of(spread, 40, length) if spread else [length])]
    predicate = "Eq(row0, col0) & (col1 <= row1)"
    found = balance_rows((predicate,), (1,), (), tuple(v), length, n, stride)
    moved, places = tuple(Pieces.of(reorder_table(p, found)) for p in v), n // stride
    held = [span_rows([places, 1, 1, 0, 0, length], length // places, place) for place in range(places)]
    plans = [[plan_blocks(predicate, q, k, (), moved, moved) for k in held] for q in held]
    loads = torch.tensor([sum(map(count_pairs, steps)) for steps in plans]).double()
    assert loads.max() / loads.mean() <= 1.05
    every = [one for steps in plans for one in steps]
    assert max(len(one.packed) + len(one.others) for one in every) <= 3
    assert max(len(one.blocks) for one in every) < 200


@pytest.mark.parametrize("predicate", [DOCUMENTS, f"{DOCUMENTS} & (q - k < 5)", "k <= q", "Eq(row0, col0)"])
def test_pairs_before_a_row(predicate: str) -> None:
    lengths = [5, 1, 90, 2, 300, 7]
    v, length = vector(lengths), sum(lengths)
    made = plan_blocks(predicate, (Segment(0, 0, length),), (Segment(0, 0, length),), (), (v,), (v,))
    index, number = torch.arange(length), packed(lengths)[0][0]
    values = {"q": index[:, None], "k": index, "row0": number[:, None], "col0": number}
    of_rows = torch.as_tensor(evaluate_mask(predicate, values)).sum(1)
    found = count_pairs_before(made, list(range(length + 1)))
    if not made.others or all(b.kind.value != "masked" for b in made.others):
        assert found == [0, *of_rows.cumsum(0).tolist()]
    assert found[-1] == count_pairs(made)
