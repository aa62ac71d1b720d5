"""Attention of elementary ops: forms that become the fused op (with its mask and scale), and others."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, S, D = 2, 4, 8, 4
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LOWEST = torch.finfo(torch.float64).min


def before() -> Tensor:
    i = torch.arange(S)
    return i[:, None] >= i


def additive(fill: float) -> Tensor:
    return torch.zeros(S, S, dtype=torch.float64).masked_fill(~before(), fill)


def last_key(fill: float) -> Tensor:
    """Return a bias that fills all keys but the last one."""
    return torch.zeros(S, dtype=torch.float64).masked_fill(torch.arange(S) != S - 1, fill).expand(S, S)


def rows(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B * H, S, D)."""
    return x.flatten(0, 1)


def with_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of older BLOOM and OPT: the mask on four dims, the products on three."""
    scores = torch.bmm(rows(q), rows(k).transpose(1, 2)).view(B, H, S, S) * 0.5
    scores = (scores + additive(LOWEST)).view(B * H, S, S)
    return torch.bmm(F.dropout(scores.softmax(-1), 0.1, False), rows(v)).view(B, H, S, D)


def with_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    empty = torch.empty(1, 1, 1, dtype=q.dtype)
    scores = torch.baddbmm(empty, rows(q), rows(k).transpose(1, 2), beta=0, alpha=0.5)
    return (scores.softmax(-1) @ rows(v)).unflatten(0, (B, H))


def as_bloom(q: Tensor, k: Tensor, v: Tensor, beta: float = 1.0) -> Tensor:
    """Attention with a bias per head and key in the product, then a mask on four dims."""
    bias = (slopes(q) * torch.arange(S)).repeat(B, 1, 1)
    scores = torch.baddbmm(bias, rows(q), rows(k).transpose(1, 2), beta=beta, alpha=0.5)
    scores = (scores.view(B, H, S, S) + additive(LOWEST)).softmax(-1).view(B * H, S, S)
    return torch.bmm(scores, rows(v)).view(B, H, S, D)


def repeated(x: Tensor) -> Tensor:
    return x[:, :2, None].expand(B, 2, 2, S, D).reshape(B, H, S, D)


def sinks(v: Tensor) -> Tensor:
    """(B, H, S, 1): a number of each head."""
    return v[0, :, 0, 0].reshape(1, -1, 1, 1).expand(B, -1, S, -1)


def shifted(x: Tensor) -> Tensor:
    return x - x.max(-1, keepdim=True).values


def as_gpt_oss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ repeated(k).mT * 0.5 + additive(LOWEST)
    weights = shifted(torch.cat([scores, sinks(v)], -1)).softmax(-1)[..., :-1]
    return F.dropout(weights, 0.1, False).to(v.dtype) @ repeated(v)


def after_the_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sinks of IBM's Granite."""
    scores = q @ repeated(k).mT * 0.5 + additive(LOWEST)
    share = (scores.logsumexp(-1) - v[0, :, 0, 0].view(1, -1, 1)).to(v.dtype).sigmoid()
    return (scores.softmax(-1) @ repeated(v)) * share.unsqueeze(-1)


