"""Which attention weights dropout keeps: a hash of where a weight stands, never a stream of random numbers.

So backward computes the mask again instead of keeping it, and every way of cutting a sequence or its heads
over ranks and blocks drops the same weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Odd multipliers with well mixed bits, as signed numbers: products of ints wrap.
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_HALF_FACTORS = (-0x7A143589, -0x3D4D51C3)


class Dropout(NamedTuple):
    """Attention dropout of some batch entries and heads."""

    seed: Tensor
    """int64 ()."""
    p: float
    batch: Tensor
    """int64 (B,)."""
    heads: Tensor
    """int64 (H,): the heads' numbers among those of all ranks."""

    def kept(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool (B, H, Q, K), True with probability 1 - p, of int64 indices (Q,) and (K,)."""
        state = _mixed(self.seed + self.batch * _FACTORS[0])[:, None]
        state = _mixed(state + self.heads * _FACTORS[1])[:, :, None]
        state = _mixed(state + queries * _FACTORS[2])[:, :, :, None]
        first, second = _halves(state)
        # What is done for each weight is kept small: 32-bit arithmetic in one buffer.
        numbers = first ^ _halves(_mixed(keys * _FACTORS[0] + _FACTORS[1]))[0]
        numbers.mul_(_HALF_FACTORS[0])
        numbers ^= numbers >> 15
        numbers.add_(second).mul_(_HALF_FACTORS[1])
        return numbers >= min(int(self.p * 2**32) - 2**31, 2**31 - 1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The 64 bits of x as two int32."""
    return x.to(torch.int32), (x >> 32).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of x."""
    x = (x ^ _shifted(x, 30)) * _FACTORS[1]
    x = (x ^ _shifted(x, 27)) * _FACTORS[2]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros moving in, where int64 moves in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
