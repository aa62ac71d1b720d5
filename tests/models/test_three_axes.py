"""Replicas of shards of a sequence: a mesh of three axes, two ranks along each, with FSDP2 block by block."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial

import pytest
import torch
from spmd.test_blocks import Stack, gathered
from support.parallel.spawning import spawned
from support.parity import build, text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

AXES = "replicas", "shards", "sp"


def sharding_mesh(mesh: DeviceMesh, with_sequence: bool) -> DeviceMesh:
    """Return FSDP2's mesh: sharded over "shards" only, or also over the ranks of a sequence, as in torchtitan."""
    if not with_sequence:
        return mesh["replicas", "shards"]
    mesh["shards", "sp"]._flatten("both")
    return mesh["replicas", "both"]


def trained(sizes: tuple[int, int, int], steps: int) -> list[tuple[float, float]]:
    """Errors of losses and of weights, with gradients summed over a sequence, and with this left to FSDP2."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    replicas = sizes[0] * sizes[1]
    mine = mesh.get_local_rank("replicas") * sizes[1] + mesh.get_local_rank("shards")
    found = []
    for grads in ("reduce", "partial"):
        model = build(Stack, layers=2)
        alone, losses = copy.deepcopy(model), list[float]()
        over = sharding_mesh(mesh, grads == "partial")
        options = {"compiler": "aot_eager", "cost": {}, "mesh": mesh, "outputs": "lazy", "param_grads": grads}
        for part in (*model.blocks, model.tail):
            part.compile(backend="sp", options=options)
        for part in (*model.blocks, model.tail, model):
            fully_shard(part, mesh=over)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, alone)]
        for step in range(steps):
            batches = [text(9, seed=10 * step + row) for row in range(replicas)]
            loss, right = model(*batches[mine]), [alone(*batch) for batch in batches]
            loss.backward()
            (sum(right) / replicas).backward()
            losses.append(abs(loss.item() / right[mine].item() - 1))
            for one in optimizers:
                one.step()
                one.zero_grad()
        pairs = zip(map(gathered, model.parameters()), alone.parameters(), strict=True)
        found.append((max(losses), max((a - b).abs().max().item() for a, b in pairs)))
    return found


@pytest.mark.slow
def test_replicas_of_shards_of_a_sequence() -> None:
    for both in spawned(8, partial(trained, (2, 2, 2), 4), timeout=timedelta(minutes=5)):
        for loss, weight in both:
            assert loss < 1e-9
            assert weight < 1e-9
