"""Windows on simulated ranks, for tests of their values and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

sp = torch.ops.sp
RANKS = (1, 2, 3, 4, 7)
SIZES = [(8, 0), (12, 0), (13, 0), (13, 2), (5, 1), (3, 0)]
"""(size of the frame, where the operand begins): even, ragged, a window, shards of one row, fewer rows than ranks."""

Op = Callable[..., Tensor]
Frame = Sequence[int]


def on_ranks(
    op: Op, x: Tensor, args: Sequence[Any], frames: Sequence[Frame], dim: int, cotangent: Tensor, n: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Return the full result and the full gradient of x on every rank."""

    def live(rank: int) -> tuple[Tensor, Tensor | None]:
        whole = x.clone().requires_grad_(x.is_floating_point())
        shard = sp.shard(whole, dim, frames[0], n, SIMULATED_GROUP)
        y = sp.unshard(op(shard, *args, *frames, n, SIMULATED_GROUP), dim, frames[-1], n, SIMULATED_GROUP)
        if y.requires_grad:
            y.backward(cotangent)
        return y.detach(), whole.grad

    return run_ranks(n, live)


def check(op: Op, torch_op: Callable[[Tensor], Tensor], x: Tensor, args: Any, frames: Any, dim: int, n: int) -> None:
    whole = x.clone().requires_grad_(x.is_floating_point())
    expected = torch_op(whole)
    cotangent = torch.randn(expected.shape, dtype=torch.float64).to(expected.dtype)
    if expected.requires_grad:
        expected.backward(cotangent)
    torch.testing.assert_close(op(x, *args), expected.detach())  # without a frame: the full tensor
    for value, grad in on_ranks(op, x, args, frames, dim, cotangent, n):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        if whole.grad is not None:
            grad = torch.zeros_like(x) if grad is None else grad  # a rank of nothing but constants
            torch.testing.assert_close(grad, whole.grad, rtol=1e-12, atol=1e-12)


def operand(size: int, start: int, dim: int = 2) -> Tensor:
    shape = [2, 3, 4]
    shape[dim] = size - start
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def frame(size: int, start: int = 0, length: int | None = None) -> list[int]:
    return [1, size, start, size - start if length is None else length]
