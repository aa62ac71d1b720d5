"""The best row of a plan on two real ranks: predicted bytes, and a single device's loss."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.models import Decoder, seeded
from support.ranks import Ranks
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.cost.few_layers import checkpoint_blocks, checkpoint_layers
from sp_compile.passes.cost.weight_memory import ADAMW_STATE

LENGTH, RANKS = 512, 2


class Trained(nn.Module):
    """(1, S) -> the mean loss of a decoder of six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(layers=6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())


def ids() -> Tensor:
    return torch.arange(LENGTH).remainder(7)[None]


def _trained(options: dict[str, Any], again: bool) -> tuple[int, float]:
    """Bytes of all that a warm step of this rank makes, and its loss."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from peak_memory import peak_activation_bytes

    model, losses = seeded(Trained), list[float]()
    with checkpoint_layers(checkpoint_blocks(model)) if again else nullcontext():
        run = torch.compile(model, backend="sp", options={**options, "mesh": worker.mesh()}, dynamic=False)

        def step() -> None:
            loss = run(ids())
            loss.backward()
            losses.append(loss.item())

        for _ in range(2):
            model.zero_grad()
            step()
        return peak_activation_bytes(step, model.parameters(), gradients=True), losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "options", "asked"),
    [
        ("10MB", {}, {"checkpoint": False, "offload": 0.0}),
        ("2.6MB", {"offload": "never"}, {"checkpoint": True, "offload": 0.0}),
        ("3.5MB", {"tiles": "never", "cost": {"host_bandwidth": 1e15}}, {"checkpoint": False}),
    ],
    ids=["roomy", "checkpoints", "host"],
)
def test_the_best_row_takes_the_planned_bytes(
    ranks: Ranks, memory: str, options: dict[str, Any], asked: dict[str, Any]
) -> None:
    model = seeded(Trained)
    options = {**options, "compiler": "aot_eager", "state": "replicated"}
    plan = sp_compile.plan(model, ids(), memory=memory, ranks=RANKS, **options)
    best = plan.best
    assert {name: getattr(best, name) for name in asked} == asked, str(plan)
    assert (best.host > 0) == ("tiles" in options)
    beside = plan.weights.parameters + ADAMW_STATE * plan.weights.trainable + ids().nbytes
    found = ranks.run(RANKS, _trained, best.options, best.checkpoint)
    made = best.memory - beside + best.host  # what waits on the host is a CPU's memory, too
    assert max(peak for peak, _ in found) == pytest.approx(made, rel=0.1)
    for _, loss in found:
        assert loss == pytest.approx(model(ids()).item(), abs=1e-12)
