"""Data parallelism over or beside the sequence axis: DDP and FSDP2 give the gradients of one process."""

import copy
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parity import Decoder, Outcome, against_eager, build, check, gradients, outcome, sp, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from sp_compile import backend

BATCHES = 2  # one for each of the two data-parallel rows of the mesh


def expected(model: nn.Module, seq: int) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one process over all batches: their mean, as data parallelism defines it."""
    losses = [model(*text(seq, prompt=0, seed=row)) for row in range(BATCHES)]
    loss = sum(losses) / BATCHES
    loss.backward()
    return loss, gradients(model)


def step(run: Any, model: nn.Module, mesh: Any, seq: int) -> tuple[Tensor, list[Tensor]]:
    """One step on this rank's batch; its loss averaged over the rows, its gradients whole."""
    loss = run(*text(seq, prompt=0, seed=mesh.get_local_rank("dp")))
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.get_group("dp"))
    return mean / BATCHES, [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients(model)]


def with_ddp(order: str, param_grads: str, seq: int) -> Outcome:
    mesh = worker.mesh2d(2, 2)
    model, how = build(layers=1), {"mesh": mesh, "mesh_dim": "sp", "param_grads": param_grads}
    alone = copy.deepcopy(model)
    group = mesh.get_group("dp") if param_grads == "reduce" else None
    if order == "compile(DDP)":
        run = sp(DDP(model, process_group=group), **how)
    else:
        run = DDP(sp(model, **how), process_group=group)
    return outcome(*step(run, model, mesh, seq), *expected(alone, seq))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("order", "param_grads"),
    [
        pytest.param("compile(DDP)", "reduce", marks=pytest.mark.slow),
        ("DDP(compile)", "partial"),
        pytest.param("compile(DDP)", "partial", marks=pytest.mark.slow),
        pytest.param("DDP(compile)", "reduce", marks=pytest.mark.slow),
    ],
)
def test_ddp(ranks: Ranks, order: str, param_grads: str) -> None:
    check(ranks.run(4, with_ddp, order, param_grads, 11))


def with_fsdp(per_block: bool, seq: int) -> Outcome:
    mesh = worker.mesh2d(2, 2)
    model = build(layers=2 if per_block else 1)
    alone = copy.deepcopy(model)
    flat = mesh._flatten("dp_sp")
    for block in model.blocks if per_block else ():
        fully_shard(block, mesh=flat)
    fully_shard(model, mesh=flat)
    run = sp(model, mesh=mesh, param_grads="partial")
    return outcome(*step(run, model, mesh, seq), *expected(alone, seq))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("per_block", [False, True], ids=["root", "per block"])
def test_fsdp2(ranks: Ranks, per_block: bool) -> None:
    check(ranks.run(4, with_fsdp, per_block, 11))


def with_small_buckets() -> Outcome:
    """DDPOptimizer cuts the graph where DDP's buckets end; each piece is compiled alone."""
    model = build(layers=2, dim=128)
    run = sp(DDP(model, process_group=worker.group(), bucket_cap_mb=1), mesh=worker.mesh(), param_grads="partial")
    backend._warn_once_on_rank_0.cache_clear()
    with TestCase().assertLogs("sp_compile.backend") as logs:
        backend.log.warning("there may be no other")
        found = against_eager(model, *text(8), run=run)
    assert ["optimize_ddp" in line for line in logs.output].count(True) == (worker.mesh().get_rank() == 0)
    return found


def test_ddp_in_pieces(ranks: Ranks) -> None:
    """As torch's default has it, which is said once, by the first rank."""
    check(ranks.run(2, with_small_buckets))


class Conditioned(Decoder):
    """A value without a sequence crosses a graph break and is added to every position behind it."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        condition = self.norm(x.mean(1, keepdim=True))
        torch._dynamo.graph_break()
        return self.blocks[1](x + condition)


def with_a_break() -> Outcome:
    mesh = worker.mesh2d(2, 2)
    model = build(Conditioned)
    alone = copy.deepcopy(model)
    run = DDP(sp(model, mesh=mesh, param_grads="partial"))
    return outcome(*step(run, model, mesh, 9), *expected(alone, 9))


@pytest.mark.slow
def test_partial_gradients_across_a_graph_break(ranks: Ranks) -> None:
    check(ranks.run(4, with_a_break))
