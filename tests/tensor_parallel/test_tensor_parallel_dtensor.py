"""DTensor models (parallelize_module) through backend="sp": their collectives appear in AOTAutograd's graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parallel.parallel_training import STEPS, Trained, step, watched
from support.parallel.spawning import spawned
from support.parity import Decoder, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, scaled_dot_product_attention

Plan = dict[str, Any]


class Attention(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.dropout = nn.RMSNorm(dim), nn.LayerNorm(dim), nn.Dropout(dropout)
        self.attention, self.mlp = Attention(dim, dim // heads), MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def decoder(dropout: float = 0.0, dim: int = 16, heads: int = 4) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(dim, layers=0)
    model.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(2))
    model.embed, model.head = nn.Embedding(32, dim), nn.Linear(dim, 32, bias=False)
    return model.double()


def each_block(plan: Plan) -> Plan:
    return {f"blocks.{i}.{name}": style for i in range(2) for name, style in plan.items()}


COLUMNS = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.up")}
ROWS = {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}


def linears(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, each_block({**COLUMNS, **ROWS}))


def tables(model: nn.Module, mesh: DeviceMesh) -> None:
    """The embedding and the head, too."""
    linears(model, mesh)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)


def tied(model: nn.Module, mesh: DeviceMesh) -> None:
    model.head.weight = model.embed.weight
    if mesh is not None:
        tables(model, mesh)
        model.head.weight = model.embed.weight


def inside_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parallelize the model such that values between two linears of an MLP stay DTensors."""
    plan = {"mlp.up": ColwiseParallel(use_local_output=False), "mlp.down": ROWS["mlp.down"]}
    parallelize_module(model, mesh, each_block(plan))


def scattered_already(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply DTensor's sequence parallelism, after which nothing can be rewritten."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    rows = RowwiseParallel(output_layouts=Shard(1))
    plan = {
        **COLUMNS, "norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole, "mlp": whole,
        "attention.o": rows, "mlp.down": rows,
    }  # fmt: skip
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }  # fmt: skip
    parallelize_module(model, mesh, {**ends, **each_block(plan)})


def gathered(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(
    plan: Callable[[nn.Module, Any], None], shape: tuple[int, int], dropout: float = 0.0, **options: Any
) -> Trained:
    """Some steps, against eager DTensor and, without dropout, one device."""
    mesh, found = worker.mesh(), Trained()
    alone = decoder(dropout)
    if plan is tied:
        tied(alone, None)
    mine, eager = copy.deepcopy(alone), copy.deepcopy(alone)
    for model in (mine, eager):
        plan(model, mesh)
    run = torch.compile(mine, backend="sp", options={"compiler": "aot_eager", **options})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (mine, eager, alone)]
    with watched(found):
        for number in range(STEPS):
            args = text(shape[1], batch=shape[0], seed=number)
            loss, grads = step(run, mine, args, optimizers[0])
            for kind, model, optimizer in (("eager", eager, optimizers[1]), ("alone", alone, optimizers[2])):
                if kind == "eager" or not dropout:
                    right, theirs = step(model, model, args, optimizer)
                    found.take(kind, f"loss {number}", gathered(loss), gathered(right), 0)
                    for name, grad in grads.items():
                        found.take(kind, f"{name} {number}", gathered(grad), gathered(theirs[name]), 1e-6)
    return found


ALL = "s" * 12  # forward two a layer; backward q, k and v each sum a gradient of their own
# A vocabulary that is split takes offsets of each rank: the programs differ, and their collectives stay.
PLANS = {linears: ALL, tables: "", tied: "", inside_dtensors: None, scattered_already: ""}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [p if p in (tied,) else pytest.param(p, marks=pytest.mark.slow) for p in PLANS])
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_plans(ranks: Ranks, plan: Callable[[nn.Module, Any], None], n: int) -> None:
    for one in ranks.run(n, trained, plan, (2, 8)):
        assert not one.where, one.where[:5]
        assert PLANS[plan] is None or one.modes == [PLANS[plan]], one.modes


@pytest.mark.slow
def test_dropout(ranks: Ranks) -> None:
    for one in ranks.run(2, trained, linears, (2, 7), 0.3):
        assert not one.where, one.where[:5]
        assert one.modes == [ALL]


def with_data(shape: tuple[int, int]) -> Trained:
    """Each row of the mesh has a batch of its own; gradients are the mean over the rows."""
    mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), Trained()
    rows, row, data = shape[0], mesh.get_local_rank("dp"), mesh.get_group("dp")
    mine, alone = (decoder(dim=12, heads=6) for _ in range(2))
    linears(mine, mesh["tp"])
    run = torch.compile(mine, backend="sp", options={"compiler": "aot_eager"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0, foreach=False) for m in (mine, alone)]
    with watched(found):
        for number in range(STEPS):
            every = [text(7, seed=10 * number + i) for i in range(rows)]
            _, grads = step(run, mine, every[row], optimizers[0])
            _, right = step(lambda *each: sum(alone(*one) for one in each) / rows, alone, every, optimizers[1])
            for name, grad in grads.items():
                mean = gathered(grad)
                dist.all_reduce(mean, group=data)
                found.take("alone", name, mean / rows, right[name], 1e-6)
    return found


@pytest.mark.slow
def test_beside_data_parallelism(ranks: Ranks) -> None:
    for one in ranks.run(4, with_data, (2, 2)):
        assert not one.where, one.where[:5]
        assert one.modes == [ALL]


def on_six() -> Trained:
    return with_data((2, 3))


@pytest.mark.slow
def test_two_by_three() -> None:
    for one in spawned(6, on_six):
        assert not one.where, one.where[:5]
        assert one.modes == [ALL]
