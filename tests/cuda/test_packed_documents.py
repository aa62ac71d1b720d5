"""Packed documents on a GPU: kernel calls of each attention for every layout, and values in float32."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
from support.attention.attending import packed
from support.attention.functional_cases import OPS, Case
from support.cuda.blocks import TOLERANCE
from support.cuda.borrowed import borrow
from support.cuda.ranks import simulated_on_gpu
from support.cuda.worker import AbsentGpu
from torch import Tensor

from sp_compile.lowering.attention import packed as calls
from sp_compile.lowering.attention.attend import _query_strips
from sp_compile.lowering.attention.masking import CallMask
from sp_compile.lowering.attention.op_args import LocalArgs
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.masks.balance_rows import balance_rows, reorder_table
from sp_compile.lowering.masks.blocks import CAUSAL_WINDOW, AttendedRun, merge_runs
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.spans import full_span, shard_spans

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, RANKS, DOCUMENTS = 1 << 17, 4, 1000
CAUSAL_WITHIN = "Eq(row0, col0) & (col1 <= row1)"
PREDICATES = {
    "all pairs": "Eq(row0, col0)",
    "causal": CAUSAL_WITHIN,
    "window": f"{CAUSAL_WITHIN} & (row1 - col1 < 100)",
}
Spans = list[tuple[list[int], list[int], int]]
"""Spans of queries and of keys, and the number of keys."""


def lengths(spread: float, count: int = DOCUMENTS, tokens: int = TOKENS) -> list[int]:
    """Return log-normal lengths of documents."""
    drawn = (spread * torch.randn(count, generator=torch.Generator().manual_seed(0))).exp()
    ends = (drawn.cumsum(0) / drawn.sum() * (tokens - count)).long() + torch.arange(1, count + 1)
    return torch.cat([ends[:1], ends.diff()]).tolist()


def ring(folds: int, stride: int = 1) -> Spans:
    n = RANKS // stride
    spans = [[n, folds, stride, shift, 0, TOKENS] for shift in range(n)]
    return [(spans[0], span, TOKENS // n) for span in spans]


WAYS: dict[str, Spans] = {
    "Ulysses": [(full_span(TOKENS), full_span(TOKENS), TOKENS)],
    "ring": ring(1),
    "ring, zigzag": ring(2),
    "hybrid": ring(1, stride=2),
    "hybrid, zigzag": ring(2, stride=2),
    "gather": [(ring(1)[0][0], full_span(TOKENS), TOKENS)],
    "gather, zigzag": [(ring(2)[0][0], span, TOKENS // 2) for span in shard_spans([1, TOKENS, 0, TOKENS, 2], RANKS)],
}


def tables_of(vectors: list[Tensor], balanced: str) -> list[Tensor]:
    """Return the tables of rows and columns. Balanced rows attend to balanced keys in a ring only."""
    tables = torch.ops.sp.pieces(vectors)
    if not balanced:
        return tables * 2
    pieces = tuple(map(Pieces.of, tables))
    found = balance_rows((CAUSAL_WITHIN,), (1,), (), pieces, TOKENS, RANKS)
    moved = [reorder_table(one, found) for one in pieces]
    return moved + (moved if balanced == "ring" else tables)


def kernels(predicate: str, spread: float, dtype: torch.dtype, spans: Spans, balanced: str = "") -> list[list[str]]:
    """Return the kernels of each attention of all ranks."""
    vectors = list(packed(lengths(spread)))
    tables, there = tables_of(vectors, balanced), [borrow(x) for x in vectors]

    def on(rank: int) -> list[list[str]]:
        found = []
        for q_span, k_span, keys in spans:
            q, k = (borrow(torch.zeros((), dtype=dtype).expand(1, 8, n, 128)) for n in (TOKENS // q_span[0], keys))
            given = [None, there, there, tables, [], predicate, None, 0.0, 1.0, "", [], []]
            args, _ = LocalArgs.of([*given, q_span, k_span, 1, SIMULATED_GROUP])
            strips = _query_strips(q, k, CallMask.of(q, k, args), mask_grad=False)
            found.append([kernel.name for strip in strips for _, kernel in strip])
        return found

    return [names for of_rank in run_ranks(RANKS, on) for names in of_rank]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", PREDICATES)
def test_three_calls_an_attention(gpu: AbsentGpu, name: str, spread: float, dtype: torch.dtype) -> None:
    """A thousand documents, in every order of rows. In float32, two more calls are made if three would need memory for
    more than 8 times the rows: for very uneven lengths, or if the non-causal ones of a zigzag shard are three."""
    crowded = dtype == FP32 and (spread == 2.0 or name == "all pairs")
    ways = [(spans, "") for spans in WAYS.values()] + [(WAYS[name], name) for name in ("ring", "gather")]
    for spans, balanced in ways:
        found = gpu.run(kernels, PREDICATES[name], spread, dtype, spans, balanced)
        assert max(map(len, found)) <= (5 if crowded else 3)
        assert any(found)
        known = {"flash" if dtype == BF16 else "efficient"}
        if spread == 2.0 or (name == "window" and dtype == FP32):
            known |= {"flex"}  # of a few tokens, or of windows whose queries and keys are not on one rank
        assert {one for names in found for one in names} <= known


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_windows_of_unsplit_documents(gpu: AbsentGpu, spread: float) -> None:
    """Every rank has all queries and keys of a document."""
    found = gpu.run(kernels, PREDICATES["window"], spread, FP32, WAYS["Ulysses"])
    assert {name for names in found for name in names} == {"efficient"}


OPTIONS = {"all pairs": {}, "causal": {"is_causal": True}, "window": {"is_causal": True, "window": 5}}


def by_any_length(op: str, case: Case, n: int) -> tuple[list[Tensor], list[Tensor], set[str], int]:
    """Run the case in three calls, by limits that forbid one call."""
    with mock.patch.multiple(calls, UNSPLIT_BYTES=0, MIN_SAVING=1, MAX_PADDING=1 << 20):
        calls._split_by_length.cache_clear()
        found = simulated_on_gpu(op, case, n)
        calls._split_by_length.cache_clear()
    return found


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("op", OPS)
def test_numbers_in_float32(gpu: AbsentGpu, op: str, name: str, layout: str) -> None:
    """Results and gradients equal a single device's for uneven lengths, which need several calls, on padded shards."""
    if op in ("ulysses", "hybrid") and layout == "zigzag":
        layout = "contiguous"
    documents = torch.arange(9).repeat_interleave(torch.tensor([3, 70, 1, 2, 1, 40, 5, 30, 5])).expand(2, -1)
    options = {"documents": documents, **OPTIONS[name]}
    case = Case(options, kv_heads=4 if op == "hybrid" else 2, s=157, layout=layout, dtype=FP32)
    got, wanted, found, products = gpu.run(by_any_length, op, case, 4)
    assert found == {"_efficient_attention_forward", "_efficient_attention_backward"}
    assert products == 0
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCE[FP32] * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_memory_for_the_longest(spread: float) -> None:
    """At most three calls cover all sequences, and none needs memory for many times the rows."""
    ends = torch.tensor([0, *lengths(spread)]).cumsum(0).tolist()
    runs = [AttendedRun((a, b), (a, b), CAUSAL_WINDOW) for a, b in pairwise(ends)]
    found = calls.split_by_length((merge_runs(runs, CAUSAL_WINDOW),), 1, 4096)
    assert len(found) <= calls.MAX_CALLS
    assert sorted(run for call in found for run in call.runs()) == runs
    longest = [len(call.runs()) * max(run.q[1] - run.q[0] for run in call.runs()) for call in found]
    assert max(longest) <= 4 * TOKENS


