"""Data parallelism over or beside the sequence axis: DDP and FSDP2 give the gradients of one process."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parity import Decoder, Outcome, build, check, gradients, outcome, sp, text, train_step
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import _pytree as pytree

from sp_compile.lowering.torch_compat import size_hint

BATCHES = 2  # one for each of the two data-parallel rows of the mesh


def expected(model: nn.Module, seq: int) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one process over all batches: their mean, as data parallelism defines it."""
    losses = [model(*text(seq, prompt=0, seed=row)) for row in range(BATCHES)]
    loss = sum(losses) / BATCHES
    loss.backward()
    return loss, gradients(model)


def step(run: Any, model: nn.Module, mesh: Any, seq: int) -> tuple[Tensor, list[Tensor]]:
    """Run one step on this rank's batch; the loss is averaged over the rows, gradients are complete."""
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


@pytest.mark.sampled(every=8)
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


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("per_block", [False, True], ids=["root", "per block"])
def test_fsdp2(ranks: Ranks, per_block: bool) -> None:
    check(ranks.run(4, with_fsdp, per_block, 11))


def in_buckets(dynamic: bool) -> tuple[list[Outcome], list[bool]]:
    """DDPOptimizer cuts the graph where DDP's buckets end; which pieces are given one device's states, or return them."""
    model, crossing = build(layers=2), list[bool]()
    alone = copy.deepcopy(model)

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        ends = [*gm.graph.find_nodes(op="placeholder"), *pytree.tree_leaves(gm.graph.output_node().args)]
        values = [n.meta.get("val") for n in ends if isinstance(n, torch.fx.Node)]
        shapes = [[size_hint(extent) for extent in x.shape] for x in values if isinstance(x, Tensor)]
        crossing.append([2, 9, 16] in shapes or [2, 12, 16] in shapes)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 12):  # it is a MiB
        parallel = DDP(model, process_group=worker.group(), bucket_cap_mb=1 / 128)
        how = {"param_grads": "partial", "outputs": "lazy", "seq_dims": {"ids": 1}}  # of an embedding by itself
        run = sp(parallel, dynamic, compiler=compiler, mesh=worker.mesh(), **how)
        found = []
        for seed, seq in enumerate((9, 12) if dynamic else (9, 9)):
            args = text(seq, seed=seed)
            found.append(outcome(*train_step(run, model, args), *train_step(alone, alone, args)))
    return found, crossing


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_between_ddp_buckets_stay_sharded(ranks: Ranks, dynamic: bool) -> None:
    """With torch's default of `optimize_ddp`: each piece is compiled for the rows that the one before returns."""
    results = ranks.run(2, in_buckets, dynamic)
    for outcomes in zip(*(found for found, _ in results)):
        check(outcomes)
    for _, crossing in results:
        assert len(crossing) > 2
        assert not any(crossing)


def with_buckets(dim: int) -> Outcome:
    model = build(layers=2, dim=dim)
    alone = copy.deepcopy(model)
    run = sp(DDP(model, process_group=worker.group()), mesh=worker.mesh(), param_grads="partial")
    return outcome(*train_step(run, model, text(8)), *train_step(alone, alone, text(8)))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [256, 512])
def test_ddp_by_default(ranks: Ranks, dim: int) -> None:
    """With torch's own buckets, which cut a model of this width."""
    check(ranks.run(2, with_buckets, dim))


class Conditioned(Decoder):
    """A value without a sequence crosses a graph break and is added to every later position."""

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
