"""The effect of Inductor's settings for overlap and bucketing on the order of exchanges, and why none is enabled."""

from __future__ import annotations

from typing import Any

import pytest
from support.cuda.programs import Sizes, attention
from support.cuda.worker import AbsentGpu
from torch._inductor import config as inductor

OPTIMIZATIONS = "aten_distributed_optimizations"
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "scheduling": {
        f"{OPTIMIZATIONS}.enable_overlap_scheduling": True,
        f"{OPTIMIZATIONS}.compute_estimator": "analytical",
        f"{OPTIMIZATIONS}.collective_bucketing": False,
    },
    "bucketing": {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all", "bucket_all_reduces_fx": "all"},
    "reordering": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
            "reorder_communication_preserving_peak_memory",
        ],
    },
}
RING, ULYSSES = ("ring", 3, Sizes()), ("ulysses", 2, Sizes(layers=2, rows=8192, heads=32, kv_heads=8))


def order(setting: str, strategy: str, n: int, sizes: Sizes) -> tuple[list[str], list[str]]:
    """Return the sends, waits and attention blocks of the forward and of the backward."""
    with inductor.patch(SETTINGS[setting]):
        rank = attention.__wrapped__(strategy, n, sizes)  # not the cached function
    return tuple([x for x in one.text().splitlines() if _is_counted(x)] for one in (rank.forward, rank.backward))


def _is_counted(event: str) -> bool:
    return " = " in event or "wait" in event or "attend" in event or "flash" in event


def numbers(events: list[str], kind: str) -> list[int]:
    """Return the indices of events that contain `kind`."""
    return [i for i, event in enumerate(events) if kind in event]


def ring(events: list[str]) -> list[str]:
    """Return the events without sums of gradients, with exchanges numbered from 0."""
    sums = [event.split()[0] for event in events if "all_reduce" in event]
    others = [event for event in events if "all_reduce" not in event and event not in {f"wait {n}" for n in sums}]
    sent = [event.split()[0] for event in others if " = " in event]

    def numbered(event: str) -> str:
        before, word, after = event.partition(" = ") if " = " in event else event.rpartition(" of ")
        if word == " = ":
            return f"{sent.index(before)} = {after}"
        if event.startswith("wait"):
            return f"wait {sent.index(event.split()[1])}"
        return f"{before} of {[sent.index(n) if n in sent else n for n in after.split(', ')]}"

    return list(map(numbered, others))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["scheduling", "bucketing"])
def test_a_ring_keeps_its_order(gpu: AbsentGpu, setting: str) -> None:
    """Compare exchanges, waits and blocks; a test below covers sums of gradients."""
    ours, theirs = (list(map(ring, gpu.run(order, how, *RING))) for how in ("none", setting))
    assert theirs == ours
    assert all(any("shift" in event for event in events) for events in ours)


@pytest.mark.slow
def test_reordering_waits_before_the_block_that_hides_the_exchange(gpu: AbsentGpu) -> None:
    ours, _ = gpu.run(order, "none", *RING)
    theirs, _ = gpu.run(order, "reordering", *RING)
    assert numbers(ours, "attend step 0") < numbers(ours, "wait 1")
    assert numbers(theirs, "wait 1") < numbers(theirs, "attend step 0")


@pytest.mark.slow
def test_scheduling_delays_groups_of_heads_until_the_last_one(gpu: AbsentGpu) -> None:
    """Without it, a group is sent during the next one. With it, all results stay in memory until the last group."""
    groups = 4
    back = "= all_to_all_single bfloat16[2, 4, 1048576]"
    for setting, overlapped in (("none", groups - 1), ("scheduling", 1)):
        forward, _ = gpu.run(order, setting, *ULYSSES)
        blocks, sent = numbers(forward, "flash")[:groups], numbers(forward, back)[:groups]
        assert len(sent) == len(blocks) == groups
        assert sum(one < blocks[-1] for one in sent) == overlapped, forward


@pytest.mark.slow
def test_bucketing_delays_gradients_until_the_last_one(gpu: AbsentGpu) -> None:
    """Without bucketing, each gradient is sent as soon as it is computed, during later blocks."""
    _, ours = gpu.run(order, "none", *ULYSSES)
    _, theirs = gpu.run(order, "bucketing", *ULYSSES)
    first, last = (numbers(events, "flash") for events in (ours, theirs))
    assert numbers(ours, "= all_reduce")[0] < first[0]
    assert numbers(theirs, "= all_reduce")[0] > last[0]
