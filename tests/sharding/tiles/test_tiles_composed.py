"""Tiles beside what else changes a program on ranks: ways and orders of attention, FSDP2 whole and by blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import ranks as worker
from support.parity import Decoder, text
from support.ranks import Ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SEQ, TILES = 21, 3
WAYS: dict[str, dict[str, Any]] = {
    "ulysses": {"attention": "ulysses"},
    "ring": {"attention": "ring", "layout": "contiguous"},
    "zigzag": {"attention": "ring", "layout": "zigzag"},
    "gathered": {"attention": "gather", "layout": "zigzag"},
    "balanced": {"attention": "ring", "layout": "balanced"},
    "host": {"offload": 1.0},
    "FSDP2": {"param_grads": "partial"},
    "FSDP2 by blocks": {"param_grads": "partial"},
}


def step(way: str) -> bool:
    """Loss and gradients of a rank are those of one device."""
    torch.manual_seed(0)
    model = Decoder(layers=2).double()
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


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("way", WAYS)
def test_one_device(ranks: Ranks, way: str) -> None:
    assert all(ranks.run(2, step, way))
