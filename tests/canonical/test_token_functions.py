"""Autograd Functions of elementwise ops run on shards."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.parity import against_eager
from support.parity import check as check_ranks
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.context import NoteKind


class Bounded(torch.autograd.Function):
    """A square root with a bounded derivative, as in RecurrentGemma."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4 * x, min=1e-2))


class Clipped(torch.autograd.Function):
    """A product whose gradients are clipped, which is not linear in them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return (grad * y).clamp(-1e-3, 1e-3), (grad * x).clamp(-1e-3, 1e-3)


class Penalized(torch.autograd.Function):
    """A scaling with a penalty on both operands, whose gradients do not depend on that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale + 0.1 * x.sign(), 0.1 * scale


class Centered(torch.autograd.Function):
    """A mean over tokens, which is not elementwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Layer(nn.Module):
    """A layer with a Function between two projections, and a loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.second = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).square()
        if self.kind == "bounded":
            y = Bounded.apply(y)
        elif self.kind == "clipped":
            y = Clipped.apply(y, x)
        elif self.kind == "penalized":
            y = Penalized.apply(y, self.scale)
        else:
            y = Centered.apply(y)
        return self.second(y.cumsum(1)).pow(2).mean()


def _train(kind: str) -> object:
    torch.manual_seed(1)
    return against_eager(Layer(kind), torch.randn(2, 7, 6, dtype=torch.float64), mesh=mesh(), seq_dims={"x": 1})


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", ["bounded", "clipped", "centered"])
@pytest.mark.sampled(every=2)
def test_functions_on_real_ranks(ranks: Ranks, kind: str, n: int) -> None:
    check_ranks(ranks.run(n, _train, kind))


@pytest.mark.parametrize("kind", ["bounded", "clipped"])
def test_elementwise_functions_are_on_shards(kind: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    for n in (2, 3):
        report = sp_compile.verify(Layer(kind), x, sp=n, seq_dims={"x": 1})
        assert not report.fallbacks
        assert not report.find_notes(NoteKind.GATHERED)
        assert max(error for _, error in report.errors) < 1e-12


def test_other_functions_are_gathered() -> None:
    report = sp_compile.explain(Layer("centered"), torch.randn(2, 7, 6, dtype=torch.float64), sp=2, seq_dims={"x": 1})
    (note,) = report.find_notes(NoteKind.GATHERED)
    assert (note.subject, note.node) == ("gather_operands", "autograd_function_apply")


def test_gradients_that_do_not_depend_on_that_of_the_result() -> None:
    """Padded rows have none, and a number does not get one from every rank."""
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    report = sp_compile.verify(Layer("penalized"), x, sp=3, seq_dims={"x": 1})
    assert max(error for _, error in report.errors) < 1e-12
    (note,) = report.find_notes(NoteKind.DECLINED)
    assert note.node == "autograd_function_apply"
    assert re.search(r"\bbackward\b.* 0\b", note.text)
