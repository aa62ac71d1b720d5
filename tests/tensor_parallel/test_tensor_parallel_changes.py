"""Tensor-parallel programs that cannot be scattered, or change later: as in eager mode, or an error on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks as worker
from support.parallel.parallel_models import Split
from support.parallel.parallel_training import message, split
from support.parallel.parallel_variants import DIM, Hidden
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

OPTIONS = {"compiler": "aot_eager"}


class Crossing(Hidden):
    """Each token is mixed with all others, so no op before the second layer can run on rows."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = super().forward(x).flatten(0, 1)
        return super().forward((tokens @ tokens.T @ tokens).view(x.shape) / 50)


class Turned(Hidden):
    """Backward kernels read channels of a transposed value in memory order, and views rely on the strides."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Remembering(Hidden):
    """A layer that shifts tokens by this rank's columns of the previous call."""

    def __init__(self, tp: Split) -> None:
        super().__init__(tp)
        self.register_buffer("last", torch.zeros(DIM, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + self.last
        self.last.copy_(self.up(x).detach().mean() * torch.ones_like(self.last))
        return super().forward(x)


def frozen_on_one(model: Hidden, x: Tensor) -> None:
    x.requires_grad_(dist.get_rank() == 0)
    model.norm.weight.requires_grad_(dist.get_rank() == 1)


def against_eager(kind: type[Hidden], shape: tuple[int, ...]) -> float:
    tp = split()
    mine, eager = kind(tp), kind(tp)
    gradients = []
    for model, run in ((mine, torch.compile(mine, backend="sp", options=OPTIONS)), (eager, eager)):
        torch.manual_seed(1)
        x = torch.randn(shape, dtype=torch.float64)
        y = run(x)
        y.sin().sum().backward()
        gradients.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert [g is None for g in gradients[0]] == [g is None for g in gradients[1]]
    pairs = [(a, b) for a, b in zip(*gradients) if a is not None and a.numel()]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Crossing, (2, 6, DIM)), (Turned, (3, 7, DIM)), (Hidden, (0, 6, DIM))],
    ids=["tokens with tokens", "transposed", "no tokens"],
)
def test_equals_eager_mode(ranks: Ranks, kind: type[Hidden], shape: tuple[int, ...]) -> None:
    assert max(ranks.run(2, against_eager, kind, shape)) < 1e-11


def frozen() -> str:
    model = Hidden(split())
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    frozen_on_one(model, x)
    return message(lambda: torch.compile(model, backend="sp", options=OPTIONS)(x))


def test_gradients_of_one_rank_are_refused(ranks: Ranks) -> None:
    for error in ranks.run(2, frozen):
        assert "SP639" in error
        assert "rank 1: x requires_grad=False" in error


def remembered() -> str:
    run = torch.compile(Remembering(split()), backend="sp", options=OPTIONS)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    run(x)
    return message(lambda: run(x))


def test_a_buffer_that_diverges(ranks: Ranks) -> None:
    """The buffer is equal on all ranks at compilation, and the program writes rank-specific values to it."""
    for error in ranks.run(2, remembered):
        assert "SP633" in error
        assert " last (" in error


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def changing_lengths(dynamic: bool | None) -> str:
    mesh = DeviceMesh.from_group(worker.group(), "cpu", mesh_dim_names=("tp",))
    model = parallelize_module(Lengths(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = torch.compile(model, backend="sp", options=OPTIONS, dynamic=dynamic)
    run(torch.randn(2, 8, 8))
    return message(lambda: run(torch.randn(2, 5, 8)))


@pytest.mark.slow
def test_dtensors_of_changing_lengths(ranks: Ranks) -> None:
    """Torch's own tracing fails, so this may pass with another torch: then there is nothing to teach."""
    for error in ranks.run(2, changing_lengths, None):
        assert not error or "SP242: " in error
    assert ranks.run(2, changing_lengths, False) == ["", ""]
