"""`sp_compile.plan`: extrapolation from a few layers, fitting rows, and the report if no row fits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.models import Decoder, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.context import Note
from sp_compile.passes.cost.attention_cost import AttentionShape, Candidate
from sp_compile.passes.cost.few_layers import LayerList, checkpoint_blocks, checkpoint_layers
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.report import Report
from sp_compile.planner import plan as plan_module
from sp_compile.planner.byte_sizes import parse_bytes, parse_unit
from sp_compile.planner.plan import NOT_CALLED, SEVERAL_GRAPHS, TILE_COUNTS, StepPlan
from sp_compile.planner.planned_steps import AttentionChoice, StepPlanner
from sp_compile.planner.report_json import plan_json
from sp_compile.planner.step_peaks import REPLICATED_STATE, SHARDED_STATE
from sp_compile.planner.variants import PlanConfig, Variant


def plain(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def decoder(layers: int = 5) -> nn.Module:
    return Decoder(plain, layers=layers)


@cache
def planned(memory: str = "1GB") -> sp_compile.StepPlan:
    with torch.device("meta"):
        model, ids = decoder(), torch.zeros(2, 64, dtype=torch.int64)
    return sp_compile.plan(model, ids, memory=memory, ranks=[1, 2, 8])


IDS, FLOATS = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64, 8)


@pytest.mark.parametrize(
    "inputs",
    [
        [IDS, IDS[0]],
        [IDS, torch.ones(2, 1, 64, 64, dtype=torch.bool)],
        [IDS, torch.ones(2, 1, 64, 64, dtype=torch.int64)],
        [IDS, torch.ones(64, 64, dtype=torch.bool), "text"],
        [IDS, torch.zeros(3, 2, 64, dtype=torch.int64)],  # positions along three axes
        [IDS, torch.zeros(1000, 50)],  # pixels
        [FLOATS, IDS[:, 0]],  # time steps of a diffusion model
        [FLOATS, torch.ones(2, 64, dtype=torch.bool)],
        [FLOATS, torch.zeros(64, 64)],  # a mask that is added to scores
        [IDS.flatten()],
        [FLOATS[..., 0]],
    ],
)
def test_tokens_of_a_step(inputs: list[Any]) -> None:
    assert plan_module._count_tokens(inputs) == 128


@pytest.mark.slow
def test_a_plan() -> None:
    plan = planned()
    assert {row.ranks for row in plan.rows} == {1, 2, 8}
    assert all(row.fits and row.seconds > 0 and row.tokens == 128 for row in plan.rows)
    assert plan.best.seconds == min(row.seconds for row in plan.rows)
    assert {row.attention for row in plan.rows if row.ranks == 2} == {"ulysses", "ring", "gather"}
    torch.compile(decoder(), backend="sp", options=plan.best.options)
    assert not any(row.checkpoint or row.offload for row in plan.rows), "as written it fits"
    assert "best" in str(plan)


def test_a_state_that_does_not_fit_needs_no_dry_run() -> None:
    with mock.patch.object(StepPlanner, "plan_steps", side_effect=AssertionError), torch.device("meta"):
        plan = sp_compile.plan(nn.Linear(64, 64), torch.zeros(1, 8, 64), memory="1KB", ranks=[1, 2, 8])
    assert not plan.rows
    assert set(plan.changes) == {1, 2, 8}
    with pytest.raises(SpError, match=r"SP723.*8 ranks: .* KB"):
        _ = plan.best


class Wide(nn.Module):
    """(1, S, 16) -> a number: an attention and MLPs, of which much is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)
        self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16)) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        h = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.parts(h).square().mean()


