"""Scans and attention in one model under backend='sp', contiguous and zigzag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import VOCAB, Block, Outcome, against_eager, build, check, text
from support.ranks import Ranks
from torch import Tensor, nn

import sp_compile


class Mixed(nn.Module):
    """A causal decoder that adds a running mean of its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, 16), Block(16, 4)
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.block(self.embed(ids))
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        logits = self.head(x + x.cumsum(1) / count)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Returns(nn.Module):
    """A value model with targets that scan rewards of a window: the scan starts with the window."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.embed, self.block, self.back = nn.Embedding(VOCAB, 16), Block(16, 4), back

    def forward(self, ids: Tensor, rewards: Tensor) -> Tensor:
        values = self.block(self.embed(ids)).mean(-1)
        if self.back:
            return F.mse_loss(values[:, :-1], rewards[:, 1:].flip(1).cumsum(1).flip(1))
        return F.mse_loss(values[:, 1:], rewards[:, 1:].cumsum(1).exp().cumprod(1))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("n", [2, 1, 3])
def test_a_scan_that_begins_in_a_window(n: int, back: bool) -> None:
    """A rank alone has rows beside its window, too."""
    ids, _ = text(9)
    rewards = torch.rand(*ids.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert sp_compile.verify(build(lambda: Returns(back)).double(), ids, rewards, sp=n).worst < 1e-9


def mixed(**how: Any) -> Outcome:
    return against_eager(build(Mixed), *text(16), mesh=worker.mesh(), **how)


def mixed_zigzag() -> Outcome:
    return mixed(attention="ring", layout="zigzag")


@pytest.mark.slow
def test_beside_attention(ranks: Ranks) -> None:
    check(ranks.run(2, mixed))
    check(ranks.run(2, mixed_zigzag))


@pytest.mark.slow
def test_scans_leave_zigzag_to_the_cost_model() -> None:
    report = sp_compile.explain(build(Mixed), *text(1 << 12, batch=1), sp=2, attention="ring")
    assert {d.chosen.layout for d in report.attention} == {"zigzag"}
    assert not any(d.chosen.relayout for d in report.attention)
    assert report.count("scan") == 1
    assert not report.fallbacks
