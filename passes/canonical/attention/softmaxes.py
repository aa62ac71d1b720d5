"""Match the forms of a softmax: the op, and its computation from exponentials.

    e = exp(s - s.amax(-1, keepdim=True));  e / e.sum(-1, keepdim=True)        also max(-1), with or without a gradient
    exp(s - logsumexp(s, -1, keepdim=True))
    exp(log_softmax(s, -1))

Here s are the scores, and a *row* is s along the dim of the softmax. `eager_attention.py` fuses the matched forms.
Unchanged, with a note: exponentials without protection from overflow, since exp(s) / exp(s).sum(-1) is NaN for a large
score and a softmax is not. Not a softmax: sums plus a term (an epsilon), values with other readers, and
s - logsumexp(s).detach(), which has a different gradient.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.sizes import is_same_shape
from sp_compile.passes.sharding.matchers import is_order_preserving, skip_ops, value_origin

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
LOG_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)
MAXIMA = (aten.max.dim, aten.amax.default)
OVERFLOWS = "exp of scores overflows without subtraction of the maximum of the row; use softmax(scores, dim)"


@dataclass(frozen=True)
class SoftmaxMatch:
    """Softmax in any form."""

    source: Node  # input of the softmax
    dim: int  # dim along which it reduces
    chain: tuple[Node, ...]  # ops of the softmax in graph order; the last one is the result
    refusal: str | None = None  # reason why a similar form is not a softmax

    @property
    def result(self) -> Node:
        """Return the probabilities."""
        return self.chain[-1]

    @property
    def readers(self) -> tuple[Node, ...]:
        """Return the ops of the chain that read the source."""
        return tuple(n for n in self.chain if self.source in n.all_input_nodes)


def match_softmax(node: Node) -> SoftmaxMatch | None:
    """Return the softmax of which a node is the result, or None.

    Its forms are softmax(s), exp(s - max(s)) / sum, exp(s - logsumexp(s)) and exp(log_softmax(s)).
    """
    if node.op != "call_function":
        return None
    if node.target in SOFTMAX:
        call = OpCall(node)
        return SoftmaxMatch(call.operands[0], call.dim(), chain=(node,))
    if node.target is aten.exp.default:
        return _match_exp_log_softmax(node)
    return _match_exp_over_sum(node) if node.target is aten.div.Tensor else None


def _match_exp_log_softmax(node: Node) -> SoftmaxMatch | None:
    """Match exp(log_softmax(s)) and exp(s - logsumexp(s)); return None for other exponentials."""
    log_weights = value_origin(node.args[0])
    if log_weights.target in LOG_SOFTMAX and _has_same_dtype(log_weights, node):
        call = OpCall(log_weights)
        return match_between(call.operands[0], call.dim(), node)
    difference = match_difference(log_weights, (aten.logsumexp.default,))  # (s, dim)
    return match_between(*difference, node) if difference is not None else None


def _match_exp_over_sum(node: Node) -> SoftmaxMatch | None:
    """Match e / e.sum(dim, keepdim=True) with e = exp(s - max(s)) as a softmax of s, or return None.

    With e = exp(s), the match has a refusal: for large s, e overflows and a softmax does not.
    """
    exponentials, total = value_origin(node.args[0]), node.args[1]
    if not is_tensor(total) or exponentials.target is not aten.exp.default or not _has_same_dtype(exponentials, node):
        return None
    dim = _match_reduction(total, exponentials, (aten.sum.dim_IntList,))
    if dim is None:
        return None
    scores = value_origin(exponentials.args[0])
    difference = match_difference(scores, MAXIMA)  # (s, dim) of s - s.amax(dim, True), or None
    if difference is None or difference[1] != dim:
        return SoftmaxMatch(scores, dim, chain=(node,), refusal=OVERFLOWS)
    return match_between(*difference, node)


def match_difference(node: Node, reductions: tuple[Any, ...]) -> tuple[Node, int] | None:
    """Return (s, dim) for a node s - f(s), where f is one of the reductions along `dim`, such as amax; else None."""
    if node.target is not aten.sub.Tensor or OpCall(node)["alpha"] != 1 or not all(map(is_tensor, node.args)):
        return None
    row = value_origin(node.args[0])  # s, without copies and views that cancel each other
    dim = _match_reduction(node.args[1], row, reductions) if _has_same_dtype(row, node) else None
    return (row, dim) if dim is not None else None


def _match_reduction(x: Node, row: Node, reductions: tuple[Any, ...]) -> int | None:
    """Return the dim along which x is a reduction of `row`, with the dim kept at size 1, as row.amax(dim, True).

    None if x is another value.

    Args:
        x: The value that may be the reduction.
        row: The operand of the reduction.
        reductions: The ops that may compute it.
    """
    # A softmax does not depend on the subtracted maximum, so its gradient has no effect, and it may be detached.
    may_detach = reductions is MAXIMA
    # Skip reshapes, such as the unsqueeze of a reduction without keepdim.
    reduced = value_origin(x)
    while is_order_preserving(reduced) or (may_detach and reduced.target is aten.detach.default):
        reduced = value_origin(reduced.args[0])
    if reduced.target is operator.getitem and reduced.args[1] == 0:  # the values of max(dim)
        reduced = reduced.args[0]
    if reduced.target not in reductions:
        return None
    call, shape = OpCall(reduced), node_shape(row)
    operand = skip_ops(value_origin(call.operands[0]), lambda n: may_detach and n.target is aten.detach.default)
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    # A reduction over all dims has none (None), and a tensor without dims has no rows.
    is_along_dim = bool(shape) and len(dims) == 1 and dims[0] is not None
    if not is_along_dim or value_origin(operand) is not row or not _has_same_dtype(row, x):
        return None
    dim = int(dims[0]) % len(shape)
    return dim if is_same_shape(node_shape(x), (*shape[:dim], 1, *shape[dim + 1 :])) else None


def _has_same_dtype(a: Node, b: Node) -> bool:
    """Return True if both tensors have the same dtype."""
    return bool(a.meta["val"].dtype == b.meta["val"].dtype)


def match_between(source: Node, dim: int, result: Node) -> SoftmaxMatch | None:
    """Return a match with all ops from the scores up to a result; None if another node reads one of them.

    The caller has checked the result: a softmax, or in `sinks.py` the difference of a row and its maximum.

    Args:
        source: The scores.
        dim: The dim of a row.
        result: The last op.
    """
    # All nodes computed from the scores, up to the result: each must lead to the result.
    between = reachable_set([source], lambda n: () if n is result else n.users) - {source}
    unread = [n for n in between if not n.users and n.target is operator.getitem]  # the indices of the maximum
    all_lead_to_result = all(n is result or n in unread or (n < result and n.users) for n in between)
    return SoftmaxMatch(source, dim, tuple(sorted(between))) if all_lead_to_result else None
