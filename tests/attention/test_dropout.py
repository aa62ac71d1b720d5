"""Dropout under backend='sp' on real ranks: other draws on every rank, the right mean and the right gradient."""

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.models import check, floats, seeded
from support.parity import Block, build, digest, sp, text, train_step
from support.ranks import Ranks
from torch import Tensor, nn


class Masks(nn.Module):
    """Dropout of ones, on the sequence and on a value that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16, 4)

    def forward(self, x: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(x)
        return F.dropout(y * 0 + 1, 0.5), F.dropout(shared, 0.5)


def drawn() -> list[Tensor]:
    model = build(Masks)
    run = sp(model, mesh=worker.mesh())
    x, shared = torch.randn(2, 32, 16, dtype=torch.float64), torch.ones(64, dtype=torch.float64)
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results += [y.detach() for y in run(x, shared)]
        results.append(torch.rand(3))  # what the user draws next is the same on every rank
    return results


@pytest.mark.slow
def test_dropout(ranks: Ranks) -> None:
    first, second = ranks.run(2, drawn)
    for a, b in zip(first, second):
        assert torch.equal(a, b)  # outputs are gathered, so both ranks see both shards' masks
    mask, shared, after, *again = first
    assert not torch.equal(mask[:, :16], mask[:, 16:])
    assert 0.4 < float((mask == 0).double().mean()) < 0.6
    assert 0.2 < float((shared == 0).double().mean()) < 0.8
    assert all(torch.equal(a, b) for a, b in zip(again[:3], (mask, shared, after)))
    assert not torch.equal(again[3], mask)
    assert not torch.equal(again[4], shared)


def dropout_training() -> list[Tensor]:
    """The gradient is that of the masks which the forward drew: the loss is quadratic in none, linear in the scale."""
    model = build(layers=1, dropout=0.3)
    run = sp(model, mesh=worker.mesh())
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(train_step(run, model, text(16)))
    weight = model.head.weight
    (_, grads), direction = results[0], torch.randn_like(weight)
    slope = (grads[-1] * direction).sum()
    losses = []
    for sign in (1, -1):
        torch.manual_seed(5)
        with torch.no_grad():
            weight += sign * 1e-5 * direction
        losses.append(run(*text(16)).detach())
        with torch.no_grad():
            weight -= sign * 1e-5 * direction
    measured = (losses[0] - losses[1]) / 2e-5
    assert abs(measured - slope) <= 1e-6 * abs(slope)
    assert digest([results[0][0], *grads]) == digest([results[1][0], *results[1][1]])
    return [results[0][0], *grads]


def test_dropout_is_reproducible_and_its_gradient_is_right(ranks: Ranks) -> None:
    first, second = ranks.run(2, dropout_training)
    assert digest(first) == digest(second)


class Filled(nn.Module):
    """Attention with a mask of floats as data, and hardly any dropout: all weights are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 48)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.linear(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=1e-9)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("attention", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize(("length", "sp"), [(16, 2), (13, 3)])
def test_rows_of_nothing_but_fills_are_averages(attention: str, length: int, sp: int) -> None:
    """finfo.min for all keys of a query, as left padding does: its log-sum-exp does not count them."""
    if attention == "ulysses" and sp == 3:
        sp = 2
    mask = torch.zeros(1, 1, length, length, dtype=torch.float64)
    mask[:, :, :5] = torch.finfo(torch.float64).min
    check(seeded(Filled), floats(2, length, 16), mask, sp=sp, attention=attention)
