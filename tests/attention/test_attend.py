"""sp::attend against plain dense attention, on the full sequence and on shards."""

import math
from contextlib import nullcontext
from functools import reduce

import pytest
import torch
from support.attention.attending import PREDICATES, Problem, dense, leaves, randn, row_indices, shard
from torch import Tensor

from sp_compile.lowering.attention import attend as blockwise
from sp_compile.lowering.attention import masking
from sp_compile.lowering.attention.kernel_args import cpu_copy_bytes
from sp_compile.lowering.attention.masking import Dropout
from sp_compile.lowering.attention.merge_blocks import merge
from sp_compile.lowering.attention.op_args import LocalArgs, ShardArgs
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.masks.spans import full_span

sp = torch.ops.sp
CUTS = {"contiguous": 1, "zigzag": 2}
each_predicate = pytest.mark.parametrize("name", PREDICATES)


def test_arguments_of_the_dataclass() -> None:
    """The schema of cached programs does not change, and the dispatcher may omit default arguments."""
    given = "Tensor? mask, Tensor[] rows, Tensor[] cols, Tensor[] pieces, SymInt[] sizes, str predicate, Tensor? seed, "
    given, scores = given + "float dropout_p, ", "str score, Tensor[] heads, Tensor[] tables, "
    frames = "SymInt[] q_frame, SymInt[] k_frame, int n, str group, bool balance"
    assert LocalArgs.schema() == (
        f"{given}float scale, {scores}SymInt[] q_span, SymInt[] k_span, int split_heads, str group"
    )
    assert ShardArgs.schema() == (f"{given}float? scale, {scores}Tensor? sinks, bool lse, {frames}")
    arguments = (None, [], [], [], [3], "k < n0", None, 0.0, 0.3, "", [], [], full_span(8), full_span(8), 1, "")
    args, others = LocalArgs.of((*arguments, True))
    assert (args.to_flat(), others) == (arguments, (True,))


@pytest.mark.sampled(every=6)
@each_predicate
@pytest.mark.parametrize(("key_heads", "v_width"), [(4, 8), (2, 8), (1, 8), (4, 5), (2, 11)])
@pytest.mark.parametrize(("q_len", "k_len"), [(13, 13), (7, 12)])
def test_full_sequence(name: str, key_heads: int, v_width: int, q_len: int, k_len: int) -> None:
    p = Problem(name, q_len, k_len, key_heads=key_heads, v_width=v_width)
    q, k, v = leaves(p.q, p.k, p.v)
    expected, lse = dense(q, k, v, p.allowed())
    expected.backward(p.grad)
    out, got_lse = sp.attend(p.q, p.k, p.v, *p.arguments(full_span(q_len), full_span(k_len)))
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(got_lse, lse.detach())
    arguments = p.arguments(full_span(q_len), full_span(k_len))
    *grads, _ = sp.attend_backward(p.grad, p.q, p.k, p.v, out, got_lse, *arguments, False)
    for got, x in zip(grads, (q, k, v)):
        torch.testing.assert_close(got, x.grad)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@each_predicate
def test_ring_over_steps(name: str, cut: str, n: int) -> None:
    """Queries of every rank meet the keys of all steps; merged results and summed gradients equal the full ones."""
    p = Problem(name, 13, 13, key_heads=2)
    q, k, v = leaves(p.q, p.k, p.v)
    expected, lse = dense(q, k, v, p.allowed())
    expected.backward(p.grad)
    spans = [[n, CUTS[cut], 1, shift, 1, 13] for shift in range(n)]

    def live(rank: int) -> None:
        q, grad, want, want_lse = (shard(x, spans[0], rank) for x in (p.q, p.grad, expected, lse[..., None]))
        wanted_rows = torch.tensor([i is not None for i in row_indices(spans[0], rank)])
        held = [[shard(x, span, rank) for x in (p.k, p.v)] for span in spans]
        arguments = [p.arguments(spans[0], span, SIMULATED_GROUP) for span in spans]
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
    arguments = p.arguments(full_span(9), full_span(11), mask=mask)
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
        arguments = p.arguments(full_span(4), [2, 2, 1, 0, 0, 8], SIMULATED_GROUP, mask=bias)
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
    arguments = p.arguments(full_span(9), full_span(11), mask=randn(1, 1, 9, 11))
    out, lse = sp.attend(p.q, p.k, p.v, *arguments)
    torch.library.opcheck(sp.attend.default, (p.q.transpose(0, 1).contiguous().transpose(0, 1), p.k, p.v, *arguments))
    for mask_grad, packed in ((True, ""), (False, "last"), (True, "rows")):
        torch.library.opcheck(
            sp.attend_backward.default, (p.grad, p.q, p.k, p.v, out, lse, *arguments, mask_grad, [out], packed)
        )
    out, lse = sp.attend(p.q, p.k, p.k, *arguments)
    given = out, p.q, p.k, p.k, out, lse, *arguments, False, [out], "stack"
    torch.library.opcheck(sp.attend_backward.default, given)


