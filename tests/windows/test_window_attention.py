"""Attention in windows of an image: each rank has complete rows of windows, and attention needs no exchange."""

from __future__ import annotations

import pytest
import torch
from support.models import check
from support.window_models import Pyramid

import sp_compile


@pytest.mark.parametrize(("size", "n"), [((32, 32), 2), ((42, 26), 3), ((26, 42), 2), ((22, 18), 2), ((70, 18), 4)])
def test_pyramids(size: tuple[int, int], n: int) -> None:
    check(Pyramid().double(), torch.randn(2, 3, *size).double(), sp=n)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(("size", "n"), [((40, 18), 3), ((26, 10), 2), ((14, 50), 4)])
def test_shifted_windows(size: tuple[int, int], n: int, tokens: bool) -> None:
    model = Pyramid(stages=1, merge=False, window=3, shift=1, tokens=tokens).double()
    check(model, torch.randn(2, 3, *size).double(), sp=n)