@pytest.mark.slow
def test_excess_is_offloaded_or_reported() -> None:
    """Little more than needed is offloaded, the fastest fitting row is best, and one rank gets a list of changes."""
    with torch.device("meta"):
        model, x = Wide().bfloat16(), torch.zeros(1, 4096, 16, dtype=torch.bfloat16)
    roads: dict[str, Any] = {"attention": "ulysses", "tiles": "never", "cost": {"host_bandwidth": 1e15}}
    plan = sp_compile.plan(model, x, memory="1.2MB", ranks=[1, 2], **roads)
    fitting = [row for row in plan.rows if row.fits]
    assert {row.state for row in fitting} == {SHARDED_STATE, REPLICATED_STATE}
    for row in [plan.best]:
        (device,) = [r for r in plan.rows if r.config == replace(row.config, offload=0.0)]
        less = row.memory + (device.memory - row.memory) * 0.05 / row.offload
        assert row.memory <= plan.memory < less
        assert row.host == pytest.approx(row.offload * row.kept, rel=0.2)
    assert plan.best == plan.of(2) == min(fitting, key=lambda row: (row.seconds, row.host))
    assert plan.best.seconds < max(row.seconds for row in fitting)
    assert plan.best.options["offload"] == plan.best.offload < 1
    assert plan.of(1) is None
    assert list(plan.changes) == [1]
    assert re.match(r"1 ranks: .*\b100% .*host\).* too much.* fits on 2\b", plan.changes[1])
    assert plan.changes[1] in str(plan)
    alone = [row for row in plan.rows if row.ranks == 1]
    with pytest.raises(SpError, match=r"SP723: plan: .*1 ranks: "):
        _ = StepPlan(plan.memory, plan.weights, alone, plan.changes).best


@pytest.mark.slow
def test_many_ranks_hold_a_small_share_of_a_long_sequence() -> None:
    """A ring sends gradients around if those of all keys do not fit."""
    with torch.device("meta"):
        model, ids = Decoder(plain).bfloat16(), torch.zeros(1, 1 << 16, dtype=torch.int64)
    plan = sp_compile.plan(model, ids, memory="20MB", ranks=[8, 512], attention="ring", tiles="never", offload="never")
    state = plan.weights.parameters * 2 + ids.nbytes  # each rank is handed the whole input
    few, many = (min(row.memory for row in plan.rows if row.ranks == n) - state for n in (8, 512))
    assert 0 < many < few / 32, (few, many)


def explained(model: nn.Module, args: tuple[Any, ...], row: Variant) -> float:
    """Return a rank's bytes by `explain` with the options and model of a row."""
    with checkpoint_layers(checkpoint_blocks(model)) if row.checkpoint else nullcontext():
        step = sp_compile.explain(model, *args, sp=row.ranks, memory=True, **row.options).step
    assert step is not None
    return step.fsdp(row.ranks) if row.state == SHARDED_STATE else step.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "memory", "options"),
    [
        (2, "1.9MB", {}),
        (2, "5MB", {"state": "replicated", "attention": "gather"}),
        (11, "1.9MB", {}),
        (11, "6MB", {"attention": "ring", "layout": "contiguous"}),
        (11, "6MB", {"offload": 0.3, "tiles": 4}),
    ],
)
def test_explain_agrees_with_the_best_row(layers: int, memory: str, options: dict[str, Any]) -> None:
    """Compare few and all layers, with and without sharded state, tiled, checkpointed and offloaded."""
    with torch.device("meta"):
        model, ids = decoder(layers).bfloat16(), torch.zeros(1, 4096, dtype=torch.int64)
    plan = sp_compile.plan(model, ids, memory=memory, ranks=[2, 4], **options)
    best = [row for n in (2, 4) if (row := plan.of(n)) is not None]
    assert best
    for row in best:
        assert row.is_measured
        assert options.items() <= row.options.items()
        assert explained(model, (ids,), row) == pytest.approx(row.memory, rel=0.01)


def local_and_global() -> nn.Module:
    """Twelve layers, of which two attend to all that is before and the others to a window."""
    transformers = pytest.importorskip("transformers")
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(12)]
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "sliding_window": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 12, "layer_types": kinds}
    config = transformers.Gemma3TextConfig(**sizes, **heads, max_position_embeddings=1 << 18, use_cache=False)
    return transformers.Gemma3ForCausalLM(config).to(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["80GB", "700MB"])
def test_explain_agrees_for_mixed_attention(memory: str) -> None:
    """The best row uses the automatic choice, which takes the strategies that the plan counted."""
    with torch.device("meta"):
        model, ids = local_and_global(), torch.zeros(1, 1 << 18, dtype=torch.int64)
    plan = sp_compile.plan(model, ids, kwargs={"labels": ids}, memory=memory, ranks=[8, 16])
    for n in (8, 16):
        row = plan.of(n)
        assert row is not None
        assert (row.attention, row.layout, row.is_measured) == ("auto", "auto", True)
        with checkpoint_layers(checkpoint_blocks(model)) if row.checkpoint else nullcontext():
            report = sp_compile.explain(model, ids, labels=ids, sp=n, memory=True, **row.options)
        assert report.step is not None
        assert report.step.fsdp(n) == pytest.approx(row.memory, rel=0.01)
        assert len({(one.chosen.kind, one.chosen.layout) for one in report.attention}) == 2


