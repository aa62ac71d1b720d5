"""``sp::ring_attention``, ``sp::hybrid_attention``, ``sp::gathered_attention``: attention whose sequence is split.

q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E) are this rank's shards as q_frame and k_frame tell; the result is
(B, H, s, E), or E + 1 with log-sum-exps. H is a multiple of Hkv. In the global view each of them is the attention of
the whole sequences. The arguments that they share are those of ``ShardArgs``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.library import composite

from .attention_autograd import attention
from .gathered_kernel import GatheredKeys
from .masked_attention import autocast, autocast_args
from .op_args import SEQUENCE, ShardArgs
from .ring_kernel import RingKeys
from .ulysses_kernel import to_heads, to_sequence
from .zigzag import to_zigzag_rows

ATTENTION_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {ShardArgs.schema()}"


def _ring_keys(q: Tensor, k: Tensor, v: Tensor, args: ShardArgs, stride: int, steps: int, grads: str) -> Tensor:
    if args.balance:
        q, k, v = to_zigzag_rows([q, k, v], args.n, args.group)
        out = _ring_keys(q, k, v, args.to_zigzag(), stride, steps, grads)
        return to_zigzag_rows([out], args.n, args.group, back=True)[0]
    if stride > 1:
        q, k, v = to_heads(q, k, v, args, stride)
    keys = RingKeys(list(args.k_frame), args.n, stride, steps, grads, args.group)
    out = attention(q, k, v, autocast_args(args.local(q, stride)), keys, args.local_sinks(stride), args.lse)
    return _zero_padding_lse(to_sequence(out, args, stride) if stride > 1 else out, args)


def _zero_padding_lse(out: Tensor, args: ShardArgs) -> Tensor:
    """Log-sum-exps of padding, which attends to nothing, are 0 and not -inf: whoever computes with them has numbers."""
    return torch.ops.sp.mask(out, SEQUENCE, args.q_frame, 0, args.n, args.group) if args.lse else out


@composite(f"ring_attention({ATTENTION_ARGUMENTS}, int steps, str grads) -> Tensor", padded="finite")
def ring_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shard(2), Shard(2), Shard(2) -> Shard(2): keys and values go round a ring of n ranks.

    steps: how many ranks' keys any query needs, counted backwards from its own (n, or fewer for a sliding window).
    grads: "travel" or "scatter", the way home of dK and dV. Bytes: (steps - 1) * bytes(k, v), as many again in the
    backward, and those of dK and dV in float32. Source: arXiv:2310.01889; see ``ring_kernel.py``.
    """
    args, (steps, grads) = ShardArgs.of(rest)
    q, k, v = autocast(q, k, v)
    return _ring_keys(q, k, v, args, 1, steps, grads)


@composite(f"hybrid_attention({ATTENTION_ARGUMENTS}, int ulysses, str grads) -> Tensor", padded="finite")
def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shard(2), Shard(2), Shard(2) -> Shard(2): heads split over `ulysses` neighbours, a ring between neighbourhoods.

    `ulysses` divides n and the query heads. Bytes: those of Ulysses on `ulysses` ranks and of a ring of n / ulysses.
    Source: USP, arXiv:2405.07719.
    """
    args, (ulysses, grads) = ShardArgs.of(rest)
    q, k, v = autocast(q, k, v)
    return _ring_keys(q, k, v, args, ulysses, args.n // ulysses, grads)


@composite(f"gathered_attention({ATTENTION_ARGUMENTS}, Tensor[]? orders=None) -> Tensor", padded="finite")
def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shard(2), Shard(2), Shard(2) -> Shard(2): keys and values are gathered; only shards are kept for the backward.

    k_frame []: the keys are whole on every rank already, and their cotangents partial. orders: an order of the keys in
    which ranks hold them, and its inverse, int64 (T,) each; once together they are put in their own, which is that of
    cols. Bytes: (n - 1) * bytes(k, v),
    as many again in the backward, and those of dK and dV in float32.
    """
    args, others = ShardArgs.of(rest)
    q, k, v = autocast(q, k, v)
    keys = GatheredKeys(list(args.k_frame) or None, args.n, args.group, *others)
    if not args.balance:
        out = attention(q, k, v, autocast_args(args.local(q, 1)), keys, args.sinks, args.lse)
        return _zero_padding_lse(out, args)
    (q,), inside = to_zigzag_rows([q], args.n, args.group), args.to_zigzag()
    out = attention(q, k, v, autocast_args(inside.local(q, 1)), keys, args.sinks, args.lse)
    out = _zero_padding_lse(out, inside)
    return to_zigzag_rows([out], args.n, args.group, back=True)[0]
