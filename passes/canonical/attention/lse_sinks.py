"""Sinks that are spelled behind an attention, of its result and its log-sum-exp. Part of `eager_attention.py` and `flex.py`.

    out * sigmoid(lse - sinks.view(1, H, 1)).unsqueeze(-1)                         torchtitan, IBM's Granite
    lse = lse.unsqueeze(-1)
    out * exp(lse - logsumexp(cat([lse, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], -1), -1, keepdim=True))
                                                                                    transformers, with flex_attention

Leaves alone: log-sum-exps that anything else reads, or that are normalised with more than one sink, or over queries.
Whoever asks says so of the attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import Call, is_tensor, shape_of
from sp_compile.passes.graph.closure import closure
from sp_compile.passes.graph.sizes import Size, all_same, same
from sp_compile.passes.sharding.matchers import behind, dies_with, is_cast, is_copy, keeps_order

from .proofs import BATCH, HEAD, QUERY
from .sinks import Sinks, of_heads

aten = torch.ops.aten


@dataclass(frozen=True)
class SinkAttention:
    """result: the attention with sinks; chain: from the lse to the result."""

    result: Node
    sinks: Sinks
    chain: tuple[Node, ...]


def renormalised(out: Node, lse: Node) -> SinkAttention | None:
    """What sinks make of an attention's out (B, H, Q, E), where its lse (B, H, Q) has no other use."""
    (result,) = out.users if len(out.users) == 1 else (None,)
    if result is None or result.target is not aten.mul.Tensor or not dies_with(lse, result):
        return None
    share = next((x for x in Call(result).operands if x is not out), None)
    rows = shape_of(out)[:-1]
    if share is None or not all_same(shape_of(share), (*rows, 1)):
        return None
    found = _sinks_of(_core(share), lse, rows)
    sinks = of_heads(*found, rows[:2]) if found is not None and len(rows) == 3 else None
    chain = sorted(closure([lse], lambda n: n.users if n < result else ()))
    return SinkAttention(result, sinks, tuple(chain)) if sinks is not None else None


def _core(x: Node) -> Node:
    """Without casts, copies and changes of the shape."""
    return behind(x, lambda n: is_cast(n) or is_copy(n) or keeps_order(n))


def _sinks_of(share: Node, lse: Node, rows: tuple[Size, ...]) -> tuple[Node, tuple[Any, ...]] | None:
    """The sinks, and which of their elements the row (b, h, q) reads."""
    difference = _core(share.args[0]) if share.target in (aten.sigmoid.default, aten.exp.default) else None
    if difference is None or difference.target is not aten.sub.Tensor or Call(difference)["alpha"] != 1:
        return None
    ours, other = Call(difference)["self"], Call(difference)["other"]
    if _core(ours) is not lse or not is_tensor(other) or not _each_alone(ours, rows):
        return None
    at: tuple[Any, ...] = (BATCH, HEAD, QUERY, 0)[: ours.meta["val"].ndim]
    if share.target is aten.exp.default:
        if other.target is not aten.logsumexp.default or not Call(other)["keepdim"]:
            return None
        joined = Call(other).operands[0]
        both = Call(joined).operands if joined.target is aten.cat.default else []
        last = joined.meta["val"].ndim - 1
        if len(both) != 2 or [d % (last + 1) for d in Call(other)["dim"]] != [last] or Call(joined).dim() != last:
            return None
        other = next((x for x in both if _core(x) is not lse), None)
        if other is None or last != len(at) - 1 or not all(same(shape_of(x)[-1], 1) for x in both):
            return None
    at = at[len(at) - other.meta["val"].ndim :]
    return other, at


def _each_alone(ours: Node, rows: tuple[Size, ...]) -> bool:
    """Does the lse stand at (b, h, q), or (b, h, q, 0)? Regrouped, a number of each head may be one of each query."""
    shape = shape_of(ours)
    return all_same(shape, rows) or all_same(shape, (*rows, 1))
