"""Programs that are compiled for an absent GPU, in the sizes of a real one: fake tensors take no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from support.cuda.wrappers import Rank, compiled
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model in bfloat16."""

    rows: int = 131072  # of one rank
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 128
    layers: int = 1
    missing: int = 0  # tokens that the sequence is shorter than all ranks' rows

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Attention(nn.Module):
    """Projections and causal attention, layer by layer; the loss is the mean of squares."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
        for layer in range(self.sizes.layers):
            x = x + self._layer(x, *weights[3 * layer : 3 * layer + 3])
        return x.float().pow(2).mean()

    def _layer(self, x: Tensor, wq: Tensor, wkv: Tensor, wo: Tensor) -> Tensor:
        heads = lambda y: y.unflatten(2, (-1, self.sizes.head_dim)).transpose(1, 2)  # noqa: E731
        q, (k, v) = heads(F.linear(x, wq)), (heads(y) for y in F.linear(x, wkv).chunk(2, 2))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.sizes.heads != self.sizes.kv_heads
        )
        return F.linear(out.transpose(1, 2).flatten(2), wo)


def inputs_of(sizes: Sizes, n: int) -> Callable[[], Sequence[Tensor]]:
    """Return a function that makes the full sequence of n ranks, without a gradient, and weights."""

    def make() -> Sequence[Tensor]:
        width, keys = sizes.width, 2 * sizes.kv_heads * sizes.head_dim
        shapes = [(width, width), (keys, width), (width, width)] * sizes.layers
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        x = torch.empty(1, sizes.rows * n - sizes.missing, width, **kind)
        return x, *(torch.empty(shape, **kind, requires_grad=True) for shape in shapes)

    return make


@cache
def attention(strategy: str, n: int, sizes: Sizes, ulysses: int | None = None, **options: Any) -> Rank:
    """Return one rank of n of `Attention`, in the process of the absent GPU."""
    return compiled(Attention(sizes), inputs_of(sizes, n), n, ulysses, attention=strategy, **options)
