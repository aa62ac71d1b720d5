"""Compute attention over a sequence that ranks share, on the shards of q, k and v of each rank.

Every rank passes its own shards and receives its shard of the result. Gradients are returned for the shards. The
functions run in eager mode and inside `torch.compile`.

    ulysses_attention   exchanges heads for sequence
    ring_attention      passes keys and values from rank to rank
    hybrid_attention    combines both
    gathered_attention  gathers keys and values

For modules that store (B, s, H, D), pass q.transpose(1, 2) and transpose the result. Both are views. Under autocast,
q, k and v are cast as `scaled_dot_product_attention` casts them.
"""
# Functions of more than 60 lines because each public function documents all of its arguments; the code is short.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.attention.masked_attention import autocast
from sp_compile.lowering.base.ranks import Mesh, Ranks, ranks_of

from .attention_call import AttentionCall, AttentionMethod, AttentionOptions

sp = torch.ops.sp


def _run_hybrid(call: AttentionCall, args: tuple[Any, ...]) -> Tensor:
    """Return the hybrid operator's result; its width is the number of ranks that exchange heads (Ulysses: all)."""
    return sp.hybrid_attention(*args, call.width, call.kv_grads)


def _run_ring(call: AttentionCall, args: tuple[Any, ...]) -> Tensor:
    """Return the ring operator's result with the number of key blocks that the mask requires."""
    return sp.ring_attention(*args, call.steps(), call.kv_grads)


