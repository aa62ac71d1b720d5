"""Match sinks that are applied to the result and the log-sum-exp (lse) of an attention.

    out * sigmoid(lse - sinks.view(1, H, 1)).unsqueeze(-1)                         torchtitan, IBM's Granite
    lse = lse.unsqueeze(-1)
    out * exp(lse - logsumexp(cat([lse, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], -1), -1, keepdim=True))
                                                                                    transformers, with flex_attention

A *sink* is a learned logit of a head, which takes a share of the weights of a row (one query) and has no value. The
factor of `out` is the *share* of a row's weights that its keys have; the sink has the other share. Unchanged:
log-sum-exps with other readers, and log-sum-exps that are normalized with more than one sink or over queries. The
caller reports these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.sizes import Size, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import is_copy, is_float_cast, is_only_read_by, is_order_preserving, skip_ops

from .proofs import BATCH_INDEX, HEAD_INDEX, QUERY_INDEX
from .sinks import SinkValue, match_sink_value

aten = torch.ops.aten


@dataclass(frozen=True)
class SinkAttention:
    """Attention with sinks that is computed from a result and a log-sum-exp."""

    result: Node  # the attention with sinks
    sinks: SinkValue  # a number per head
    chain: tuple[Node, ...]  # nodes from the log-sum-exp to the result


def match_lse_sinks(out: Node, lse: Node) -> SinkAttention | None:
    """Match out * sigmoid(lse - sinks), and its other forms, so that one attention with sinks can replace it.

    A sink is a learned logit per head that takes a share of the weights of each query and has no value. The factor of
    `out` is the share that the keys have.

    Args:
        out: (B, H, Q, E), the result of an attention.
        lse: (B, H, Q), its log-sum-exp.

    Returns:
        The attention with sinks; None for another use of `out`, or if the log-sum-exp has another reader.
    """
    result = next(iter(out.users)) if len(out.users) == 1 else None
    if result is None or result.target is not aten.mul.Tensor or not is_only_read_by(lse, result):
        return None
    share = next((x for x in OpCall(result).operands if x is not out), None)
    rows = node_shape(out)[:-1]  # (B, H, Q)
    if share is None or len(rows) != 3 or not is_same_shape(node_shape(share), (*rows, 1)):
        return None
    sinks = _match_share_sinks(_strip_moves(share), lse, rows)
    # The nodes that compute the result from the log-sum-exp, which the caller replaces; `<` is the order in the graph.
    chain = sorted(reachable_set([lse], lambda n: n.users if n < result else ()))
    return SinkAttention(result, sinks, tuple(chain)) if sinks is not None else None


def _strip_moves(x: Node) -> Node:
    """Return the value before casts to floats, copies and changes of shape, in any number."""
    return skip_ops(x, lambda n: is_float_cast(n) or is_copy(n) or is_order_preserving(n))


def _match_share_sinks(share: Node, lse: Node, rows: tuple[Size, ...]) -> SinkValue | None:
    """Return the sinks s in sigmoid(lse - s) or exp(lse - logsumexp([lse, s])), or None for another value.

    Args:
        share: The factor of the attention's result: the share of the weights that the keys have.
        lse: The log-sum-exp of the attention.
        rows: The shape (B, H, Q) of the queries.
    """
    difference = _strip_moves(share.args[0]) if share.target in (aten.sigmoid.default, aten.exp.default) else None
    if difference is None or difference.target is not aten.sub.Tensor or OpCall(difference)["alpha"] != 1:
        return None
    row_lse, sinks = OpCall(difference)["self"], OpCall(difference)["other"]
    if _strip_moves(row_lse) is not lse or not is_tensor(sinks):
        return None
    shape = node_shape(row_lse)
    if not is_same_shape(shape, rows) and not is_same_shape(shape, (*rows, 1)):  # another shape may mix the dims
        return None
    if share.target is aten.exp.default:
        sinks = _match_joined_sinks(sinks, lse, len(shape))
        if sinks is None:
            return None
    # The index of row (b, h, q) in each dim of `shape`, to which the sinks broadcast: they may lack its first dims.
    coords = (BATCH_INDEX, HEAD_INDEX, QUERY_INDEX, 0)[: len(shape)]
    return match_sink_value(sinks, coords[len(shape) - sinks.meta["val"].ndim :], rows[:2])


def _match_joined_sinks(total: Node, lse: Node, ndim: int) -> Node | None:
    """Return s if the total is logsumexp(cat([lse, s], -1), -1, keepdim=True), else None.

    Args:
        total: The value that may have this form.
        lse: The log-sum-exp of the attention.
        ndim: The number of dims of lse in the program, 4 for (B, H, Q, 1): s is joined to it along its last dim.
    """
    if total.target is not aten.logsumexp.default or not OpCall(total)["keepdim"]:
        return None
    joined = OpCall(total).operands[0]
    last_dim = joined.meta["val"].ndim - 1
    if joined.target is not aten.cat.default or OpCall(joined).dim() != last_dim or last_dim != ndim - 1:
        return None
    parts = OpCall(joined).operands
    if len(parts) != 2 or [d % ndim for d in OpCall(total)["dim"]] != [last_dim]:
        return None
    if not all(is_same_size(node_shape(x)[-1], 1) for x in parts):  # one column each
        return None
    sinks = [x for x in parts if _strip_moves(x) is not lse]
    return sinks[0] if len(sinks) == 1 else None