SIZES = AttentionChoice(("ring", "zigzag"), [(Candidate("ring", 1, 2, "zigzag", 1.0, 2.0, 0.0, (1, 1)), 2.0)])


class Looked:
    """A made-up dry run: 400 bytes of values, of which 300 may be offloaded, and attention that takes 3 s."""

    def __init__(self, n: int, again: bool) -> None:
        self.config, self.again = PlanConfig(n, *SIZES.key, again, "never", SHARDED_STATE), again
        self.attention, self.max_tiles, self.saved_bytes, self.dry_run = 0.0, 0, 320.0, mock.Mock(steps=[1])

    def peak_memory(self, share: float) -> Any:
        state = {SHARDED_STATE: 1000 / 4 + 200 + 100, REPLICATED_STATE: 1000}
        values = 400 - 300 * share

        def memory(way: str, n: int, attention_bytes: float) -> tuple[float, str]:
            return state[way] + values + attention_bytes, "backward"

        return mock.Mock(memory=memory, host=300 * share)

    def actual_attention(self, attend: AttentionChoice) -> AttentionChoice:
        return attend

    def is_exact(self, attend: AttentionChoice, state: str, share: float) -> bool:
        return (attend.key, state, share) == (SIZES.key, SHARDED_STATE, 0.0)

    def seconds(self, attend: AttentionChoice, machine: Machine) -> float:
        return attend.seconds + attend.forward * self.again


def rows(again: bool = False, memory: float = 1e9, shares: tuple[float, ...] = (0.5, 1.0)) -> list[Variant]:
    """Return the planned rows of 4 ranks."""
    machine = Machine.of("cpu", {"memory": memory})
    planner = StepPlanner(nn.Linear(2, 2), [], {}, machine, {}, shares, 2.0, 64, [])
    return list(planner.plan_rows(Looked(4, again), SIZES))  # type: ignore[arg-type]


def test_memory_and_seconds_of_a_row() -> None:
    """Sharded state first; only the needed share is offloaded; a checkpoint repeats the attention forward."""
    sharded, whole = rows()
    assert (sharded.config.state, whole.config.state) == (SHARDED_STATE, REPLICATED_STATE)
    assert (sharded.memory, whole.memory) == (550 + 400, 1000 + 400)
    assert (sharded.kept, sharded.host, sharded.phase) == (320, 0, "backward")
    assert [row.is_measured for row in (sharded, whole)] == [True, False]
    more = [again.seconds - one.seconds for again, one in zip(rows(True), rows())]
    assert more == pytest.approx([2.0, 2.0])
    least, half, *_ = rows(memory=sharded.memory - 1)
    assert [row.config.offload for row in (least, half)] == [0.0, 0.5]
    assert (least.fits, half.fits, half.host, half.kept) == (False, True, 150, 320)
    assert [row.config.offload for row in rows(memory=10)] == [0.0, 1.0, 0.0, 1.0]
    assert [row.config.offload for row in rows(memory=10, shares=())] == [0.0, 0.0]


def test_offload_is_limited_by_host_memory() -> None:
    """The host has memory for 150 of 300 bytes; a requested share above that does not fit."""
    machine = Machine.of("cpu", {"memory": 700})

    def found(host: float, shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0), asked: float = 0.0) -> list[Any]:
        planner = StepPlanner(nn.Linear(2, 2), [], {}, machine, {}, shares, 2.0, 64, [], asked, host)
        made = planner.plan_rows(Looked(4, False), SIZES)  # type: ignore[arg-type]
        return [(row.config.offload, row.fits) for row in made if row.config.state == SHARDED_STATE]

    assert found(math.inf) == [(0.0, False), (1.0, True)]
    assert found(299) == [(0.0, False), (0.75, False)]
    assert found(150) == [(0.0, False), (0.5, False)]
    assert found(10) == [(0.0, False)]
    assert [found(host, (), 1.0) for host in (300, 299)] == [[(1.0, True)], [(1.0, False)]]


