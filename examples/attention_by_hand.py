"""A hand-written distributed attention, and the one call that replaces what is distributed about it.

    torchrun --nproc-per-node 2 examples/attention_by_hand.py

`ByHand` is what tutorials build: right, forward and backward, for full attention of equal shards. `OneCall` takes the
same shards; causal masks, windows, documents, dropout, grouped heads and zigzag shards are options.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile


class Gather(torch.autograd.Function):
    """A shard to those of all ranks (n, ...); backward: the sum of what all ranks say of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, x)
        return torch.stack(shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad := grad.contiguous())
        return grad[dist.get_rank()]


class ByHand(nn.Module):
    """q, k, v (B, s, H, D), one shard a rank, to (B, s, H, D): every rank's keys, merged by log-sum-exp."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(1, 2)
        everyone = zip(Gather.apply(k), Gather.apply(v), strict=True)
        out, lse = self.block(q, *next(everyone))
        for keys, values in everyone:
            out, lse = self.merge(out, lse, *self.block(q, keys, values))
        return out.transpose(1, 2)

    def block(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to some of the keys, and its log-sum-exp."""
        scores = q @ k.permute(0, 2, 3, 1) / q.shape[-1] ** 0.5
        return scores.softmax(-1) @ v.transpose(1, 2), scores.logsumexp(-1, keepdim=True)

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to both sets of keys."""
        total = torch.logaddexp(lse, other_lse)
        return out * (lse - total).exp() + other * (other_lse - total).exp(), total


class OneCall(nn.Module):
    """The same. A transpose is a view, and the ops take any strides."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sp_compile.ring_attention(q, k, v, **options).transpose(1, 2)


def one_device(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True).transpose(1, 2)


def gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def compare(name: str, module: nn.Module, kv_heads: int = 4, **options: bool) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(2, 64 * n, heads, 16, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    shards = [x.detach().chunk(n, 1)[rank].contiguous().requires_grad_() for x in whole]
    expected = gradients(one_device(*whole, is_causal=bool(options)), *whole)
    found = gradients(module(*shards, **options), *shards)
    pairs = zip(found, expected, strict=True)
    worst = max((a - b.chunk(n, 1)[rank]).abs().max() / b.abs().max() for a, b in pairs)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{name:<45} largest relative error against one device: {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    dist.init_process_group("gloo")
    compare("by hand", ByHand())
    compare("one call", OneCall())
    compare("one call, causal, 2 key heads for 4 queries", OneCall(), kv_heads=2, is_causal=True)
    dist.destroy_process_group()