def test_lengths_of_every_size_are_more_calls() -> None:
    """One sequence of half the rows, two of a quarter, ...: three calls would need memory for many times the rows."""
    sizes = [1 << (16 - level) for level in range(12) for _ in range(1 << level)]
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    runs = [AttendedRun((a, b), (a, b), CAUSAL_WINDOW) for a, b in pairwise(ends)]
    found = calls.split_by_length((merge_runs(runs, CAUSAL_WINDOW),), 1, 4096)
    assert 2 <= len(found) <= 4
    longest = [len(call.runs()) * max(run.q[1] - run.q[0] for run in call.runs()) for call in found]
    assert max(longest) <= calls.MAX_PADDING * ends[-1]


def test_sequences_per_call_are_limited_by_the_grid() -> None:
    runs = [AttendedRun((i, i + 1), (i, i + 1), CAUSAL_WINDOW) for i in range(70_000)]
    found = calls.split_by_length((merge_runs(runs, CAUSAL_WINDOW),), 2, 64)
    assert [len(call.runs()) for call in found] == [32_767, 32_767, 4_466]
    apart = [AttendedRun((3 * i, 3 * i + 1), (2 * i, 2 * i + 1), CAUSAL_WINDOW) for i in range(30_000)]
    found = calls.split_by_length((merge_runs(apart, CAUSAL_WINDOW),), 1, None)
    assert [run for call in found for run in call.runs()] == apart
    assert max(len(call.queries) for call in found) <= calls.MAX_SEQUENCES
