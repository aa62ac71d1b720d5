"""Handwritten tensor-parallel models; with one rank, the same models without parallelism.

Full weights are drawn from one seed on every rank and then cut; the attribute `cut` of a parameter is the dim, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB = 24


class Copy(torch.autograd.Function):
    """Megatron's f: into column-parallel linears."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Split) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.sum(grad), None


class Reduce(torch.autograd.Function):
    """Megatron's g: out of row-parallel linears."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Split) -> Tensor:
        return tp.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True)
class Split:
    """The rank's part of tensor parallelism."""

    n: int = 1
    rank: int = 0
    group: Any = None
    form: str = "pair"  # f and g; "in place": with dist.all_reduce; "plain": without f

    def sum(self, x: Tensor) -> Tensor:
        if self.n == 1:
            return x
        if self.form == "in place":
            x = x.contiguous().clone()
            dist.all_reduce(x, group=self.group)
            return x
        return funcol.all_reduce(x, "sum", self.group)

    def largest(self, x: Tensor) -> Tensor:
        return x if self.n == 1 else funcol.all_reduce(x, "max", self.group)

    def f(self, x: Tensor) -> Tensor:
        return x if self.n == 1 or self.form == "plain" else Copy.apply(x, self)

    def g(self, x: Tensor) -> Tensor:
        if self.n == 1:
            return x
        return self.sum(x) if self.form == "plain" else Reduce.apply(x, self)

    def part(self, whole: Tensor, dim: int | None) -> nn.Parameter:
        mine = whole if dim is None else whole.chunk(self.n, dim)[self.rank]
        parameter = nn.Parameter(mine.detach().clone())
        parameter.cut = dim
        return parameter


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5


class Linear(nn.Module):
    """A linear of which each rank has columns (cut 0) or rows (cut 1); the bias of rows is added after the sum."""

    def __init__(self, tp: Split, wide: int, out: int, cut: int, bias: bool = True, draw: Any = drawn) -> None:
        super().__init__()
        self.tp, self.rows = tp, cut == 1
        self.weight = tp.part(draw(out, wide), cut)
        self.bias = tp.part(drawn(out), None if self.rows else 0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.rows:
            return F.linear(x, self.weight, self.bias)
        y = self.tp.g(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """An RMSNorm of elementary ops, as in Llama, or a norm of torch."""

    def __init__(self, tp: Split, dim: int, kind: str) -> None:
        super().__init__()
        self.kind, self.dim = kind, dim
        self.weight = tp.part(1 + drawn(dim), None)
        self.bias = tp.part(drawn(dim), None) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (self.dim,), self.weight, self.bias)
        if self.kind == "rms":
            return F.rms_norm(x, (self.dim,), self.weight)
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    """Causal attention on 1/n of the heads."""

    def __init__(self, tp: Split, dim: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads // tp.n
        self.q, self.k, self.v = (Linear(tp, dim, dim, 0, bias) for _ in range(3))
        self.o = Linear(tp, dim, dim, 1, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """GELU or gated."""

    def __init__(self, tp: Split, dim: int, gated: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = Linear(tp, dim, 2 * dim, 0, bias), Linear(tp, 2 * dim, dim, 1, bias)
        self.gate = Linear(tp, dim, 2 * dim, 0, bias) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(F.gelu(y) if self.gate is None else F.silu(self.gate(x)) * y)


class Block(nn.Module):
    """Pre-norm; `parallel`: attention and MLP read one norm (GPT-J)."""

    def __init__(self, tp: Split, dim: int, heads: int, how: Settings) -> None:
        super().__init__()
        self.tp, self.drop = tp, nn.Dropout(how.dropout)
        self.norm1 = Norm(tp, dim, how.norms[0])
        self.norm2 = None if how.parallel else Norm(tp, dim, how.norms[1])
        self.attention, self.mlp = Attention(tp, dim, heads, how.bias), MLP(tp, dim, how.gated, how.bias)

    def forward(self, x: Tensor) -> Tensor:
        drop = self.drop
        h = self.tp.f(self.norm1(x))
        if self.norm2 is None:
            return x + drop(self.attention(h)) + drop(self.mlp(h))
        x = x + drop(self.attention(h))
        return x + drop(self.mlp(self.tp.f(self.norm2(x))))


@dataclass(frozen=True)
class Settings:
    """What the models differ by."""

    layers: int = 2
    dim: int = 12
    heads: int = 12
    norms: tuple[str, str] = ("rms", "layer")
    dropout: float = 0.0
    bias: bool = True
    gated: bool = False
    parallel: bool = False
    checkpointed: bool = False
    head: str = "replicated"  # or "vocab" (cut, as the embedding is) or "tied" (and shared with it) or "tied whole"
    hidden_states: bool = False
    casts: torch.dtype | None = None


class Decoder(nn.Module):
    """Token ids in, next-token loss out (and hidden states)."""

    def __init__(self, tp: Split, how: Settings) -> None:
        super().__init__()
        self.tp, self.how = tp, how
        cut = 0 if how.head in ("vocab", "tied") else None
        self.embed = tp.part(drawn(VOCAB, how.dim), cut)
        self.blocks = nn.ModuleList(Block(tp, how.dim, how.heads, how) for _ in range(how.layers))
        self.norm = Norm(tp, how.dim, how.norms[0])
        self.head = self.embed if how.head in ("tied", "tied whole") else tp.part(drawn(VOCAB, how.dim), cut)

    def embedded(self, ids: Tensor) -> Tensor:
        if self.embed.cut is None or self.tp.n == 1:
            return F.embedding(ids, self.embed)
        size = VOCAB // self.tp.n
        mine = ids - self.tp.rank * size
        inside = (mine >= 0) & (mine < size)
        rows = F.embedding(torch.where(inside, mine, 0), self.embed)
        return self.tp.g(rows * inside.unsqueeze(-1))

    def forward(self, ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, states = self.embedded(ids), []
        if self.how.casts is not None:
            x = x.to(self.how.casts)
        for block in self.blocks:
            states.append(x)
            x = checkpoint(block, x, use_reentrant=False) if self.how.checkpointed else block(x)
        x = self.norm(x)[:, :-1].flatten(0, 1)
        loss = self.loss(x, ids[:, 1:].flatten())
        return (loss, *states) if self.how.hidden_states else loss

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.embed.cut is None or self.tp.n == 1:
            return F.cross_entropy(F.linear(x, self.head.to(x.dtype)), labels)
        return vocab_parallel_loss(self.tp, F.linear(self.tp.f(x), self.head.to(x.dtype)), labels)


def vocab_parallel_loss(tp: Split, logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over a vocabulary of which each rank has a part (Megatron's)."""
    size = logits.shape[-1]
    top = tp.largest(logits.detach().amax(-1))
    shifted = logits - top.unsqueeze(-1)
    mine = labels - tp.rank * size
    inside = (mine >= 0) & (mine < size)
    picked = shifted.gather(-1, torch.where(inside, mine, 0).unsqueeze(-1)).squeeze(-1) * inside
    total = tp.g(shifted.exp().sum(-1))
    return (total.log() - tp.g(picked)).mean()


Model = Callable[[Split], nn.Module]


def build(tp: Split, **how: Any) -> Decoder:
    """The same whole weights wherever it is called."""
    torch.manual_seed(3)
    return Decoder(tp, Settings(**how))


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
