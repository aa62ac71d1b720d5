"""Match the forms of a softmax: the op, and its computation from exponentials.

    e = exp(s - s.amax(-1, keepdim=True));  e / e.sum(-1, keepdim=True)        max(-1), too, with or without a gradient
    exp(s - logsumexp(s, -1, keepdim=True))
    exp(log_softmax(s, -1))

Leaves alone, and says so, exponentials that nothing keeps from overflow: exp(s) / exp(s).sum(-1) is nan where a score
is large and a softmax is not. No softmax are sums that something is added to (an epsilon), what anything else reads,
and s - logsumexp(s).detach(), which has another gradient.
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
from sp_compile.passes.sharding.matchers import keeps_order, skip_ops, value_origin

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
LOG_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)
MAXIMA = (aten.max.dim, aten.amax.default)
OVERFLOWS = "exp of scores from which the greatest of the row is not taken overflows; softmax(scores, dim) does not"


@dataclass(frozen=True)
class SoftmaxMatch:
    """source: what it is of; dim: along which; chain: the ops of it, in the graph's order; result: the last of these.

    why_not: why it is not taken for one although it looks like one.
    """

    source: Node
    dim: int
    chain: tuple[Node, ...]
    refusal: str | None = None

    @property
    def result(self) -> Node:
        """The probabilities."""
        return self.chain[-1]

    @property
    def readers(self) -> tuple[Node, ...]:
        """What of it reads the source."""
        return tuple(n for n in self.chain if self.source in n.all_input_nodes)


def match_softmax(node: Node) -> SoftmaxMatch | None:
    """The softmax whose result the node is."""
    if node.op != "call_function":
        return None
    if node.target in SOFTMAX:
        call = OpCall(node)
        return SoftmaxMatch(call.operands[0], call.dim(), (node,))
    if node.target is aten.exp.default:
        return _match_exp_log_softmax(node)
    return _match_exp_over_sum(node) if node.target is aten.div.Tensor else None


def _match_exp_log_softmax(node: Node) -> SoftmaxMatch | None:
    """exp(log_softmax(s)), exp(s - logsumexp(s))."""
    logs = value_origin(node.args[0])
    if logs.target in LOG_SOFTMAX and not _has_other_dtype(logs, node):
        call = OpCall(logs)
        return _region_between(call.operands[0], call.dim(), node)
    found = _match_difference(logs, (aten.logsumexp.default,))
    return _region_between(*found, node) if found is not None else None


def _match_exp_over_sum(node: Node) -> SoftmaxMatch | None:
    """e / e.sum(dim, keepdim=True), where e is exp(s - the greatest s)."""
    each, total = value_origin(node.args[0]), node.args[1]
    if not is_tensor(total) or each.target is not aten.exp.default or _has_other_dtype(each, node):
        return None
    dim = _match_reduction(total, each, (aten.sum.dim_IntList,))
    if dim is None:
        return None
    scores = value_origin(each.args[0])
    found = _match_difference(scores, MAXIMA)
    return (
        _region_between(*found, node)
        if found is not None and found[1] == dim
        else SoftmaxMatch(scores, dim, (node,), OVERFLOWS)
    )


def _match_difference(node: Node, reductions: tuple[Any, ...]) -> tuple[Node, int] | None:
    """(s, dim) of s - f(s), where f is one of these reductions along that dim."""
    if node.target is not aten.sub.Tensor or OpCall(node)["alpha"] != 1 or not all(map(is_tensor, node.args)):
        return None
    row = value_origin(node.args[0])
    dim = _match_reduction(node.args[1], row, reductions) if not _has_other_dtype(row, node) else None
    return (row, dim) if dim is not None else None


def _match_reduction(x: Node, row: Node, reductions: tuple[Any, ...]) -> int | None:
    """The one dim of a row that x is such a reduction of it along, standing beside each element of it; else None."""
    detached = reductions is MAXIMA  # no gradient of the greatest counts, whichever it is
    sums = value_origin(x)
    while keeps_order(sums) or (detached and sums.target is aten.detach.default):
        sums = value_origin(sums.args[0])
    if sums.target is operator.getitem and sums.args[1] == 0:
        sums = sums.args[0]
    if sums.target not in reductions:
        return None
    call, shape = OpCall(sums), node_shape(row)
    of = skip_ops(value_origin(call.operands[0]), lambda n: detached and n.target is aten.detach.default)
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    if value_origin(of) is not row or len(dims) != 1 or _has_other_dtype(row, x):
        return None
    dim = int(dims[0]) % len(shape)
    return dim if is_same_shape(node_shape(x), (*shape[:dim], 1, *shape[dim + 1 :])) else None


def _has_other_dtype(a: Node, b: Node) -> bool:
    return bool(a.meta["val"].dtype != b.meta["val"].dtype)


def _region_between(source: Node, dim: int, result: Node) -> SoftmaxMatch | None:
    """All between what a softmax is of and its result; None if something else reads any of it."""
    between = reachable_set([source], lambda n: () if n is result else n.users) - {source}
    unread = [n for n in between if not n.users and n.target is operator.getitem]  # where the greatest stands
    alone = all(n is result or n in unread or (n < result and n.users) for n in between)
    return SoftmaxMatch(source, dim, tuple(sorted(between))) if alone else None
