"""Which attention weights dropout keeps: a hash of where a weight stands, never a stream of random numbers.

So backward computes the mask again instead of keeping it, and every way of cutting a sequence or its heads
over ranks and blocks drops the same weights.
"""

import torch
from torch import Tensor

# Odd 64-bit multipliers with well mixed bits, as signed numbers: int64 products wrap.
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def keep_mask(
    seed: Tensor, dropout_p: float, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """bool (B, H, Q, K), True with probability 1 - dropout_p, from the int64 coordinates of its dims.

    ``seed`` is int64 (), ``batch`` (B,), ``head`` (H,), ``query`` (Q,) and ``key`` (K,).
    """
    state = _mixed(seed + batch * _FACTORS[0])[:, None]
    state = _mixed(state + head * _FACTORS[1])[:, :, None]
    state = _mixed(state + query * _FACTORS[2])[:, :, :, None]
    numbers = _mixed(state ^ _mixed(key * _FACTORS[0] + _FACTORS[1]))
    return numbers >= min(int(dropout_p * 2**64) - 2**63, 2**63 - 1)


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of x."""
    x = (x ^ _shifted(x, 30)) * _FACTORS[1]
    x = (x ^ _shifted(x, 27)) * _FACTORS[2]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros moving in, where int64 moves in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def global_heads(local: int, rank: int, split_heads: int, device: torch.device) -> Tensor:
    """The numbers of a rank's heads among those of the ``split_heads`` ranks that share them."""
    return torch.arange(local, device=device) + rank % split_heads * local
