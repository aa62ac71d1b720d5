"""A decoder layer whose MLP is a mixture of experts, as people write these, with a loss that balances the experts."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from models.test_experts import EXPERTS, ROUTINGS, TOP, WIDTH, Experts, Mixture
from support.models import BATCH, rotated, seeded
from torch import Tensor, nn


def every_expert(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """All experts on all tokens, in three products."""
    share = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
    inside = torch.einsum("td,edh->teh", x, model.up).tanh()
    return torch.einsum("te,ted->td", share, torch.einsum("teh,ehd->ted", inside, model.down) + model.bias)


def one_by_one(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A loop over the experts, each on all tokens."""
    share = (F.one_hot(ids, EXPERTS) * weights[..., None]).sum(1)
    made = [
        share[:, e, None] * ((x @ model.up[e]).tanh() @ model.down[e] + model.bias[e]) for e in range(len(model.up))
    ]
    return torch.stack(made).sum(0)


def each_its_matrices(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The matrices of its expert for each choice of each token, as transformers' batched_mm."""
    at = ids.reshape(-1)
    rows = x.repeat_interleave(TOP, 0)
    inside = torch.bmm(rows.unsqueeze(1), model.up[at]).squeeze(1).tanh()
    made = torch.bmm(inside.unsqueeze(1), model.down[at]).squeeze(1) + model.bias[at]
    return (made * weights.reshape(-1, 1)).view(-1, TOP, WIDTH).sum(1)


MIXTURES: list[Experts] = [*ROUTINGS, every_expert, one_by_one, each_its_matrices]


class MixtureLayer(nn.Module):
    """(batch, seq, WIDTH) -> a number: attention, a mixture, and a penalty of the router's load as in Switch."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        self.mixture = Mixture(experts, inside=3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (6, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        h = x + F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True).transpose(1, 2).flatten(2)
        h = self.norm(h)
        share = self.mixture.router(h).flatten(0, 1).softmax(-1)
        taken = F.one_hot(share.topk(TOP).indices, EXPERTS).sum(1).to(x.dtype).mean(0)
        return self.mixture(h).square().mean() + 0.1 * (taken * share.mean(0)).sum()


def layer(experts: Experts) -> nn.Module:
    return seeded(partial(MixtureLayer, experts))


def rows(seq: int) -> Tensor:
    generator = torch.Generator().manual_seed(seq)
    return torch.randn(BATCH, seq, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