def shared(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Sinks as in transformers, applied after flex_attention, where they are (B, H, S, 1)."""
    scores = q @ k.mT
    lse = scores.logsumexp(-1, keepdim=sinks.ndim == 4)
    share = torch.exp(lse - torch.cat([lse, sinks], -1).logsumexp(-1, keepdim=True))
    return (scores.softmax(-1) @ v) * share.view(B, H, S, 1)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat([q @ k.mT, sinks.expand(B, H, S, 1)], -1).softmax(-1)[..., :-1] @ v


def with_sinks_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose last row of weights is dropped, in place of the weights of the sinks."""
    weights = torch.cat([q @ k.mT, sinks(v)], -1).softmax(-1).mT[..., :-1]
    return weights @ v[:, :, :-1]


def einsum(scores: str, out: str) -> Attend:
    return lambda q, k, v: torch.einsum(out, torch.einsum(scores, q, k).softmax(-1), v)


def exponentials(s: Tensor, dim: int = -1) -> Tensor:
    e = torch.exp(s - s.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def exponentials_without_kept_dims(s: Tensor) -> Tensor:
    e = (s - s.detach().max(-1).values.unsqueeze(-1)).exp()
    return e / e.sum(-1)[..., None]


def slopes(like: Tensor) -> Tensor:
    """(H, 1, 1)."""
    return (2.0 ** -torch.arange(1, H + 1)).to(like.dtype)[:, None, None] / 3


def distance() -> Tensor:
    """(S, S), from the query to the key."""
    i = torch.arange(S)
    return i - i[:, None]


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~before(), -math.inf)


# (q, k, v) of (B, H, S, D) to the arguments of the fused op: its mask ("data" for a tensor) and its scale
FORMS: dict[str, tuple[Attend, tuple[str, float]]] = {
    "matmul": (lambda q, k, v: F.softmax(q @ k.permute(0, 1, 3, 2), dim=3) @ v, ("", 1.0)),
    "keys that are already transposed": (lambda q, k, v: (q @ (k.mT * 1.5)).softmax(-1) @ v, ("", 1.0)),
    "scale after the product": (lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v, ("", 0.3)),
    "scale as a division": (lambda q, k, v: (q @ k.mT / D**0.5).softmax(-1) @ v, ("", 0.5)),
    "scale on q": (lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v, ("", 1.0)),
    "scale on k": (lambda q, k, v: (q @ (k / 2).mT).softmax(-1) @ v, ("", 1.0)),
    "scale of a tensor": (lambda q, k, v: (torch.full([], 0.3, dtype=q.dtype) * (q @ k.mT)).softmax(-1) @ v, ("", 0.3)),
    "learned scale": (lambda q, k, v: (q @ k.mT / (1 + v[0, :, :1, :1] ** 2)).softmax(-1) @ v, ("", 1.0)),
    "two scales": (lambda q, k, v: (q[:, :, 3:] @ k.mT / 2 * 0.5).softmax(-1) @ v, ("", 0.25)),
    "einsum": (einsum("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"), ("", 1.0)),
    "einsum with dots": (einsum("...id, ...jd -> ...ij", "...ij, ...jd -> ...id"), ("", 1.0)),
    "einsum, keys first": (
        lambda q, k, v: torch.einsum("bhke,bhqk->bhqe", v, torch.einsum("bhkd,bhqd->bhqk", k, q).softmax(-1)),
        ("", 1.0),
    ),
    "einsum, heads last": (
        lambda q, k, v: einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd")(*(t.transpose(1, 2) for t in (q, k, v))).transpose(
            1, 2
        ),
        ("", 1.0),
    ),
    "bmm": (with_bmm, ("k <= q", 0.5)),
    "baddbmm": (with_baddbmm, ("", 0.5)),
    "baddbmm of a bias": (
        lambda q, k, v: (
            torch.baddbmm(v.mean(-1).view(B * H, 1, S), rows(q), rows(k).mT, beta=0.5).softmax(-1) @ rows(v)
        ).unflatten(0, (B, H)),
        ("data", 1.0),
    ),
    "baddbmm of a bias, masked on four dims": (
        lambda q, k, v: (
            (
                torch.baddbmm(v.mean(-1).view(B * H, 1, S), rows(q), rows(k).mT).view(B, H, S, S) + additive(LOWEST)
            ).softmax(-1)
            @ v
        ),
        ("data", 1.0),
    ),
    "-inf fill": (lambda q, k, v: (q @ k.mT).masked_fill(~before(), -math.inf).softmax(-1) @ v, ("k <= q", 1)),
    "finfo.min fill": (lambda q, k, v: (q @ k.mT).masked_fill(~before(), LOWEST).softmax(-1) @ v, ("k <= q", 1)),
    "fill, then scale": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~before(), -math.inf) * 0.3).softmax(-1) @ v,
        ("k <= q", 0.3),
    ),
    "where": (lambda q, k, v: torch.where(before(), q @ k.mT, -1e9).softmax(-1) @ v, ("k <= q", 1.0)),
    "where, swapped": (lambda q, k, v: torch.where(~before(), LOWEST, q @ k.mT).softmax(-1) @ v, ("k <= q", 1)),
    "where of a tensor": (
        lambda q, k, v: torch.where(before(), q @ k.mT, torch.full([], LOWEST, dtype=q.dtype)).softmax(-1) @ v,
        ("k <= q", 1.0),
    ),
    "two fills": (
        lambda q, k, v: (q @ k.mT).masked_fill(~before(), LOWEST).masked_fill(~before().mT, LOWEST).softmax(-1) @ v,
        ("(k <= q) & (q <= k)", 1.0),
    ),
    "added -inf": (lambda q, k, v: (q @ k.mT * 0.3 + additive(-math.inf)).softmax(-1) @ v, ("k <= q", 0.3)),
    "added finfo.min": (lambda q, k, v: (additive(LOWEST) + q @ k.mT).softmax(-1) @ v, ("k <= q", 1.0)),
    "subtracted": (lambda q, k, v: (q @ k.mT - (~before()).double() * 1e9).softmax(-1) @ v, ("k <= q", 1.0)),
    "bias": (lambda q, k, v: (q @ k.mT + v.mean(-1)[:, :, None]).softmax(-1) @ v, ("data", 1.0)),
    "bias of one dim": (lambda q, k, v: (q @ k.mT + v[0, 0, :, 0]).softmax(-1) @ v, ("data", 1.0)),
    "bias and fill": (
        lambda q, k, v: (q @ k.mT + v.mean(-1)[:, :, None]).masked_fill(~before(), LOWEST).softmax(-1) @ v,
        ("data", 1.0),
    ),
    "repeated heads": (lambda q, k, v: (q @ repeated(k).mT).softmax(-1) @ repeated(v), ("", 1.0)),
    "greatest score subtracted": (lambda q, k, v: shifted(q @ k.mT * 0.3).softmax(-1) @ v, ("", 0.3)),
    "greatest score subtracted without a gradient": (
        lambda q, k, v: (lambda s: s - s.amax(-1, keepdim=True).detach())(q @ k.mT).softmax(-1) @ v,
        ("", 1.0),
    ),
    "sinks": (lambda q, k, v: with_sinks(q, k, v, sinks(v)), ("", 1.0)),
    "sinks as GPT-OSS has them": (as_gpt_oss, ("k <= q", 0.5)),
    "sinks after the attention": (after_the_attention, ("k <= q", 0.5)),
    "sinks as a share of all": (lambda q, k, v: shared(q, k, v, sinks(v)), ("", 1.0)),
    "one sink for all heads": (lambda q, k, v: with_sinks(q, k, v, v[:1, :1, :1, :1] * 2), ("", 1.0)),
    "sinks first": (lambda q, k, v: torch.cat([sinks(v), q @ k.mT], -1).softmax(-1)[..., 1:] @ v, ("", 1.0)),
    "sinks and a bias": (
        lambda q, k, v: torch.cat([q @ k.mT + v.mean(-1)[:, :, None], sinks(v)], -1).softmax(-1)[..., :-1] @ v,
        ("data", 1.0),
    ),
    "sinks and finite fills of whole rows": (
        lambda q, k, v: torch.cat([(q @ k.mT).masked_fill(before(), -1e9), sinks(v)], -1).softmax(-1)[..., :-1] @ v,
        ("q < k", 1.0),
    ),
    "sinks and finite fills of data": (
        lambda q, k, v: (
            torch.cat([q @ k.mT + (v[:, :1, None, :, 0] > 0.2).to(q.dtype) * -1e9, sinks(v)], -1).softmax(-1)[..., :-1]
            @ v
        ),
        ("Eq(col0, 0)", 1.0),
    ),
    "multiplied with a mask and filled": (
        lambda q, k, v: (q @ k.mT * before().to(q.dtype) - 1e10 * (1 - before().to(q.dtype))).softmax(-1) @ v,
        ("k <= q", 1.0),
    ),
    "a mask multiplied, scaled and filled": (
        lambda q, k, v: (before() * (q @ k.mT) * 0.5 + (1 - before().to(q.dtype)) * LOWEST).softmax(-1) @ v,
        ("k <= q", 0.5),
    ),
    "an additive -10000": (
        lambda q, k, v: (q @ k.mT + (1 - before().to(q.dtype)) * -1e4).softmax(-1) @ v,
        ("data", 1.0),
    ),
    "exponentials": (lambda q, k, v: exponentials(q @ k.mT * 0.5) @ v, ("", 0.5)),
    "exponentials of masked scores": (lambda q, k, v: exponentials(causal_scores(q, k)) @ v, ("k <= q", 1.0)),
    "exponentials of a detached greatest": (
        lambda q, k, v: exponentials_without_kept_dims(causal_scores(q, k)) @ v,
        ("k <= q", 1.0),
    ),
    "exp of log_softmax": (lambda q, k, v: F.log_softmax(causal_scores(q, k), -1).exp() @ v, ("k <= q", 1.0)),
    "exp of a difference to logsumexp": (
        lambda q, k, v: (lambda s: torch.exp(s - s.logsumexp(-1, keepdim=True)))(causal_scores(q, k)) @ v,
        ("k <= q", 1.0),
    ),
    "values first": (lambda q, k, v: (v.mT @ causal_scores(q, k).softmax(-1).mT).mT, ("k <= q", 1.0)),
    "keys first": (
        lambda q, k, v: (k @ q.mT * 0.3).masked_fill(~before().mT, -math.inf).softmax(-2).mT @ v,
        ("k <= q", 0.3),
    ),
    "keys and values first": (
        lambda q, k, v: (v.mT @ (k @ q.mT + v.mean(-1)[..., None]).softmax(-2)).mT,
        ("data", 1.0),
    ),
    "turned between": (
        lambda q, k, v: (k @ q.mT).mT.masked_fill(~before(), LOWEST).softmax(-1).mT.mT @ v,
        ("k <= q", 1.0),
    ),
    "einsum, keys along the third dim": (
        lambda q, k, v: torch.einsum(
            "bqkh,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bqkh", q, k) + additive(-math.inf)[..., None]).softmax(2), v
        ),
        ("k <= q", 1.0),
    ),
    "einsum, heads before the batch": (
        lambda q, k, v: einsum("bhqd,bhkd->hbqk", "hbqk,bhkd->hbqd")(q, k, v).transpose(0, 1),
        ("", 1.0),
    ),
    "exponentials, keys first": (lambda q, k, v: exponentials(k @ q.mT, -2).mT @ v, ("", 1.0)),
    "a learned scale, keys first": (
        lambda q, k, v: (k @ q.mT / (1 + v[0, :, :1, :1] ** 2)).softmax(-2).mT @ v,
        ("", 1.0),
    ),
    "nan_to_num of the weights": (lambda q, k, v: causal_scores(q, k).softmax(-1).nan_to_num() @ v, ("k <= q", 1.0)),
    "nan_to_num of rows without a key": (
        lambda q, k, v: (q @ k.mT).masked_fill(before(), -math.inf).softmax(-1).nan_to_num(0.0) @ v,
        ("q < k", 1.0),
    ),
    "nan_to_num of the result": (lambda q, k, v: (causal_scores(q, k).softmax(-1) @ v).nan_to_num(), ("k <= q", 1.0)),
    "what changes nothing": (
        lambda q, k, v: ((((q @ k.mT).view(B * H, S, S) + 0.0).view(B, H, S, S) * 1.0).softmax(-1) * 1.0 + 0.0) / 1 @ v,
        ("", 1.0),
    ),
    "other width of values": (lambda q, k, v: (q @ k.mT).softmax(-1) @ torch.cat([v, v], -1), ("", 1.0)),
}