def test_offloaded_bytes_are_shown_with_host_memory() -> None:
    row = replace(variant(1.0, 300e6, True, True), offload=0.5, host=120e6)
    plan = StepPlan(500e6, ModelBytes(1, 1, 0, 1), [row], unit=parse_unit("500MB"), host_memory=200e6)
    assert re.match(r"500\.0 MB .* 200\.0 MB .*host", str(plan))
    assert "120.0 MB" in str(plan)
    assert (plan_json(plan)["host_memory_bytes"], plan_json(plan)["ways"][0]["host_bytes"]) == (200e6, 120e6)
    words = plan_module._required_change(mock.Mock(**{"constant.return_value": 1.0}), replace(plan, memory=400e6), 2)
    assert "too much" not in words
    assert re.search(r"\b120\.0 MB .*host .*\b200\.0 MB", words)
    with pytest.raises(SpError, match=r"SP722: host_memory.*'much'"):
        sp_compile.plan(nn.Linear(2, 2), (), host_memory="much")


def variant(seconds: float, memory: float, looked: bool, fits: bool, n: int = 2, **way: Any) -> Variant:
    made = {"attention": "ring", "layout": "zigzag", "checkpoint": False, "tiles": "auto", "offload": 0.0, **way}
    rest = {
        "host": 0.0,
        "state": SHARDED_STATE,
        "phase": "loss",
        "kept": 100.0,
        "tokens": 64,
        "fits": fits,
        "is_measured": looked,
    }
    return Variant(ranks=n, memory=memory, seconds=seconds, **made, **rest)


def predicted(config: PlanConfig, **numbers: Any) -> Variant:
    """Return the variant of a configuration with these numbers."""
    rest = {"host": 0.0, "phase": "loss", "kept": 100.0, "tokens": 64, "seconds": 1.0, "is_measured": True}
    return Variant(**vars(config), **{**rest, **numbers})


def test_the_best_estimate_is_dry_run_until_exact() -> None:
    """A failed estimate moves down and another offload share is tried; an impossible configuration is removed."""
    known, here = variant(9.0, 80, True, True), variant(1.0, 200, True, False, attention="gather")
    first, second = (
        variant(s, 80, False, True, offload=o, attention=a) for s, o, a in ((1, 0.5, "gather"), (2, 0.0, "ulysses"))
    )
    plan = StepPlan(100, ModelBytes(1, 1, 0, 1), [known, here, first, second])
    planner = mock.Mock(shares=(0.25, 0.5, 0.75), tokens=64, options={}, host=math.inf)
    planner.attention_choices.return_value = [mock.Mock(key=row.config.key) for row in plan.rows]
    planner.plan_steps = lambda ways: [
        mock.Mock(config=way, is_for_any_share=False) for way in ways if way.attention == "gather"
    ]
    holds = {0.5: 130.0, 0.75: 95.0}  # of 200 without a share
    planner.plan_row = lambda step, attend, state, share: predicted(
        step.config, host=100 * share, memory=holds[share], fits=holds[share] <= 100
    )
    plan_module._update_rows(planner, plan, plan_module._rows_to_examine(plan, 2), adds_estimates=True)
    more = plan.of(2)
    assert more is not None
    assert (more.offload, more.host, more.is_measured) == (0.75, 75, False)
    plan_module._update_rows(planner, plan, plan_module._rows_to_examine(plan, 2), adds_estimates=True)
    best = plan.of(2)
    assert best is not None
    assert (best.offload, best.memory, best.is_measured) == (0.75, 95, True)
    assert plan_module._rows_to_examine(plan, 2) == []
    holds[0.75] = 40.0  # less than has to go
    plan.rows = [here, replace(more, is_measured=False)]
    plan_module._update_rows(planner, plan, plan.rows[1:], adds_estimates=False)
    assert [row.offload for row in plan.rows] == [0.0, 0.75]
    plan.rows[1] = replace(more, is_measured=False)
    plan_module._update_rows(planner, plan, plan.rows[1:], adds_estimates=True)
    assert [row.offload for row in plan.rows] == [0.0, 0.75, 0.5]
    plan.rows.append(second)
    plan_module._update_rows(planner, plan, [second], adds_estimates=True)
    assert second not in plan.rows


