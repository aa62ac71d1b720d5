"""Models that call attention once per head: each call is sharded, and results and gradients equal one device's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.models import BATCH, check, floats, seeded
from torch import Tensor, nn

WIDTH, HEADS, SIZE = 12, 4, 3


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * SIZE**-0.5
        length = x.shape[1]
        lower = torch.ones(length, length).tril()
        return scores.masked_fill(lower == 0, -math.inf).softmax(-1) @ self.v(x)


class Joined(nn.Module):
    """Concatenate the results of (B, T, E) attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


class Stacked(Joined):
    """Call one attention of (H, B, T, E)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.stack([getattr(head, name)(x) for head in self.heads]) for name in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(torch.cat(list(out), dim=-1))


class ReadTwice(Joined):
    def forward(self, x: Tensor) -> Tensor:
        each = [head(x) for head in self.heads]
        return self.out(torch.cat(each, dim=-1)) + each[0].mean()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("attention", "op"), [("ring", "ring_attention"), ("ulysses", "all_to_all")])
@pytest.mark.parametrize(("make", "calls"), [(Joined, HEADS), (ReadTwice, HEADS), (Stacked, 1)])
def test_heads_stay_separate(make: Callable[[], nn.Module], calls: int, attention: str, op: str) -> None:
    report = check(seeded(make), floats(BATCH, 13, WIDTH), sp=2, attention=attention, seq_dims={"x": 1})
    assert not report.fallbacks
    assert report.count(op) == (2 * calls if op == "all_to_all" else calls)
