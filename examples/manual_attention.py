"""Compare a distributed attention of torch.distributed ops with one call of `ring_attention`.

    torchrun --nproc-per-node 2 examples/manual_attention.py

`ManualAttention` is the version of tutorials: correct, forward and backward, for full attention of equal shards.
`OneCall` takes the same shards; causal masks, windows, documents, dropout, grouped heads and zigzag shards are options.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile


class Gather(torch.autograd.Function):
    """An all-gather of shards to (n, ...). The backward sums all ranks' gradients of the local shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Gather the shards of all ranks."""
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, x)
        return torch.stack(shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Sum the gradients of this rank's shard over all ranks."""
        dist.all_reduce(grad := grad.contiguous())
        return grad[dist.get_rank()]


class ManualAttention(nn.Module):
    """Full attention on shards: q, k, v (B, s, H, D), one shard per rank, to (B, s, H, D).

    All ranks' keys are gathered, and the results of their blocks are merged by log-sum-exp.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return this rank's rows of the attention."""
        q = q.transpose(1, 2)
        everyone = zip(Gather.apply(k), Gather.apply(v), strict=True)
        out, lse = self.block(q, *next(everyone))
        for keys, values in everyone:
            out, lse = self.merge(out, lse, *self.block(q, keys, values))
        return out.transpose(1, 2)

    def block(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention to a block of the keys, and its log-sum-exp."""
        scores = q @ k.permute(0, 2, 3, 1) / q.shape[-1] ** 0.5
        return scores.softmax(-1) @ v.transpose(1, 2), scores.logsumexp(-1, keepdim=True)

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention to both sets of keys, and its log-sum-exp."""
        total = torch.logaddexp(lse, other_lse)
        return out * (lse - total).exp() + other * (other_lse - total).exp(), total


class OneCall(nn.Module):
    """One call for this attention. A transpose is a view, and the ops accept any strides."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        """Return this rank's rows of the attention."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sp_compile.ring_attention(q, k, v, **options).transpose(1, 2)


def one_device(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Return single-device attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True).transpose(1, 2)


def gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Return the output and the gradients of its sum of squares."""
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def compare(name: str, module: nn.Module, kv_heads: int = 4, **options: bool) -> None:
    """Print the largest relative error of a module's output and gradients against a single device."""
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
    compare("manual", ManualAttention())
    compare("one call", OneCall())
    compare("one call, causal, 2 key heads for 4 queries", OneCall(), kv_heads=2, is_causal=True)
    dist.destroy_process_group()
