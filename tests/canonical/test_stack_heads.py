"""Attention written head by head becomes one attention whose heads ranks can split."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.models import BATCH, check, floats, seeded
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.sharding.attention import ATTENTION

WIDTH, HEADS, SIZE = 12, 4, 3
Mask = Callable[["Head", Tensor, Tensor], Tensor]


class Head(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, SIZE) for _ in range(3))
        self.mask = mask
        self.register_buffer("lower", torch.ones(32, 32).tril())

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * SIZE**-0.5
        return self.mask(self, scores, x).softmax(-1) @ self.v(x)


def lower(head: Head, scores: Tensor, x: Tensor) -> Tensor:
    length = x.shape[1]
    return scores.masked_fill(torch.ones(length, length).tril() == 0, -math.inf)


def stored(head: Head, scores: Tensor, x: Tensor) -> Tensor:
    length = x.shape[1]
    return scores.masked_fill(head.lower[:length, :length] == 0, -math.inf)


def padded(head: Head, scores: Tensor, x: Tensor) -> Tensor:
    return scores.masked_fill((x[:, :, 0] > 0.9)[:, None], -math.inf)


MASKS: dict[str, tuple[Mask, str]] = {
    "none": (lambda head, scores, x: scores, "none"),
    "causal": (lower, "causal"),
    "a buffer of each head": (stored, "data"),
    "padding": (padded, "Eq(col0, 0)"),
}


class Joined(nn.Module):
    """Karpathy's MultiHeadAttention."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(mask) for _ in range(HEADS))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


class Stacked(Joined):
    """(H, B, T, E)"""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.stack([getattr(head, name)(x) for head in self.heads]) for name in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(torch.cat(list(out), dim=-1))


class Different(Joined):
    """The first head has a scale of its own."""

    def forward(self, x: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(
            *(f(x) for f in (self.heads[0].q, self.heads[0].k, self.heads[0].v)), scale=2.0
        )
        return self.out(torch.cat([first, *(head(x) for head in self.heads[1:])], dim=-1))


class ReadTwice(Joined):
    def forward(self, x: Tensor) -> Tensor:
        each = [head(x) for head in self.heads]
        return self.out(torch.cat(each, dim=-1)) + each[0].mean()


def attentions(model: nn.Module, length: int = 8) -> list[torch.fx.Node]:
    x = floats(BATCH, length, WIDTH)
    gm = sp_compile.capture_export(torch.export.export(model, (x,)))
    Canonicalize()(gm)
    return [n for n in gm.graph.nodes if n.target in ATTENTION]


def said(node: torch.fx.Node) -> str:
    if node.target is torch.ops.sp.masked_attention.default:
        return str(node.args[6])
    causal = node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False)
    return "causal" if causal else "none" if node.args[3] is None else "data"


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", MASKS)
def test_heads_become_one_attention(name: str) -> None:
    mask, expected = MASKS[name]
    model = seeded(lambda: Joined(mask))
    (node,) = attentions(model)
    assert list(node.meta["val"].shape) == [BATCH, HEADS, 8, SIZE]
    assert said(node) == expected
    report = check(model, floats(BATCH, 13, WIDTH), sp=2, attention="ulysses", seq_dims={"x": 1})
    assert report.count("all_to_all") == 2


def test_heads_in_front_of_the_batch() -> None:
    model = seeded(lambda: Stacked(lower))
    (node,) = attentions(model)
    assert list(node.meta["val"].shape) == [BATCH, HEADS, 8, SIZE]
    report = check(model, floats(BATCH, 16, WIDTH), sp=4, attention="ulysses", seq_dims={"x": 1})
    assert report.count("all_to_all") == 2


@pytest.mark.parametrize("model", [Different, ReadTwice])
def test_heads_that_stay_apart(model: Callable[[Mask], nn.Module]) -> None:
    module = seeded(lambda: model(lower))
    assert len(attentions(module)) == HEADS
    check(module, floats(BATCH, 13, WIDTH), sp=3)
