"""Tensor-parallel programs through backend="sp" on real ranks: one device's losses, gradients and steps."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
import torch.nn.functional as F
from support import ranks as worker
from support.parallel.parallel_training import message
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import sp_compile
from sp_compile.passes.joint import joint

WIDTH, HIDDEN, STEPS = 8, 16, 3
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return funcol.all_reduce(grad, "sum", ctx.group), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Parallel(nn.Module):
    """A block's columns and rows on this rank."""

    def __init__(self, whole: Block, group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.norm, self.bias = group, whole.norm, whole.down.bias
        self.up_weight = nn.Parameter(whole.up.weight.detach().chunk(n, 0)[rank].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(n, 0)[rank].clone())
        self.down_weight = nn.Parameter(whole.down.weight.detach().chunk(n, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(Copy.apply(self.norm(x), self.group), self.up_weight, self.up_bias))
        return x + Reduce.apply(F.linear(h, self.down_weight), self.group) + self.bias


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def mesh_of(tp: int) -> dist.DeviceMesh:
    """Groups of tp ranks: all of this call, or the inner axis of 2 x 2."""
    return worker.mesh() if worker.group().size() == tp else worker.mesh2d(2, 2)["sp"]


def cut(model: Net, form: str, mesh: dist.DeviceMesh) -> Net:
    if form == "dtensor":
        for block in model.blocks:
            parallelize_module(block, mesh, PLAN)
    else:
        model.blocks = nn.Sequential(*(Parallel(b, mesh.get_group()) for b in model.blocks))
    return model


def trained(form: str, shape: tuple[int, int], tp: int, compiler: str, **options: Any) -> tuple[float, list[str]]:
    """(largest difference of losses and norm weights from one device over some steps, modes of the layers)."""
    mesh = mesh_of(tp)
    torch.manual_seed(0)
    whole = Net().double()
    model = cut(copy.deepcopy(whole), form, mesh)
    found: list[Any] = []
    plain = joint.JointPasses.__call__

    def watched(self: Any, gm: torch.fx.GraphModule) -> None:
        plain(self, gm)
        found.append(self.report)

    joint.JointPasses.__call__ = watched
    try:
        run = torch.compile(model, backend="sp", options={"compiler": compiler, **options})
        worst = 0.0
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
        for _ in range(STEPS):
            x = torch.randn(*shape, WIDTH, dtype=torch.float64)
            losses = [run(x), whole(x)]
            for loss, optimizer in zip(losses, optimizers):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            pairs = [losses, *((a.norm.weight, b.norm.weight) for a, b in zip(model.blocks, whole.blocks))]
            worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
    finally:
        joint.JointPasses.__call__ = plain
    return worst, [layer.mode for report in found for layer in report.layers]


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("form", ["functions", "dtensor"])
@pytest.mark.parametrize(("ranks_of_all", "tp", "shape"), [(2, 2, (2, 7)), (4, 4, (1, 9)), (4, 2, (3, 5))])
def test_trains_as_one_device(ranks: Ranks, form: str, ranks_of_all: int, tp: int, shape: tuple[int, int]) -> None:
    for worst, modes in ranks.run(ranks_of_all, trained, form, shape, tp, "aot_eager"):
        assert worst < 1e-12
        assert modes == ["scattered"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("form", ["functions", "dtensor"])
def test_inductor(ranks: Ranks, form: str) -> None:
    for worst, modes in ranks.run(2, trained, form, (2, 7), 2, "inductor"):
        assert worst < 1e-12
        assert modes == ["scattered"] * 4


def left_alone() -> tuple[float, list[str]]:
    return trained("functions", (2, 6), 2, "aot_eager", sequence_parallel_linear="never")


def test_the_option_leaves_layers_as_they_are(ranks: Ranks) -> None:
    for worst, modes in ranks.run(2, left_alone):
        assert worst < 1e-12
        assert modes == []


def rows_of_their_own() -> str:
    """The first call has equal inputs, as a warm-up with zeros has; the second has not."""
    torch.manual_seed(0)
    mesh = mesh_of(2)
    model = torch.compile(cut(Net().double(), "functions", mesh), backend="sp", options={"compiler": "aot_eager"})
    model(torch.zeros(2, 6, WIDTH, dtype=torch.float64))
    return message(lambda: model(torch.full((2, 6, WIDTH), float(dist.get_rank()), dtype=torch.float64)))


def test_inputs_that_differ_later_are_an_error(ranks: Ranks) -> None:
    for error in ranks.run(2, rows_of_their_own):
        assert "SP63" in error
        assert " x (" in error


def run_with_another_batch() -> str:
    """Return the error if one rank recompiles for another batch size while the other runs its compiled program."""
    torch.manual_seed(0)
    mesh = mesh_of(2)
    model = torch.compile(cut(Net().double(), "functions", mesh), backend="sp", options={"compiler": "aot_eager"})
    model(torch.zeros(2, 6, WIDTH, dtype=torch.float64))
    try:
        model(torch.zeros(2 + dist.get_rank(), 6, WIDTH, dtype=torch.float64))
    except Exception as error:
        return str(error)
    return ""


def test_a_rank_that_compiles_alone_is_an_error(ranks: Ranks) -> None:
    for error in ranks.run(2, run_with_another_batch):
        assert "SP602: rank 1 of 2 compiles" in error


@pytest.mark.slow
def test_explain_shows_the_mode_of_every_layer() -> None:
    with mp.get_context("spawn").Pool(1) as pool:
        text, inputs, parallel = pool.apply(_explained_alone)
    assert (inputs, parallel) == ({}, [2])
    assert re.match(r"tensor-parallel .*\b2 ranks", text)
    assert text.count("scattered") == 4


def _explained_alone() -> tuple[str, dict[str, list[int]], list[int]]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    report = sp_compile.explain(cut(Net().double(), "functions", mesh), torch.randn(2, 6, WIDTH).double())
    return str(report), report.inputs, report.parallel
