"""One kernel from the texts of pairs and scores: visited tiles, and graphs with single-device results.

Torch's eager flex_attention replaces the kernel. It evaluates every pair; the tables are tested separately.
"""

from __future__ import annotations

import contextlib
from functools import reduce
from unittest import mock

import pytest
import torch
from support.attention.attending import PREDICATES, SIZES, Problem, dense, leaves, randn, row_indices, shard
from support.attention.fused import fused_here
from support.attention.score_texts import score_of
from torch import Tensor

from sp_compile.lowering.attention import attend as bodies
from sp_compile.lowering.attention.merge_blocks import merge
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.masks import score as scores
from sp_compile.lowering.masks.block_plan import plan_blocks
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.predicate import evaluate_mask
from sp_compile.lowering.masks.spans import full_span, span_rows
from sp_compile.lowering.triton.flex import flex_calls as calls
from sp_compile.lowering.triton.flex.flex_tables import (
    EMPTY_TILE,
    FULL_TILE,
    PARTIAL_TILE,
    BlockTables,
    build_tables,
    tile_kinds,
    tile_size,
)
from sp_compile.lowering.triton.flex.flex_texts import max_magnitude, max_score_magnitude

sp = torch.ops.sp
TEXTS = ["", "30.0*tanh(s/30.0)", "s + head0*(k - q)", "s - Abs(k - q)/8.0 + exp(-s**2)"]
SLOPES = [0.5, 0.25, 0.125, 0.0625]


def in_numpy(p: Problem) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...]]:
    found = [Pieces.of(table) for table in sp.pieces([*p.rows, *p.cols])]
    return tuple(found[:2]), tuple(found[2:])


@pytest.mark.sampled(every=26)
@pytest.mark.parametrize("tile", [4, 16])
@pytest.mark.parametrize(
    ("n", "folds", "start", "length"), [(1, 1, 0, 61), (2, 1, 3, 61), (2, 2, 1, 90), (3, 2, 0, 96)]
)
@pytest.mark.parametrize("name", PREDICATES)
def test_tiles(name: str, n: int, folds: int, start: int, length: int, tile: int) -> None:
    """Tiles are empty, full or masked, on each rank for the keys of each rank."""
    p = Problem(name, length, length)
    allowed = p.allowed().any(0)[0], p.allowed().all(0)[0]
    for rank in range(n):
        for shift in range(n):
            spans = [n, folds, 1, 0, start, length], [n, folds, 1, shift, start, length]
            rows, keys = row_indices(spans[0], rank), row_indices(spans[1], rank)
            of = [span_rows(s, len(x), rank) for s, x in zip(spans, (rows, keys))]
            states = tile_kinds(plan_blocks(p.predicate, *of, tuple(SIZES), *in_numpy(p)), len(rows), len(keys), tile)
            for i, j in torch.cartesian_prod(*map(torch.arange, states.shape)).tolist():
                here = [x[at * tile : (at + 1) * tile] for x, at in ((rows, i), (keys, j))]
                at = (
                    torch.tensor([[r for r in x if r is not None] for x in here[:1]]).T,
                    [r for r in here[1] if r is not None],
                )
                some, every = (x[at[0], at[1]] if len(at[1]) else x[:0, :0] for x in allowed)
                if states[i, j] == EMPTY_TILE:
                    assert not some.any()
                elif states[i, j] == FULL_TILE:
                    assert every.all()
                    assert None not in here[0] + here[1]


def test_few_tiles_are_masked() -> None:
    """Only tiles on the diagonal evaluate the mask."""
    rows = span_rows(full_span(4096), 4096, 0)
    states = tile_kinds(plan_blocks("k <= q", rows, rows), 4096, 4096, 128)
    assert torch.equal(states == PARTIAL_TILE, torch.eye(32, dtype=torch.bool))
    assert torch.equal(states == FULL_TILE, torch.ones(32, 32).tril(-1).bool())