@pytest.mark.parametrize("packed", ["last", "rows", "stack"])
@pytest.mark.parametrize("name", ["none", "causal", "documents", "nothing"])
def test_gradients_as_they_are_sent(name: str, packed: str) -> None:
    """Keys' and values' in one, whose memory has never been anything else: no row of it is left as it was."""
    v_width = 8 if packed == "stack" else 5
    p = Problem("none" if name == "nothing" else name, 9, 11, key_heads=2, v_width=v_width)
    arguments = p.arguments(full_span(9), full_span(11))
    if name == "nothing":
        arguments = [*arguments[:5], "k < q - 99", *arguments[6:]]
    out, lse = sp.attend(p.q, p.k, p.v, *arguments)
    given = p.grad, p.q, p.k, p.v, out, lse, *arguments, False, None
    dq, dk, dv, _ = sp.attend_backward(*given)
    got, both, nothing, _ = sp.attend_backward(*given, packed)
    assert torch.equal(got, dq)
    assert torch.equal(both, torch.stack([dk, dv]) if packed == "stack" else torch.cat([dk, dv], 3))
    assert not nothing.numel()
    order = both.movedim(2, 0) if packed == "rows" else both
    assert order.is_contiguous()


def test_no_keys() -> None:
    q, k, grad = randn(2, 4, 5, 8), randn(2, 2, 0, 8), randn(2, 4, 5, 8)
    arguments = [None, [], [], [], [], "", None, 0.0, 1.0, "", [], [], full_span(5), full_span(0), 1, ""]
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
    arguments = [
        None,
        [],
        cols,
        [],
        [],
        "(k <= q) & Ne(col0, 0)",
        None,
        0.0,
        5.0,
        "",
        [],
        [],
        full_span(6),
        full_span(6),
        1,
        "",
    ]
    out, lse = sp.attend(q, k, v, *arguments)
    assert (lse[:, :, :3] == -math.inf).all()
    dq, dk, dv, _ = sp.attend_backward(grad, q, k, v, out, lse, *arguments, False)
    assert not dq[:, :, :3].any()
    assert not dk[:, :, :3].any()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


# Dropout.


