"""Memory of a rank while its program runs on a GPU: one accumulator for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.cuda.programs import Sizes, attention
from support.cuda.worker import AbsentGpu

SIZES = Sizes()
MIB = 1 << 20


def peaks(gpu: AbsentGpu, strategy: str, ns: Sequence[int], ulysses: int | None = None) -> list[list[int]]:
    """Return the peaks of the forward and of the backward per number of ranks, with constant rows per rank."""
    ranks = [gpu.run(attention, strategy, n, SIZES, ulysses) for n in ns]
    return [[rank.forward.peak for rank in ranks], [rank.backward.peak for rank in ranks]]


@pytest.mark.parametrize("ns", [(3, 6), pytest.param((2, 4, 8, 16), marks=pytest.mark.slow)])
def test_a_ring_keeps_one_accumulator(gpu: AbsentGpu, ns: tuple[int, ...]) -> None:
    for few, *found in peaks(gpu, "ring", ns):
        flat(found if ns[0] == 2 else [few, *found])
        assert few <= found[0] + MIB  # two ranks have fewer transfers in flight


@pytest.mark.slow
@pytest.mark.parametrize("ns", [(4, 6, 8), (4, 8, 16)])
def test_a_hybrid_keeps_one_accumulator(gpu: AbsentGpu, ns: tuple[int, ...]) -> None:
    for few, *found in peaks(gpu, "hybrid", ns, ulysses=2):
        flat(found)
        assert few <= found[0] + MIB


def flat(found: Sequence[int]) -> None:
    """Check that the peaks are equal, except for a few values that are summed over the ranks."""
    assert max(found) - min(found) < MIB, found


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("layout", "missing"), [("zigzag", 0), ("zigzag", 3), ("contiguous", 3)])
def test_gathered_keys_are_not_copied(gpu: AbsentGpu, layout: str, missing: int) -> None:
    """No kernel writes the rows of all ranks, or one half of each rank's; padding is not removed by a copy."""
    rank = gpu.run(attention, "gather", 4, Sizes(missing=missing), layout=layout)
    every = {2 * SIZES.rows, 2 * SIZES.rows - missing, 4 * SIZES.rows, 4 * SIZES.rows - missing}
    for trace in (rank.forward, rank.backward):
        assert trace.buffers
        assert not [x for x in trace.buffers if not every.isdisjoint(x)]
