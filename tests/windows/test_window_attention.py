"""Attention in windows of an image: each rank has complete rows of windows, and attention needs no exchange."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from support.models import check
from support.parity import against_eager
from support.parity import check as check_ranks
from support.programs.window_models import Backbone, Block, Pyramid
from support.ranks import Ranks, mesh
from torch import Tensor, nn


@pytest.mark.slow
@pytest.mark.parametrize(("size", "n"), [((32, 32), 2), ((42, 26), 3), ((26, 42), 2), ((22, 18), 2), ((18, 118), 4)])
@pytest.mark.sampled(every=5)
def test_pyramids(size: tuple[int, int], n: int) -> None:
    report = check(Pyramid().double(), torch.randn(2, 3, *size).double(), sp=n)
    assert not report.fallbacks, report
    assert report.work.flops_share == 1.0
    assert not report.attention, "attention in windows needs no exchange"
    assert report.count("roll") == 4, "only the shifts need rows of other ranks"


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("size", "n"), [((40, 18), 3), ((26, 10), 2), ((14, 50), 4)])
def test_shifted_windows(size: tuple[int, int], n: int, tokens: bool) -> None:
    model = Pyramid(stages=1, merge=False, window=3, shift=1, tokens=tokens).double()
    report = check(model, torch.randn(2, 3, *size).double(), sp=n)
    assert not report.fallbacks, report


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("size", "n"), [((34, 28), 2), ((34, 28), 3), ((70, 28), 4)])
def test_windows_and_attention_over_all_pixels(size: tuple[int, int], n: int) -> None:
    report = check(Backbone().double(), torch.randn(2, 3, *size).double(), sp=n)
    assert not report.fallbacks, report
    assert sum(d.nodes for d in report.attention) == 1, "only the attention over all pixels needs an exchange"


class Loss(nn.Module):
    """The mean square of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Pyramid(stages=1, merge=False, window=3, shift=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.model(image).pow(2).mean()


def _train() -> object:
    torch.manual_seed(1)
    return against_eager(Loss().double(), torch.randn(2, 3, 40, 14).double(), mesh=mesh())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.sampled(every=2)
def test_shifted_windows_on_real_ranks(ranks: Ranks, n: int) -> None:
    check_ranks(ranks.run(n, _train))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.sampled(every=2)
def test_windows_of_a_signal(n: int) -> None:
    class Signal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.inner = Block(8, 4, 0), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = F.pad(self.inner(x), (0, 0, 0, -x.shape[1] % 4))
            y = self.block.attention(y.view(-1, 4, 8)).view(x.shape[0], -1, 8)[:, : x.shape[1]]
            return self.block.mlp(x + y)

    report = check(Signal().double(), torch.randn(2, 35, 8).double(), sp=n)
    assert not report.fallbacks, report
    assert report.work.flops_share == 1.0


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_step_that_does_not_divide_the_rows(start: int) -> None:
    class Subsampled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)[:, start::3].sin()

    check(Subsampled(), torch.randn(2, 14, 4).double().requires_grad_(), sp=2)
    check(Subsampled(), torch.randn(2, 15, 4).double().requires_grad_(), sp=2)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "n"), [((36, 22), 2), ((28, 70), 4)])
def test_values_of_other_sizes(size: tuple[int, int], n: int) -> None:
    """Attention over all pixels is gathered for these, where rows of windows are not the sequence."""
    check(Backbone().double(), torch.randn(2, 3, *size).double(), sp=n)


class Summaries(nn.Module):
    """Attention over text, and a layer of each 16th row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.layer(h[:, 15::16]).sum()


def test_ranks_need_no_complete_groups_of_a_slice_of_text() -> None:
    report = check(Summaries().double(), torch.randn(2, 64, 8).double(), sp=8)
    assert re.search(r"\b64: 8 positions", str(report)), "8 ranks have no 4 groups of 16 rows"
