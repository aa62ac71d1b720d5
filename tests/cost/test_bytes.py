"""The bytes that predictions are made of are those that `explain` lists, and those that the exchanges have."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from torch import Tensor

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.collective_time import collective_bytes
from sp_compile.passes.cost.machine import CPU, Machine
from sp_compile.passes.cost.scan_cost import CarryExchangeCost, choose_exchange
from sp_compile.passes.report import Report
from sp_compile.passes.strategies import scan_demands as scan_strategy
from sp_compile.passes.strategies.attention import choose_attention as attention_strategy
from sp_compile.pipeline import run_pipeline

N, BATCH, LENGTH, DIM = 4, 2, 32, 8
FREE = {"flops": math.inf, "memory_bandwidth": math.inf, "block_keys": 0.0, "call": 0.0, "ranks_per_node": math.inf}
ONE = {f.name: 1.0 for f in fields(CPU) if f.name.endswith("bandwidth") and f.name != "memory_bandwidth"}
NONE = {f.name: 0.0 for f in fields(CPU) if f.name.endswith("latency")}
BYTES = Machine.of("cpu", {**FREE, **ONE, **NONE})
"""Its seconds are the bytes that one rank sends: no start, no copies, no compute, one byte a second."""


def report_of(fn: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Report:
    gm = captured(fn, x.requires_grad_())
    return run_pipeline(gm, PassContext.of(Ranks(N, SIMULATED_GROUP), machine=BYTES, **options))[1]


def attending(heads: int, kv_heads: int, window: int | None) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        q, k, v = ((x * 2).unflatten(-1, (-1, DIM)).transpose(1, 2)[:, :h] for h in (heads, kv_heads, kv_heads))
        if window is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        i = torch.arange(x.shape[1])
        mask = (i[:, None] >= i) & (i[:, None] - i < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != kv_heads)

    return fn


CASES = [
    (kind, relayout, heads, kv_heads, window)
    for kind in ("ulysses", "ring", "hybrid", "gather")
    for relayout in (False, True)
    for heads, kv_heads, window in ((8, 8, None), (8, 4, None), (8, 1, None), (8, 2, 6))
    if not relayout or (kind != "ulysses" and window is None)
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("kind", "relayout", "heads", "kv_heads", "window"), CASES)
def test_attention(
    monkeypatch: pytest.MonkeyPatch, kind: str, relayout: bool, heads: int, kv_heads: int, window: int | None
) -> None:
    taken = lambda found: next(c for c in found if (c.kind, c.relayout) == (kind, relayout))  # noqa: E731
    monkeypatch.setattr(attention_strategy, "choose_attention", taken)
    x = torch.randn(BATCH, LENGTH, heads * DIM, dtype=torch.bfloat16)
    report = report_of(attending(heads, kv_heads, window), x, attention=kind, outputs="local")
    (decision,) = report.attention
    listed = [e for e in report.exchanges if e.op == "all_to_all" or e.op.endswith("_attention")]
    assert listed
    assert decision.chosen.forward == sum(e.forward for e in listed) > 0
    assert decision.chosen.backward == sum(e.backward for e in listed) > 0


def test_a_ring_within_the_rows_of_a_rank_sends_nothing() -> None:
    x = torch.randn(BATCH, LENGTH, 8 * DIM, dtype=torch.bfloat16)
    report = report_of(attending(8, 8, window=1), x, attention="ring", outputs="local")
    (exchange,) = (e for e in report.exchanges if e.op.endswith("_attention"))
    assert (exchange.forward, exchange.backward) == (0, 0)


@pytest.mark.parametrize("exchange", ["gather", "steps"])
def test_scans(monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    made: list[CarryExchangeCost] = []

    def chosen(nbytes: int, n: int, machine: Machine, *_: object) -> CarryExchangeCost:
        made.append(choose_exchange(nbytes, n, machine, 1 if exchange == "steps" else 2))
        return made[-1]

    monkeypatch.setattr(scan_strategy, "choose_exchange", chosen)
    report = report_of(lambda x: (x * 2).cumsum(1), torch.randn(BATCH, LENGTH, DIM))
    (carries,), (listed,) = made, [e for e in report.exchanges if e.op == "scan"]
    assert carries.exchange == exchange
    assert listed.forward == getattr(carries, exchange) > 0


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_chunks_that_a_fold_moves(n: int) -> None:
    """Two chunks a rank; the busiest one counts."""
    sent = [
        sum(to != rank for to in routes.route_ends(routes.fold_route("g"), rank, n).destinations) for rank in range(n)
    ]
    assert collective_bytes("fold", 2, n) == max(sent)