ULYSSES_FUNCTION = AttentionMethod("ulysses_attention", _run_hybrid)
HYBRID_FUNCTION = AttentionMethod("hybrid_attention", _run_hybrid, merges=True)
RING_FUNCTION = AttentionMethod("ring_attention", _run_ring, merges=True, skips_steps=True)
GATHERED_FUNCTION = AttentionMethod("gathered_attention", lambda call, args: sp.gathered_attention(*args))


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    layout: str = "contiguous",
    length: int | None = None,
    kv_length: int | None = None,
    is_causal: bool = False,
    window: int | None = None,
    documents: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Compute attention with two all-to-alls that exchange heads for sequence.

    The number of ranks must divide H. Algorithm: DeepSpeed-Ulysses (arXiv:2309.14509).

    Args:
        q: (B, H, s, D), the queries of this rank, any floating dtype and strides. All ranks pass the same s.
        k: (B, Hkv, t, D), the keys of this rank, with q's dtype and device. H is a multiple of Hkv.
        v: (B, Hkv, t, E), the values of this rank, with q's dtype and device.
        mesh: The ranks that share the sequence: a ProcessGroup, a DeviceMesh of one axis, of axes ("ring", "ulysses")
            or with an axis "sp". None selects the default process group.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n, for even s and t.
        length: Rows of the global queries without padding, from 1 to n * s. None: no row is padding. Results of padded
            rows are undefined.
        kv_length: Rows of the global keys without padding, from 1 to n * t; for self-attention, the same as `length`.
            None: no row is padding. No query attends to padded keys.
        is_causal: If True, query i attends to keys 0 to i of the sequence.
        window: Attend only to keys less than this number of positions away. None: no limit.
        documents: (B | 1, S), integers, replicated: the document of each position. Queries attend only to keys of their
            own document, and S is the length of queries and keys. None: one document.
        attn_mask: Broadcastable to (B, H, S, T), replicated: bool (True: attend) or a floating dtype (added to the
            scores). Its gradient is the contribution of this rank. None: no mask.
        dropout_p: Probability to drop a weight, at least 0 and less than 1.
        seed: Dropout seed: an int, or an int64 tensor of shape (). One seed drops the same weights on any number of
            ranks. None: drawn from the generator of this rank.
        scale: Factor of the scores. None: 1 / sqrt(D).
        sinks: (H,), any floating dtype, replicated: a logit for each query head that takes part in the softmax and adds
            no value. Its gradient is the contribution of this rank. None: no sinks.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (B, H, s, E) with q's dtype, the rows of this rank.

    Raises:
        SpError: An argument is invalid on a rank (SP451 to SP455, SP502 to SP507), the calls of the ranks differ
            (SP508), or the mesh does not define the ranks (SP111 to SP116).
    """
    options = AttentionOptions(
        layout=layout, length=length, kv_length=kv_length, is_causal=is_causal, window=window, documents=documents,
        attn_mask=attn_mask, dropout_p=dropout_p, seed=seed, scale=scale, sinks=sinks, check=check,
    )  # fmt: skip
    ranks = ranks_of(mesh)
    return _call_attention(ULYSSES_FUNCTION, q, k, v, ranks, options, width=ranks.n)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    kv_grads: str = "travel",
    layout: str = "contiguous",
    length: int | None = None,
    kv_length: int | None = None,
    is_causal: bool = False,
    window: int | None = None,
    documents: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Compute attention on a ring of ranks that passes keys and values on in n - 1 shifts.

    A causal window needs fewer shifts. Any number of heads is supported. Algorithm: Ring Attention (arXiv:2310.01889).

    Args:
        q: (B, H, s, D), the queries of this rank, any floating dtype and strides. All ranks pass the same s.
        k: (B, Hkv, t, D), the keys of this rank, with q's dtype and device. H is a multiple of Hkv.
        v: (B, Hkv, t, E), the values of this rank, with q's dtype and device.
        mesh: The ranks that share the sequence: a ProcessGroup, a DeviceMesh of one axis, of axes ("ring", "ulysses")
            or with an axis "sp". None selects the default process group.
        kv_grads: The exchange of the gradients of k and v. "travel": they follow the keys around the ring. "scatter":
            they return in one exchange.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n, for even s and t.
        length: Rows of the global queries without padding, from 1 to n * s. None: no row is padding. Results of padded
            rows are undefined.
        kv_length: Rows of the global keys without padding, from 1 to n * t; for self-attention, the same as `length`.
            None: no row is padding. No query attends to padded keys.
        is_causal: If True, query i attends to keys 0 to i of the sequence.
        window: Attend only to keys less than this number of positions away. None: no limit.
        documents: (B | 1, S), integers, replicated: the document of each position. Queries attend only to keys of their
            own document, and S is the length of queries and keys. None: one document.
        attn_mask: Broadcastable to (B, H, S, T), replicated: bool (True: attend) or a floating dtype (added to the
            scores). Its gradient is the contribution of this rank. None: no mask.
        dropout_p: Probability to drop a weight, at least 0 and less than 1.
        seed: Dropout seed: an int, or an int64 tensor of shape (). One seed drops the same weights on any number of
            ranks. None: drawn from the generator of this rank.
        scale: Factor of the scores. None: 1 / sqrt(D).
        sinks: (H,), any floating dtype, replicated: a logit for each query head that takes part in the softmax and adds
            no value. Its gradient is the contribution of this rank. None: no sinks.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (B, H, s, E) with q's dtype, the rows of this rank.

    Raises:
        SpError: An argument is invalid on a rank (SP451 to SP455, SP502 to SP507), the calls of the ranks differ
            (SP508), or the mesh does not define the ranks (SP111 to SP116).
    """
    options = AttentionOptions(
        layout=layout, length=length, kv_length=kv_length, is_causal=is_causal, window=window, documents=documents,
        attn_mask=attn_mask, dropout_p=dropout_p, seed=seed, scale=scale, sinks=sinks, check=check,
    )  # fmt: skip
    width = 1  # no heads are exchanged
    return _call_attention(RING_FUNCTION, q, k, v, ranks_of(mesh), options, width=width, kv_grads=kv_grads)


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    ulysses: int | None = None,
    kv_grads: str = "travel",
    layout: str = "contiguous",
    length: int | None = None,
    kv_length: int | None = None,
    is_causal: bool = False,
    window: int | None = None,
    documents: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Compute attention with Ulysses among adjacent ranks and a ring between these groups of ranks.

    Algorithm: unified sequence parallelism (arXiv:2405.07719).

    Args:
        q: (B, H, s, D), the queries of this rank, any floating dtype and strides. All ranks pass the same s.
        k: (B, Hkv, t, D), the keys of this rank, with q's dtype and device. H is a multiple of Hkv.
        v: (B, Hkv, t, E), the values of this rank, with q's dtype and device.
        mesh: The ranks that share the sequence: a ProcessGroup, a DeviceMesh of one axis, of axes ("ring", "ulysses")
            or with an axis "sp". None selects the default process group.
        ulysses: Number of adjacent ranks that exchange heads, a divisor of n and H. None: the size of the axis
            "ulysses" of the mesh.
        kv_grads: The exchange of the gradients of k and v. "travel": they follow the keys around the ring. "scatter":
            they return in one exchange.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n, for even s and t.
        length: Rows of the global queries without padding, from 1 to n * s. None: no row is padding. Results of padded
            rows are undefined.
        kv_length: Rows of the global keys without padding, from 1 to n * t; for self-attention, the same as `length`.
            None: no row is padding. No query attends to padded keys.
        is_causal: If True, query i attends to keys 0 to i of the sequence.
        window: Attend only to keys less than this number of positions away. None: no limit.
        documents: (B | 1, S), integers, replicated: the document of each position. Queries attend only to keys of their
            own document, and S is the length of queries and keys. None: one document.
        attn_mask: Broadcastable to (B, H, S, T), replicated: bool (True: attend) or a floating dtype (added to the
            scores). Its gradient is the contribution of this rank. None: no mask.
        dropout_p: Probability to drop a weight, at least 0 and less than 1.
        seed: Dropout seed: an int, or an int64 tensor of shape (). One seed drops the same weights on any number of
            ranks. None: drawn from the generator of this rank.
        scale: Factor of the scores. None: 1 / sqrt(D).
        sinks: (H,), any floating dtype, replicated: a logit for each query head that takes part in the softmax and adds
            no value. Its gradient is the contribution of this rank. None: no sinks.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (B, H, s, E) with q's dtype, the rows of this rank.

    Raises:
        SpError: An argument is invalid on a rank (SP451 to SP455, SP502 to SP507), the calls of the ranks differ
            (SP508), or the mesh does not define the ranks (SP111 to SP116).
    """
    options = AttentionOptions(
        layout=layout, length=length, kv_length=kv_length, is_causal=is_causal, window=window, documents=documents,
        attn_mask=attn_mask, dropout_p=dropout_p, seed=seed, scale=scale, sinks=sinks, check=check,
    )  # fmt: skip
    ranks = ranks_of(mesh)
    width = ulysses if ulysses is not None else ranks.ulysses
    if ranks.n == 1:  # nothing is exchanged, so the mesh need not have an axis "ulysses"
        width = 1
    return _call_attention(HYBRID_FUNCTION, q, k, v, ranks, options, width=width, kv_grads=kv_grads)


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    layout: str = "contiguous",
    length: int | None = None,
    kv_length: int | None = None,
    is_causal: bool = False,
    window: int | None = None,
    documents: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Compute attention over gathered keys and values, which the backward gathers again.

    Any number of heads is supported.

    Args:
        q: (B, H, s, D), the queries of this rank, any floating dtype and strides. All ranks pass the same s.
        k: (B, Hkv, t, D), the keys of this rank, with q's dtype and device. H is a multiple of Hkv.
        v: (B, Hkv, t, E), the values of this rank, with q's dtype and device.
        mesh: The ranks that share the sequence: a ProcessGroup, a DeviceMesh of one axis, of axes ("ring", "ulysses")
            or with an axis "sp". None selects the default process group.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n, for even s and t.
        length: Rows of the global queries without padding, from 1 to n * s. None: no row is padding. Results of padded
            rows are undefined.
        kv_length: Rows of the global keys without padding, from 1 to n * t; for self-attention, the same as `length`.
            None: no row is padding. No query attends to padded keys.
        is_causal: If True, query i attends to keys 0 to i of the sequence.
        window: Attend only to keys less than this number of positions away. None: no limit.
        documents: (B | 1, S), integers, replicated: the document of each position. Queries attend only to keys of their
            own document, and S is the length of queries and keys. None: one document.
        attn_mask: Broadcastable to (B, H, S, T), replicated: bool (True: attend) or a floating dtype (added to the
            scores). Its gradient is the contribution of this rank. None: no mask.
        dropout_p: Probability to drop a weight, at least 0 and less than 1.
        seed: Dropout seed: an int, or an int64 tensor of shape (). One seed drops the same weights on any number of
            ranks. None: drawn from the generator of this rank.
        scale: Factor of the scores. None: 1 / sqrt(D).
        sinks: (H,), any floating dtype, replicated: a logit for each query head that takes part in the softmax and adds
            no value. Its gradient is the contribution of this rank. None: no sinks.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (B, H, s, E) with q's dtype, the rows of this rank.

    Raises:
        SpError: An argument is invalid on a rank (SP451 to SP455, SP502 to SP507), the calls of the ranks differ
            (SP508), or the mesh does not define the ranks (SP111 to SP116).
    """
    options = AttentionOptions(
        layout=layout, length=length, kv_length=kv_length, is_causal=is_causal, window=window, documents=documents,
        attn_mask=attn_mask, dropout_p=dropout_p, seed=seed, scale=scale, sinks=sinks, check=check,
    )  # fmt: skip
    return _call_attention(GATHERED_FUNCTION, q, k, v, ranks_of(mesh), options, width=1)  # no heads are exchanged