def kept_of(seed: int, p: float, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    batch_, heads_, queries_, keys_ = (torch.arange(n) for n in (batch, heads, queries, keys))
    return Dropout(torch.tensor(seed), p, batch_, heads_).keep_mask(queries_, keys_)


def test_dropout_keeps_the_share_it_should() -> None:
    """Dropout masks of neighbors along every dim are independent."""
    shape = 3, 4, 96, 96
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        kept = kept_of(5, p, *shape).double()
        assert kept.shape == shape
        assert abs(kept.mean() - (1 - p)) < 0.005
        if 0 < p < 1:
            for dim, size in enumerate(shape):
                a, b = kept.narrow(dim, 0, size - 1), kept.narrow(dim, 1, size - 1)
                pair = torch.stack([a.flatten(), b.flatten()])
                assert abs(torch.corrcoef(pair)[0, 1]) < 0.01
    agreed = kept_of(6, 0.5, *shape) == kept_of(5, 0.5, *shape)
    assert abs(agreed.double().mean() - 0.5) < 0.01


def test_dropout_of_all_weights_drops_the_greatest_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    upper_half = (2**31 - 1) * pow(masking._HASH_HALF_FACTORS[1], -1, 2**32) % 2**32  # whose hash is 2**31 - 1

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(x.shape, dtype=torch.int32), torch.full(x.shape, upper_half).to(torch.int32)

    monkeypatch.setattr(masking, "_split_int64", split)
    assert not kept_of(5, 1.0, 1, 1, 2, 3).any()
    assert kept_of(5, 1 - 2**-32, 1, 1, 2, 3).all()


@pytest.mark.parametrize("lse", [False, True])
def test_sinks_and_lse_are_exclusive(lse: bool) -> None:
    q, sinks = randn(1, 2, 3, 4).requires_grad_(), randn(2).requires_grad_()
    with pytest.raises(SpError, match="SP433") if lse else nullcontext():
        torch.ops.sp.masked_attention(q, q, q, [], [], [], "", 0.0, None, False, sinks=sinks, lse=lse)


@pytest.mark.parametrize("name", ["none", "causal", "documents"])
def test_dropout_is_that_of_its_mask(name: str) -> None:
    p, seed = Problem(name, 9, 9, key_heads=2), torch.tensor(11)
    kept = kept_of(11, 0.3, 2, 4, 9, 9)
    q, k, v = leaves(p.q, p.k, p.v)
    expected, _ = dense(q, k, v, p.allowed(), dropout=kept / 0.7)
    expected.backward(p.grad)
    arguments = p.arguments(full_span(9), full_span(9), seed=seed, dropout_p=0.3)
    out, lse = sp.attend(p.q, p.k, p.v, *arguments)
    torch.testing.assert_close(out, expected.detach())
    *grads, _ = sp.attend_backward(p.grad, p.q, p.k, p.v, out, lse, *arguments, False)
    for got, x in zip(grads, (q, k, v)):
        torch.testing.assert_close(got, x.grad)


def test_dropout_is_the_same_however_the_work_is_cut() -> None:
    p, seed = Problem("causal", 8, 8), torch.tensor(11)
    expected, _ = sp.attend(p.q, p.k, p.v, *p.arguments(full_span(8), full_span(8), seed=seed, dropout_p=0.5))

    def by_sequence(rank: int) -> Tensor:
        spans = [[2, 2, 1, shift, 0, 8] for shift in range(2)]
        q = shard(p.q, spans[0], rank)
        parts = [
            sp.attend(
                q, *(shard(x, span, rank) for x in (p.k, p.v)),
                *p.arguments(spans[0], span, SIMULATED_GROUP, seed=seed, dropout_p=0.5),
            )
            for span in spans
        ]  # fmt: skip
        return merge(*parts[0], *parts[1])[0]

    def by_head(rank: int) -> Tensor:
        assert current_communicator().rank(SIMULATED_GROUP) == rank
        q, k, v = (x[:, 2 * rank : 2 * rank + 2] for x in (p.q, p.k, p.v))
        arguments = p.arguments(full_span(8), full_span(8), SIMULATED_GROUP, seed=seed, dropout_p=0.5, split_heads=2)
        return sp.attend(q, k, v, *arguments)[0]

    for rank, out in enumerate(run_ranks(2, by_sequence)):
        torch.testing.assert_close(out, shard(expected, [2, 2, 1, 0, 0, 8], rank))
    torch.testing.assert_close(torch.cat(run_ranks(2, by_head), 1), expected)


@pytest.mark.parametrize("name", ["none", "causal", "all"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_large_blocks_are_cut(name: str, masked: bool, dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a kernel would allocate all scores, queries run in slices with equal results."""
    p = Problem(name, 12, 12, key_heads=2)
    mask = randn(1, 1, 12, 12) if masked else None
    arguments = p.arguments(full_span(12), full_span(12), mask=mask, seed=torch.tensor(3), dropout_p=dropout_p)

    def results() -> list[Tensor]:
        out, lse = sp.attend(p.q, p.k, p.v, *arguments)
        return [out, lse, *sp.attend_backward(p.grad, p.q, p.k, p.v, out, lse, *arguments, masked)]

    expected = results()
    monkeypatch.setattr(blockwise, "CPU_SCORES", 300)
    torch.testing.assert_close(results(), expected)


@pytest.mark.parametrize(
    ("rows", "dtype", "strided", "expected"),
    [
        (512, torch.float32, 3, 3), (512, torch.float32, 1, 1), (512, torch.float64, 3, 6), (512, torch.float32, 0, 0),
        (511, torch.float32, 3, 0), (512, torch.bfloat16, 3, 0), (1 << 16, torch.float64, 3, 0),
    ],
)  # fmt: skip
def test_rows_that_are_apart_are_copied_where_it_pays(
    rows: int, dtype: torch.dtype, strided: int, expected: int
) -> None:
    """Return bytes of the strided ones of q, k and v in float32; none for half types, few rows, or over 64 MiB."""
    shape = (1, rows, 4, 16)
    views = [torch.empty(shape, dtype=dtype).transpose(1, 2) for _ in range(strided)]
    others = [torch.empty(1, 4, rows, 16, dtype=dtype) for _ in range(3 - strided)]
    assert cpu_copy_bytes(*views, *others) == expected * math.prod(shape) * 4
