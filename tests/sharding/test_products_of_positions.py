"""Programs that relate tokens by a product without a softmax over it: the tokens are found, and shards are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from sp_compile import SpError

HEADS, WIDTH, LENGTH = 2, 16, 37
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]  # of queries, keys and values (B, HEADS, S, WIDTH / HEADS)


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products with a decay by distance and rows that are divided by their sums (arXiv:2307.08621)."""
    positions = torch.arange(q.shape[-2])
    decay = 0.9 ** (positions[:, None] - positions).clamp(min=0)
    scores = q @ k.mT * decay.tril()
    return scores / scores.sum(-1, keepdim=True).abs().clamp(min=1) @ v


def squared_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).relu().square() / q.shape[-2], v)


def selected_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the 5 keys of each query with the highest scores."""
    scores, index = (q @ k.mT).detach().masked_fill(torch.ones(q.shape[-2], q.shape[-2]).triu(1) > 0, -1e9).topk(5)
    index = index.unsqueeze(-1).expand(*index.shape, k.shape[-1])
    keys, values = (x.unsqueeze(2).expand(-1, -1, q.shape[-2], -1, -1).gather(3, index) for x in (k, v))
    weights = ((q.unsqueeze(3) * keys).sum(-1) + scores.clamp(max=0)).softmax(-1)
    return (weights.unsqueeze(-1) * values).sum(3)


class Mixer(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.project, self.out = mix, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("mix", [retention, squared_relu, selected_keys], ids=lambda mix: mix.__name__)
def test_positions_are_the_sequence(mix: Mix, n: int) -> None:
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    report = sp_compile.verify(Mixer(mix).double(), x, sp=n)
    assert report.worst < 1e-11
    assert report.inputs == {"x": [1]}
    assert report.work.flops_share == 1.0


def test_samples_of_a_contrastive_loss_are_no_sequence() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        x = x @ w
        return (x @ x.mT).square().mean()

    def of_channels(x: Tensor, w: Tensor) -> Tensor:
        x = (x @ w).unflatten(0, (2, 4))
        return (x @ x.mT).square().mean()

    with pytest.raises(SpError, match="SP301"):
        sp_compile.explain(of_channels, torch.randn(8, WIDTH), torch.randn(WIDTH, WIDTH), sp=2)
    with pytest.raises(SpError, match="SP301"):
        sp_compile.explain(loss, torch.randn(8, WIDTH), torch.randn(WIDTH, WIDTH), sp=2)
