"""Attention of plain ops: forms that become the fused op, forms that stay, and equal values."""

from __future__ import annotations

import math
from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.attention.score_texts import score_of
from support.capturing import compile_function
from support.golden import captured, show
from support.models import check, floats, seeded
from support.parity import Outcome, against_eager
from support.parity import check as same_on_ranks
from support.ranks import Ranks
from support.variants.eager_attention import (
    DATA,
    FORMS,
    LOWEST,
    SOFT_CAPS,
    STAYS,
    Attend,
    B,
    D,
    H,
    S,
    additive,
    before,
    repeated,
    sinks,
    with_sinks,
)
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.sharding.attention_axes import ATTENTION

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(floats(B, H, S, D, seed=seed).to(dtype) * 2 - 1 for seed in range(3))


def canonical(attend: Attend, dtype: torch.dtype = torch.float64, differentiable: bool = True) -> torch.fx.GraphModule:
    gm = sp_compile.capture_export(torch.export.export(Model(attend), inputs(dtype)))
    for node in gm.graph.find_nodes(op="placeholder"):
        set_node_info(node, requires_grad=differentiable)
    Canonicalize()(gm)
    return gm


def test_a_bias_that_may_hold_anything_stays() -> None:
    """An untrained float input: for a row of finfo.min, fused attention would have another gradient."""
    gm = canonical(FORMS["bias"][0], differentiable=False)
    assert not [n for n in gm.graph.nodes if n.target in ATTENTION]


@pytest.mark.parametrize(
    ("bias", "is_fused"),
    [
        (lambda keep: (keep.float() - 1) * 10**9, False),
        (lambda keep: ((keep - 1) * 10**9).float(), False),
        (lambda keep: (keep.float() - 1) * 1000 * 1000 * 1000, False),
        (lambda keep: (keep.float() - 1) / 1e-9, False),
        (lambda keep: (1 - keep.float()) * -100, True),
    ],
)
def test_products_of_constants_may_be_fills(bias: Callable[[Tensor], Tensor], is_fused: bool) -> None:
    """A row of padding only: fused attention would have another gradient."""

    def attend(q: Tensor, keep: Tensor) -> Tensor:
        return (q @ q.mT / 2 + bias(keep)[:, None, None]).softmax(-1) @ q

    gm = captured(attend, torch.randn(1, 2, 6, 4), torch.zeros(1, 6, dtype=torch.long))
    Canonicalize()(gm)
    assert any(n.target in ATTENTION for n in gm.graph.nodes) is is_fused


def test_untrained_sinks_may_be_fills() -> None:
    """A row of only finite fills would share its weights with them."""
    assert not [
        n
        for n in canonical(FORMS["sinks and finite fills of data"][0], differentiable=False).graph.nodes
        if n.target in ATTENTION
    ]


def test_sinks_leave_no_pairs() -> None:
    values = [n.meta.get("val") for n in canonical(FORMS["sinks as GPT-OSS has them"][0]).graph.nodes]
    assert not [x for x in values if isinstance(x, Tensor) and x.shape[-2:] in ((S, S), (S, S + 1))]


def mask_and_scale(gm: torch.fx.GraphModule) -> tuple[str, float]:
    (node,) = (n for n in gm.graph.nodes if n.target in ATTENTION)
    if node.target is torch.ops.sp.masked_attention.default:
        return "data" if node.kwargs.get("attn_mask") is not None else str(node.args[6]), node.args[8]
    mask = "k <= q" if True in node.args[5:6] else "" if node.args[3] is None else "data"
    return mask, node.kwargs["scale"]


