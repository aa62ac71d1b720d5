"""`explain` of a deep model on the meta device traces a few of its layers, and reports the same as for all."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import WIDTH, Decoder
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.passes.cost.walk.liveness import walk
from sp_compile.passes.report import Report

LAYERS, LENGTH, RANKS = 11, 4096, 4


def plain(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Trained(nn.Module):
    """A decoder with its loss. again: its layers are computed again. wider: every fourth layer is of another kind.

    normed: a norm follows the layers.
    """

    def __init__(self, again: bool, wider: bool, normed: bool) -> None:
        super().__init__()
        self.model, self.again, self.normed = Decoder(plain, layers=LAYERS), again, normed
        if wider:
            for layer in self.model.layers[3::4]:
                layer.up, layer.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids)
        for layer in self.model.layers:
            attend = partial(self.model.attend, self.model)
            x = checkpoint(layer, x, attend, use_reentrant=False) if self.again else layer(x, attend)
        x = F.rms_norm(x, x.shape[-1:]) if self.normed else x
        return F.cross_entropy(self.model.head(x).flatten(0, 1).float(), ids.flatten())


def explained(again: bool, wider: bool, normed: bool = False, **options: Any) -> Report:
    with torch.device("meta"):
        model, ids = Trained(again, wider, normed).bfloat16(), torch.zeros(1, LENGTH, dtype=torch.int64)
    return sp_compile.explain(model, ids, sp=RANKS, memory=True, **options)


def sent(report: Report) -> dict[str, float]:
    """Bytes by collective; gradients of weights go in buckets, whose number depends on how many there are."""
    found: Counter[str] = Counter()
    for one in report.exchanges:
        found[one.op] += one.forward + one.backward
    return dict(found)


@pytest.mark.slow
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("wider", "offload", "memory", "tiles"),
    [
        (False, "never", 1e15, "never"),
        (True, 0.4, 1e15, "never"),
        (True, "auto", 1.9e6, "never"),
        (True, "never", 1e15, 4),
    ],
)
def test_a_few_layers_give_the_report_of_all(
    monkeypatch: pytest.MonkeyPatch, wider: bool, offload: Any, memory: float, tiles: Any
) -> None:
    """Copies to the host take no longer than the overlapping work.

    Not fused: Inductor sums gradients of such small layers over two or three of them at once.
    """
    cost = {"memory": memory, "host_bandwidth": 1e15}
    options = {"offload": offload, "cost": cost, "state": "sharded", "param_grads": "partial", "tiles": tiles}
    options["compiler"] = "aot_eager"
    few = explained(True, wider, normed=tiles != "never", **options)
    monkeypatch.setattr(import_module("sp_compile.planner.explain"), "MIN_SKIPPED_LAYERS", LAYERS)
    whole = explained(True, wider, normed=tiles != "never", **options)
    assert [note.label for note in few.notes if note not in whole.notes].count("extrapolated") == 1
    assert "extrapolated" not in {note.label for note in whole.notes}
    assert [d.nodes for d in few.attention] == [d.nodes for d in whole.attention] == [LAYERS]
    assert few.memory == whole.memory
    lines = [Counter((note.label, note.where) for note in report.notes) for report in (few, whole)]
    assert lines[0] - Counter({one: 1 for one in lines[0] if one[0] == "extrapolated"}) == lines[1]
    assert sent(few) == pytest.approx(sent(whole), rel=0.02)
    one, all_of_them = few.step, whole.step
    assert one is not None
    assert all_of_them is not None
    assert one.weights == all_of_them.weights
    assert one.saved == pytest.approx(all_of_them.saved, rel=0.01)
    for phase, point in all_of_them.peaks().items():
        assert one.peaks()[phase].nbytes == pytest.approx(point.nbytes, rel=0.01), phase
    assert one.fsdp(RANKS) == pytest.approx(all_of_them.fsdp(RANKS), rel=0.01)
    assert one.fsdp(RANKS) <= memory
    sent_by = [0 if step.offloaded is None else step.offloaded.nbytes for step in (one, all_of_them)]
    assert sent_by[0] == pytest.approx(sent_by[1], rel=0.01)
    assert (sent_by[0] > 0) == (offload != "never")
    point = one.peaks()["backward"]
    assert sum(held.nbytes for held in one.alive(point)) == point.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [1, 25 << 20])
def test_gradients_of_a_few_layers_count_for_those_of_all(monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    """Gradients of a layer count once per layer, others once. A large bucket contains those of several layers."""

    def bytes_of(report: Report) -> Counter[str]:
        found: Counter[str] = Counter()
        for one in report.exchanges:
            if one.op == "reduce_grad":
                found[one.shape if bucket == 1 else ""] += one.backward
        return found

    gradients = import_module("sp_compile.passes.localize.reduce_gradients")
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket)
    monkeypatch.setattr(gradients, "SMALL_BUCKET", bucket)
    few = bytes_of(explained(False, False))
    monkeypatch.setattr(import_module("sp_compile.planner.explain"), "MIN_SKIPPED_LAYERS", LAYERS)
    assert few == pytest.approx(bytes_of(explained(False, False)), rel=1e-3)
    assert len(few) == 1 or bucket == 1


def test_losses_have_gradients_on_the_meta_device() -> None:
    """A model of one layer; without these gradients its backward would be placed in the forward."""
    with torch.device("meta"):
        model, ids = Decoder(plain), torch.zeros(1, 64, dtype=torch.int64)
    report = sp_compile.explain(lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()), ids, sp=2, memory=True)
    assert report.step is not None
    (graph,) = report.step.graphs
    assert graph.backward is not None
    assert not [moment.name for moment in graph.forward.moments if "backward" in moment.name]
    assert any("backward" in moment.name for moment in graph.backward.moments)


def test_distant_sums_are_two_kernels() -> None:
    """Both read one value; the first sum does not wait for inputs of the second."""

    def run(x: Tensor, y: Tensor, apart: int) -> tuple[Tensor, ...]:
        first = (x * y).sum(0)
        for _ in range(apart):
            x = x @ x
        return first, (x * y).sum(0), x

    x = torch.ones(32, 32)
    walks = [walk(make_fx(partial(run, apart=apart), tracing_mode="fake")(x, x).graph, True) for apart in (8, 80)]
    assert [sum(moment.name.startswith("sum") for moment in one.moments) for one in walks] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", ["Llama-8B", "Gemma-3-4B", "gpt-oss-20b"])
def test_a_million_tokens_fit_as_people_train(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int) -> None:
    """Every attention has a candidate that fits 80 GB, as the step does, and no look takes 30 CPU seconds."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from plans import made

    model, ids = made(name).train(), torch.zeros(1, 1 << 20, dtype=torch.int64, device="meta")
    model.gradient_checkpointing_enable()
    options: dict[str, Any] = {"offload": "auto", "state": "sharded", "param_grads": "partial"}
    begin = time.process_time()
    report = sp_compile.explain(model, ids, labels=ids, sp=ranks, memory=True, cost={"memory": 80e9}, **options)
    assert time.process_time() - begin < 30
    assert report.step is not None
    assert 10e9 < report.step.fsdp(ranks) <= 80e9
    assert all(d.chosen.refusal is None and d.chosen.seconds > 0 < d.chosen.memory for d in report.attention)
    assert sum(d.nodes for d in report.attention) == model.config.num_hidden_layers
    assert not report.fallbacks
