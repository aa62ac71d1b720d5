"""Dropout inside of a tile: the backward draws the same random numbers as the forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sharding.tiles.losses import HEADS, WIDTH
from torch import Tensor, nn

import sp_compile


class Model(nn.Module):
    """Attention, and an MLP that drops of its inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.down(F.dropout(F.gelu(self.up(h)), 0.5)).square().sum()


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients(compiler: str) -> None:
    """Against differences of the loss along a direction, the same numbers drawn for both."""
    model = Model().double()
    run = torch.compile(model, backend="sp", options={"tiles": 3, "compiler": compiler})
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    along, step = torch.randn_like(x), 1e-5

    def at(moved: float, seed: int = 1) -> Tensor:
        torch.manual_seed(seed)
        return run((x.detach() + moved * along).requires_grad_())

    torch.manual_seed(1)
    run(x).backward()
    assert x.grad is not None
    torch.testing.assert_close((x.grad * along).sum(), (at(step) - at(-step)) / (2 * step), rtol=1e-6, atol=0)
    assert at(0.0) != at(0.0, seed=2)


class Rows(Model):
    """A model that returns the MLP's rows."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.down(F.dropout(F.gelu(self.up(h)), 0.5))


def test_tiles_draw_differently() -> None:
    """Tiles of one row each, with equal rows, drop different elements."""
    x = torch.ones(1, 8, WIDTH)
    run = torch.compile(Rows(), backend="sp", options={"tiles": 8, "compiler": "aot_eager"})
    torch.manual_seed(3)
    found = run(x)
    after = torch.rand(1)
    assert len(found[0].unique(dim=0)) == 8
    torch.manual_seed(3), torch.randint(1 << 62, ())
    assert after == torch.rand(1), "they change the generator's state only by their seed"


class Undropped(Model):
    """In evaluation, or at a rate of nothing, as adapters have it."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        z = F.dropout(F.gelu(self.up(h)), 0.5, training=False)
        return self.down(F.dropout(z, 0.0)).square().sum()


def test_tiles_without_dropout() -> None:
    """Without random numbers, results equal a single device's in float64, and tiles need no seed."""
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    found = sp_compile.verify(Undropped().double(), x, sp=2, tiles=2)
    assert found.worst < 1e-9
    assert [note.label for note in found.notes if note.subject == "run_in_tiles"] == ["run_in_tiles"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("model", [Model, Rows])
@pytest.mark.parametrize("n", [1, 2])
def test_it_is_tiled(model: type[Model], n: int) -> None:
    found = sp_compile.explain(model(), torch.randn(2, 8, WIDTH), sp=n, tiles=2)
    assert [note.label for note in found.notes if note.subject == "run_in_tiles"] == ["run_in_tiles"]
