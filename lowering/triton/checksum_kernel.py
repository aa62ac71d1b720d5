"""Compute checksums with one Triton kernel per tensor. Importing this module requires triton."""

import triton
import triton.language as tl
from torch import Tensor

from .device import use_device

CHECKSUM_BLOCK = 1024
STEPS = 32  # blocks that one program of the kernel sums before it adds to the result


@triton.jit
def _add_kernel(bits, out, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to out the sum, modulo 2**64, of a hash of each of the n integers of `bits` and its index."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros((BLOCK,), tl.uint64)
    for step in range(STEPS):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        word = tl.load(bits + at, mask=inside, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
        z = ((at + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15) ^ word
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        total += tl.where(inside, z ^ (z >> 31), 0)
    tl.atomic_add(out, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def add_checksum(bits: Tensor, out: Tensor) -> None:
    """Add a checksum to `out` in one launch.

    Args:
        bits: (n,), integers, contiguous.
        out: (), int64. The added value equals that of `checksums.checksum_of`.
    """
    with use_device(bits):
        _add_kernel[(triton.cdiv(bits.numel(), CHECKSUM_BLOCK * STEPS),)](
            bits, out, bits.numel(), BLOCK=CHECKSUM_BLOCK, STEPS=STEPS
        )
