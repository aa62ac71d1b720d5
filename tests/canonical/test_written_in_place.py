"""A value that a custom op mutates differs from its node's result: no pattern matches through it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.passes.canonical.canonicalize import Canonicalize


@torch.library.custom_op("tests_written::add_one_", mutates_args=("x",))
def add_one_(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("tests_written::causal_", mutates_args=("mask",))
def causal_(mask: Tensor) -> None:
    mask.copy_(torch.full_like(mask, float("-inf")).triu(1))


def written(x: Tensor) -> Tensor:
    add_one_(x)
    return x


def scan(x: Tensor) -> Tensor:
    return x.cumsum(1) - written(x.clone())


def shift(x: Tensor) -> Tensor:
    return torch.cat([written(x.new_zeros(2, 1, 3)), x[:, :-1]], 1)


def mask(x: Tensor) -> Tensor:
    allowed = x.new_zeros(6, 6)
    causal_(allowed)
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, allowed)


def loop(x: Tensor) -> Tensor:
    h, states = written(x.new_zeros(2, 3)), []
    for step in x.unbind(1):
        h = step.sigmoid() * h + step
        states.append(h)
    return torch.stack(states, 1)


def repeated_heads(x: Tensor) -> Tensor:
    keys, values = x[:, None].repeat_interleave(2, 1), written(x[:, None].repeat_interleave(2, 1))
    return F.scaled_dot_product_attention(keys, keys, values)


def run(gm: GraphModule, x: Tensor) -> Tensor:
    found = gm(x)
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("fn", [scan, shift, mask, loop, repeated_heads])
def test_is_exact(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    gm = captured(fn, x)
    Canonicalize()(gm)
    found = run(gm, x)
    torch.testing.assert_close(found, fn(x), rtol=1e-12, atol=1e-12)


def filled(value: float, dtype: torch.dtype, x: Tensor) -> Tensor:
    return torch.cat([torch.full((2, 1), value).to(dtype).to(x.dtype), x[:, :-1]], 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("value", [0.1, 2**40, -1, float("inf")])
def test_a_fill_is_rounded_to_its_dtype(value: float, dtype: torch.dtype) -> None:
    """0.1 rounds differently in each dtype; integer dtypes cannot represent it."""
    x = torch.randn(2, 6, dtype=torch.float64)
    gm = captured(lambda x: filled(value, dtype, x), x)
    Canonicalize()(gm)
    found = run(gm, x)
    torch.testing.assert_close(found, filled(value, dtype, x), rtol=0, atol=0)


def test_a_scale_is_rounded_to_its_dtype() -> None:
    def attention(q: Tensor) -> Tensor:
        return ((q @ q.mT) * torch.full((), 0.1).double()).softmax(-1) @ q

    q = torch.randn(1, 2, 6, 4, dtype=torch.float64) * 3
    gm = captured(attention, q)
    Canonicalize()(gm)
    found = run(gm, q)
    torch.testing.assert_close(found, attention(q), rtol=1e-12, atol=1e-12)