def grads(run: Attend, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    given = [t.clone().requires_grad_() for t in inputs(dtype)]
    torch.manual_seed(3)
    out = run(*given)
    loss = (out.sin() * floats(*out.shape, seed=9)).sum()
    return [out, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    attend, expected = FORMS[name]
    gm = canonical(attend)
    assert mask_and_scale(gm) == expected
    assert not any("softmax" in str(n.target) for n in gm.graph.nodes)
    torch.testing.assert_close(grads(gm), grads(attend), rtol=1e-12, atol=1e-12)


class Projected(Model):
    """With parameters, of which the gradients are compared, too."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.projections = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(*(projection(x) for projection in self.projections)).sin()


ON_RANKS = {name: attend for name, (attend, _) in {**FORMS, **SOFT_CAPS}.items()}


@pytest.mark.sampled(every=80)
@pytest.mark.parametrize(("attention", "ranks"), [("ulysses", 2), ("ring", 3), ("gather", 4)])
@pytest.mark.parametrize("name", ON_RANKS)
def test_on_ranks(name: str, attention: str, ranks: int) -> None:
    """Loss and gradients equal a single device's."""
    x = (floats(B, H, S, D) * 2 - 1).requires_grad_()
    check(seeded(lambda: Projected(ON_RANKS[name])), x, sp=ranks, attention=attention, seq_dims={"x": 2})


class Scored(Projected):
    """A scalar of the attention and of row-wise ops after it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def trained(name: str) -> Outcome:
    x = floats(B, H, S, D) * 2 - 1
    return against_eager(seeded(lambda: Scored(ON_RANKS[name])), x, mesh=worker.mesh(), seq_dims={"x": 2})


@pytest.mark.as_users_run
@pytest.mark.parametrize("name", [next(iter(FORMS))])
def test_training_step(ranks: Ranks, name: str) -> None:
    """On real ranks, which do not divide the length."""
    same_on_ranks(ranks.run(3, trained, name))


@pytest.mark.parametrize("name", SOFT_CAPS)
def test_soft_caps(name: str) -> None:
    attend, text = SOFT_CAPS[name]
    gm = canonical(attend)
    (node,) = (n for n in gm.graph.nodes if n.target in ATTENTION)
    assert OpCall(node)["score"] == score_of(text)
    assert not any("softmax" in str(n.target) for n in gm.graph.nodes)
    torch.testing.assert_close(grads(gm), grads(attend), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DATA)
def test_biases_without_a_text(name: str) -> None:
    gm = canonical(DATA[name])
    (node,) = (n for n in gm.graph.nodes if n.target in ATTENTION)
    assert OpCall(node)["attn_mask"] is not None
    assert not OpCall(node).get("score")
    torch.testing.assert_close(grads(gm), grads(DATA[name]), rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str) -> None:
    gm = canonical(STAYS[name])
    assert not [n for n in gm.graph.nodes if n.target in ATTENTION]
    torch.testing.assert_close(grads(gm), grads(STAYS[name]), rtol=0, atol=0)


HALVES: dict[str, Attend] = {
    "plain": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "softmax in float32": lambda q, k, v: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v,
    "scores in float32": lambda q, k, v: F.softmax((q @ k.mT).float(), -1).to(q.dtype) @ v,
    "product in float32": lambda q, k, v: F.softmax(q.float() @ k.float().mT, -1).type_as(q) @ v,
    "sinks": lambda q, k, v: with_sinks(q, k, v, sinks(v)),
    "sinks in float32": lambda q, k, v: (
        torch.cat([q @ k.mT, sinks(v).float()], -1).softmax(-1)[..., :-1].to(q.dtype) @ v
    ),
    "mask in float32": lambda q, k, v: F.softmax((q @ k.mT).float() + additive(-math.inf).float(), -1).to(q.dtype) @ v,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALVES)
def test_half_types_lose_nothing(name: str, dtype: torch.dtype) -> None:
    """The fused op is at least as close to float64."""
    attend = HALVES[name]
    gm = canonical(attend, dtype)
    assert mask_and_scale(gm)[0] == ("k <= q" if "mask" in name else "")
    exact = grads(lambda *x: attend(*(t.to(dtype).double() for t in x)))
    for fused, plain, wanted in zip(grads(gm, dtype), grads(attend, dtype), exact):
        assert fused.dtype == dtype
        limit = 2 * (plain - wanted).abs().max() + torch.finfo(dtype).eps / 4
        assert (fused - wanted).abs().max() <= limit


def test_a_sum_of_all_elements_is_no_softmax() -> None:
    def normalize(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return weights / weights.sum(None, keepdim=True) @ v

    assert not any(n.target in ATTENTION for n in canonical(normalize, torch.float32).graph.nodes)


def test_weights_that_are_sorted_are_read_by_no_product() -> None:
    """A sort has several results; the weights of blocks, of which the largest are kept, are sorted."""

    def keep_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values, indices = torch.softmax(q @ k.mT, -1).sort(-1)
        return (values.cumsum(-1) > 0.3).gather(-1, indices.argsort(-1)) * v.sum()

    assert not any(n.target in ATTENTION for n in canonical(keep_largest).graph.nodes)


def distance() -> Tensor:
    return torch.arange(S) - torch.arange(S)[:, None]


# Biases of the slopes of the heads, of which an expression would be rounded differently, or is infinite.
INEXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "a quotient": lambda slopes: slopes * distance() / 7,
    "a quotient in a function": lambda slopes: (slopes * distance() / 7).tanh(),
    "a quotient of a function": lambda slopes: (slopes * distance()).tanh() / 7,
    "a quotient by a number per head": lambda slopes: distance() / slopes,
    "three factors": lambda slopes: slopes * distance() * 0.1,
    "a scaled term": lambda slopes: torch.add(slopes * torch.arange(S), distance(), alpha=0.1),
    "an infinite sum": lambda slopes: (distance() / slopes + math.inf) * 2,
}
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "a quotient by a power of two": lambda slopes: -(distance().abs() / 8 * slopes),
    "a product of a function": lambda slopes: (slopes * distance()).tanh() * 0.1,
}


@pytest.mark.parametrize("name", [*INEXACT, *EXACT])
def test_biases_are_rounded_as_written(name: str) -> None:
    bias = {**INEXACT, **EXACT}[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias(v.mean((0, 2, 3))[:, None, None]))

    (node,) = (n for n in canonical(attend, torch.float32, differentiable=False).graph.nodes if n.target in ATTENTION)
    assert bool(OpCall(node).get("score")) == (name in EXACT)


@pytest.mark.parametrize("half_first", [False, True])
def test_a_bias_of_two_dtypes_of_queries(half_first: bool) -> None:
    """The bias is rounded as the half type of some queries, but not of others."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        bias = v.mean((0, 2, 3))[:, None, None] * distance()
        dtypes = (torch.bfloat16, torch.float32) if half_first else (torch.float32, torch.bfloat16)
        # The op itself, since torch's function refuses a bias of another dtype than q.
        return tuple(aten.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), bias) for dtype in dtypes)

    nodes = [n for n in canonical(attend, torch.float32, differentiable=False).graph.nodes if n.target in ATTENTION]
    scored = [n.meta["val"].dtype for n in nodes if OpCall(n).get("score")]
    assert scored == [torch.float32]