def test_a_dry_run_of_few_layers_gives_the_share() -> None:
    """One dry run covers all shares: a smaller fitting one, or a larger one, needs no dry run of its own."""
    here, guess = variant(1.0, 200, True, False), variant(1.0, 90, False, True, offload=0.5)
    for first, enough in ((0.5, 0.75), (0.75, 0.5)):
        plan = StepPlan(100, ModelBytes(1, 1, 0, 1), [here, replace(guess, offload=first)])
        planner = mock.Mock(shares=(0.25, 0.5, 0.75, 1.0), tokens=64, options={})
        planner.attention_choices.return_value = [mock.Mock(key=here.config.key)]
        planner.plan_steps.side_effect = lambda ways: [mock.Mock(config=way, is_for_any_share=True) for way in ways]

        def row(step: Any, attend: Any, state: str, share: float, enough: float = enough) -> Variant:
            memory, config = 200 - 101 * share / enough, replace(step.config, offload=share)
            return predicted(config, memory=memory, fits=memory <= 100, seconds=1.0 + share)

        planner.plan_row = row
        planner.min_offload = lambda step, attend, state, enough=enough: row(step, attend, state, enough)
        plan_module._refine_best(planner, plan, [2])
        best = plan.of(2)
        assert best is not None
        assert (best.offload, best.is_measured, planner.plan_steps.call_count) == (enough, True, 1)


def test_near_misses_are_dry_run_once() -> None:
    near, far = variant(1.0, 105, False, False), variant(1.0, 120, False, False)
    plan = StepPlan(100, ModelBytes(1, 1, 0, 1), [near, far])
    assert plan_module._rows_to_examine(plan, 2) == [near]
    assert plan_module._rows_to_examine(plan, 2, near=False) == []
    slow, guess = variant(1.02, 70, True, True), variant(1.02, 80, False, True, attention="gather")
    plan.rows = [near, far, slow]
    assert plan_module._rows_to_examine(plan, 2) == [near], "it would be faster than what fits"
    plan.rows = [near, guess]
    assert plan_module._rows_to_examine(plan, 2) == [guess, near]
    plan.rows = [near, replace(slow, seconds=1.005)]
    assert plan_module._rows_to_examine(plan, 2) == [], "what fits is as good"


def test_nothing_more_is_tried_where_nothing_can_be_faster() -> None:
    """Rows that fit without offload, or with hidden copies, end the search; rows that wait for copies do not."""
    large, hidden = variant(10.0, 200, True, False), variant(10.05, 80, True, True, offload=0.5)
    for best, settled in ((hidden, True), (replace(hidden, seconds=11.0), False), (replace(hidden, fits=False), False)):
        assert plan_module._is_settled(StepPlan(100, ModelBytes(1, 1, 0, 1), [large, best]), 2) is settled
    small = variant(12.0, 80, True, True)
    assert plan_module._is_settled(StepPlan(100, ModelBytes(1, 1, 0, 1), [large, small]), 2)
    assert not plan_module._is_settled(StepPlan(100, ModelBytes(1, 1, 0, 1), [large, small]), 4)


def looked(checkpoints: bool, *notes: Note) -> Any:
    """Return the result of a dry run."""
    return mock.Mock(checkpoints=checkpoints, report=Report(2, [*notes]))


def test_checkpoints_are_tried_if_only_an_estimate_fits() -> None:
    """By the estimate, full offload fits, but its dry run does not."""
    seen: list[PlanConfig] = []

    def look(ways: Sequence[PlanConfig]) -> list[Any]:
        seen.extend(ways)
        return [
            mock.Mock(config=way, max_tiles=0, is_for_any_share=False, dry_run=looked(checkpoints=way.checkpoint))
            for way in ways
        ]

    def row(step: Any, attend: Any, state: str, share: float, looked: bool = True) -> Variant:
        memory = 70.0 if step.config.checkpoint else 200.0 - (105 if looked else 120) * share
        config, seconds = replace(step.config, offload=share), 10.0 + step.config.checkpoint
        return predicted(config, memory=memory, seconds=seconds, host=share, fits=memory <= 90, is_measured=looked)

    planner = mock.Mock(shares=(1.0,), tokens=64, options={}, offload=0.0, blocks=[1], plan_steps=look, plan_row=row)
    planner.host = math.inf
    planner.constant.return_value = 0.0
    planner.attention_choices.return_value = [SIZES]
    planner.states.return_value = [SHARDED_STATE]
    planner.plan_rows = lambda step, attend: [
        row(step, attend, SHARDED_STATE, 0.0),
        row(step, attend, SHARDED_STATE, 1.0, looked=False),
    ]
    plan = StepPlan(90, ModelBytes(1, 1, 0, 1))
    plan_module._plan_first(planner, plan, [2], None)
    assert [(way.checkpoint, way.offload) for way in seen][:3] == [(False, 0.0), (False, 1.0), (True, 0.0)]
    best = plan.of(2)
    assert best is not None
    assert (best.checkpoint, best.is_measured, best.memory) == (True, True, 70)