SOFT_CAPS: dict[str, tuple[Attend, str]] = {
    "divided": (lambda q, k, v: (torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v, "5*tanh(s)"),
    "multiplied": (lambda q, k, v: (5 * torch.tanh(0.2 * (q @ k.mT))).softmax(-1) @ v, "5*tanh(s)"),
    "masked": (
        lambda q, k, v: (torch.tanh(q @ k.mT * 0.5 / 5) * 5).masked_fill(~before(), -math.inf).softmax(-1) @ v,
        "5*tanh(s)",
    ),
    "a mask added": (lambda q, k, v: (torch.tanh(q @ k.mT / 5) * 5 + additive(-1e9)).softmax(-1) @ v, "5*tanh(s)"),
    "twice": (lambda q, k, v: (torch.tanh(torch.tanh(q @ k.mT) * 2) / 4).softmax(-1) @ v, "tanh(2*tanh(s))/4"),
    "turned": (lambda q, k, v: (torch.tanh(q @ k.mT) * -3).softmax(-1) @ v, "-3*tanh(s)"),
    "sinks": (
        lambda q, k, v: torch.cat([torch.tanh(q @ k.mT), sinks(v).expand(B, H, S, 1)], -1).softmax(-1)[..., :-1] @ v,
        "tanh(s)",
    ),
    "ALiBi": (lambda q, k, v: (q @ k.mT * 0.5 + slopes(q) * distance()).softmax(-1) @ v, "head0*(k - q) + s"),
    "ALiBi of keys, masked": (
        lambda q, k, v: (q @ k.mT + slopes(q) * torch.arange(S)).masked_fill(~before(), -math.inf).softmax(-1) @ v,
        "head0*k + s",
    ),
    "ALiBi and an additive mask": (
        lambda q, k, v: (q @ k.mT - slopes(q) * distance().abs() + additive(LOWEST)).softmax(-1) @ v,
        "-head0*Abs(k - q) + s",
    ),
    "ALiBi in a mask": (
        lambda q, k, v: (
            (q @ k.mT + torch.where(before(), distance().to(q.dtype) / 4 * slopes(q), -math.inf)).softmax(-1) @ v
        ),
        "head0*(k/4 - q/4) + s",
    ),
    "ALiBi and fills in a mask": (
        lambda q, k, v: (q @ k.mT + (slopes(q) * distance() + additive(-1e9))).softmax(-1) @ v,
        "head0*(k - q) + s",
    ),
    "ALiBi given to torch's op": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, slopes(q) * distance()),
        "head0*(k - q) + s",
    ),
    "ALiBi, keys first": (
        lambda q, k, v: (k @ q.mT + slopes(q) * distance().mT).softmax(-2).mT @ v,
        "head0*(k - q) + s",
    ),
    "ALiBi in the product, as BLOOM has it": (as_bloom, "head0*k + s"),
    "half of ALiBi in the product": (lambda q, k, v: as_bloom(q, k, v, 0.5), "head0*k/2 + s"),
    "one slope, and two numbers": (
        lambda q, k, v: (
            (q @ k.mT + 0.5 * distance().to(q.dtype) - torch.exp(-distance().to(q.dtype).abs() * 1.0)).softmax(-1) @ v
        ),
        "k/2 - q/2 + s - exp(-Abs(k - q))",
    ),
    "values of a head each": (
        lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", (torch.tanh(q @ k.mT) * 5).softmax(-1), v),
        "5*tanh(s)",
    ),
}
"""Attention with scores that are capped or biased by positions and heads, and the text of their score_mod."""

