"""Attention by blocks against dense attention written out by hand, in float64."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.lowering.blocks import Block, Kind, plan, work
from sp_compile.lowering.communicator import current
from sp_compile.lowering.dropout import keep_mask
from sp_compile.lowering.merge import merge
from sp_compile.lowering.runs import runs_of
from sp_compile.lowering.spans import Segment, intervals, valid_rows, whole
from sp_compile.predicate import conjuncts, evaluate
from sp_compile.simulate import GROUP, run_ranks

sp = torch.ops.sp
PREDICATES = {
    "none": "",
    "causal": "k <= q",
    "shifted": "k <= q + n1",
    "window": "(k <= q) & (q - k < 5)",
    "prefix": "(k < n0) | (k <= q)",
    "padding": "Ne(col0, 0)",
    "documents": "Eq(row1, col1)",
    "all": "(k <= q) & Eq(row1, col1) & Ne(col0, 0)",
    "sink": "(k <= q) & ((k < 2) | (q - k < 4))",
    "chunks": "Eq(floor(q/4), floor(k/4)) & (k <= q)",
    "nothing": "k < 0",
}
SIZES = [3, 2]
each_predicate = pytest.mark.parametrize("name", PREDICATES)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape)), dtype=dtype)


class Problem:
    """Operands of whole length, vectors, and the dense mask of the predicate."""

    def __init__(
        self, name: str, q_len: int, k_len: int, heads: int = 4, key_heads: int = 4, width: int = 8, v_width: int = 8
    ) -> None:
        self.predicate = PREDICATES[name]
        self.q, self.k = randn(2, heads, q_len, width, seed=1), randn(2, key_heads, k_len, width, seed=2)
        self.v, self.grad = randn(2, key_heads, k_len, v_width, seed=3), randn(2, heads, q_len, v_width, seed=4)
        pad = torch.ones(2, k_len, dtype=torch.bool)
        pad[0, :2] = pad[1, -3:] = False
        length = max(q_len, k_len)
        documents = torch.bucketize(torch.arange(length), torch.tensor([length // 3, 2 * length // 3]))[None]
        self.rows = [torch.zeros(1, q_len, dtype=torch.long), documents[:, :q_len]]
        self.cols = [pad, documents[:, :k_len]]

    def allowed(self) -> Tensor:
        """bool (2, 1, Q, K)."""
        q_len, k_len = self.q.shape[2], self.k.shape[2]
        values: dict[str, Tensor | int] = {"q": torch.arange(q_len)[:, None], "k": torch.arange(k_len)}
        values |= {f"row{i}": x[:, None, :, None] for i, x in enumerate(self.rows)}
        values |= {f"col{i}": x[:, None, None, :].long() for i, x in enumerate(self.cols)}
        values |= {f"n{i}": size for i, size in enumerate(SIZES)}
        mask = torch.ones(2, 1, q_len, k_len, dtype=torch.bool)
        return mask & torch.as_tensor(evaluate(self.predicate, values))

    def arguments(self, q_span: Sequence[int], k_span: Sequence[int], group: str = "", **other: Any) -> list[Any]:
        """The operators' arguments from ``mask`` to ``group``."""
        given = {"mask": None, "seed": None, "dropout_p": 0.0, "scale": 0.3, "split_heads": 1} | other
        return [
            given["mask"], self.rows, self.cols, SIZES, self.predicate, given["seed"], given["dropout_p"],
            given["scale"], q_span, k_span, given["split_heads"], group,
        ]  # fmt: skip


