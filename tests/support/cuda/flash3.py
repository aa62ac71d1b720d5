"""FlashAttention-3 as a user activates it, on borrowed tensors: torch's own glue runs, its kernel is arithmetic.

The replacement of ``flash_attn_3``'s C++ asserts its requirements, converts windows as it does, and returns -inf as the
log-sum-exp of a row without keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from support.cuda.attention import _flash, _flash_backward
from support.cuda.borrowed import borrow, give_back
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import _fa3, _registry

aten = torch.ops.aten
GLUE = {
    aten._flash_attention_forward.default: _fa3._fa3_flash_attention_forward_impl_default,
    aten._flash_attention_backward.default: _fa3._fa3_flash_attention_backward_impl,
}
WIDEST, WIDEST_REPEATABLE = 256, 192


class Handle:
    """The handle that an implementation returns to torch's registry."""

    def remove(self) -> None:
        pass


@contextmanager
def active(name: str) -> Iterator[None]:
    """Activate an implementation of that name; check that it is still active at the end."""
    with mock.patch.dict(_registry._FLASH_ATTENTION_IMPLS):
        attention.register_flash_attention_impl(name, register_fn=Handle)
        attention.activate_flash_attention_impl(name)
        try:
            yield
            assert attention.current_flash_attention_impl() == name
        finally:
            attention.restore_flash_attention_impl()


@contextmanager
def installed() -> Iterator[None]:
    """Replace the kernels of torch's glue by arithmetic."""
    with mock.patch.multiple(_fa3, _FA3_CUDA_FWD=forward, _FA3_CUDA_BWD=backward), active("FA3"):
        yield


def _window(causal: bool, left: int, right: int, most_q: int, most_k: int) -> tuple[bool, int | None, int | None]:
    left, right = (-1 if left >= most_k - 1 else left), (-1 if right >= most_q - 1 else right)
    if causal:
        right = 0
    if left < 0 and right in (-1, 0):
        return right == 0, None, None
    return False, most_k - 1 if left < 0 else left, most_q - 1 if right < 0 else right


def _arguments(q: Tensor, k: Tensor, ends: Any, most: Any, causal: bool, left: int, right: int) -> tuple[Any, Any]:
    most = most if ends[0] is not None else (q.shape[1], k.shape[1])
    causal, *sizes = _window(causal, left, right, *most)
    return (*ends, *most, 0.0, causal), dict(zip(("window_size_left", "window_size_right"), sizes))


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    new, ends, more, most = rest[:4], rest[4:6], rest[6:9], rest[9:11]
    scale, causal, left, right, chunk, softcap = rest[20:26]
    assert [*new, *more, *rest[11:20]] == [None] * 16
    assert (chunk, softcap) == (0, 0.0)
    assert q.shape[-1] <= WIDEST
    q, k, v, *ends = map(give_back, (q, k, v, *ends))
    args, sizes = _arguments(q, k, ends, most, causal, left, right)
    out, lse, *_ = _flash(q, k, v, *args, False, scale=scale, **sizes)
    return borrow(out), borrow(torch.where(lse == math.inf, -math.inf, lse)), None, None


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    *rest: Any,
) -> None:  # fmt: skip
    ends, used, most = rest[:2], rest[2:4], rest[4:6]
    scale, causal, left, right, softcap, deterministic, _ = rest[6:]
    assert used == (None, None)
    assert softcap == 0.0
    assert q.shape[-1] <= (WIDEST_REPEATABLE if deterministic else WIDEST)
    grad, q, k, v, out, lse, *ends = map(give_back, (grad, q, k, v, out, lse, *ends))
    assert not (lse == -math.inf).any()
    args, sizes = _arguments(q, k, ends, most, causal, left, right)
    unused = torch.zeros(())
    found = _flash_backward(grad, q, k, v, out, lse, *args, unused, unused, scale=scale, **sizes)
    for x, value in zip((dq, dk, dv), found, strict=True):
        give_back(x).copy_(value)