DATA: dict[str, Attend] = {
    "learned slopes": lambda q, k, v: (q @ k.mT + v[0, :, :1, :1] * distance()).softmax(-1) @ v,
    "a distance of floats": lambda q, k, v: (q @ k.mT + slopes(q) * distance().abs().sqrt()).softmax(-1) @ v,
    "a table looked up": lambda q, k, v: (
        (q @ k.mT + torch.linspace(0, 1, 2 * S, dtype=q.dtype)[distance() + S]).softmax(-1) @ v
    ),
    "slopes of a batch entry": lambda q, k, v: (
        (q @ k.mT + torch.arange(1.0, B + 1, dtype=q.dtype)[:, None, None, None] * distance()).softmax(-1) @ v
    ),
    "rounded to float32": lambda q, k, v: (q @ k.mT + (slopes(q).float() / 3 * distance()).double()).softmax(-1) @ v,
    "rounded otherwise": lambda q, k, v: (q @ k.mT + distance().to(q.dtype) / 7).softmax(-1) @ v,
    "two biases chosen": lambda q, k, v: (
        (q @ k.mT + torch.where(before(), slopes(q) * distance(), slopes(q))).softmax(-1) @ v
    ),
    "of rows": lambda q, k, v: (q @ k.mT + slopes(q) * torch.arange(S)).softmax(-1) @ v,
}
"""Attention whose biases remain tensors."""

