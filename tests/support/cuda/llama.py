"""A Llama on an absent GPU (blocks with an MLP, a head and a loss), and the prediction of `explain` for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from support.cuda.steps import Step, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.passes.cost.step_memory import StepMemory
from sp_compile.passes.cost.weight_memory import ModelBytes


@dataclass(frozen=True)
class Llama:
    """Sizes, in bfloat16."""

    rows: int = 16384  # of one rank
    dim: int = 1024
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 3584
    vocab: int = 32768
    layers: int = 2
    checkpoints: bool = True  # recompute each block in the backward

    def of(self, layers: int) -> Llama:
        """Return the same sizes with this number of layers."""
        return replace(self, layers=layers)

    def state(self, ranks: int) -> int:
        """Return the bytes of a rank's shards of parameters, gradients and AdamW's state, and of FSDP's full tensors."""
        weights = ModelBytes.of(self.model("meta"))
        return sum(weights.sharded_bytes(ranks))

    def model(self, device: str = "cuda") -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be cast
        try:
            with torch.device(device):
                return LlamaLM(self)
        finally:
            torch.set_default_dtype(before)

    def inputs(self, n: int, device: str = "cuda") -> Sequence[Tensor]:
        """Return the full ids and labels."""
        return [torch.empty(1, n * self.rows, dtype=torch.int64, device=device) for _ in range(2)]


def rotated(x: Tensor) -> Tensor:
    """Return x (B, H, S, D) with rotary positions."""
    rows, half = x.shape[2], x.shape[3] // 2
    steps = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(rows, device=x.device, dtype=torch.float32)[:, None] * steps
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self, of: Llama) -> None:
        super().__init__()
        self.width = of.dim // of.heads
        self.norm1, self.norm2 = nn.RMSNorm(of.dim), nn.RMSNorm(of.dim)
        self.q, self.out = (nn.Linear(of.dim, of.dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(of.dim, of.kv_heads * self.width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(of.dim, of.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(of.hidden, of.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (made(y).unflatten(2, (-1, self.width)).transpose(1, 2) for made in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaLM(nn.Module):
    """A decoder that returns the mean loss of ids and labels (1, S)."""

    def __init__(self, of: Llama) -> None:
        super().__init__()
        self.checkpoints = of.checkpoints
        self.embed = nn.Embedding(of.vocab, of.dim)
        self.blocks = nn.ModuleList(Block(of) for _ in range(of.layers))
        self.norm = nn.RMSNorm(of.dim)
        self.head = nn.Linear(of.dim, of.vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compiled_step(of: Llama, n: int, ulysses: int | None = None, **options: Any) -> Step:
    """Return the memory of a step of one rank of n, measured on the wrappers, in the process of the absent GPU."""
    return step(of.model, partial(of.inputs, n), n, ulysses, **options)


def predicted(of: Llama, n: int, **options: Any) -> StepMemory:
    """Return the prediction of `explain` for the model on the meta device."""
    found = sp_compile.explain(of.model("meta"), *of.inputs(n, "meta"), sp=n, memory=True, **options).step
    assert found is not None
    return found


LLAMA_8B = Llama(rows=1 << 17, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, layers=32)
"""A million tokens on 8 ranks."""
OF_MANY = {"cost": {"memory": 4e9}}
"""For a few layers that represent all: attention's results do not fit in memory until the backward, as with all."""
