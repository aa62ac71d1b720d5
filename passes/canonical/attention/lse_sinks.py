"""Match sinks that are applied to the result and the log-sum-exp of an attention.

    out * sigmoid(lse - sinks.view(1, H, 1)).unsqueeze(-1)                         torchtitan, IBM's Granite
    lse = lse.unsqueeze(-1)
    out * exp(lse - logsumexp(cat([lse, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], -1), -1, keepdim=True))
                                                                                    transformers, with flex_attention

Unchanged: log-sum-exps with other readers, and log-sum-exps that are normalized with more than one sink or over
queries. The caller reports these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.sizes import Size, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import is_cast_op, is_copy, is_only_read_by, keeps_order, skip_ops

from .proofs import BATCH_INDEX, HEAD_INDEX, QUERY_INDEX
from .sinks import SinkValue, sink_index

aten = torch.ops.aten


@dataclass(frozen=True)
class SinkAttention:
    """Attention with sinks that is computed from a result and a log-sum-exp."""

    result: Node  # the attention with sinks
    sinks: SinkValue
    chain: tuple[Node, ...]  # nodes from the log-sum-exp to the result


def match_lse_sinks(out: Node, lse: Node) -> SinkAttention | None:
    """Match sinks on the output of an attention.

    Args:
        out: (B, H, Q, E), the result of the attention.
        lse: (B, H, Q), its log-sum-exp, without other readers.

    Returns:
        The attention with sinks, or None.
    """
    (result,) = out.users if len(out.users) == 1 else (None,)
    if result is None or result.target is not aten.mul.Tensor or not is_only_read_by(lse, result):
        return None
    share = next((x for x in OpCall(result).operands if x is not out), None)
    rows = node_shape(out)[:-1]
    if share is None or not is_same_shape(node_shape(share), (*rows, 1)):
        return None
    found = _match_share_sinks(_strip_moves(share), lse, rows)
    sinks = sink_index(*found, rows[:2]) if found is not None and len(rows) == 3 else None
    chain = sorted(reachable_set([lse], lambda n: n.users if n < result else ()))
    return SinkAttention(result, sinks, tuple(chain)) if sinks is not None else None


def _strip_moves(x: Node) -> Node:
    """Return the value before casts, copies and changes of shape."""
    return skip_ops(x, lambda n: is_cast_op(n) or is_copy(n) or keeps_order(n))


def _match_share_sinks(share: Node, lse: Node, rows: tuple[Size, ...]) -> tuple[Node, tuple[Any, ...]] | None:
    """Return the sinks and the element that row (b, h, q) reads."""
    difference = _strip_moves(share.args[0]) if share.target in (aten.sigmoid.default, aten.exp.default) else None
    if difference is None or difference.target is not aten.sub.Tensor or OpCall(difference)["alpha"] != 1:
        return None
    ours, other = OpCall(difference)["self"], OpCall(difference)["other"]
    if _strip_moves(ours) is not lse or not is_tensor(other) or not _reads_each_row(ours, rows):
        return None
    at: tuple[Any, ...] = (BATCH_INDEX, HEAD_INDEX, QUERY_INDEX, 0)[: ours.meta["val"].ndim]
    if share.target is aten.exp.default:
        if other.target is not aten.logsumexp.default or not OpCall(other)["keepdim"]:
            return None
        joined = OpCall(other).operands[0]
        both = OpCall(joined).operands if joined.target is aten.cat.default else []
        last = joined.meta["val"].ndim - 1
        if len(both) != 2 or [d % (last + 1) for d in OpCall(other)["dim"]] != [last] or OpCall(joined).dim() != last:
            return None
        other = next((x for x in both if _strip_moves(x) is not lse), None)
        if other is None or last != len(at) - 1 or not all(is_same_size(node_shape(x)[-1], 1) for x in both):
            return None
    at = at[len(at) - other.meta["val"].ndim :]
    return other, at


def _reads_each_row(ours: Node, rows: tuple[Size, ...]) -> bool:
    """Return True if the lse is read at (b, h, q) or (b, h, q, 0); regrouping may mix dims."""
    shape = node_shape(ours)
    return is_same_shape(shape, rows) or is_same_shape(shape, (*rows, 1))
