"""Ops of a pattern in different autocast regions do not match: an op computes in the dtype of its region."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile import verify

ROUNDING = 2e-3  # the same roundings to bfloat16 on both sides, of sums in another order; scores in bfloat16 cost 1e-2


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def product_inside(x: Tensor) -> Tensor:
    weights = (x @ x.mT).softmax(-1)
    with autocast():
        return (weights @ x).float()


def scores_outside(x: Tensor) -> Tensor:
    with autocast():
        with torch.autocast("cpu", enabled=False):
            weights = (x @ x.mT).softmax(-1)
        return (weights @ x).float()


def scores_inside(x: Tensor) -> Tensor:
    with autocast():
        scores = x @ x.mT
    return scores.float().softmax(-1) @ x


def joined_inside(x: Tensor) -> Tensor:
    heads = [F.scaled_dot_product_attention(y, y, y) for y in x.chunk(2, -1)]
    with autocast():
        return torch.cat(heads, -1)


class Model(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.f = nn.Linear(8, 8), f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(4 * self.linear(x))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("f", [product_inside, scores_outside, scores_inside, joined_inside])
def test_parts_in_different_regions(f: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert verify(Model(f), torch.randn(2, 12, 8), sp=2, seq_dims={"x": 1}).worst <= ROUNDING


def joined_outside(x: Tensor) -> Tensor:
    with autocast():
        heads = [F.scaled_dot_product_attention(y, y, y) for y in x.chunk(2, -1)]
    return torch.cat(heads, -1)


def test_the_dtype_of_heads() -> None:
    torch.manual_seed(0)
    assert verify(Model(joined_outside), torch.randn(2, 12, 8), sp=2, seq_dims={"x": 1}).worst <= 0.05
