"""`sp_compile.plan`: what a few layers say of all, what fits, and what is said where nothing does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.models import Decoder, tokens
from torch import Tensor, nn

import sp_compile
from sp_compile.cost.layers import Depth, checkpointed
from sp_compile.cost.machine import Machine
from sp_compile.cost.plan import plan as plan_module
from sp_compile.cost.plan.plan import TILES, StepPlan, Variant, _AllLayers, _change, _look, _PlanLook, _rows, _telling
from sp_compile.cost.plan.sizes import bytes_of_text
from sp_compile.cost.step import ModelBytes, written
from sp_compile.errors import SpError
from sp_compile.passes.report import Report


def plain(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def decoder(layers: int = 5) -> nn.Module:
    return Decoder(plain, layers=layers)


@cache
def planned(memory: str = "1GB") -> sp_compile.StepPlan:
    with torch.device("meta"):
        model, ids = decoder(), torch.zeros(2, 64, dtype=torch.int64)
    return sp_compile.plan(model, ids, memory=memory, ranks=[1, 2, 8])


@pytest.mark.slow
def test_a_plan() -> None:
    plan = planned()
    assert {row.ranks for row in plan.rows} == {1, 2, 8}
    assert all(row.fits and row.seconds > 0 and row.tokens == 128 for row in plan.rows)
    assert plan.best.seconds == min(row.seconds for row in plan.rows)
    assert {row.attention for row in plan.rows if row.ranks == 2} == {"ulysses", "ring", "gather"}
    torch.compile(decoder(), backend="sp", options=plan.best.options)
    again = {row.checkpoint: row.kept for row in plan.rows if row.ranks == 2 and row.attention == "ring"}
    assert again[True] < again[False] / 2
    assert "best" in str(plan)


@pytest.mark.slow
def test_nothing_fits() -> None:
    plan = planned("1KB")
    assert not any(row.fits for row in plan.rows)
    assert set(plan.changes) == {1, 2, 8}
    with pytest.raises(SpError, match=r"8 ranks: the least is .* too much"):
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


def test_what_does_not_fit_goes_to_the_host_or_is_said() -> None:
    """No more goes than has to, the fastest of what fits is best, and for one rank it says what would have to change."""
    with torch.device("meta"):
        model, x = Wide().bfloat16(), torch.zeros(1, 4096, 16, dtype=torch.bfloat16)
    roads: dict[str, Any] = {"attention": "ulysses", "tiles": "never", "cost": {"host_bandwidth": 1e15}}
    plan = sp_compile.plan(model, x, memory=1.2e6, ranks=[1, 2], **roads)
    fitting = [row for row in plan.rows if row.fits]
    assert len(fitting) == 2
    for row in fitting:
        (device,) = [r for r in plan.rows if (r.ranks, r.state, r.offload) == (2, row.state, 0.0)]
        a_share_less = row.memory + (device.memory - row.memory) * 0.05 / row.offload
        assert row.memory <= plan.memory < a_share_less
        assert row.host == pytest.approx(row.offload * row.kept, rel=0.2)
    assert plan.best == plan.of(2) == min(fitting, key=lambda row: row.seconds)
    assert plan.best.seconds < max(row.seconds for row in fitting)
    assert plan.best.options["offload"] == plan.best.offload < 1
    assert plan.of(1) is None
    assert list(plan.changes) == [1]
    for word in ("1 ranks: the least is", "100% of what is kept on the host", "too much", "it fits on 2", "checkpoint"):
        assert word in plan.changes[1]
    assert plan.changes[1] in str(plan)
    alone = [row for row in plan.rows if row.ranks == 1]
    with pytest.raises(SpError, match="nothing fits: 1 ranks: the least is"):
        _ = StepPlan(plan.memory, plan.weights, alone, plan.changes).best


def test_many_ranks_hold_a_small_share_of_a_long_sequence() -> None:
    """The samples gather all keys; what a ring holds of them falls with the ranks."""
    with torch.device("meta"):
        model, ids = Decoder(plain).bfloat16(), torch.zeros(1, 1 << 16, dtype=torch.int64)
    plan = sp_compile.plan(model, ids, ranks=[8, 512], attention="ring", tiles="never", offload="never")
    state = plan.weights.parameters * 2 + ids.nbytes  # each rank is handed the whole input
    few, many = (min(row.memory for row in plan.rows if row.ranks == n) - state for n in (8, 512))
    assert 0 < many < few / 32, (few, many)


class Known:
    """What all layers take, by hand: 400 bytes of values in all, of which 300 may go to the host."""

    weights, per_weight, inputs = ModelBytes(parameters=1000, learned=800, buffers=30, unit=100), 2.0, 50
    parts: ClassVar = {"peak backward": 400.0, "hosted peak backward": 100.0, "host": 300.0, "kept": 320.0}

    def __call__(self, name: str, n: int) -> float:
        return self.parts.get(name, 0.0) / n

    def beside_attention(self, phase: str, n: int) -> float:
        return 0.0

    def names(self, beginning: str) -> list[str]:
        return []


def rows(again: bool, memory: float = 1e9) -> list[Variant]:
    """Of 4 ranks, with two attentions of 3 s, a third of them forward."""
    ways = [(("ring", "contiguous"), [(SimpleNamespace(seconds=3.0, forward=1.0, memory=0.0), 2.0)])]
    machine = Machine.of("cpu", {"memory": memory})
    with mock.patch.object(plan_module, "_ways", return_value=ways):
        return _rows(Known(), 4, machine, _PlanLook(again, "never", 64, "auto", (0.5, 1.0)))  # type: ignore[arg-type]


def test_memory_and_seconds_of_a_row() -> None:
    """State in shards, beside two layers' weights and one's gradients; a checkpoint attends forwards once more."""
    sharded, whole = rows(False)
    state = 1000 + 800 + 2 * 800
    assert (sharded.state, whole.state) == ("sharded", "on every rank")
    assert sharded.memory == state / 4 + 2 * 100 + 100 + 30 + 50 + 400 / 4
    assert whole.memory == state + 30 + 50 + 400 / 4
    assert (sharded.kept, sharded.host, sharded.phase) == (80, 0, "backward")
    more = [again.seconds - one.seconds for again, one in zip(rows(True), rows(False))]
    assert more == pytest.approx([2.0, 2.0])
    least, *others = rows(False, sharded.memory - 1)
    assert [row.offload for row in others if row.state == "sharded"] == [0.5]
    assert (others[0].fits, others[0].host, others[0].memory) == (True, 150 / 4, least.memory - 150 / 4)


def test_rows_that_say_nothing_are_left_out() -> None:
    """One that holds no less than a faster one which is asked for alike; what is asked for otherwise stays."""
    fast, whole = rows(False)
    slow = replace(fast, seconds=fast.seconds * 2)
    small = replace(slow, memory=fast.memory / 2)
    assert _telling([fast, slow, small, replace(small, seconds=99.0), whole]) == [fast, small, whole]


def test_what_would_have_to_change() -> None:
    """The next number of ranks on which something fits, and the line of the largest value, of the least way."""
    large, small = rows(True, 100.0)[0], rows(False, 100.0)[0]
    more = [replace(small, ranks=n, fits=fits) for n, fits in ((2, True), (8, False), (16, True), (64, True))]
    largest = {(False, "never"): "a line", (True, "never"): "another"}
    words = _change([replace(large, memory=1e6), small], StepPlan(100.0, Known.weights, more), largest)
    assert words.startswith(f"4 ranks: the least is {written(small.memory)} (ring, as written, state sharded")
    assert f"{written(small.memory - 100)} too much, in its backward; the largest there: a line" in words
    assert "it fits on 16;" in words
    assert "checkpoint its layers" not in words, "that was tried"


def ways_looked_at(fits: bool, **options: Any) -> list[tuple[bool, int | str]]:
    """Checkpoints and tiles of each look that a plan takes where all that it finds fits, or nothing does."""
    seen: dict[tuple[bool, int | str], None] = {}

    def look(*given: Any) -> list[Any]:
        seen[given[4], given[6]["tiles"]] = None
        return [SimpleNamespace(tiled=["a head"])]

    def found(whole: Any, n: int, machine: Machine, of: _PlanLook) -> list[Variant]:
        memory = 1e6 if fits else 2e9
        return [Variant(n, "ring", "zigzag", of.again, of.tiles, 0, 0, "sharded", memory, "loss", 1, 1.0, 64, fits)]

    step = mock.MagicMock()
    step.points.return_value, step.summary.return_value = [SimpleNamespace(nbytes=1)], [("value", "a line")]
    stand_ins = {
        "_look": look,
        "_rows": found,
        "_AllLayers": lambda *given: SimpleNamespace(falls={"kept": 0.5}),
        "_step": lambda report: step,
    }
    with mock.patch.multiple(plan_module, **stand_ins):
        plan = sp_compile.plan(decoder(), tokens(64), memory=1e9, ranks=[2], **options)
    assert (len(plan.rows), list(plan.changes)) == (len(seen), [] if fits else [2])
    return list(seen)


def test_checkpoints_are_tried_and_tiles_where_something_does_not_fit() -> None:
    assert ways_looked_at(fits=True) == [(False, "never"), (True, "never")]
    assert ways_looked_at(fits=False) == [(False, "never"), (True, "never"), (True, TILES)]
    assert ways_looked_at(fits=False, tiles=4) == [(False, 4), (True, 4)]


RING: dict[str, Any] = {"attention": "ring", "cost": {}}


def looks(model: nn.Module, depth: Depth, checkpoint: bool = False) -> list[list[Report]]:
    """At each of the variants of its layers."""
    return [_look(model, (tokens(64),), depth, one, checkpoint, 2.0, RING) for one in depth.variants]


def layered() -> tuple[nn.Module, Depth]:
    model = decoder()
    depth = Depth.of(model)
    assert depth is not None
    return model, depth


@pytest.mark.slow
def test_layers_add_up() -> None:
    """Two layers and three say what five keep and compute."""
    model, depth = layered()
    weights = ModelBytes.of(model)
    few = _AllLayers(looks(model, depth), depth, weights, 2.0)
    whole = _AllLayers([_look(model, (tokens(64),), None, (), False, 2.0, RING)], None, weights, 2.0)
    assert few("flops", 2) == whole("flops", 2) > 0
    assert few("kept", 4) == whole("kept", 4) > 0
    assert few("peak loss", 4) == pytest.approx(whole("peak loss", 4), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kept", "flops", "peak backward"])
def test_checkpointed_layers_fall_as_others_do(part: str) -> None:
    """A plan looks at a second number of ranks for layers as they are written only."""
    model, depth = layered()
    few = _AllLayers(looks(model, depth), depth, ModelBytes.of(model), 2.0)
    looked = looks(model, depth, checkpoint=True)
    right = _AllLayers(looked, depth, few.weights, 2.0)
    again = _AllLayers([looked[0], looked[1][:1]], depth, few.weights, 2.0, few.falls)
    assert again(part, 8) == pytest.approx(right(part, 8), rel=0.05)


def test_kinds_of_layers() -> None:
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 4)])
    depth = Depth.of(nn.Sequential(layers))
    assert depth is not None
    assert depth.kinds == (0, 0, 1, 0, 1)
    assert depth.variants == [(0, 1), (0, 1, 3), (0, 1, 2)]
    assert depth.combine([10 + 2, 10 + 3, 10 + 2 + 5]) == 10 + 3 * 1 + 2 * 5
    with depth.only((0, 2)):
        assert [layer.out_features for layer in layers] == [8, 4]
    assert len(layers) == 5


def test_what_a_config_says_of_each_layer_goes_with_them() -> None:
    class Config:
        def __init__(self) -> None:
            self.layer_types, self.others = ["near", "near", "far"], [1, 2]

    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]))
    model.config = model[0].config = Config()
    depth = Depth.of(model)
    assert depth is not None
    with depth.only((0, 2)):
        assert vars(model.config) == {"layer_types": ["near", "far"], "others": [1, 2]}
    assert model.config.layer_types == ["near", "near", "far"]


def test_layers_are_computed_again_for_a_while() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with checkpointed([layer]):
        assert type(layer) is not nn.Linear
        assert torch.equal(layer(x), layer(x))
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(("text", "nbytes"), [("80GB", 80e9), ("75 GiB", 75 * 2**30), (1e9, 1e9), ("512", 512)])
def test_sizes(text: str | float, nbytes: float) -> None:
    assert bytes_of_text(text) == nbytes


@pytest.mark.parametrize("memory", ["much", "80 apples", 0, "0GB"])
def test_what_is_no_size(memory: str | float) -> None:
    with pytest.raises(SpError, match="memory="):
        sp_compile.plan(nn.Linear(2, 2), (), memory=memory)


def test_what_are_no_ranks() -> None:
    with pytest.raises(SpError, match="ranks="):
        sp_compile.plan(nn.Linear(2, 2), (), ranks=[0])
