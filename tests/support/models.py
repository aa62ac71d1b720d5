"""A small decoder whose parts tests replace, and a comparison by `verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.report import Report

TOLERANCE = 1e-9
BATCH, VOCABULARY, WIDTH = 2, 11, 24

Attend = Callable[..., Tensor]
SIZES = [(2, 16), (3, 13), (4, 17), (4, 3), (1, 16), (2, 17), (3, 16), (4, 16), (3, 2)]
"""(ranks, sequence): even, ragged, shorter than the ranks."""


def check(model: Callable[..., Any], *args: Any, sp: int, **config: Any) -> Report:
    """Verify a model on simulated ranks; check that results and gradients are within TOLERANCE."""
    report = sp_compile.verify(model, *args, sp=sp, **config)
    assert report.errors, "nothing was compared"
    wrong = [(name, error) for name, error in report.errors if not error <= TOLERANCE]
    assert not wrong, f"{wrong}\n{report}"
    return report


def rotated(x: Tensor) -> Tensor:
    """Return x (B, H, S, D) with rotary positions."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / 100 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return torch.cat([turned, x[..., 2 * half :]], -1)


def causal(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = rotated(q), rotated(k)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = WIDTH // heads
        self.before, self.after = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, heads * self.head_dim)
        self.k = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.o = nn.Linear(heads * self.head_dim, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, WIDTH) -> q, k, v of (B, heads, S, head_dim)."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return q, k, v

    def merge(self, y: Tensor) -> Tensor:
        """(B, heads, S, head_dim) -> (B, S, WIDTH)."""
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        x = x + self.merge(attend(*self.split(self.before(x))))
        return x + self.down(F.silu(self.up(self.after(x))))


class Decoder(nn.Module):
    """attend(model, q, k, v): the attention of every layer. Call it with ids (B, S): logits (B, S, VOCABULARY)."""

    def __init__(self, attend: Attend = causal, heads: int = 4, kv_heads: int | None = None, layers: int = 1) -> None:
        super().__init__()
        self.attend = attend
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(heads, kv_heads or heads) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def states(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, lambda q, k, v: self.attend(self, q, k, v))
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a float64 model whose parameters depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def tokens(length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, length), generator=generator)


def floats(*shape: int, seed: int = 2) -> Tensor:
    """Uniform in [0, 1), float64."""
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