FULL = AttentionShape(
    **{"n": 1, "batch": 1, "q_len": 1 << 20, "kv_len": 1 << 20, "heads": 64, "kv_heads": 8, "head_dim": 64},
    **{"v_head_dim": 64, "element_size": 2, "causal": True, "kernel": "flash"},
)


def attends(n: int, *shapes: AttentionShape, **options: Any) -> dict[tuple[str, str], list[tuple[str, str, bool]]]:
    """The ways of a planner's attention, each as strategy, layout and whether it is moved for every shape."""
    planner = StepPlanner(nn.Linear(2, 2), [], {}, Machine.of("meta"), options, (), 2.0, 64, [])
    vars(planner)["_shapes"] = [(shape, 12.0) for shape in shapes]
    found = planner.attention_choices(n)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    return {one.key: [(c.kind, c.layout, c.relayout) for c, _ in one.candidates] for one in found}


def test_local_and_global_attention_may_go_different_ways() -> None:
    """The automatic choice may mix strategies; if all attention is equal, it equals a single strategy."""
    local = replace(FULL, window=128)
    assert ("auto", "auto") not in attends(128, FULL)
    found = attends(128, FULL, local)
    assert next(iter(found)) == ("auto", "auto")
    whole, near = found["auto", "auto"]
    assert (whole[1:], near) == (("zigzag", True), ("ring", "contiguous", False))
    assert found["ring", "auto"] == [("ring", "zigzag", True), ("ring", "contiguous", False)]
    assert found["ring", "zigzag"] == [("ring", "zigzag", False)] * 2, "the whole program is in that order"
    assert attends(128, FULL, local, attention="ring", layout="zigzag").keys() == {("ring", "zigzag")}
    assert {kind for kind, _ in attends(128, FULL, local, attention="ring")} == {"ring"}
    assert {layout for _, layout in attends(128, FULL, local, layout="contiguous")} == {"contiguous"}


def test_required_change() -> None:
    """The report names the next number of ranks that fits, and the line of the largest value of the smallest row."""
    small = variant(1.0, 300e6, True, False)
    more = [replace(small, ranks=n, fits=fits) for n, fits in ((1, True), (8, False), (16, True), (64, True))]
    plan = StepPlan(100e6, ModelBytes(1, 1, 0, 1), [replace(small, memory=1e9), small, *more], unit=parse_unit("100MB"))
    planner = mock.Mock(**{"largest_value_line.return_value": "a line", "constant.return_value": 1.0})
    words = plan_module._required_change(planner, plan, 2)
    smallest, largest, elsewhere, _ = words.split("; ")
    assert re.match(r"2 ranks: .* 300\.0 MB \(ring, .*sharded, .*auto, 0% .*\), 200\.0 MB .*\bloss$", smallest)
    assert largest.endswith(": a line")
    assert elsewhere.endswith(" 16")
    planner.constant.return_value = 101e6
    assert re.match(r"2 ranks: .*state .* 101\.0 MB; .* 16; ", plan_module._required_change(planner, plan, 2))


def ways_looked_at(fits: bool, model: nn.Module, own: bool = False, **options: Any) -> tuple[list[Any], StepPlan]:
    """Checkpoints and tiles of each look that a plan takes where all that it finds fits, or nothing does."""
    seen: dict[tuple[bool, int | str], None] = {}

    def look(self: StepPlanner, ways: list[PlanConfig]) -> list[Any]:
        seen.update(((way.checkpoint, way.tiles), None) for way in ways)
        return [mock.Mock(config=way, max_tiles=2, dry_run=looked(checkpoints=own or way.checkpoint)) for way in ways]

    def found(self: StepPlanner, looked: Any, attend: AttentionChoice) -> list[Variant]:
        return [predicted(looked.config, memory=1e6 if fits else 2e9, fits=fits, most_tiles=2)]

    stand_ins = {
        "plan_steps": look,
        "plan_rows": found,
        "attention_choices": lambda self, n: [SIZES],
        "largest_value_line": lambda self, way: "",
    }
    with mock.patch.multiple(StepPlanner, **stand_ins):
        plan = sp_compile.plan(model, tokens(64), memory=1e9, ranks=[2], **options)
    assert (len(plan.rows), list(plan.changes)) == (len(seen), [] if fits else [2])
    return list(seen), plan


