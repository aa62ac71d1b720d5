"""Sequence-parallel attention as published: eager modules that a model calls on its shard.

Both take q, k, v and return the result as (B, s, H, D), causal, one shard per rank. They follow the papers and the
behavior of the well-known repositories, and are the baseline of sp_compile.

    UlyssesAttention       arXiv:2309.14509: four all-to-alls, a permuted copy at each; shards are contiguous
    ZigzagRingAttention    arXiv:2310.01889: send and receive K and V, a flash block a step, merged by log-sum-exp;
                           shards are zigzag, rank r of n holds chunks r and 2n - 1 - r of 2n
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten
Pair = tuple[Tensor, Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, S, D) -> (B, H, S, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class UlyssesAttention(nn.Module):
    """Whole sequences and a share of the heads, between two kinds of all-to-all. attend: what is done to these."""

    def __init__(self, group: dist.ProcessGroup, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal) -> None:
        super().__init__()
        self.group, self.attend = group, attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_Exchange.apply(self.group, x, True).transpose(1, 2) for x in (q, k, v))
        return _Exchange.apply(self.group, self.attend(q, k, v).transpose(1, 2), False)


class _Exchange(torch.autograd.Function):
    """(B, s, H, D) -> (B, S, H / n, D), or back."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(x, group) if to_heads else _to_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, _Exchange.apply(ctx.group, grad, not ctx.to_heads), None


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    n = group.size()
    sent = x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(1, 0, 2, 3, 4).contiguous().flatten(1, 2)


def _to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    n = group.size()
    sent = x.unflatten(1, (n, -1)).permute(1, 0, 2, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(1, 2, 0, 3, 4).contiguous().flatten(2, 3)


class ZigzagRingAttention(nn.Module):
    """Keys and values go round; step i attends to the keys of the rank i before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return _Ring.apply(self.group, q, k, v).transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, half = (k, v), q.shape[2] // 2
        out, lse = _flash(q, k, v, causal=True)
        out = out.float()
        coming = _Shift(group, k, v)
        for step in range(1, group.size()):
            k, v = coming.wait()
            if step + 1 < group.size():
                coming = _Shift(group, k, v)
            if step <= group.rank():
                out, lse = _merged(out, lse, *_flash(q, k[:, :, :half], v[:, :, :half], causal=False))
            else:
                late, late_lse = _flash(q[:, :, half:], k, v, causal=False)
                late, late_lse = _merged(out[:, :, half:], lse[:, :, half:], late, late_lse)
                out[:, :, half:], lse[:, :, half:] = late, late_lse
        out = out.to(q.dtype)
        ctx.save_for_backward(q, *own, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        group, half, home = ctx.group, q.shape[2] // 2, None
        given = grad.contiguous(), out, lse
        late = [x[:, :, half:] for x in given]
        dq, dk, dv = (x.float() for x in _flash_backward(given, q, k, v, causal=True))
        for step in range(1, group.size()):
            coming = _Shift(group, k, v)
            home = _Shift(group, dk, dv)
            k, v = coming.wait()
            if step <= group.rank():
                parts = _flash_backward(given, q, k[:, :, :half], v[:, :, :half], causal=False)
                dk, dv = home.wait()
                dq += parts[0]
                dk[:, :, :half] += parts[1]
                dv[:, :, :half] += parts[2]
            else:
                parts = _flash_backward(late, q[:, :, half:], k, v, causal=False)
                dk, dv = home.wait()
                dq[:, :, half:] += parts[0]
                dk += parts[1]
                dv += parts[2]
        dk, dv = _Shift(group, dk, dv).wait()
        return None, dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class _Shift:
    """A transfer of two tensors to the next rank and two from the previous one. Sent tensors are kept until `wait`."""

    def __init__(self, group: dist.ProcessGroup, a: Tensor, b: Tensor) -> None:
        there, here = ((group.rank() + step) % group.size() for step in (1, -1))
        self._sent = [a.contiguous(), b.contiguous()]
        self._received = [torch.empty_like(x) for x in self._sent]
        self._works = []
        for sent, received in zip(self._sent, self._received, strict=True):
            self._works.append(dist.isend(sent, group=group, group_dst=there))
            self._works.append(dist.irecv(received, group=group, group_src=here))

    def wait(self) -> Pair:
        for work in self._works:
            work.wait()
        return self._received[0], self._received[1]


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Pair:
    """(B, H, s, D) and its log-sum-exp (B, H, s)."""
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _flash_backward(
    given: tuple[Tensor, ...] | list[Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    grad, out, lse = given
    if q.is_cuda:
        lengths, unused = (None, None, q.shape[2], k.shape[2]), q.new_empty((), dtype=torch.int64)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, unused, unused
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Pair:
    """Attention over two sets of keys from that over each."""
    share = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    return out - share * (out - other), lse - F.logsigmoid(lse - other_lse)


def zigzag(x: Tensor, rank: int, n: int) -> Tensor:
    """Rank's rows (B, s, ...) of a whole x (B, S, ...)."""
    chunks = x.chunk(2 * n, 1)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], 1)
