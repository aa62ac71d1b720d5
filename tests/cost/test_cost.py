"""The cost model of attention: bytes, published throughput, choices, refused candidates."""

import math
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.passes.cost import attention_cost as attention
from sp_compile.passes.cost.attention_cost import (
    AttentionShape,
    Candidate,
    all_candidates,
    choose_attention,
    fastest_candidate,
    halving_documents,
)
from sp_compile.passes.cost.decision import describe_shape
from sp_compile.passes.cost.machine import CPU, GPU, Machine
from sp_compile.passes.cost.walk.workspace import op_workspace

LINKS = {f"{kind}_bandwidth": 1.0 for kind in ("all_to_all", "all_gather", "hop")}
BYTES = replace(  # seconds are bytes: nothing but exchanges costs, and none of them hides
    CPU,
    **LINKS,
    flops=math.inf,
    call=0,
    all_to_all_latency=0,
    all_gather_latency=0,
    hop_latency=0,
    memory_bandwidth=math.inf,
)
# CP ranks: TFLOP/s per rank by the plain formulas, and as published for 8 H100 a node (read off a chart).
CHART = {
    8: {"ulysses": (609, 602), "gather": (620, 601), "ring": (496, 421)},
    16: {"ulysses": (571, 557), "gather": (619, 591), "ring": (493, 455)},
    32: {"ulysses": (578, 580), "gather": (618, 592), "ring": (492, 451)},
    64: {"ulysses": (593, 585), "gather": (617, 580), "ring": (492, 446)},
}


def shape(n: int, heads: int = 64, kv_heads: int = 8, rows: int = 1024, **changes: Any) -> AttentionShape:
    """A causal bfloat16 attention of `rows` positions per rank and 128 dims a head."""
    sizes = {"batch": 1, "q_len": n * rows, "kv_len": n * rows, "head_dim": 128, "v_head_dim": 128}
    given = {**sizes, "element_size": 2, "causal": True, "order": LAYOUTS["zigzag"], **changes}
    return AttentionShape(n=n, heads=heads, kv_heads=kv_heads, **given)


def of(found: list[Candidate], kind: str, ulysses: int = 0, layout: str = "") -> Candidate:
    """The candidate of this kind; the best balanced one if the layout is not given."""
    return [c for c in found if c.kind == kind and ulysses in (0, c.ulysses) and (not layout or c.layout == layout)][-1]