def _call_attention(
    method: AttentionMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Ranks,
    options: AttentionOptions,
    width: int | None,
    kv_grads: str = "travel",
) -> Tensor:
    """Run an attention function on the shards of this rank, with the casts of autocast.

    Args:
        method: The implementation of the function.
        q: The queries, as in the public functions.
        k: The keys.
        v: The values.
        ranks: The ranks that share the sequence.
        options: The arguments that all attention functions have.
        width: Number of adjacent ranks that exchange heads; None if it is not known, which raises an error.
        kv_grads: As in `ring_attention`.

    Returns:
        The rows of this rank.
    """
    mask = options.attn_mask
    if isinstance(mask, Tensor):
        if mask.ndim < 4:
            mask = mask[(None,) * (4 - mask.ndim)]  # leading dims of size 1
        (mask,) = autocast(mask)
        options = replace(options, attn_mask=mask)
    are_tensors = all(isinstance(x, Tensor) for x in (q, k, v))  # otherwise `run` raises an error on all ranks
    if are_tensors:
        q, k, v = autocast(q, k, v)
    call = AttentionCall(
        name="attention", check=options.check, function=method, q=q, k=k, v=v, ranks=ranks, options=options,
        width=width, kv_grads=kv_grads,
    )  # fmt: skip
    device = q.device.type if are_tensors else "meta"  # torch.is_autocast_enabled does not accept "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return call.run()
    with torch.autocast(device, enabled=False):  # the operands are cast already
        return call.run()
