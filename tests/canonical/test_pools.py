"""Average pools with one result for each channel are means, which ranks compute from their rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile


class Pooled(nn.Module):
    """Attention over tokens (B, S, 8), and a pool of all tokens."""

    def __init__(self, size: int, squeeze: Callable[[Tensor], Tensor] = lambda x: x.squeeze(1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.size, self.squeeze = nn.Linear(8, 8), size, squeeze

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unsqueeze(1)
        y = self.squeeze(F.scaled_dot_product_attention(q, q, q))
        return F.adaptive_avg_pool1d(y.mT, self.size).sin().sum()


@pytest.mark.parametrize(("size", "is_whole"), [(1, False), (5, True)])
def test_a_pool_of_all_tokens_is_on_shards(size: int, is_whole: bool) -> None:
    x = torch.randn(2, 35, 8, dtype=torch.float64)
    report = sp_compile.verify(Pooled(size).double(), x, sp=3)
    assert report.worst < 1e-12
    assert bool(report.fallbacks) == is_whole


@pytest.mark.parametrize(
    "squeeze",
    [torch.squeeze, lambda x: x.squeeze((1, 2)), lambda x: x.squeeze(-3).squeeze(2)],
    ids=["every dim", "two dims", "one dim after another"],
)
def test_dims_that_are_not_removed_stay_on_shards(squeeze: Callable[[Tensor], Tensor]) -> None:
    report = sp_compile.verify(Pooled(1, squeeze).double(), torch.randn(2, 5, 8, dtype=torch.float64), sp=4)
    assert report.worst < 1e-12
    assert not report.fallbacks