def dense(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float = 0.3, bias: Tensor | None = None, kept: Any = None
) -> tuple[Tensor, Tensor]:
    """softmax by hand: output and log-sum-exp, 0 and -inf where nothing is allowed."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale + (0 if bias is None else bias)).masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse == -math.inf, 0.0, 1.0)[..., None] * torch.exp(
        scores - torch.where(lse == -math.inf, 0.0, lse)[..., None]
    )
    return (weights if kept is None else weights * kept) @ v, lse


def leaves(*xs: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in xs]


@each_predicate
@pytest.mark.parametrize(("key_heads", "v_width"), [(4, 8), (2, 8), (1, 8), (4, 5), (2, 11)])
@pytest.mark.parametrize(("q_len", "k_len"), [(13, 13), (7, 12)])
def test_whole(name: str, key_heads: int, v_width: int, q_len: int, k_len: int) -> None:
    p = Problem(name, q_len, k_len, key_heads=key_heads, v_width=v_width)
    q, k, v = leaves(p.q, p.k, p.v)
    expected, lse = dense(q, k, v, p.allowed())
    expected.backward(p.grad)
    out, got_lse = sp.attend(p.q, p.k, p.v, *p.arguments(whole(q_len), whole(k_len)))
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(got_lse, lse.detach())
    arguments = p.arguments(whole(q_len), whole(k_len))
    *grads, _ = sp.attend_backward(p.grad, p.q, p.k, p.v, out, got_lse, *arguments, False)
    for got, x in zip(grads, (q, k, v)):
        torch.testing.assert_close(got, x.grad)


CUTS = {"contiguous": 1, "zigzag": 2}


def row_indices(span: Sequence[int], rank: int) -> list[int | None]:
    """The indices of the rows that a rank holds, by the definition of spans; None is padding."""
    n, folds, stride, shift, start, length = span
    chunk = -(-(start + length) // (n * folds))
    r = (rank // stride - shift) % n
    positions = [*range(r * chunk, (r + 1) * chunk)]
    if folds == 2:
        positions += range((2 * n - 1 - r) * chunk, (2 * n - r) * chunk)
    return [p - start if 0 <= p - start < length else None for p in positions]


def shard(x: Tensor, span: Sequence[int], rank: int) -> Tensor:
    """The rows of ``x`` that a rank holds; copies of row 0 at padding."""
    return x.index_select(2, torch.tensor([i or 0 for i in row_indices(span, rank)]))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@each_predicate
def test_ring_by_hand(name: str, cut: str, n: int) -> None:
    """Every rank's queries meet the keys of all steps: merged results and summed gradients are the whole ones."""
    p = Problem(name, 13, 13, key_heads=2)
    q, k, v = leaves(p.q, p.k, p.v)
    expected, lse = dense(q, k, v, p.allowed())
    expected.backward(p.grad)
    spans = [[n, CUTS[cut], 1, shift, 1, 13] for shift in range(n)]

    def live(rank: int) -> None:
        q, grad, want, want_lse = (shard(x, spans[0], rank) for x in (p.q, p.grad, expected, lse[..., None]))
        wanted_rows = torch.tensor([i is not None for i in row_indices(spans[0], rank)])
        held = [[shard(x, span, rank) for x in (p.k, p.v)] for span in spans]
        arguments = [p.arguments(spans[0], span, GROUP) for span in spans]
        parts = [sp.attend(q, *x, *a) for x, a in zip(held, arguments)]
        out, lse_ = reduce(lambda a, b: merge(*a, *b), parts)
        torch.testing.assert_close(out[:, :, wanted_rows], want[:, :, wanted_rows].detach())
        torch.testing.assert_close(lse_[:, :, wanted_rows], want_lse[:, :, wanted_rows, 0].detach())
        grad = grad * wanted_rows[:, None]
        grads = [sp.attend_backward(grad, q, *x, out, lse_, *a, False) for x, a in zip(held, arguments)]
        rows = [i for i in row_indices(spans[0], rank) if i is not None]
        sums["q"][:, :, rows] += sum(g[0] for g in grads)[:, :, wanted_rows]
        for span, (_, dk, dv, _) in zip(spans, grads):
            for local, i in enumerate(row_indices(span, rank)):
                if i is not None:
                    sums["k"][:, :, i] += dk[:, :, local]
                    sums["v"][:, :, i] += dv[:, :, local]

    sums = {"q": torch.zeros_like(p.q), "k": torch.zeros_like(p.k), "v": torch.zeros_like(p.v)}
    run_ranks(n, live)
    for got, x in zip(sums.values(), (q, k, v)):
        torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize("shape", [(2, 4, 9, 11), (1, 1, 9, 11), (2, 1, 1, 11), (1, 4, 9, 1)])
