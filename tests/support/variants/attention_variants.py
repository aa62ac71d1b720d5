"""Attention in every form, as functions of a model, q, k and v."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from support.models import BATCH, Decoder, causal
from torch import Tensor, nn

Attend = Callable[..., Tensor]
LONGEST = 20


class Model(Decoder):
    """attend(model, q, k, v) may read model.padding (B, S), model.positions (B, S) and parameters for biases."""

    def __init__(self, attend: Attend, heads: int = 4, kv_heads: int | None = None, layers: int = 1) -> None:
        super().__init__(attend, heads, kv_heads, layers)
        self.bias = nn.Parameter(torch.randn(1, heads, LONGEST, LONGEST))
        self.distance = nn.Embedding(2 * LONGEST, heads)
        self.sink = nn.Parameter(torch.randn(heads))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))

    def forward(self, ids: Tensor, padding: Tensor, positions: Tensor) -> Tensor:
        self.padding, self.positions = padding, positions
        return super().forward(ids)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: object) -> Tensor:
    grouped = q.ndim == 4 and q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, **options)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Repeat the heads as transformers does."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def expanded(q: Tensor, k: Tensor) -> Tensor:
    return repeat_kv(k, q.shape[1] // k.shape[1])


def before(q: Tensor, window: int = LONGEST) -> Tensor:
    """Bool (S, S): a query sees the last `window` keys."""
    i = torch.arange(q.shape[-2])
    return (i[:, None] >= i) & (i[:, None] - i < window)


def additive(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill(~mask, -1e9)


def documents(m: Model) -> Tensor:
    """Bool (B, 1, S, S): causal within a document; one begins where the position is 0."""
    document = (m.positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None]
    i = torch.arange(document.shape[1])
    return (same & (i[:, None] >= i))[:, None]


def alibi(m: Model, q: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    return (m.slopes[:, None, None] * (i - i[:, None]))[None]


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ expanded(q, k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ expanded(q, v)


def einsum_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, expanded(q, k)).masked_fill(~before(q), -1e9)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), expanded(q, v))


def with_sinks(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of GPT-OSS in transformers."""
    scores = q @ expanded(q, k).transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores + mask
    sinks = m.sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    every = torch.cat([scores, sinks], -1)
    every = every - every.max(dim=-1, keepdim=True).values
    return every.softmax(-1)[..., :-1] @ expanded(q, v)


def three_dims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, expanded(q, k), expanded(q, v)))
    return sdpa(q, k, v, is_causal=True).unflatten(0, (BATCH, -1))


def learned(m: Model, q: Tensor) -> Tensor:
    return m.bias[:, :, : q.shape[2], : q.shape[2]]


