"""Define the attention operators over sequence shards: ring, hybrid and gathered.

q (B, H, s, D), k (B, Hkv, t, D) and v (B, Hkv, t, E) are this rank's shards, described by q_frame and k_frame. The
result is (B, H, s, E), or (B, H, s, E + 1) with log-sum-exps. H is a multiple of Hkv. In the global view each operator
computes attention over the full sequences. ``ShardArgs`` describes the arguments that they share.

    ring           keys and values rotate over the ranks, queries do not move (``ring_kernel.py``)
    neighborhood   adjacent ranks, ``stride`` (or ``ulysses``) of them, that exchange heads for rows (Ulysses):
                   q (B, H, s, D) -> (B, H / stride, stride * s, D), and k and v likewise; the result back
    hybrid         Ulysses in each neighborhood; rings link every stride-th rank
    gathered       each rank all-gathers keys and values (``gathered_kernel.py``)
    zigzag         rank r stores chunks r and 2n - 1 - r of 2n, which balances causal attention
                   (``collectives/zigzag.py``)
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, frame_folds, is_known
from sp_compile.lowering.base.library import composite
from sp_compile.lowering.collectives.zigzag import to_zigzag_rows
from sp_compile.lowering.comm import routes

from .attention_autograd import attention
from .gathered_kernel import GatheredKeys
from .masked_attention import autocast, autocast_args
from .op_args import HEADS, SEQUENCE, LocalArgs, ShardArgs
from .ring_kernel import RingKeys

ATTENTION_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {ShardArgs.schema()}"


def _attend_in_rings(
    q: Tensor, k: Tensor, v: Tensor, args: ShardArgs, stride: int, steps: int, grads: str, mask_rows: bool = False
) -> Tensor:
    """Compute ring attention (a stride of 1), or hybrid attention in neighborhoods of ``stride`` ranks.

    In hybrid attention, each neighborhood exchanges heads for rows, and rings link every stride-th rank. With
    ``args.balance``, contiguous shards are exchanged for zigzag ones first, and the result back. For ``steps``,
    ``grads`` and ``mask_rows`` see `ring_attention`.
    """
    if args.balance:
        q, k, v = to_zigzag_rows([q, k, v], args.n, args.group)
        out = _attend_in_rings(q, k, v, _to_zigzag(args, mask_rows), stride, steps, grads, mask_rows)
        return to_zigzag_rows([out], args.n, args.group, back=True)[0]
    if stride > 1:
        q, k, v = _to_heads(q, k, v, args, stride)
    keys = RingKeys(list(args.k_frame), args.n, stride, steps, grads, args.group)
    local = autocast_args(_local_args(args, q, stride, mask_rows))
    out = attention(q, k, v, local, keys, args.local_sinks(stride), args.lse)
    out = _to_sequence(out, args, stride) if stride > 1 else out
    return _zero_padding_lse(out, args)


def _local_args(args: ShardArgs, q: Tensor, stride: int, mask_rows: bool) -> LocalArgs:
    """Return the arguments for this rank's queries, whose rows are selected from the mask.

    With ``mask_rows`` the mask is sharded, too: it has only the rows of this rank. ``stride`` is the number of ranks of
    a neighborhood, 1 if none exchange heads for rows.
    """
    if not mask_rows:
        return args.local(q, stride)
    without_mask = replace(args, mask=None).local(q, stride)  # selects no rows
    return replace(without_mask, mask=args.mask)


def _to_zigzag(args: ShardArgs, mask_rows: bool) -> ShardArgs:
    """Return the arguments for operands in the zigzag layout; with ``mask_rows`` the mask is exchanged to it, too."""
    layout = args.to_zigzag()
    if not mask_rows or args.mask is None:
        return layout
    return replace(layout, mask=to_zigzag_rows([args.mask], args.n, args.group)[0])


def _zero_padding_lse(out: Tensor, args: ShardArgs) -> Tensor:
    """Return the result with padded rows set to 0, since their log-sum-exps of -inf would make later values infinite.

    Without ``args.lse`` the result has no log-sum-exps and is returned unchanged.
    """
    return torch.ops.sp.mask(out, SEQUENCE, args.q_frame, 0, args.n, args.group) if args.lse else out


def _to_heads(q: Tensor, k: Tensor, v: Tensor, args: ShardArgs, ranks: int) -> list[Tensor]:
    """Exchange this rank's rows of all heads for the rows of its neighborhood of some heads (Ulysses).

    A neighborhood is ``ranks`` adjacent ranks. The exchange is one all-to-all among them, or two if keys have another
    length than queries. Padding is not removed.

    Args:
        q: (B, H, s, D).
        k: (B, Hkv, t, D). Key heads are repeated until ``ranks`` divides their number.
        v: (B, Hkv, t, E).
        args: Arguments of the sharded operator.
        ranks: The number of ranks of a neighborhood.

    Returns:
        [q, k, v], shaped (B, heads / ranks, ranks * rows, width).
    """
    keys, values = (_repeat_key_heads(x, ranks) for x in (k, v))
    heads, route = keys.shape[HEADS], routes.neighborhood_route(args.group, ranks)
    have_equal_rows = is_known(q.shape[SEQUENCE] == keys.shape[SEQUENCE])
    exchanges = [[q, keys, values]] if have_equal_rows else [[q], [keys, values]]
    results = []
    for xs, frame in zip(exchanges, (args.q_frame, args.k_frame)):
        row_frame = _neighborhood_frame(frame, xs[0].shape[SEQUENCE] * ranks)
        # The heads are split without padding. The frame counts key heads, also for q: its H dim is (key heads, query
        # heads of each), so that a rank gets the query heads of its key heads.
        head_frame = [1, heads, 0, heads]
        results += torch.ops.sp.all_to_all(xs, HEADS, head_frame, SEQUENCE, row_frame, ranks, route)
    return results


def _to_sequence(out: Tensor, args: ShardArgs, ranks: int) -> Tensor:
    """Exchange the result, all rows of a neighborhood of this rank's heads, for this rank's rows of all heads.

    Args:
        out: (B, H / ranks, ranks * s, E).
        args: Arguments of the sharded operator.
        ranks: The number of ranks of a neighborhood.

    Returns:
        (B, H, s, E).
    """
    row_frame, heads = _neighborhood_frame(args.q_frame, out.shape[SEQUENCE]), out.shape[HEADS] * ranks
    head_frame = [1, heads, 0, heads]  # outer, size, start, length: all heads, without padding
    route = routes.neighborhood_route(args.group, ranks)
    return torch.ops.sp.all_to_all([out], SEQUENCE, row_frame, HEADS, head_frame, ranks, route)[0]


def _repeat_key_heads(x: Tensor, ranks: int) -> Tensor:
    """Repeat key heads until ``ranks`` divides their number; the backward sums over the repetitions."""
    repeats = math.lcm(x.shape[HEADS], ranks) // x.shape[HEADS]
    return x if repeats == 1 else x.repeat_interleave(repeats, HEADS)


def _neighborhood_frame(frame: FrameArg, length: int) -> FrameArg:
    """Return a frame in which all ``length`` rows of a neighborhood are valid, with the layout of ``frame``.

    ``sp::all_to_all`` then removes no padding. Zigzag rows arrive in sequence order: the first chunks of all ranks,
    then their second chunks in reverse.
    """
    return [1, length, 0, length, frame_folds(frame)]  # outer, size, start, length, chunks per rank


@composite(
    f"ring_attention({ATTENTION_ARGUMENTS}, int steps, str grads, bool mask_rows=False) -> Tensor", padded="finite"
)
def ring_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """Compute attention over Shard(2) operands with a ring exchange of keys and values over n ranks.

    Source: arXiv:2310.01889; see ``ring_kernel.py``.

    Args:
        q: (B, H, s, D), Shard(2).
        k: (B, Hkv, t, D), Shard(2).
        v: (B, Hkv, t, E), Shard(2).
        *arguments: The fields of ``ShardArgs``, then:
            steps: The number of ranks whose keys a query needs, counted backward from its own rank (n, or fewer for a
                sliding window).
            grads: "travel" or "scatter": how dK and dV return to their owners.
            mask_rows: Whether the mask is Shard(2), too, and has the rows of this rank's queries only.

    Returns:
        (B, H, s, E), Shard(2).

    Bytes: (steps - 1) * bytes(k, v) in the forward; the same in the backward, and dK and dV in float32.
    """
    args, (steps, grads, *optional) = ShardArgs.of(arguments)  # the dispatcher omits mask_rows if it is False
    q, k, v = autocast(q, k, v)
    return _attend_in_rings(q, k, v, args, stride=1, steps=steps, grads=grads, mask_rows=any(optional))


@composite(f"hybrid_attention({ATTENTION_ARGUMENTS}, int ulysses, str grads) -> Tensor", padded="finite")
def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """Compute attention over Shard(2) operands with Ulysses in groups of ranks and a ring between them.

    Source: USP, arXiv:2405.07719.

    Args:
        q: (B, H, s, D), Shard(2).
        k: (B, Hkv, t, D), Shard(2).
        v: (B, Hkv, t, E), Shard(2).
        *arguments: The fields of ``ShardArgs``, then:
            ulysses: The number of ranks of a neighborhood, which split the heads. Divides n and the number of query
                heads.
            grads: As for ``ring_attention``.

    Returns:
        (B, H, s, E), Shard(2).

    Bytes: those of Ulysses over ``ulysses`` ranks and of a ring over n / ulysses ranks.
    """
    args, (ulysses, grads) = ShardArgs.of(arguments)
    q, k, v = autocast(q, k, v)
    return _attend_in_rings(q, k, v, args, stride=ulysses, steps=args.n // ulysses, grads=grads)


@composite(
    f"gathered_attention({ATTENTION_ARGUMENTS}, Tensor[]? orders=None, bool mask_rows=False) -> Tensor", padded="finite"
)
def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """Compute attention over Shard(2) operands with all-gathered keys and values; save only shards.

    Args:
        q: (B, H, s, D), Shard(2).
        k: (B, Hkv, t, D), Shard(2). If k_frame is [], k and v are replicated and their cotangents are partial.
        v: (B, Hkv, t, E), Shard(2).
        *arguments: The fields of ``ShardArgs``, then:
            orders: The order in which the ranks store the keys and its inverse, int64 (T,) each. The gathered keys are
                permuted to sequence order, which is also the order of cols.
            mask_rows: As for ``ring_attention``.

    Returns:
        (B, H, s, E), Shard(2).

    Bytes: (n - 1) * bytes(k, v) in the forward; the same in the backward, and dK and dV in float32.
    """
    args, optional = ShardArgs.of(arguments)  # the dispatcher omits trailing arguments with default values
    orders = optional[0] if optional else None
    mask_rows = len(optional) > 1 and bool(optional[1])
    q, k, v = autocast(q, k, v)
    keys = GatheredKeys(list(args.k_frame) or None, args.n, args.group, orders)
    # With ``balance``, the queries are in the zigzag layout during the computation. Keys are gathered as they are.
    query_args = _to_zigzag(args, mask_rows) if args.balance else args
    q = to_zigzag_rows([q], args.n, args.group)[0] if args.balance else q
    local = autocast_args(_local_args(query_args, q, stride=1, mask_rows=mask_rows))
    out = attention(q, k, v, local, keys, args.sinks, args.lse)
    out = _zero_padding_lse(out, query_args)
    return to_zigzag_rows([out], args.n, args.group, back=True)[0] if args.balance else out
