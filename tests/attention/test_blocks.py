"""The plan of blocks: every pair once, nothing masked that need not be, and the same work on all ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention.attending import PREDICATES
from torch import Tensor

from sp_compile.lowering.attention.blocks import Block, Kind, Segment, intervals, plan, runs_of, valid_rows, whole
from sp_compile.lowering.attention.predicate import conjuncts, evaluate
from sp_compile.lowering.simulate import GROUP, run_ranks


def rows_of(span: Sequence[int], local: int, rank: int) -> tuple[Segment, ...]:
    return run_ranks(rank + 1, lambda r: valid_rows(span, local, GROUP))[rank]


def work(blocks: tuple[Block, ...]) -> float:
    """Computed pairs, in which a CAUSAL block counts half."""
    return sum(b.q_len * b.k_len * (0.5 if b.kind is Kind.CAUSAL else 1) for b in blocks)


def covered(blocks: Sequence[Block], q_rows: Any, k_rows: Any, q_len: int, k_len: int) -> Tensor:
    """How many blocks hold each pair of indices; FULL and CAUSAL ones only the pairs that they let attend."""
    counts = torch.zeros(q_len, k_len, dtype=torch.int64)
    for block in blocks:
        queries = [i for a, b in intervals(q_rows, block.q_off, block.q_off + block.q_len) for i in range(a, b + 1)]
        keys = [i for a, b in intervals(k_rows, block.k_off, block.k_off + block.k_len) for i in range(a, b + 1)]
        held = torch.ones(len(queries), len(keys), dtype=torch.int64)
        assert held.shape == (block.q_len, block.k_len)
        if block.kind is Kind.CAUSAL:
            assert block.q_len == block.k_len
            held = held.tril()
        counts[torch.tensor(queries)[:, None], torch.tensor(keys)] += held
    return counts


@settings(max_examples=150)
@given(st.data())
def test_blocks_cover_each_pair_once(data: st.DataObject) -> None:
    draw = data.draw
    predicate = draw(st.sampled_from(sorted(PREDICATES.values())))
    n, shift = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rank = draw(st.integers(0, n - 1))
    spans, lengths = [], []
    for i in range(2):
        folds, length = draw(st.integers(1, 2)), draw(st.integers(1, 600))
        spans.append([n, folds, 1, shift * i, draw(st.integers(0, 3)), length])
        lengths.append(folds * -(-(length + spans[-1][4]) // (n * folds)))
    q_rows, k_rows = (rows_of(span, local, rank) for span, local in zip(spans, lengths))
    q_len, k_len = spans[0][5], spans[1][5]
    values = st.lists(st.integers(0, 3), min_size=1, max_size=6)
    rows, cols = ([stretched(draw(values), size) for _ in range(2)] for size in (q_len, k_len))
    bounds = [tuple(runs_of(x) for x in xs) for xs in (rows, cols)]
    blocks = plan(predicate, q_rows, k_rows, (3, 2), *bounds)

    known: dict[str, Any] = {"q": torch.arange(q_len)[:, None], "k": torch.arange(k_len), "n0": 3, "n1": 2}
    known |= {f"row{i}": x[0][:, None] for i, x in enumerate(rows)} | {f"col{i}": x[0] for i, x in enumerate(cols)}
    allowed = torch.ones(q_len, k_len, dtype=torch.bool) & torch.as_tensor(evaluate(predicate, known))
    here = torch.zeros_like(allowed)
    for a, b in intervals(q_rows, 0, lengths[0]):
        for c, d in intervals(k_rows, 0, lengths[1]):
            here[a : b + 1, c : d + 1] = True
    counts = covered(blocks, q_rows, k_rows, q_len, k_len)
    assert counts.max() <= 1
    assert (counts[allowed & here] == 1).all()
    sure = [block for block in blocks if block.kind is not Kind.MASKED]
    assert not (covered(sure, q_rows, k_rows, q_len, k_len).bool() & ~allowed).any()
    for block in blocks:
        assert set(block.conditions) <= set(conjuncts(predicate))
        assert (block.kind is Kind.FULL) == (not block.conditions)


def stretched(values: Sequence[int], length: int) -> Tensor:
    """(1, length): the values in stretches of about equal length."""
    return torch.tensor(values)[torch.arange(length) * len(values) // length][None]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_zigzag_is_balanced(n: int) -> None:
    """Every rank does the same work in every step, in at most one call besides its own block."""
    length = 64 * n
    for shift in range(n):
        plans = []
        for rank in range(n):
            spans = [[n, 2, 1, s, 0, length] for s in (0, shift)]
            plans.append(plan("k <= q", *(rows_of(span, 64, rank) for span in spans)))
        assert len({work(blocks) for blocks in plans}) == 1
        assert shift == 0 or all(len(blocks) == 1 and blocks[0].kind is Kind.FULL for blocks in plans)


def test_causal_is_never_masked() -> None:
    """Any alignment of two cuts: rectangles and triangles."""
    for q_span in ([4, 2, 1, 0, 0, 500], [4, 1, 1, 0, 3, 480], whole(512)):
        for k_span in ([4, 2, 1, 1, 5, 490], [3, 1, 1, 1, 0, 512], whole(512)):
            for rank in range(3):
                locals_ = [512 if span[0] == 1 else 2 * -(-512 // (2 * span[0])) for span in (q_span, k_span)]
                rows = [rows_of(span, local, rank) for span, local in zip((q_span, k_span), locals_)]
                for predicate in ("k <= q", "k < q + 7", "k <= q - 3"):
                    assert all(block.kind is not Kind.MASKED for block in plan(predicate, *rows))


def test_blocks_of_a_window_and_of_documents() -> None:
    """The work is near what is attended, and a document is one causal block."""
    rows = (Segment(0, 0, 4096),)
    window = plan("(k <= q) & (q - k < 256)", rows, rows)
    assert work(window) <= 1.6 * 4096 * 256
    documents = torch.bucketize(torch.arange(4096), torch.tensor([700, 1300, 2900]))[None]
    bounds = (runs_of(documents),)
    blocks = plan("(k <= q) & Eq(row0, col0)", rows, rows, (), bounds, bounds)
    assert [block.kind for block in blocks] == [Kind.CAUSAL] * 4
    padding = plan("Ne(col0, 0)", rows, rows, (), (), (runs_of(torch.arange(4096)[None] % 2),))
    assert len(padding) == 1