def test_tables_are_small() -> None:
    """A rank's million of keys; tables are those of torch's BlockMask."""
    assert tile_size(1 << 17, 1 << 20) == 512
    q, k = span_rows(full_span(1000), 1000, 0), span_rows(full_span(700), 700, 0)
    found = build_tables(plan_blocks("(k <= q) | (k < 300)", q, k), 1000, 700, False, torch.device("cpu"))
    states = tile_kinds(plan_blocks("(k <= q) | (k < 300)", q, k), 1000, 700, 128)
    assert [x.shape for x in found] == [(1, 1, 8), (1, 1, 8, 6)] * 2 + [(1, 1, 6), (1, 1, 6, 8)] * 2
    for numbers, indices, wanted in zip(found[::2], found[1::2], [states == PARTIAL_TILE, states == FULL_TILE] * 2):
        wanted = wanted if numbers.shape[2] == 8 else wanted.T
        for row, number, columns in zip(wanted, numbers[0, 0].tolist(), indices[0, 0]):
            assert columns[:number].tolist() == row.nonzero()[:, 0].tolist()
            assert sorted(columns.tolist()) == list(range(len(row)))


def reference(p: Problem, text: str, bias: Tensor | None = None) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of attention without kernels on a single device."""
    q, k, v = leaves(p.q, p.k, p.v)
    places = {"q": torch.arange(q.shape[2])[:, None], "k": torch.arange(k.shape[2])}
    values = places | {"head0": torch.tensor(SLOPES, dtype=torch.float64)[:, None, None]}
    keys, values_ = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scaled = q @ keys.mT * 0.3
    scored = scores.evaluate_score(score_of(text), scaled, values) if text else scaled
    if bias is not None and bias.dtype != torch.bool:
        scored = scored + bias
    allowed = p.allowed() if bias is None or bias.dtype != torch.bool else p.allowed() & bias
    out, lse = dense(q, keys, values_, allowed, bias=scored - scaled)
    out.backward(p.grad)
    found = [q.grad, k.grad, v.grad]
    return [out.detach(), lse.detach(), *(x for x in found if x is not None)]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def options(text: str) -> dict[str, object]:
    return {"score": score_of(text), "heads": [torch.tensor(SLOPES, dtype=torch.float64)] if "head" in text else []}


@pytest.mark.sampled(every=82)
@pytest.mark.parametrize(("n", "folds", "length"), [(1, 1, 29), (2, 1, 31), (2, 2, 31), (3, 1, 32), (4, 2, 45)])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", PREDICATES)
def test_round_a_ring(name: str, text: str, n: int, folds: int, length: int) -> None:
    """Queries of each rank over keys of each rank, with the log-sum-exps of all; padding before and after."""
    p = Problem(name, length, length, key_heads=2, v_width=5)
    wanted = reference(p, text)
    found = [torch.zeros_like(x) for x in wanted]
    spans = [[n, folds, 1, shift, 1, length] for shift in range(n)]

    def live(rank: int) -> None:
        indices = row_indices(spans[0], rank)
        rows, valid = [i for i in indices if i is not None], torch.tensor([i is not None for i in indices])
        q, out, grad = (shard(x, spans[0], rank) for x in (p.q, wanted[0], p.grad))
        lse = shard(wanted[1][..., None], spans[0], rank)[..., 0]
        parts = []
        for span in spans:
            args = p.arguments(spans[0], span, SIMULATED_GROUP, **options(text))
            keys, values = shard(p.k, span, rank), shard(p.v, span, rank)
            parts.append(bodies.attend(q, keys, values, *args))
            dq, dk, dv, _ = bodies.attend_backward(grad, q, keys, values, out, lse, *args, False)
            found[2][:, :, rows] += dq[:, :, valid]
            for local, i in enumerate(row_indices(span, rank)):
                if i is not None:
                    found[3][:, :, i] += dk[:, :, local]
                    found[4][:, :, i] += dv[:, :, local]
        total = reduce(lambda a, b: merge(*a, *b), parts)
        for whole_, part in zip(found, total):
            whole_[:, :, rows] = part[:, :, valid]

    with fused_here() as programs, torch.no_grad():
        run_ranks(n, live)
    close(found, wanted)
    assert len(programs.made) == (0 if name == "nothing" else 2)  # forward and backward, of all ranks and steps


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 13, 30), (1, 1, 13, 30), (2, 1, 1, 30), (1, 4, 13, 1)])
def test_masks_that_are_data(shape: tuple[int, ...], bias: bool) -> None:
    p = Problem("causal", 13, 30, key_heads=2)
    data = randn(*shape, seed=5) if bias else randn(*shape, seed=5) > -0.5
    with fused_here() as programs, torch.no_grad():
        args = p.arguments(full_span(13), full_span(30), mask=data, **options(TEXTS[1]))
        out, lse = bodies.attend(p.q, p.k, p.v, *args)
        *grads, _ = bodies.attend_backward(p.grad, p.q, p.k, p.v, out, lse, *args, False)
    assert len(programs.made) == 2
    close([out, lse, *grads], reference(p, TEXTS[1], data))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("text", ["k <= q + row0", "row0 < col0 + 9", "row0 - 2*col0 < 5", "Eq(row0 + 1, col0 + 1)"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_vectors_of_any_integer_dtype(dtype: torch.dtype, text: str, is_fused: bool) -> None:
    """Sums of the largest numbers of a dtype do not overflow."""
    q, k, v = (randn(1, 1, 8, 4, seed=seed) for seed in range(3))
    vector = torch.arange(8, dtype=dtype)[None]
    vector[0, 2:4] = torch.iinfo(dtype).max
    wide, places = vector.long(), torch.arange(8)
    values = {"q": places[:, None], "k": places, "row0": wide[..., None], "col0": wide[:, None]}
    with fused_here() if is_fused else contextlib.nullcontext():
        out = sp.masked_attention(q, k, v, [vector], [vector], [], text, 0.0, 0.3, False)
    close([out], [dense(q, k, v, torch.as_tensor(evaluate_mask(text, values)))[0]])


def test_products_of_positions_exceed_int32() -> None:
    """Kernels have int32 positions only if scores do not multiply them."""
    p, text = Problem("none", 1, 50_000), "s - (q - k)**2/2.0**30"
    args = p.arguments(full_span(1), full_span(50_000), **options(text))
    wanted = reference(p, text)[:2]
    with fused_here(), torch.no_grad():
        close(list(bodies.attend(p.q, p.k, p.v, *args)), wanted)


@pytest.mark.parametrize(
    ("text", "magnitude"),
    [(TEXTS[3], 200), ("s + head0*(k - q)", 200), ("s - (q - k)**2/8.0", 40_000), ("s - Abs(q*(k - 9))/8.0", 10_900)],
)
def test_bounds_of_integers_of_scores(text: str, magnitude: int) -> None:
    assert max_score_magnitude(score_of(text), 100, frozenset({"head0"})) == magnitude


def test_lengths_that_change_share_a_program() -> None:
    """The first has one of its own, and one more is of any."""
    problems = [Problem("all", length, length) for length in (20, 25, 33, 150, 20)]
    wanted = [reference(p, TEXTS[1])[:2] for p in problems]
    with fused_here() as programs, torch.no_grad():
        for p, here in zip(problems, wanted):
            rows = full_span(p.q.shape[2])
            close(list(bodies.attend(p.q, p.k, p.v, *p.arguments(rows, rows, **options(TEXTS[1])))), here)
    assert len(programs.made) == 2


def test_uncompiled_texts_run_dense() -> None:
    """The fallback warns once and is not retried."""

    def broken(graph: object, fakes: object) -> None:
        raise RuntimeError("no compiler")

    p = Problem("causal", 20, 20)
    args = p.arguments(full_span(20), full_span(20), **options(TEXTS[1]))
    with fused_here(), calls.COMPILER.force(broken), torch.no_grad(), mock.patch.object(calls, "_failed", False):
        with pytest.warns(UserWarning, match="no compiler"):
            out, lse = bodies.attend(p.q, p.k, p.v, *args)
        again = bodies.attend(p.q, p.k, p.v, *args)
    close([out, lse], reference(p, TEXTS[1])[:2])
    close([out, lse], list(again))


def test_dropout_is_dense() -> None:
    p = Problem("causal", 20, 20)
    args = p.arguments(full_span(20), full_span(20), seed=torch.tensor(3), dropout_p=0.3)
    with fused_here() as programs, torch.no_grad():
        bodies.attend(p.q, p.k, p.v, *args)
    assert not programs.made


def test_order_of_tables() -> None:
    """Tables have the order of torch's BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask

    names = [name for name in BlockMask.__annotations__ if name.endswith(("num_blocks", "indices"))]
    assert tuple(names) == BlockTables._fields


@pytest.mark.parametrize(
    ("text", "is_small"),
    [("(k <= q) & (q - k < 4)", True), ("(q*65536 >= k*65536)", False), ("q*99999 < k + 7", False)],
)
def test_positions_are_int64_for_large_products(text: str, is_small: bool) -> None:
    assert (max_magnitude(text, 1 << 20) < 1 << 31) == is_small
