"""Sums over the sequence that add up to one loss are one sum: for the ranks, and for the tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from sharding.tiles.losses import Loss, Model, batch, flat
from support.golden import captured, notes_of, show
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.strategies.combine_partials import MarkPartialSums
from sp_compile.passes.strategies.reduce_demands import DecomposeMeans, ReducePartials

EXACT = 1e-9


def three(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Scaled, subtracted, added in turn."""
    z, y = flat(h, head, ids)
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()
    return F.cross_entropy(z, y) + 1e-2 * z.logsumexp(-1).square().mean() - entropy / 8


def summed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Add losses by Python's `sum`, which starts from 0."""
    z, y = flat(h, head, ids)
    return sum([F.cross_entropy(z, y, reduction="sum"), z.square().sum()]) / ids.numel()


def learned(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Multiply a sum with a learned scale."""
    z, y = flat(h, head, ids)
    return F.cross_entropy(z, y) + z.logsumexp(-1).square().mean() * head.weight.square().mean()


def tensor_coefficients(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Multiply sums with tensor coefficients: a constant, a learned one, and a sum of another kind."""
    z, y = flat(h, head, ids)
    aux, scale = z.logsumexp(-1).square().mean(), head.weight.square().mean()
    return torch.tensor(0.5, dtype=h.dtype) * F.cross_entropy(z, y) + scale * (weights.mean() * aux)


def of_two_sums(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Multiply two sums: the product is not the sum of the ranks' products."""
    z, y = flat(h, head, ids)
    aux = z.logsumexp(-1).mean()
    return F.cross_entropy(z, y) + z.square().mean() * aux + 0.1 * z.exp().mean() * z.sin().mean()


def offset(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """A number, which every rank would count."""
    z, y = flat(h, head, ids)
    return (F.cross_entropy(z, y) + 3) * 2 + z.logsumexp(-1).mean()


def squared(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Combine sums nonlinearly."""
    z, y = flat(h, head, ids)
    mean = z.logsumexp(-1).mean()
    return F.cross_entropy(z, y) + mean * mean


def of_two_heads(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Several tokens ahead, with two heads: their tiles are not one loop."""
    a, b = head(h), F.linear(h, head.weight.roll(1, 0))
    first = F.cross_entropy(a[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return first + 0.3 * F.cross_entropy(b[:, :-2].flatten(0, 1), ids[:, 2:].flatten())


def beside_a_sum(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """One of the sums is of narrow rows, as of a router's."""
    z, y = flat(h, head, ids)
    return F.cross_entropy(z, y) + 1e-3 * h.square().mean()


def by_rows(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Sums over the sequence, one of them times rows of it: each rank has its own of these."""
    m = h @ h.mT
    return (m.sum(1) * h.sum(-1) + m.square().sum(1)).square().mean()


ONE = (three, summed, learned, tensor_coefficients)
"""Losses that become one sum."""
LOSSES = (*ONE, of_two_sums, offset, squared, of_two_heads, beside_a_sum, by_rows)


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_one_device(loss: Loss, n: int) -> None:
    found = sp_compile.verify(Model(loss).double(), *batch(23), sp=n, tiles=3)
    assert found.worst < EXACT
    assert found.tiled
    if loss in ONE:
        assert not any(one.recomputed for one in found.tiled)
        assert [e.op for e in found.exchanges].count("all_reduce") == 1


class Metrics(Model):
    """A model that also returns each of two losses."""

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        parts: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            z, y = flat(h, head, ids)
            parts.extend([F.cross_entropy(z, y), z.logsumexp(-1).square().mean()])
            return parts[0] + 0.01 * parts[1]

        self.loss = loss
        return super().forward(ids, weights), parts[0].detach(), parts[1]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [2, 1])
def test_sums_that_others_read(n: int) -> None:
    found = sp_compile.verify(Metrics(three).double(), *batch(23), sp=n, tiles=3)
    assert found.worst < EXACT


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    """A cast does not apply to a partial sum of ranks, with and without autocast."""
    model = Model(three).to(dtype)
    right = Model(three).double()
    found = torch.compile(model, backend="sp", options={"tiles": 3, "compiler": "aot_eager"})(*batch(16))
    torch.testing.assert_close(
        found.double(), right(*batch(16)), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=0
    )


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x * 2).half().sum(1),
        lambda x: (x * 2).half().nansum(1),
        lambda x: (x * 2).half().sum() / 2 + (x * 2).half().sum(),
    ],
)
def test_sums_of_ranks_do_not_overflow(model: Any) -> None:
    """The sums of both ranks exceed the range of float16, and their sum is 0."""
    x = torch.full((1, 8, 2), 3e4)
    x[:, 4:] *= -1
    assert sp_compile.verify(model, x.requires_grad_(), sp=2, seq_dims={"x": 1}).worst < 1e-3


def test_elements_are_rounded_to_the_dtype_of_a_sum() -> None:
    """257 is 256 in bfloat16."""
    x = torch.tensor([[257.0, -256.0, 0.0, 0.0]])

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 1).sum(1, dtype=torch.bfloat16), x.cumsum(1)

    assert sp_compile.verify(model, x, sp=2, seq_dims={"x": 1}).worst == 0


class Goldens(TestCase):
    """Golden graphs of the pass between its neighbors in the pipeline."""

    def test_a_loss_and_its_z_loss(self) -> None:
        def program(x, y):
            h = F.scaled_dot_product_attention(x, x, x)[:, 0]
            return F.cross_entropy(h.mT, y) + 0.1 * h.logsumexp(-1).square().mean()

        gm = captured(program, torch.randn(2, 1, 8, 4), torch.randint(4, (2, 8)))
        DecomposeMeans(2)(gm)
        notes = notes_of(MarkPartialSums(2), gm)
        ReducePartials(2)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 1, 8, 4] = placeholder
y: [2, 8] = placeholder
scaled_dot_product_attention: [2, 1, 8, 4] = aten.scaled_dot_product_attention(x, x, x)
select: [2, 8, 4] = aten.select.int(scaled_dot_product_attention, 1, 0)
m_t: [2, 4, 8] = aten.mT(select)
cross_entropy_loss_default: [] = aten.cross_entropy_loss(m_t, y, reduction=2)
ne_scalar: [2, 8] = aten.ne.Scalar(y, -100)
sum_default: [] = aten.sum(ne_scalar)
to_dtype: [] = aten.to.dtype(sum_default, float32)
div_tensor: [] = aten.div.Tensor(cross_entropy_loss_default, to_dtype)
logsumexp: [2, 8] = aten.logsumexp(select, [-1])
square: [2, 8] = aten.square(logsumexp)
sum_dim_int_list: [] = aten.sum.dim_IntList(square, [0, 1], False)
div_tensor_1: [] = aten.div.Tensor(sum_dim_int_list, 16)
mul: [] = aten.mul.Tensor(div_tensor_1, 0.1)
add: [] = aten.add.Tensor(div_tensor, mul)
all_reduce_default: [] = sp.all_reduce(add, 2, )
return (all_reduce_default,)""",
        )
        self.assertExpectedInline("\n".join(f"{note.label} {note.node}" for note in notes), """mark_partial_sums add""")