@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("name", ["none", "causal", "all"])
def test_data_mask(name: str, kind: str, shape: tuple[int, ...]) -> None:
    p = Problem(name, 9, 11, key_heads=2)
    bias = randn(*shape, seed=7)
    mask = bias > -0.5 if kind == "bool" else bias.masked_fill(bias > 1.5, -math.inf)
    q, k, v, m = leaves(p.q, p.k, p.v, bias if kind == "bool" else mask)
    allowed = p.allowed() & mask if kind == "bool" else p.allowed()
    expected, _ = dense(q, k, v, allowed, bias=None if kind == "bool" else m)
    expected.backward(p.grad)
    arguments = p.arguments(whole(9), whole(11), mask=mask)
    out, lse = sp.attend(p.q, p.k, p.v, *arguments)
    torch.testing.assert_close(out, expected.detach())
    for mask_grad in (False, True):
        *grads, dmask = sp.attend_backward(p.grad, p.q, p.k, p.v, out, lse, *arguments, mask_grad)
        for got, x in zip(grads, (q, k, v)):
            torch.testing.assert_close(got, x.grad)
    if kind == "float":
        torch.testing.assert_close(dmask, m.grad)


def test_columns_of_a_mask_are_key_indices() -> None:
    p = Problem("none", 8, 8)
    bias = randn(1, 1, 4, 8, seed=3)

    def live(rank: int) -> Tensor:
        k, v = (shard(x, [2, 2, 1, 0, 0, 8], rank) for x in (p.k, p.v))
        arguments = p.arguments(whole(4), [2, 2, 1, 0, 0, 8], GROUP, mask=bias)
        q = p.q[:, :, :4]
        out, lse = sp.attend(q, k, v, *arguments)
        dmask = sp.attend_backward(p.grad[:, :, :4], q, k, v, out, lse, *arguments, True)[3]
        absent = [i for i in range(8) if i not in row_indices([2, 2, 1, 0, 0, 8], rank)]
        assert not dmask[..., absent].any()
        return out

    index = [row_indices([2, 2, 1, 0, 0, 8], rank) for rank in range(2)]
    for rank, out in enumerate(run_ranks(2, live)):
        keys = index[rank]
        everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        expected, _ = dense(p.q[:, :, :4], p.k[:, :, keys], p.v[:, :, keys], everything, bias=bias[..., keys])
        torch.testing.assert_close(out, expected)


