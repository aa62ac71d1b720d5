"""A package that stands for flash_attn: its functions, Functions and operators by their names, in arithmetic.

The operators are those of its versions from 2.7 on, which know no CPU; here they do, in any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Window = tuple[int, int]
LIBRARY = torch.library.Library("flash_attn", "DEF")
LIBRARY_3 = torch.library.Library("flash_attn_3", "DEF")
_OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? alibi_slopes"
)
_OF_DOCUMENTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
)
_GRADIENTS += "Tensor(c!)? dv, "


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *rest: Any) -> Tensor:
    """(S, H, D), of one document or batch entry."""
    left, right, cap, slopes = rest
    right = 0 if causal else right
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    place = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (place - key).abs()
    seen = ((key <= place + right) | (right < 0)) & ((key >= place - left) | (left < 0))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v)


def _dense(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    *options, slopes = options
    of_each = [slopes] * len(q) if slopes is None or slopes.ndim == 1 else slopes
    return torch.stack([_attention(*each, *options, one) for *each, one in zip(q, k, v, of_each)])


def _documents(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *options: Any) -> Tensor:
    spans = zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()))
    return torch.cat([_attention(q[slice(*a)], k[slice(*b)], v[slice(*b)], *options) for a, b in spans])


def _results(q: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    return out, q.new_zeros(q.shape[:-1], dtype=torch.float32), q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *rest: Any) -> tuple[Tensor, ...]:
    return _results(q, _dense(q, k, v, *rest[:-1]))


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, most_q: int, most_k: int, dropout_p: float,
    scale: float, causal: bool, left: int = -1, right: int = -1, cap: float = 0.0, slopes: Tensor | None = None,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The dispatcher leaves out what is the default."""
    return _results(q, _documents(q, k, v, q_ends, k_ends, scale, causal, left, right, cap, slopes))


def _gradients(attention: Any, dout: Tensor, qkv: tuple[Tensor, ...], places: Any) -> Tensor:
    for place, gradient in zip(places, torch.func.vjp(attention, *qkv)[1](dout)):
        place.copy_(gradient)
    return dout.new_empty(1)


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    *places, _, scale, causal, left, right, cap, slopes, _, _ = rest
    return _gradients(lambda *qkv: _dense(*qkv, scale, causal, left, right, cap, slopes), dout, (q, k, v), places)


def _varlen_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    dq, dk, dv, q_ends, k_ends, _, _, _, scale, causal, left, right, cap, slopes, _, _ = rest
    options = scale, causal, left, right, cap, slopes
    return _gradients(lambda *qkv: _documents(*qkv, q_ends, k_ends, *options), dout, (q, k, v), (dq, dk, dv))


def _register() -> None:
    four = "(Tensor, Tensor, Tensor, Tensor)"
    more = "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    more += "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None"
    qkv, ended = "Tensor q, Tensor k, Tensor v, ", "bool deterministic, Tensor? rng_state=None"
    schemas = {
        f"_flash_attn_forward({qkv}{_OPTIONS}, bool return_softmax) -> {four}": _forward,
        f"_flash_attn_varlen_forward({qkv}{_OF_DOCUMENTS}float dropout_p, float softmax_scale, bool causal, {more}) -> "
        f"{four}": _varlen_forward,
        f"_flash_attn_backward({_GRADIENTS}{_OPTIONS}, {ended}) -> Tensor": _backward,
        f"_flash_attn_varlen_backward({_GRADIENTS}{_OF_DOCUMENTS}{_OPTIONS}, {ended}) -> Tensor": _varlen_backward,
    }
    for schema, body in schemas.items():
        name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, body, "CPU")
        forward = "dq" not in schema
        fake = (lambda q, *_: _results(q, torch.empty_like(q))) if forward else (lambda dout, *_: dout.new_empty(1))
        torch.library.register_fake(f"flash_attn::{name}", lambda *a, f=fake, **k: f(*a), lib=LIBRARY)