def relative(m: Model, q: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    return m.distance(i[:, None] - i + LONGEST).permute(2, 0, 1)[None]


def complex_rotation(x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angle = torch.outer(torch.arange(x.shape[2]), torch.arange(z.shape[-1])).to(x.dtype)
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


# Attention that costs one exchange before and one after, wherever the ranks divide the heads.
EXCHANGED: dict[str, Attend] = {
    "causal": causal,
    "full": lambda m, q, k, v: sdpa(q, k, v),
    "scale": lambda m, q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3),
    "keywords": lambda m, q, k, v: F.scaled_dot_product_attention(
        query=q, key=expanded(q, k), value=expanded(q, v), is_causal=True
    ),
    "positional": lambda m, q, k, v: F.scaled_dot_product_attention(
        q, expanded(q, k), expanded(q, v), before(q), 0.0, False
    ),
    "mask (S, S)": lambda m, q, k, v: sdpa(q, k, v, before(q)),
    "mask (1, S, S)": lambda m, q, k, v: sdpa(q, k, v, before(q)[None]),
    "mask (1, 1, S, S)": lambda m, q, k, v: sdpa(q, k, v, before(q)[None, None]),
    "mask (B, 1, 1, S)": lambda m, q, k, v: sdpa(q, k, v, m.padding[:, None, None]),
    "mask (1, S)": lambda m, q, k, v: sdpa(q, k, v, m.padding[:1]),
    "mask (B, 1, S, 1) of floats": lambda m, q, k, v: sdpa(q, k, v, additive(m.padding, q)[:, None, :, None]),
    "mask (B, 1, S, S)": lambda m, q, k, v: sdpa(q, k, v, m.padding[:, None, None] & before(q)),
    "mask (B, H, S, S) of floats": lambda m, q, k, v: sdpa(
        q, k, v, additive(m.padding, q)[:, None, None].expand(-1, q.shape[1], q.shape[2], -1)
    ),
    "mask (S, S) of floats": lambda m, q, k, v: sdpa(q, k, v, additive(before(q), q)),
    "left padding": lambda m, q, k, v: sdpa(
        q, k, v, (m.padding.flip(1)[:, None, None] & before(q)) | torch.eye(q.shape[2], dtype=torch.bool)
    ),
    "documents": lambda m, q, k, v: sdpa(q, k, v, documents(m)),
    "sliding window": lambda m, q, k, v: sdpa(q, k, v, before(q, 3)),
    "prefix": lambda m, q, k, v: sdpa(q, k, v, before(q) | (torch.arange(q.shape[2]) < 3)),
    "alibi (1, H, S, S)": lambda m, q, k, v: sdpa(q, k, v, alibi(m, q) + additive(before(q), q)),
    "alibi (H, S, S)": lambda m, q, k, v: sdpa(q, k, v, alibi(m, q)[0]),
    "alibi (1, H, 1, S)": lambda m, q, k, v: sdpa(q, k, v, -m.slopes[None, :, None, None] * torch.arange(k.shape[2])),
    "bias (1, H, 1, 1)": lambda m, q, k, v: sdpa(q, k, v, m.sink[None, :, None, None]),
    "learned bias": lambda m, q, k, v: sdpa(q, k, v, learned(m, q)),
    "learned bias of all heads": lambda m, q, k, v: sdpa(q, k, v, learned(m, q)[:, :1]),
    "learned bias and padding": lambda m, q, k, v: sdpa(q, k, v, learned(m, q) + additive(m.padding, q)[:, None, None]),
    "relative bias": lambda m, q, k, v: sdpa(q, k, v, relative(m, q)),
    "sinks": with_sinks,
    "sinks, window": lambda m, q, k, v: with_sinks(m, q, k, v, additive(before(q, 3), q)),
    "sinks, padding": lambda m, q, k, v: with_sinks(m, q, k, v, additive(m.padding[:, None, None] & before(q), q)),
    "sinks, learned bias": lambda m, q, k, v: with_sinks(m, q, k, v, learned(m, q) + additive(before(q), q)),
    "repeat_kv": lambda m, q, k, v: sdpa(q, expanded(q, k), expanded(q, v), is_causal=True),
    "repeat_interleave": lambda m, q, k, v: sdpa(
        q, *(t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v)), is_causal=True
    ),
    "tiled": lambda m, q, k, v: sdpa(q, *(t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))),
    "one tensor": lambda m, q, k, v: sdpa(q, q, q, is_causal=True),
    "three dims": lambda m, q, k, v: three_dims(q, k, v),
    "wider values": lambda m, q, k, v: sdpa(q, k, torch.cat([v, v.sin()], -1))[..., : q.shape[-1]],
    "complex rotation": lambda m, q, k, v: sdpa(complex_rotation(q), complex_rotation(k), v, is_causal=True),
    "normalized": lambda m, q, k, v: sdpa(F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:]), v),
    "values used again": lambda m, q, k, v: sdpa(q, k, v, is_causal=True) + expanded(q, v) + q,
}

# Attention that is exact with any exchanges.
OTHERS: dict[str, Attend] = {
    "eager": lambda m, q, k, v: eager_attention(q, k, v),
    "eager, causal": lambda m, q, k, v: eager_attention(q, k, v, before(q)),
    "eager, padding": lambda m, q, k, v: eager_attention(q, k, v, before(q) & m.padding[:, None, None]),
    "einsum": lambda m, q, k, v: einsum_attention(q, k, v),
    "linear": lambda m, q, k, v: q.softmax(-1) @ (expanded(q, k).softmax(-2).mT @ expanded(q, v)),
    "bias of the states": lambda m, q, k, v: sdpa(
        q, k, v, q.mean((1, 3))[:, None, :, None] * k.mean((1, 3))[:, None, None]
    ),
    "one key head, broadcast": lambda m, q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
    "values minus their mean": lambda m, q, k, v: sdpa(q, k, v - v.mean((1, 2), keepdim=True)),
    "learned keys first": lambda m, q, k, v: sdpa(
        q, *(torch.cat([m.bias[:, : t.shape[1], :2, : t.shape[3]].expand(BATCH, -1, -1, -1), t], 2) for t in (k, v))
    ),
    "last query": lambda m, q, k, v: sdpa(q[:, :, -1:], k, v).expand_as(q),
    "learned queries": lambda m, q, k, v: (
        sdpa(m.bias[:, :, :3, : q.shape[3]].expand(BATCH, -1, -1, -1), k, v).mean(2, keepdim=True).expand_as(q)
    ),
}
