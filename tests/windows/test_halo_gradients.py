"""Gradients of windows on shards, on simulated ranks: adjoints, cotangents outside the window, second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.scans.halos import RANKS, Op, frame
from torch import Tensor

from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

sp = torch.ops.sp


WEIGHT = torch.randn(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(
    ("op", "args", "length"),
    [(sp.shift, (0, 3, -3, 0), 11), (sp.roll, (0, 4), 11), (sp.unfold, (0, 1, 0, 0, 2, 1), 11)],
    ids=["shift", "roll", "unfold"],
)
def test_adjoints(n: int, op: Op, args: Any, length: int) -> None:
    """<A x, g> = <x, A* g>, summed over the ranks, for any shards and any cotangent of the window's rows."""
    frames = [frame(13, 1, length)] * (1 if op is sp.roll else 2)
    generator = torch.Generator().manual_seed(n)
    s = -(-13 // n)
    xs = [torch.randn(s, 2, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(n)]

    def live(rank: int) -> tuple[float, float]:
        y = op(xs[rank], *args, *frames, n, SIMULATED_GROUP)
        g = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        g = sp.mask(g, 0, frames[0], 0, n, SIMULATED_GROUP)
        (back,) = torch.autograd.grad(y, xs[rank], g)
        ones = op(torch.zeros_like(xs[rank]), *args, *frames, n, SIMULATED_GROUP)  # constants: the map is affine
        return ((y - ones) * g).sum().item(), (back * xs[rank]).sum().item()

    there, back = (sum(side) for side in zip(*run_ranks(n, live), strict=True))
    assert there == pytest.approx(back, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_cotangents_outside_the_window_are_zeros(n: int) -> None:
    """Also for NaN outside the window, which is never read."""
    where = frame(13, 2, 8)
    s = -(-13 // n)

    def live(rank: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(rank * s, (rank + 1) * s)
        outside = (positions < 2) | (positions >= 10)
        x = torch.ones(1, 3, s, dtype=torch.float64).masked_fill(outside, torch.nan).requires_grad_()
        y = sp.conv_along(x, WEIGHT, None, 2, 2, 0, [1], [0], [1], 1, where, where, n, SIMULATED_GROUP)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y).masked_fill(outside, torch.nan))
        return y, grad[0, 0][outside]

    for y, outside in run_ranks(n, live):
        assert y.isfinite().all()
        assert not outside.any()


def test_second_derivatives() -> None:
    x = torch.randn(1, 2, 6, dtype=torch.float64)
    weight = torch.randn(2, 2, 3, dtype=torch.float64)

    def twice(y_of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((y_of(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    def sharded(x: Tensor) -> Tensor:
        args = (frame(6), frame(6), 3, SIMULATED_GROUP)
        shard = sp.conv_along(
            sp.shard(x, 2, frame(6), 3, SIMULATED_GROUP), weight, None, 2, 2, 0, [1], [0], [1], 1, *args
        )
        return sp.unshard(shard, 2, frame(6), 3, SIMULATED_GROUP)

    expected = twice(lambda x: F.conv1d(F.pad(x, (2, 0)), weight), x)
    for found in run_ranks(3, lambda rank: twice(sharded, x)):
        torch.testing.assert_close(found, expected)