class OneHead(nn.Module):
    """Scores of three dims, which a bias of four makes four."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return ((x @ x.mT).transpose(1, 2) + bias).softmax(-1) @ x


def test_scores_of_fewer_dims_than_their_bias() -> None:
    check(OneHead(), floats(1, 6, 4), floats(1, 1, 6, 6), sp=3)


def test_dropout_becomes_an_argument() -> None:
    gm = canonical(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.25, True) @ v)
    (node,) = (n for n in gm.graph.nodes if n.target in ATTENTION)
    assert node.args[4] == 0.25
    assert not any("dropout.default" in str(n.target) for n in gm.graph.nodes)
    torch.manual_seed(0)
    mean = torch.stack([gm(*inputs()) for _ in range(400)]).mean(0)
    assert (mean - F.scaled_dot_product_attention(*inputs(), scale=1.0)).abs().max() < 0.15


def test_numbers_that_dynamo_lifted_out_of_the_graph() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / torch.tensor(2.5, dtype=q.dtype)
        return torch.where(before(), scores, torch.tensor(-1e9, dtype=q.dtype)).softmax(-1) @ v

    run, backend = compile_function(attend)
    run(*inputs())
    (gm,) = backend.graphs
    Canonicalize()(gm)
    assert mask_and_scale(gm) == ("k <= q", 0.4)


class Goldens(expecttest.TestCase):
    def test_everything_at_once(self):
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = torch.einsum("bqhd,bkhd->bhqk", *(t.transpose(1, 2) for t in (q, repeated(k)))) * 0.5
            weights = F.dropout(F.softmax(scores.masked_fill(~before(), LOWEST), -1), 0.1, True)
            return torch.einsum("bhqk,bkhd->bqhd", weights, repeated(v).transpose(1, 2))

        self.assertExpectedInline(
            show(canonical(attend)),
            """\
q: [2, 4, 8, 4] = placeholder
k: [2, 4, 8, 4] = placeholder
v: [2, 4, 8, 4] = placeholder
slice_1: [2, 2, 8, 4] = aten.slice.Tensor(k, 1, 0, 2)
slice_2: [2, 2, 8, 4] = aten.slice.Tensor(v, 1, 0, 2)
scaled_dot_product_attention_default: [2, 4, 8, 4] = aten.scaled_dot_product_attention(q, slice_1, slice_2, None, 0.1, True, scale=0.5, enable_gqa=True)
permute_default: [2, 8, 4, 4] = aten.permute(scaled_dot_product_attention_default, [0, 2, 1, 3])
return (permute_default,)""",
        )

    def test_bias_and_fill(self):
        attend = FORMS["bias and fill"][0]
        self.assertExpectedInline(
            show(canonical(attend)),
            """\
q: [2, 4, 8, 4] = placeholder
k: [2, 4, 8, 4] = placeholder
v: [2, 4, 8, 4] = placeholder
mean: [2, 4, 8] = aten.mean.dim(v, [-1])
unsqueeze: [2, 4, 1, 8] = aten.unsqueeze(mean, 2)
arange: [8] = aten.arange(8, device=cpu, pin_memory=False)
unsqueeze_1: [8, 1] = aten.unsqueeze(arange, 1)
ge: [8, 8] = aten.ge.Tensor(unsqueeze_1, arange)
bitwise_not: [8, 8] = aten.bitwise_not(ge)
logical_not_default: [8, 8] = aten.logical_not(bitwise_not)
where_scalar_other: [2, 4, 8, 8] = aten.where.ScalarOther(logical_not_default, unsqueeze, -inf)
scaled_dot_product_attention_default: [2, 4, 8, 4] = aten.scaled_dot_product_attention(q, k, v, where_scalar_other, 0.0, scale=1.0)
return (scaled_dot_product_attention_default,)""",
        )