def test_checkpoints_and_tiles_are_tried_where_something_does_not_fit() -> None:
    assert ways_looked_at(True, decoder())[0] == [(False, "auto")]
    assert ways_looked_at(False, decoder())[0] == [(False, "auto"), (True, "auto"), (True, TILE_COUNTS)]
    assert ways_looked_at(False, decoder(), tiles=4)[0] == [(False, 4), (True, 4)]


def test_skipped_configurations_are_reported() -> None:
    ways, plan = ways_looked_at(False, nn.Linear(8, 8))
    assert ways == [(False, "auto"), (False, TILE_COUNTS)]
    assert plan.notes == [plan_module.NO_BLOCKS]
    ways, plan = ways_looked_at(False, decoder(), own=True)
    assert ways == [(False, "auto"), (False, TILE_COUNTS)]
    assert plan.notes == [plan_module.OWN_CHECKPOINTS]
    assert plan_module.OWN_CHECKPOINTS in str(plan)
    with pytest.raises(SpError, match=f"SP723: .*{plan_module.OWN_CHECKPOINTS}"):
        _ = plan.best
    assert not ways_looked_at(True, nn.Linear(8, 8))[1].notes


class Parts(nn.Module):
    """(1, S, 16) -> a scalar. called: call the entries of its list, instead of the parts in them."""

    def __init__(self, called: bool, own: bool = False) -> None:
        super().__init__()
        self.mix, self.called, self.own = nn.Linear(16, 48), called, own
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        for part in self.parts:
            if self.own:
                x = checkpoint(part, x, use_reentrant=False)
            else:
                x = part(x) if self.called else part[2](part[1](part[0](x)))
        return x.square().mean()


@pytest.mark.slow
def test_a_models_own_checkpoints_and_lists_that_are_not_called() -> None:
    for called, own, note in ((True, False, ""), (False, False, NOT_CALLED), (True, True, "own checkpoints")):
        with torch.device("meta"):
            model, x = Parts(called, own), torch.zeros(1, 512, 16)
        plan = sp_compile.plan(model, x, memory="150KB", ranks=2)
        assert {row.checkpoint for row in plan.rows} == ({False, True} if not note else {False})
        kept = [
            min(row.kept for row in plan.rows if row.checkpoint == again) for again in (False, True)[: 2 - bool(note)]
        ]
        assert kept == sorted(kept, reverse=True)
        assert note in " ".join(plan.notes)
        assert bool(plan.notes) == bool(note)