STAYS: dict[str, Attend] = {
    "padding that may fill a row": lambda q, k, v: (
        (q @ k.mT + (v[:, :1, None, :, 0] > 0.2).to(q.dtype) * -1e9).softmax(-1) @ v
    ),
    "soft-cap of masked scores": lambda q, k, v: (
        (torch.tanh((q @ k.mT).masked_fill(~before(), -5.0) / 5) * 5).softmax(-1) @ v
    ),
    "probabilities read elsewhere": lambda q, k, v: (lambda p: p @ v + p.sum())((q @ k.mT).softmax(-1)),
    "scores read elsewhere": lambda q, k, v: (lambda s: s.softmax(-1) @ v + s.mean())(q @ k.mT),
    "float32 softmax of float64": lambda q, k, v: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v,
    "softmax over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "scores in integers": lambda q, k, v: (4 * (q @ k.mT)).int().to(q.dtype).softmax(-1) @ v,
    "scores and sinks in integers": lambda q, k, v: (
        torch.cat([4 * (q @ k.mT), sinks(v)], -1).int().to(q.dtype).softmax(-1)[..., :-1] @ v
    ),
    "sinks in integers": lambda q, k, v: with_sinks(q, k, v, (4 * sinks(v)).int().to(q.dtype)),
    "weights in integers": lambda q, k, v: (9 * (q @ k.mT).softmax(-1)).int().to(q.dtype) @ v,
    "weights that are above 0": lambda q, k, v: (q @ k.mT).softmax(-1).bool().to(q.dtype) @ v,
    "queries weighted, not values": lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v,
    "fill that leaves weight": lambda q, k, v: (q @ k.mT).masked_fill(~before(), -5.0).softmax(-1) @ v,
    "finite fill of whole rows": lambda q, k, v: (q @ k.mT).masked_fill(before(), -1e9).softmax(-1) @ v,
    "finite fill of data": lambda q, k, v: (q @ k.mT).masked_fill(v[:, :1, None, :, 0] > 0.2, -1e9).softmax(-1) @ v,
    "a bias and finite fills that leave no key together": lambda q, k, v: (
        (q @ k.mT + last_key(-1e9)).masked_fill(~before(), -1e9).softmax(-1) @ v
    ),
    "two biases that leave no key together": lambda q, k, v: (
        (q @ k.mT + last_key(-1e9) + additive(-1e9)).softmax(-1) @ v
    ),
    "bias, then scale": lambda q, k, v: ((q @ k.mT + additive(-1.0)) * 0.3).softmax(-1) @ v,
    "sinks of each batch entry": lambda q, k, v: with_sinks(q, k, v, v[:, :, :1, :1]),
    "sinks of each query": lambda q, k, v: with_sinks(q, k, v, q[..., :1]),
    "sinks that stay": lambda q, k, v: (
        torch.cat([q @ k.mT, sinks(v)], -1).softmax(-1) @ torch.cat([v, v[:, :, :1]], -2)
    ),
    "a key is dropped, and no sink": lambda q, k, v: torch.cat([q @ k.mT, sinks(v)], -1).softmax(-1)[..., 1:] @ v,
    "log-sum-exp read elsewhere": lambda q, k, v: (
        lambda s: (s.softmax(-1) @ v) * (s.logsumexp(-1) - v[0, :, :1, 0]).sigmoid()[..., None] + s.logsumexp(-1).sum()
    )(q @ k.mT),
    "another function of the log-sum-exp": lambda q, k, v: (
        lambda s: (s.softmax(-1) @ v) * (v[0, :, :1, 0] - s.logsumexp(-1)).sigmoid()[..., None]
    )(q @ k.mT),
    "integers of the log-sum-exp": lambda q, k, v: (
        lambda s: (s.softmax(-1) @ v) * (s.logsumexp(-1) - v[0, :, :1, 0]).int().to(q.dtype).sigmoid()[..., None]
    )(q @ k.mT),
    "shares among queries": lambda q, k, v: shared(q, k, v, v[:1, :, 0, :1].expand(B, H, 1)),
    "two sinks per head, after the attention": lambda q, k, v: shared(q, k, v, sinks(v).expand(B, H, S, 2)),
    "a value per query, after the attention": lambda q, k, v: (
        lambda s: (s.softmax(-1) @ v[:1]) * (s.logsumexp(-1).view(H, H) - v[0, 0, :H, 0]).sigmoid().view(1, H, H, 1)
    )(q[:1, :, :H] @ k[:1].mT),
    "greatest score subtracted beside sinks": lambda q, k, v: (
        torch.cat([shifted(q @ k.mT), sinks(v)], -1).softmax(-1)[..., :-1] @ v
    ),
    "greatest score of another row": lambda q, k, v: (lambda s: s - s.amax(-2, keepdim=True))(q @ k.mT).softmax(-1) @ v,
    "least score subtracted": lambda q, k, v: (lambda s: s - s.amin(-1, keepdim=True))(q @ k.mT).softmax(-1) @ v,
    "multiplied with a mask and filled with -10000": lambda q, k, v: (
        (q @ k.mT * before().to(q.dtype) - 1e4 * (1 - before().to(q.dtype))).softmax(-1) @ v
    ),
    "multiplied with a mask and filled elsewhere": lambda q, k, v: (
        (q @ k.mT * before().to(q.dtype) + additive(-1e9).mT).softmax(-1) @ v
    ),
    "multiplied with twice a mask": lambda q, k, v: (
        (q @ k.mT * (2 * before().to(q.dtype)) + additive(-1e9)).softmax(-1) @ v
    ),
    "multiplied with data": lambda q, k, v: (q @ k.mT * v[:, :, :, 0][:, :, None] + additive(-1e9)).softmax(-1) @ v,
    "multiplied with a mask": lambda q, k, v: (q @ k.mT * before().to(q.dtype)).softmax(-1) @ v,
    "multiplied with a mask of whole rows": lambda q, k, v: (
        (q @ k.mT * (~before()).to(q.dtype) - 1e10 * before().to(q.dtype)).softmax(-1) @ v
    ),
    "an additive -10000 of data": lambda q, k, v: (
        (q @ k.mT + (v[:, :1, None, :, 0] > 0.2).to(q.dtype) * -1e4).softmax(-1) @ v
    ),
    "exponentials that may overflow": lambda q, k, v: (lambda e: e / e.sum(-1, keepdim=True))((q @ k.mT).exp()) @ v,
    "exponentials of another shift": lambda q, k, v: (
        (lambda e: e / e.sum(-1, keepdim=True))((q @ k.mT - v[..., :1]).exp()) @ v
    ),
    "exponentials and an epsilon": lambda q, k, v: (
        (lambda e: e / (e.sum(-1, keepdim=True) + 1e-3))(shifted(q @ k.mT).exp()) @ v
    ),
    "exponentials summed over queries": lambda q, k, v: (
        (lambda e: e / e.sum(-2, keepdim=True))(shifted(q @ k.mT).exp()) @ v
    ),
    "exponentials summed for other queries": lambda q, k, v: (
        (lambda e: e / e.sum(-1)[:, :, None])(shifted(q @ k.mT).exp()) @ v
    ),
    "exponentials over queries": lambda q, k, v: exponentials(q @ k.mT, -2) @ v,
    "exponentials whose sum has no gradient": lambda q, k, v: (
        (lambda e: e / e.sum(-1, keepdim=True).detach())(shifted(q @ k.mT).exp()) @ v
    ),
    "exponentials read elsewhere": lambda q, k, v: (
        lambda e: e / e.sum(-1, keepdim=True) @ v + e.mean(-1, keepdim=True)
    )(shifted(q @ k.mT).exp()),
    "zeroed exponentials": lambda q, k, v: (
        (lambda e: e / e.sum(-1, keepdim=True))(shifted(q @ k.mT).exp() * before()) @ v
    ),
    "logsumexp without a gradient": lambda q, k, v: (
        (lambda s: torch.exp(s - s.logsumexp(-1, keepdim=True).detach()))(q @ k.mT) @ v
    ),
    "logsumexp over queries": lambda q, k, v: (lambda s: torch.exp(s - s.logsumexp(-2, keepdim=True)))(q @ k.mT) @ v,
    "half of a logsumexp": lambda q, k, v: (
        (lambda s: torch.exp(torch.sub(s, s.logsumexp(-1, keepdim=True), alpha=0.5)))(q @ k.mT) @ v
    ),
    "exp2 of log_softmax": lambda q, k, v: F.log_softmax(q @ k.mT, -1).exp2() @ v,
    "log_softmax read elsewhere": lambda q, k, v: (lambda p: p.exp() @ v + p.mean())(F.log_softmax(q @ k.mT, -1)),
    "float32 log_softmax of float64": lambda q, k, v: (
        F.log_softmax(q @ k.mT, -1, dtype=torch.float32).exp().to(q.dtype) @ v
    ),
    "keys first, weighted over queries": lambda q, k, v: (k @ q.mT).softmax(-1).mT @ v,
    "values before weights of queries": lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1),
    "sinks, and a query dropped": with_sinks_turned,
    "nan_to_num to another number": lambda q, k, v: causal_scores(q, k).softmax(-1).nan_to_num(0.5) @ v,
    "nan_to_num of the scores": lambda q, k, v: causal_scores(q, k).nan_to_num(neginf=-5.0).softmax(-1) @ v,
    "twice the weights": lambda q, k, v: ((q @ k.mT).softmax(-1) * 2.0) @ v,
    "more weight": lambda q, k, v: ((q @ k.mT).softmax(-1) + 0.5) @ v,
    "clamped scores": lambda q, k, v: (q @ k.mT).clamp(-0.5, 0.5).softmax(-1) @ v,
    "linear attention": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "zeroed after the softmax": lambda q, k, v: (q @ k.mT).softmax(-1).masked_fill(~before(), 0.0) @ v,
    "one value head": lambda q, k, v: (q @ k.mT).softmax(-1) @ v[:, :1],
}