def _forward_3(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return _results(q, _documents(q, k, v, q_ends, q_ends if k_ends is None else k_ends, *rest, -1, -1, 0.0, None))


def _register_3() -> None:
    """FlashAttention-3's, one kernel for documents and without; some of its arguments."""
    schema = "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    schema += "float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    schema += "int attention_chunk=0, float softcap=0.0, int num_splits=1) -> (Tensor, Tensor, Tensor, Tensor)"
    name = LIBRARY_3.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY_3.impl(name, _forward_3, "CPU")
    fake = lambda q, *_, **__: _results(q, torch.empty_like(q))  # noqa: E731
    torch.library.register_fake(f"flash_attn_3::{name}", fake, lib=LIBRARY_3)


_register()
_register_3()
ops, ops_3 = torch.ops.flash_attn, torch.ops.flash_attn_3


def _padded(*xs: Tensor) -> Iterator[Tensor]:
    """Pad heads to a multiple of 8, as the kernels require."""
    return (F.pad(x, [0, -x.shape[-1] % 8]) if x.shape[-1] % 8 else x for x in xs)


def forward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Window, softcap: float, alibi_slopes: Tensor | None, deterministic: bool, return_softmax: bool,
) -> Any:  # fmt: skip
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    width = q.shape[3]
    q, k, v = _padded(q, k, v)
    out, lse, dropped, state = ops._flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal=causal, window_size_left=window_size[0],
        window_size_right=window_size[1], softcap=softcap, alibi_slopes=alibi_slopes,
        return_softmax=return_softmax and dropout_p > 0,
    )  # fmt: skip
    ctx.save_for_backward(q, k, v, out, lse, state)
    ctx.options = dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes, deterministic
    out = out[..., :width]
    return (out, lse, dropped) if return_softmax else out


def backward(ctx: Any, dout: Tensor) -> list[Tensor]:
    q, k, v, out, lse, state = ctx.saved_tensors
    grads = [torch.empty_like(x) for x in (q, k, v)]
    width = dout.shape[3]
    (padded,) = _padded(dout)
    ops._flash_attn_backward(padded, q, k, v, out, lse, *grads, *ctx.options, rng_state=state)
    return [grad[..., :width] for grad in grads]


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
        return *backward(ctx, dout), *[None] * 8


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    """qkv (B, S, 3, H, D), whose parts its forward cuts off from autograd."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, causal: bool) -> Tensor:
        q, k, v = (qkv[:, :, i].detach() for i in range(3))
        scale = q.shape[-1] ** -0.5
        out, lse, _, state = ops._flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.options = 0.0, scale, causal, -1, -1, 0.0, None, False
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, state = ctx.saved_tensors
        dqkv = q.new_empty((*q.shape[:-2], 3, *q.shape[-2:]))
        grads = dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2]
        ops._flash_attn_backward(dout, q, k, v, out, lse, *grads, *ctx.options, rng_state=state)
        return dqkv, None


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, most_q: int, most_k: int,
        dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Window, softcap: float,
        alibi_slopes: Tensor | None, deterministic: bool,
    ) -> Tensor:  # fmt: skip
        softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse, _, state = ops._flash_attn_varlen_forward(
            q, k, v, q_ends, k_ends, most_q, most_k, dropout_p, softmax_scale, causal=causal,
            window_size_left=window_size[0], window_size_right=window_size[1], softcap=softcap,
            alibi_slopes=alibi_slopes, return_softmax=False, block_table=None,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, q_ends, k_ends, state)
        ctx.options = (
            most_q,
            most_k,
            dropout_p,
            softmax_scale,
            causal,
            *window_size,
            softcap,
            alibi_slopes,
            deterministic,
        )
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, q_ends, k_ends, state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        given = dout, q, k, v, out, lse, *grads, q_ends, k_ends, *ctx.options
        ops._flash_attn_varlen_backward(*given, rng_state=state)
        return *grads, *[None] * 11


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnFunc.apply(q, k, v, *given)


def flash_attn_qkvpacked_func(qkv: Tensor, causal: bool = False) -> Tensor:
    return FlashAttnQKVPackedFunc.apply(qkv, causal)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return FlashAttnVarlenFunc.apply(q, k, v, *ends, *given)
