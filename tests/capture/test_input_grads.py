"""A program that makes the output of a frozen layer require a gradient, as transformers does for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import VOCAB, Outcome, against_eager, check, sp, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile

WIDTH = 16


class Adapted(nn.Module):
    """A frozen model with adapters in checkpoints; the output of the embedding is marked."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH).double(), nn.Linear(WIDTH, VOCAB).double()
        self.bases = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in "ab")
        self.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in "ab")

        def mark(module: nn.Module, args: Any, output: Tensor) -> None:
            output.requires_grad_(True)

        self.embed.register_forward_hook(mark)

    def layer(self, x: Tensor, base: nn.Module, adapter: nn.Module) -> Tensor:
        return x + F.gelu(base(x.cumsum(1)) + adapter(x))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for base, adapter in zip(self.bases, self.adapters, strict=True):
            x = checkpoint(self.layer, x, base, adapter, use_reentrant=self.use_reentrant)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_is_on_shards(use_reentrant: bool) -> None:
    report = sp_compile.verify(Adapted(use_reentrant), *text(9), sp=2)
    assert report.worst < 1e-9
    assert not report.fallbacks
    assert report.work.flops_share == 1


def tuned() -> Outcome:
    model = Adapted(use_reentrant=False)
    return against_eager(model, *text(9), run=sp(model, mesh=worker.mesh()))


def test_on_ranks(ranks: Ranks) -> None:
    check(ranks.run(2, tuned))


def marked(x: Tensor) -> Tensor:
    return (x * 2).requires_grad_()


def returned(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = marked(x)
    return (h @ w).cumsum(1), h


def of_frozen_weights(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = marked(x)
    with torch.no_grad():
        frozen = w * 2
    return (h @ w).cumsum(1), h @ frozen


def of_a_checkpoint(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return checkpoint(lambda h, w: ((h @ w).cumsum(1), h.tanh()), marked(x), w, use_reentrant=False)


def hooked(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = marked(x)
    h.register_hook(lambda grad: grad * 2)
    return (h @ w).cumsum(1), h.sum()


def written(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = marked(x)
    y.copy_(h)
    return ((h @ w).cumsum(1),)


@pytest.mark.parametrize("program", [returned, of_frozen_weights, of_a_checkpoint, hooked, written])
def test_effects_outside_of_the_program(program: Callable[..., tuple[Tensor, ...]]) -> None:
    """Results whose gradient is that of the marked value alone require one as in eager mode."""

    def run(call: Callable[..., tuple[Tensor, ...]]) -> list[Any]:
        torch.manual_seed(0)
        x, y, w = torch.randn(2, 6, 4), torch.randn(2, 6, 4), torch.randn(4, 4, requires_grad=True)
        results = call(x, w, y)
        sum(result.sum() for result in (*results, y)).backward()  # type: ignore[union-attr]
        return [[one.requires_grad, one.detach(), one.grad if one.is_leaf else None] for one in (*results, w, y)]

    torch._dynamo.reset()
    expected, found = run(program), run(torch.compile(program, backend="sp", options={"compiler": "aot_eager"}))
    torch.testing.assert_close(found, expected)
