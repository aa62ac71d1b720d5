"""What Inductor's own settings for overlap and bucketing make of the order of exchanges, and why none is switched on."""

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
    """What happens forward and backward: sends, waits and blocks of attention alone."""
    with inductor.patch(SETTINGS[setting]):
        rank = attention.__wrapped__(strategy, n, sizes)  # whose results others keep by their sizes
    return tuple([x for x in one.text().splitlines() if _counts(x)] for one in (rank.forward, rank.backward))


def _counts(event: str) -> bool:
    return " = " in event or "wait" in event or "attend" in event or "flash" in event


def numbers(events: list[str], kind: str) -> list[int]:
    """Where events of a kind lie."""
    return [i for i, event in enumerate(events) if kind in event]


def ring(events: list[str]) -> list[str]:
    """Without sums of gradients; exchanges are numbered anew."""
    sums = [event.split()[0] for event in events if "all_reduce" in event]
    left = [event for event in events if "all_reduce" not in event and event not in {f"wait {n}" for n in sums}]
    sent = [event.split()[0] for event in left if " = " in event]

    def numbered(event: str) -> str:
        before, word, behind = event.partition(" = ") if " = " in event else event.rpartition(" of ")
        if word == " = ":
            return f"{sent.index(before)} = {behind}"
        if event.startswith("wait"):
            return f"wait {sent.index(event.split()[1])}"
        return f"{before} of {[sent.index(n) if n in sent else n for n in behind.split(', ')]}"

    return list(map(numbered, left))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["scheduling", "bucketing"])
def test_a_ring_stays_as_it_is(gpu: AbsentGpu, setting: str) -> None:
    """Its exchanges, waits and blocks; what becomes of gradients' sums is below."""
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
def test_scheduling_sends_groups_of_heads_back_behind_the_last_of_them(gpu: AbsentGpu) -> None:
    """Ours go back as each is done, beside the next; its own wait for all, and their results lie in memory until then."""
    groups = 4
    back = "= all_to_all_single bfloat16[2, 4, 1048576]"
    for setting, beside in (("none", groups - 1), ("scheduling", 1)):
        forward, _ = gpu.run(order, setting, *ULYSSES)
        blocks, sent = numbers(forward, "flash")[:groups], numbers(forward, back)[:groups]
        assert len(sent) == len(blocks) == groups
        assert sum(one < blocks[-1] for one in sent) == beside, forward


@pytest.mark.slow
def test_bucketing_keeps_gradients_until_the_last_is_there(gpu: AbsentGpu) -> None:
    """Ours leave as they are made, which is what hides them."""
    _, ours = gpu.run(order, "none", *ULYSSES)
    _, theirs = gpu.run(order, "bucketing", *ULYSSES)
    first, last = (numbers(events, "flash") for events in (ours, theirs))
    assert numbers(ours, "= all_reduce")[0] < first[0]
    assert numbers(theirs, "= all_reduce")[0] > last[0]