def test_opcheck() -> None:
    p = Problem("all", 9, 11, key_heads=2, v_width=5)
    arguments = p.arguments(whole(9), whole(11), mask=randn(1, 1, 9, 11))
    out, lse = sp.attend(p.q, p.k, p.v, *arguments)
    torch.library.opcheck(sp.attend.default, (p.q.transpose(0, 1).contiguous().transpose(0, 1), p.k, p.v, *arguments))
    for mask_grad in (True, False):
        torch.library.opcheck(
            sp.attend_backward.default, (p.grad, p.q, p.k, p.v, out, lse, *arguments, mask_grad, out)
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("predicate", ["k <= q", "(k <= q) & (q - k < 40)", "Ne(col0, 0) & (k <= q)"])
def test_half_precision(dtype: torch.dtype, predicate: str) -> None:
    """At most twice the error that SDPA makes in the same dtype."""
    xs = [randn(1, 4, 300, 16, seed=i) for i in range(4)]
    grad = xs.pop()
    pad = torch.arange(300)[None] < 280
    i = torch.arange(300)
    mask = {"k": i <= i[:, None], "(": (i <= i[:, None]) & (i[:, None] - i < 40), "N": (i <= i[:, None]) & pad}
    allowed = mask[predicate[0]]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def errors(fn: Any) -> list[float]:
        given = leaves(*(x.to(dtype) for x in xs))
        out = fn(*given)
        out.backward(grad.to(dtype))
        return [float((a - b).norm()) for a, b in zip([out, *(x.grad for x in given)], expected)]

    exact = leaves(*xs)
    whole_out = sdpa(*exact, attn_mask=allowed)
    whole_out.backward(grad)
    expected = [whole_out, *(x.grad for x in exact)]
    ours = errors(lambda q, k, v: sp.masked_attention(q, k, v, [], [pad], [], predicate, 0.0, None, False))
    theirs = errors(lambda q, k, v: sdpa(q, k, v, attn_mask=allowed))
    assert all(a <= 2 * b + 1e-12 for a, b in zip(ours, theirs)), (ours, theirs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_masked_attention(compiled: bool, dropout_p: float) -> None:
    """In eager and compiled: the values and gradients of the operator below, in the operands' dtypes."""
    p = Problem("all", 9, 11, key_heads=2)
    q, k, v = leaves(*(x.float() for x in (p.q, p.k, p.v)))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sp.masked_attention(q, k, v, p.rows, p.cols, SIZES, p.predicate, dropout_p, 0.3, True)

    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    arguments = p.arguments(whole(9), whole(11), seed=seed, dropout_p=dropout_p)
    out, lse = sp.attend(q.detach(), k.detach(), v.detach(), *arguments)
    grads = sp.attend_backward(p.grad.float(), q.detach(), k.detach(), v.detach(), out, lse, *arguments, False)
    torch.manual_seed(3)
    run = torch.compile(fn, backend="aot_eager" if dropout_p else "inductor", fullgraph=True) if compiled else fn
    got = run(q, k, v)
    got.backward(p.grad.float())
    torch.testing.assert_close(got, out)
    for x, wanted in zip((q, k, v), grads):
        torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape", "gqa"),
    [
        ((5, 4), (6, 4), (6, 3), False),
        ((2, 5, 4), (2, 6, 4), (2, 6, 3), False),
        ((2, 5, 4), (6, 4), (6, 3), False),
        ((2, 3, 5, 4), (3, 6, 4), (1, 6, 3), False),
        ((2, 3, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4), False),
        ((3, 2, 1, 5, 4), (1, 2, 4, 6, 4), (3, 1, 4, 6, 4), False),
        ((3, 2, 4, 5, 4), (3, 2, 2, 6, 4), (3, 2, 2, 6, 4), True),
        ((4, 5, 4), (2, 6, 4), (2, 6, 4), True),
        ((2, 3, 0, 4), (2, 3, 6, 4), (2, 3, 6, 4), False),
        ((0, 3, 5, 4), (0, 3, 6, 4), (0, 3, 6, 4), False),
    ],
)
def test_shapes_of_masked_attention(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...], gqa: bool
) -> None:
    xs = [randn(*shape, seed=i) for i, shape in enumerate((q_shape, k_shape, v_shape))]
    ours, theirs = leaves(*xs), leaves(*xs)
    got = sp.masked_attention(*ours, [], [], [], "k <= q", 0.0, None, gqa)
    i, j = torch.arange(q_shape[-2]), torch.arange(k_shape[-2])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = sdpa(*theirs, attn_mask=j <= i[:, None], enable_gqa=gqa)
    torch.testing.assert_close(got, expected)
    grad = randn(*expected.shape)
    got.backward(grad)
    expected.backward(grad)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad)


def test_no_keys() -> None:
    q, k, grad = randn(2, 4, 5, 8), randn(2, 2, 0, 8), randn(2, 4, 5, 8)
    arguments = [None, [], [], [], "", None, 0.0, 1.0, whole(5), whole(0), 1, ""]
    out, lse = sp.attend(q, k, k, *arguments)
    assert not out.any()
    assert (lse == -math.inf).all()
    dq, dk, _, _ = sp.attend_backward(grad, q, k, k, out, lse, *arguments, False)
    assert not dq.any()
    assert dk.shape == k.shape


def test_rows_without_keys_give_no_gradient() -> None:
    """Also when their score of another block is large: no NaN, no inf, exact zeros."""
    q, k, v, grad = (randn(1, 2, 6, 8, seed=i) * 30 for i in range(4))
    cols = [torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.bool)]
    arguments = [None, [], cols, [], "(k <= q) & Ne(col0, 0)", None, 0.0, 5.0, whole(6), whole(6), 1, ""]
    out, lse = sp.attend(q, k, v, *arguments)
    assert (lse[:, :, :3] == -math.inf).all()
    dq, dk, dv, _ = sp.attend_backward(grad, q, k, v, out, lse, *arguments, False)
    assert not dq[:, :, :3].any()
    assert not dk[:, :, :3].any()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


