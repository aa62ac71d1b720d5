"""Tiles beside what else changes a program on ranks: ways of attention, AMP, checkpoints, FSDP2 whole and by blocks."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import ranks as worker
from support.parity import Checkpointed, Decoder, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SEQ, TILES = 21, 3
WAYS: dict[str, dict[str, Any]] = {
    "ulysses": {"attention": "ulysses"},
    "ring": {"attention": "ring", "layout": "contiguous"},
    "zigzag": {"attention": "ring", "layout": "zigzag"},
    "gathered": {"attention": "gather", "layout": "zigzag"},
    "balanced": {"attention": "ring", "layout": "balanced"},
    "AMP": {"attention": "ring"},
    "AMP, ulysses": {"attention": "ulysses"},
    "AMP inside": {"attention": "ring"},
    "AMP inside, ulysses, host": {"attention": "ulysses", "offload": 0.5},
    "AMP inside, gathered, checkpoints": {"attention": "gather", "layout": "zigzag"},
    "checkpoints": {"attention": "ring"},
    "host": {"offload": 1.0},
    "FSDP2": {"param_grads": "partial"},
    "FSDP2 by blocks": {"param_grads": "partial"},
    "FSDP2 by blocks, checkpoints, host": {"param_grads": "partial", "offload": 0.5},
}
FAST = ("ulysses", "ring", "zigzag", "balanced", "AMP", "AMP inside", "checkpoints")


class Mixed(nn.Module):
    """Its model under an autocast of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args)


def step(way: str) -> bool:
    """Loss and gradients of a rank are those of one device."""
    if way.startswith("AMP"):
        return mixed(way)
    torch.manual_seed(0)
    model = (Checkpointed if "checkpoints" in way else Decoder)(layers=1 if way in FAST else 2).double()
    alone = copy.deepcopy(model)
    if way.startswith("FSDP2"):
        for part in (*(model.blocks if "blocks" in way else ()), model):
            fully_shard(part, mesh=worker.mesh())
    options = {"mesh": worker.mesh(), "tiles": TILES, "compiler": "aot_eager", "cost": {}, **WAYS[way]}
    run = torch.compile(model, backend="sp", options=options)
    found, right = run(*text(SEQ)), alone(*text(SEQ))
    found.backward(), right.backward()
    torch.testing.assert_close(found.detach(), right.detach(), rtol=1e-9, atol=0)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    torch.testing.assert_close(gradients, [p.grad for p in alone.parameters()], rtol=1e-9, atol=1e-12)
    return True


def mixed(way: str) -> bool:
    """Under autocast, around the program or inside of it, no further from float64 than one device under it."""
    torch.manual_seed(0)
    model: nn.Module = (Checkpointed if "checkpoints" in way else Decoder)(layers=1)
    model = Mixed(model) if "inside" in way else model
    exact, alone = copy.deepcopy(model).double(), copy.deepcopy(model)
    given = {"mesh": worker.mesh(), "tiles": TILES, "compiler": "aot_eager", "cost": {}, **WAYS[way]}
    exact(*text(SEQ)).backward()
    errors = []
    for one, run in ((model, torch.compile(model, backend="sp", options=given)), (alone, alone)):
        with nullcontext() if "inside" in way else torch.autocast("cpu", torch.bfloat16):
            loss = run(*text(SEQ))
        loss.backward()
        pairs = zip(one.parameters(), exact.parameters(), strict=True)
        errors.append([float((a.grad.double() - b.grad).norm() / b.grad.norm()) for a, b in pairs])
    assert all(found < 1.5 * right + 1e-3 for found, right in zip(*errors)), errors
    assert max(errors[0]) > 1e-3, "float32"
    return True


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in FAST else pytest.mark.slow) for way in WAYS])
def test_one_device(ranks: Ranks, way: str) -> None:
    assert all(ranks.run(2, step, way))