@pytest.mark.parametrize("kv_heads", [8, 64])
def test_workspace_of_the_flash_backward(kv_heads: int) -> None:
    """The workspace equals the walk over a rank's graph, for the tensors of each strategy."""
    s = shape(16, kv_heads=kv_heads, kernel="flash")
    rows, keys = s.q_rows, s.kv_len

    def taken(kind: str, layout: str, ulysses: int = 0) -> float:
        with_it = of(all_candidates(s, GPU), kind, ulysses, layout)
        with mock.patch.object(attention, "WORKSPACE_KERNELS", frozenset()):
            return with_it.memory - of(all_candidates(s, GPU), kind, ulysses, layout).memory

    def walked(heads: int, of_keys: int, rows: int, keys: int) -> int:
        q, k = (
            torch.empty(1, *size, 128, dtype=torch.bfloat16, device="meta") for size in ((heads, rows), (of_keys, keys))
        )
        return op_workspace(torch.ops.sp.attend_backward.default, [q, q, k, k])

    whole = kv_heads * 2 * 128 * 2 * keys  # later, gradients of all keys are packed while no keys are stored
    assert taken("gather", "contiguous") == max(0, walked(64, kv_heads, rows, keys) - whole)
    assert taken("ring", "contiguous") == walked(64, kv_heads, rows, rows)
    assert taken("hybrid", "contiguous", 4) == walked(16, kv_heads // 4, 4 * rows, 4 * rows)
    assert taken("ulysses", "contiguous") == walked(4, max(kv_heads // 16, 1), keys, keys)
    assert replace(s, training=False).workspace(1, keys) == 0


@pytest.mark.parametrize("element_size", [2, 4, 8])
@pytest.mark.parametrize(("n", "heads", "kv_heads"), [(2, 8, 8), (4, 32, 8), (8, 64, 8), (16, 64, 8), (8, 64, 1)])
def test_bytes(n: int, heads: int, kv_heads: int, element_size: int) -> None:
    s = shape(n, heads, kv_heads, batch=3, element_size=element_size)
    found = all_candidates(s, BYTES)
    head, wide = 3 * 1024 * 128 * element_size, max(4, element_size) / element_size
    ulysses = (n - 1) / n * head * (2 * heads + 2 * max(kv_heads, n))
    assert of(found, "ulysses").forward == pytest.approx(ulysses)
    assert of(found, "ulysses").backward == pytest.approx(ulysses)
    kv = (n - 1) * 2 * kv_heads * head
    for kind in ("gather", "ring"):
        assert of(found, kind).forward == pytest.approx(kv)
        home = kv / (n - 1) if of(found, kind).ring_grads == "travel" else 0  # one hop more, in the dtype of the keys
        assert of(found, kind).backward == pytest.approx(kv * (1 + wide) + home)
    whole_keys = n * 2 * kv_heads * head  # with their gradients, or these and what is sent of them
    assert of(found, "gather").memory == max(whole_keys * (1 + wide), 2 * whole_keys * wide) + heads * head * wide
    alone = all_candidates(replace(s, training=False), BYTES)
    assert of(alone, "gather").memory == whole_keys
    for hybrid in (c for c in found if c.kind == "hybrid"):
        u, r = hybrid.ulysses, hybrid.ring
        inside = (u - 1) / u * head * (2 * heads + 2 * max(kv_heads, u))
        assert hybrid.forward == pytest.approx(inside + (r - 1) * 2 * max(kv_heads, u) * head)
    assert {(c.ulysses, c.ring) for c in found if c.kind == "hybrid"} == {
        (u, n // u) for u in range(2, n) if n % u == 0 and heads % u == 0
    }


def ring_grads(s: AttentionShape, machine: Machine) -> str:
    return of(all_candidates(s, machine), "ring", layout="contiguous").ring_grads


def test_gradients_that_travel_make_one_hop_more() -> None:
    s = shape(4, 8, 2)
    hop = 2 * 2 * s.q_bytes
    assert ring_grads(s, BYTES) == "scatter"
    slow_reduction = replace(BYTES, all_gather_bandwidth=0.5)
    assert ring_grads(s, slow_reduction) == "travel"
    ring = of(all_candidates(s, slow_reduction), "ring")
    assert ring.backward == 3 * hop + 3 * 2 * hop + hop  # sums in float32, and the last hop in the dtype of the keys
    assert ring.rounds == (3, 7)
    assert ring_grads(shape(8, rows=8192), GPU) == "travel"  # all but its last hop hides
    assert ring_grads(shape(2, rows=8192), CPU) == "travel"  # within 5 %, and in less memory


def test_gradients_travel_if_a_window_needs_few_hops() -> None:
    """As in the op: a scatter would need a part of every rank."""
    fast_reduction = replace(BYTES, all_gather_bandwidth=100.0)
    assert ring_grads(shape(4, 8, 2), fast_reduction) == "scatter"
    windowed = of(all_candidates(shape(4, 8, 2, window=100), fast_reduction), "ring", layout="contiguous")
    assert windowed.ring_grads == "travel"
    assert windowed.rounds == (1, 3)


def test_scattered_gradients_are_copied() -> None:
    """Parts of all ranks are copied, stacked and summed; a ring of fewer hops has no part of each rank."""
    s = shape(4, 8, 2)
    machines = [replace(BYTES, memory_bandwidth=bandwidth) for bandwidth in (math.inf, 100)]
    free, copied = (of(all_candidates(s, machine), "ring", layout="contiguous") for machine in machines)
    parts = (3 + 3 + 4 + 4 + 4 + 1) * s.head_bytes.keys * s.widening  # of each hop, and of the stack and the sum of all
    assert (free.ring_grads, copied.ring_grads) == ("scatter", "scatter")
    assert copied.backward - free.backward == pytest.approx((parts + 3 * s.accumulate_bytes) / 100)
    assert ring_grads(s, replace(BYTES, memory_bandwidth=1.0)) == "travel"
    assert ring_grads(replace(s, window=1025), replace(BYTES, hop_bandwidth=0.01)) == "travel"


def test_parts_of_gradients_have_to_fit() -> None:
    s, fast_reduction = shape(8, 8, 8), replace(BYTES, all_gather_bandwidth=100.0)
    scattered = of(all_candidates(s, fast_reduction), "ring")
    assert scattered.ring_grads == "scatter"
    traveling = of(all_candidates(s, replace(fast_reduction, memory=scattered.memory - 1)), "ring")
    assert (traveling.ring_grads, traveling.refusal) == ("travel", None)
    assert scattered.memory - traveling.memory == 2 * s.head_bytes.keys * 2 * 8


def test_different_head_dims_and_lengths() -> None:
    s = shape(4, 8, 8, q_len=100, kv_len=37, head_dim=192, v_head_dim=128, causal=False)
    found = all_candidates(s, BYTES)
    q, out, kv = 25 * 192 * 2, 25 * 128 * 2, 10 * (192 + 128) * 2
    assert of(found, "ulysses").forward == pytest.approx(3 / 4 * 8 * (q + kv + out))
    assert of(found, "ring").forward == pytest.approx(3 * 8 * kv)
    assert s.flops == 2 * 8 * (192 + 128) * 100 * 37 / 4


def test_work_of_masks() -> None:
    full = shape(4, causal=False).flops
    assert shape(4).flops == full / 2
    assert shape(4, window=10**9).flops == full / 2
    band = shape(4, window=64)
    assert band.flops == pytest.approx(full * (64 * 4096 - 64 * 64 / 2) / 4096**2)
    both = shape(4, window=64, causal=False)
    assert both.flops == pytest.approx(full * (2 * 64 * 4096 - 64 * 64) / 4096**2)
    # The last of 4 contiguous parts does 3 full blocks and a diagonal one; the mean is 2.
    assert shape(4).imbalance(4) == pytest.approx(3.5 / 2)
    assert band.imbalance(4) == pytest.approx(1, abs=0.02)
    assert shape(4, causal=False).imbalance(4) == pytest.approx(1)
    assert shape(2, q_len=0, kv_len=0).imbalance(2) == 1


def test_work_of_documents() -> None:
    """One of half the sequence, one of a quarter, ...: a third of the pairs of a causal mask over all of it."""
    s, other = shape(4, documents=True), shape(4, documents=True, causal=False)
    assert sum(length for _, length in halving_documents(4096)) == 4096
    assert halving_documents(1) == [(0, 1)]
    assert s.pairs(0, 4096) == pytest.approx(4096**2 / 6, rel=1e-3)
    # The second of 4 contiguous ranks has the second half of the longest one: three quarters of its pairs.
    assert s.imbalance(4) == pytest.approx(4 * (3 / 32) * 6, rel=1e-3)
    assert s.imbalance(4, "zigzag") == pytest.approx(1.5, rel=1e-3)  # of (7/128 + 1/128) and 1/24
    assert s.imbalance(4, "balanced") == 1
    assert describe_shape(s).endswith("causal, documents")
    assert other.imbalance(4) == pytest.approx(4 * (1 / 8) * 3, rel=1e-3)
    ring = of(all_candidates(replace(s, order=LAYOUTS["balanced"]), BYTES), "ring", layout="balanced")
    assert ring.seconds == of(all_candidates(s, BYTES), "ring", layout="contiguous").seconds


def test_plain_formulas_give_the_published_model() -> None:
    plain = replace(GPU, block_keys=0, call=0, ring_efficiency=0.82)
    for n, expected in CHART.items():
        s = shape(n, rows=8192)
        for kind, (model, _) in expected.items():
            machine = plain if kind == "ring" else replace(plain, memory_bandwidth=math.inf)
            assert s.flops / of(all_candidates(s, machine), kind).forward / 1e12 == pytest.approx(model, rel=0.005)


def test_default_gpu_against_the_published_chart() -> None:
    for n, expected in CHART.items():
        s = shape(n, rows=8192)
        found = all_candidates(s, GPU)
        for kind, (model, chart) in expected.items():
            predicted = s.flops / of(found, kind).forward / 1e12
            assert predicted == pytest.approx(model, rel={"ulysses": 0.021, "gather": 0.04, "ring": 0.015}[kind])
            assert -0.02 < predicted / chart - 1 < {"ulysses": 0.02, "gather": 0.05, "ring": 0.17}[kind]


def bytes_winner(n: int, heads: int, kv_heads: int) -> tuple[str, int]:
    best = fastest_candidate(all_candidates(shape(n, heads, kv_heads, training=False), BYTES))
    return best.kind, best.ulysses


def test_rules_that_fall_out_of_the_bytes() -> None:
    for n in (4, 8, 16):
        assert bytes_winner(n, 32, 32) == ("ulysses", n)
    assert bytes_winner(3, 36, 36) == ("ulysses", 3)
    assert bytes_winner(2, 32, 8) == bytes_winner(4, 32, 8) == ("gather", 1)
    assert bytes_winner(8, 32, 8) == ("ulysses", 8)
    assert bytes_winner(16, 32, 8) == ("hybrid", 8)
    assert bytes_winner(8, 64, 8) == ("gather", 1)
    assert bytes_winner(16, 64, 8) == bytes_winner(32, 64, 8) == ("hybrid", 8)
    for n in (2, 4, 8, 16, 32):
        assert bytes_winner(n, 32, 1) == ("gather", 1)


def test_gradients_move_the_rules_towards_ulysses() -> None:
    """The gradients of K and V are reduced in float32: bytes both ways are 4 to 2 of the forward's, not 1 to 1."""
    assert fastest_candidate(all_candidates(shape(4, 32, 8), BYTES)).kind == "ulysses"
    assert fastest_candidate(all_candidates(shape(2, 32, 8), BYTES)).kind == "gather"
    assert fastest_candidate(all_candidates(shape(8, 64, 4), BYTES)).kind == "gather"


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("rows", [1024, 8192, 131072])
def test_rules_that_survive_all_terms(machine: Machine, rows: int) -> None:
    for n in (4, 8):
        assert choose_attention(all_candidates(shape(n, 32, 32, rows), machine)).kind == "ulysses"
        short = machine is GPU and rows == 1024  # the launches of the cut blocks weigh as much as the bytes
        assert short or choose_attention(all_candidates(shape(n, 32, 1, rows), machine)).kind == "gather"


def test_heads_decide_legality() -> None:
    found = all_candidates(shape(4, 6, 6), GPU)
    assert re.match(r"4 ranks .*\b6 .*heads", of(found, "ulysses").refusal)
    assert of(found, "hybrid").refusal is None
    assert choose_attention(found).kind != "ulysses"
    assert [c.kind for c in all_candidates(shape(4, 5, 5, causal=False), GPU)] == ["ulysses", "gather", "ring"]
    # Neither 6 ranks nor 4 key heads divide the other: all 12 heads are repeated.
    s = shape(6, 12, 4)
    assert of(all_candidates(s, BYTES), "ulysses").forward == pytest.approx(5 / 6 * s.q_bytes * (2 * 12 + 2 * 12))


def test_layouts() -> None:
    s = shape(4)
    assert {c.layout for c in all_candidates(replace(s, causal=False), GPU)} == {"contiguous"}
    assert {c.layout for c in all_candidates(replace(s, window=64), GPU)} == {"contiguous"}
    assert {c.layout for c in all_candidates(replace(s, kv_len=128), GPU)} == {"contiguous"}
    free, moved = (
        of(all_candidates(x, BYTES), "ring", 1, "zigzag") for x in (s, replace(s, order=LAYOUTS["contiguous"]))
    )
    assert not free.relayout
    assert moved.relayout
    assert moved.forward - free.forward == s.q_bytes * (2 * 64 + 2 * 8)
    assert moved.collectives == free.collectives + 4
    halves = replace(shape(2), order=LAYOUTS["contiguous"])  # of two ranks, each keeps a half
    moved = of(all_candidates(halves, BYTES), "ring", 1, "zigzag")
    assert moved.forward == halves.q_bytes * (2 * 8 + (2 * 64 + 2 * 8) / 2)


def test_a_window_needs_few_hops() -> None:
    for window, hops in [(1, 0), (2, 1), (1025, 1), (1026, 2), (10**6, 7)]:
        s = shape(8, window=window)
        ring = of(all_candidates(s, BYTES), "ring", 1, "contiguous")
        assert ring.rounds[0] == hops
        assert ring.forward == hops * 16 * s.q_bytes
    alone = of(all_candidates(shape(8, window=1), BYTES), "ring", 1)
    assert (alone.rounds, alone.backward) == ((0, 0), 0)
    assert of(all_candidates(shape(8, window=64, causal=False), BYTES), "ring").rounds[0] == 7
    assert choose_attention(all_candidates(shape(8, 8, 8, rows=8192, window=1024, training=False), CPU)).kind == "ring"


def test_one_rank_and_inference() -> None:
    (alone,) = all_candidates(shape(1), GPU)
    assert (alone.kind, alone.collectives, alone.memory) == ("ulysses", 0, 0)
    assert alone.forward == GPU.attention(shape(1).flops, 1024) + GPU.call
    for c in all_candidates(shape(4, training=False), GPU):
        assert c.backward == 0
        assert c.rounds[1] == 0


def candidate(kind: str, seconds: float, rounds: int = 4, memory: float = 1.0, **more: Any) -> Candidate:
    return Candidate(kind, 1, 4, "contiguous", seconds, 0.0, memory, (rounds, 0), **more)


def test_ties() -> None:
    ring, ulysses, gather = candidate("ring", 1.0), candidate("ulysses", 1.04), candidate("gather", 1.03)
    assert choose_attention([ring, gather, ulysses]) == ulysses
    assert choose_attention([gather, ring]) == gather
    assert choose_attention([ring, candidate("ulysses", 1.06)]) == ring
    assert choose_attention([ulysses, candidate("gather", 1.05, rounds=3)]).kind == "gather"
    assert choose_attention([ulysses, candidate("gather", 1.05, rounds=3, memory=2.0)]) == ulysses
    assert choose_attention([ring, candidate("ulysses", 0.5, refusal="no")]) == ring
    with pytest.raises(SpError, match=r"SP701: attention: .*ring.*gather"):
        choose_attention([candidate("ring", 1, refusal="too large"), candidate("gather", 1, refusal="also")])


def test_the_order_of_candidates_does_not_matter() -> None:
    for n in (2, 4, 6, 8, 16):
        found = all_candidates(shape(n, 48, 4, order=LAYOUTS["contiguous"]), GPU)
        assert found == all_candidates(shape(n, 48, 4, order=LAYOUTS["contiguous"]), GPU)
        assert choose_attention(found) == choose_attention(found[::-1])


def test_memory_is_a_limit() -> None:
    s = shape(8, 32, 32, causal=False)
    gather = of(all_candidates(s, GPU), "gather")
    allowed = replace(GPU, memory=gather.memory - 1)
    refused = of(all_candidates(s, allowed), "gather")
    assert not refused.fits
    assert re.findall(r"[\d.]+ \w+B", refused.refusal) == ["528.0 MiB"] * 2  # needed and free
    with pytest.raises(SpError, match="SP701: attention: "):
        choose_attention(all_candidates(s, replace(GPU, memory=1)))
    masked = replace(s, mask=True)
    assert of(all_candidates(masked, GPU), "gather").memory - gather.memory == s.q_rows * s.kv_len


def test_groups_of_heads_where_they_hide_an_exchange() -> None:
    """One group per head of a rank if calls are free; no groups if nothing overlaps, or if calls cost more."""
    machine = replace(BYTES, flops=4e3, overlap=1.0)
    (plain, grouped) = [
        c for c in all_candidates(shape(4), machine) if c.kind == "ulysses" and c.layout == "contiguous"
    ]
    assert (plain.chunks, grouped.chunks) == (1, 2)
    assert grouped.seconds < plain.seconds
    assert choose_attention([plain, grouped]) is grouped
    compute = machine.attention(shape(4).flops, shape(4).kv_len)
    assert grouped.forward == pytest.approx(compute + (plain.forward - compute) / 2)
    for other in (replace(machine, overlap=0.0), replace(machine, call=1e12)):
        assert [c.chunks for c in all_candidates(shape(4), other) if c.kind == "ulysses"] == [1]