# Dropout.


def test_dropout_keeps_the_share_it_should() -> None:
    """And neighbours along every dim are independent."""
    numbers = [torch.arange(n) for n in (3, 4, 96, 96)]
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        kept = keep_mask(torch.tensor(5), p, *numbers).double()
        assert kept.shape == (3, 4, 96, 96)
        assert abs(kept.mean() - (1 - p)) < 0.005
        if 0 < p < 1:
            for dim in range(4):
                a, b = kept.narrow(dim, 0, kept.shape[dim] - 1), kept.narrow(dim, 1, kept.shape[dim] - 1)
                pair = torch.stack([a.flatten(), b.flatten()])
                assert abs(torch.corrcoef(pair)[0, 1]) < 0.01
    other = keep_mask(torch.tensor(6), 0.5, *numbers)
    assert abs((other == keep_mask(torch.tensor(5), 0.5, *numbers)).double().mean() - 0.5) < 0.01


@pytest.mark.parametrize("name", ["none", "causal", "documents"])
def test_dropout_is_that_of_its_mask(name: str) -> None:
    p, seed = Problem(name, 9, 9, key_heads=2), torch.tensor(11)
    kept = keep_mask(seed, 0.3, *(torch.arange(n) for n in (2, 4, 9, 9)))
    q, k, v = leaves(p.q, p.k, p.v)
    expected, _ = dense(q, k, v, p.allowed(), kept=kept / 0.7)
    expected.backward(p.grad)
    arguments = p.arguments(whole(9), whole(9), seed=seed, dropout_p=0.3)
    out, lse = sp.attend(p.q, p.k, p.v, *arguments)
    torch.testing.assert_close(out, expected.detach())
    *grads, _ = sp.attend_backward(p.grad, p.q, p.k, p.v, out, lse, *arguments, False)
    for got, x in zip(grads, (q, k, v)):
        torch.testing.assert_close(got, x.grad)


def test_dropout_is_the_same_however_the_work_is_cut() -> None:
    p, seed = Problem("causal", 8, 8), torch.tensor(11)
    expected, _ = sp.attend(p.q, p.k, p.v, *p.arguments(whole(8), whole(8), seed=seed, dropout_p=0.5))

    def by_sequence(rank: int) -> Tensor:
        spans = [[2, 2, 1, shift, 0, 8] for shift in range(2)]
        q = shard(p.q, spans[0], rank)
        parts = [
            sp.attend(
                q, *(shard(x, span, rank) for x in (p.k, p.v)),
                *p.arguments(spans[0], span, GROUP, seed=seed, dropout_p=0.5),
            )
            for span in spans
        ]  # fmt: skip
        return merge(*parts[0], *parts[1])[0]

    def by_head(rank: int) -> Tensor:
        assert current().rank(GROUP) == rank
        q, k, v = (x[:, 2 * rank : 2 * rank + 2] for x in (p.q, p.k, p.v))
        arguments = p.arguments(whole(8), whole(8), GROUP, seed=seed, dropout_p=0.5, split_heads=2)
        return sp.attend(q, k, v, *arguments)[0]

    for rank, out in enumerate(run_ranks(2, by_sequence)):
        torch.testing.assert_close(out, shard(expected, [2, 2, 1, 0, 0, 8], rank))
    torch.testing.assert_close(torch.cat(run_ranks(2, by_head), 1), expected)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_gradcheck(dropout_p: float) -> None:
    p = Problem("all", 4, 5, heads=2, key_heads=1, width=3, v_width=2)

    def fn(*xs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return sp.masked_attention(*xs, p.rows, p.cols, SIZES, p.predicate, dropout_p, None, True)

    assert torch.autograd.gradcheck(fn, leaves(p.q, p.k, p.v))


# Blocks.


def rows_of(span: Sequence[int], local: int, rank: int) -> tuple[Segment, ...]:
    return run_ranks(rank + 1, lambda r: valid_rows(span, local, GROUP))[rank]


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


@settings(max_examples=150, deadline=None, derandomize=True)
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