class Broken(nn.Module):
    """(1, S, 16) -> a scalar, after a line that torch.compile runs in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch._dynamo.graph_break()
        return h.square().mean()


def test_graph_breaks_are_reported() -> None:
    """The note is printed once for all dry runs."""
    with torch.device("meta"):
        model, x = Broken(), torch.zeros(1, 512, 16)
    plan = sp_compile.plan(model, x, memory="1GB", ranks=[1, 2])
    (note,) = plan.notes
    assert "test_plan_step.py" in note
    assert "torch._dynamo.graph_break()" in note
    assert note.endswith(SEVERAL_GRAPHS)
    assert note in str(plan)


def test_blocks_are_the_outermost_entries_that_are_called() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers, tail = nn.ModuleList([inner, nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])
    model = nn.ModuleDict({"layers": layers, "tail": tail, "both": nn.ModuleList([nn.ModuleList([inner]), tail])})
    assert checkpoint_blocks(model) == [inner, layers[1]]
    assert checkpoint_blocks(nn.Sequential(nn.SiLU(), nn.Linear(2, 2))) == []


@pytest.mark.slow
def test_strategies_that_are_legal_for_the_number_of_ranks() -> None:
    """Ulysses needs a head per rank; only the requested strategy is planned, or the reason against it is reported."""
    with torch.device("meta"):
        model, ids = decoder(2), torch.zeros(1, 64, dtype=torch.int64)
    plan = sp_compile.plan(model, ids, memory="1GB", ranks=[2, 3], attention="ulysses", tiles="never", state="sharded")
    assert {(row.ranks, row.attention, row.state) for row in plan.rows} == {(2, "ulysses", SHARDED_STATE)}
    assert list(plan.changes) == [3]
    assert re.match(r"3 ranks: attention='ulysses' .*\(ulysses: ", plan.changes[3])


def test_options_contain_the_plans_arguments() -> None:
    with torch.device("meta"):
        model, ids = decoder(2), torch.zeros(1, 64, dtype=torch.int64)
    given = {"seq_dims": {"ids": 1}, "activation_memory_budget": 0.5, "cost": {"flops": 1e12}}
    plan = sp_compile.plan(model, {"ids": ids}, memory="1GB", ranks=2, attention="ring", state="sharded", **given)
    options = plan.best.options
    assert {name: options[name] for name in ("seq_dims", "activation_memory_budget")} == {
        name: given[name] for name in ("seq_dims", "activation_memory_budget")
    }
    assert options["cost"] == {"flops": 1e12, "memory": 1e9}
    assert plan.best.tokens == 64
    torch.compile(decoder(2), backend="sp", options=options)


def test_kinds_of_layers() -> None:
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 4)])
    depth = LayerList.of(nn.Sequential(layers))
    assert depth is not None
    assert depth.kinds == (0, 0, 1, 0, 1)
    assert depth.reduced_positions == (0, 1, 2)
    with depth.only((0, 2)):
        assert [layer.out_features for layer in layers] == [8, 4]
    assert len(layers) == 5


def test_per_layer_config_entries_follow_the_layers() -> None:
    class Config:
        def __init__(self) -> None:
            self.layer_types, self.others = ["near", "near", "far"], [1, 2]

    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]))
    model.config = model[0].config = Config()
    depth = LayerList.of(model)
    assert depth is not None
    with depth.only((0, 2)):
        assert vars(model.config) == {"layer_types": ["near", "far"], "others": [1, 2]}
    assert model.config.layer_types == ["near", "near", "far"]


def test_layers_are_computed_again_for_a_while() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with checkpoint_layers([layer]):
        assert type(layer) is not nn.Linear
        assert torch.equal(layer(x), layer(x))
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(("text", "nbytes"), [("80GB", 80e9), ("75 GiB", 75 * 2**30), (1e9, 1e9), ("512B", 512)])
def test_sizes(text: str | float, nbytes: float) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("memory", ["much", "80 apples", 0, "0GB", "1.2.3GB", float("inf"), True, 80, "80"])
def test_invalid_sizes(memory: str | float) -> None:
    with pytest.raises(SpError, match="SP722: memory"):
        sp_compile.plan(nn.Linear(2, 2), (), memory=memory)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("80GB", "80.0 GB"),
        ("75 GiB", "75.0 GiB"),
        ("0.5gb", "0.5 GB"),
        (1.5e9, "1500.0 MB"),
        (8e10, "80.0 GB"),
        ("512b", "512.0 B"),
    ],
)
def test_sizes_are_shown_as_requested(asked: str | float, shown: str) -> None:
    unit = parse_unit(asked)
    assert unit(parse_bytes(asked)) == shown
    assert f"{shown} a rank; parameters {unit(32)}" in str(
        StepPlan(parse_bytes(asked), ModelBytes(32, 32, 0, 32), unit=unit)
    )


@pytest.mark.parametrize("ranks", [[0], [], ["8"], [True]])
def test_invalid_ranks(ranks: Any) -> None:
    with pytest.raises(SpError, match="SP711: ranks"):
        sp_compile.plan(nn.Linear(2, 2), (), ranks=ranks)


def test_invalid_models_and_options() -> None:
    with pytest.raises(SpError, match="SP721"):
        sp_compile.plan(lambda x: x, (torch.ones(2),))  # type: ignore[arg-type]
    with pytest.raises(SpError, match="SP109: mesh_dim"):
        sp_compile.plan(nn.Linear(2, 2), torch.ones(2, 2), mesh_dim="sp")
    with pytest.raises(SpError, match=r"SP103: attention.*'rung'"):
        sp_compile.plan(nn.Linear(2, 2), torch.ones(2, 2), attention="rung")
