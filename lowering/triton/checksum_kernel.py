"""Compute checksums with one Triton kernel per tensor. Importing this module requires triton.

Ranks compare checksums of weights, buffers and gradients, to find those that differ. A program is one block of threads.
"""

import triton
import triton.language as tl
from torch import Tensor

from .device import use_device

CHECKSUM_BLOCK = 1024  # integers that a program reads at once
STEPS = 32  # blocks that one program of the kernel sums before it adds to the result


@triton.jit
def _add_kernel(bits, out, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to out the sum, modulo 2**64, of a hash of each of the n integers of `bits` and its index."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros((BLOCK,), tl.uint64)
    for step in range(STEPS):
        index = first + step * BLOCK + tl.arange(0, BLOCK)
        inside = index < n
        word = tl.load(bits + index, mask=inside, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
        # `_hash_bits` and `mix_bits` of `checksums.py`: index + 1 times a factor, and the mixing steps of SplitMix64.
        hashed = ((index + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15) ^ word
        hashed = (hashed ^ (hashed >> 30)) * 0xBF58476D1CE4E5B9
        hashed = (hashed ^ (hashed >> 27)) * 0x94D049BB133111EB
        total += tl.where(inside, hashed ^ (hashed >> 31), 0)
    tl.atomic_add(out, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def add_checksum(bits: Tensor, out: Tensor) -> None:
    """Add a checksum to `out` in one launch.

    Args:
        bits: (n,), integers, contiguous.
        out: (), int64. The added value equals that of `checksums.checksum_of`.
    """
    programs = triton.cdiv(bits.numel(), CHECKSUM_BLOCK * STEPS)
    with use_device(bits):
        _add_kernel[(programs,)](bits, out, bits.numel(), BLOCK=CHECKSUM_BLOCK, STEPS=STEPS)
