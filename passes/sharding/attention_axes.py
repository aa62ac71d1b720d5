"""Classify attention ops, and find values that may contain mask fills.

A fill is a large finite negative number, such as finfo.min, that represents "never". A softmax over a row of fills only
is the mean of its values. Its log-sum-exp is the fill itself, because the log of the count is lost in rounding.
Therefore blocks of such a row cannot be merged, and its gradient cannot be computed from the log-sum-exp. Float inputs
without a gradient (a user's mask, a buffer) may contain any value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.base.dtypes import MIN_FILL, has_gradient_dtype
from sp_compile.lowering.base.ranks import STRATEGIES
from sp_compile.lowering.masks.predicate import predicate_symbols
from sp_compile.lowering.torch_compat import flex_attention_op, pytree, varlen_attention
from sp_compile.passes.graph.call import OpCall, is_tensor, node_packet
from sp_compile.passes.graph.node_info import node_info

from .rule import lookup_rule

# attention ops: q, k, v are the first three tensor operands; all accept dropout_p, scale and enable_gqa
ATTENTION = (torch.ops.aten.scaled_dot_product_attention.default, torch.ops.sp.masked_attention.default)

# attention ops of torch that were not canonicalized and run on gathered values, with the token dim of q, k, v
ATTENTION_OF_TORCH = {op: dim for op, dim in ((flex_attention_op, -2), (varlen_attention, 0)) if op is not None}


def op_strategy(op: Any) -> Any:
    """Return the strategy that replaces attention by this op, such as ring for sp::ring_attention, or None.

    Such an op has q, k, v as its first operands, and contains the exchanges between ranks.
    """
    return next((strategy for strategy in STRATEGIES.values() if strategy.op is not None and strategy.op == op), None)


def attention_nodes(gm: GraphModule) -> list[Node]:
    """Return all attention nodes that are not sharded yet, in graph order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in ATTENTION]


def all_attention_nodes(gm: GraphModule) -> list[Node]:
    """Return all attention nodes, sharded or not, in graph order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and (n.target in ATTENTION or op_strategy(n.target))]


def softmax_attended_dims(gm: GraphModule, axes: Any) -> Iterator[tuple[Node, Any]]:
    """Yield (product, dim) for dims that a softmax normalizes over and a later product sums over.

    This is attention that is written out: softmax(q @ k.T) @ v.

    Args:
        gm: The graph.
        axes: The `Axes` of its values.
    """
    normalized: set[int] = set()  # classes that a softmax normalizes over
    for node in gm.graph.nodes:
        call, rule = lookup_rule(node) or (None, None)
        if call is None or rule is None:
            continue
        for operand, factors in zip(call.operands, rule.operands):
            for dim, factor in zip(axes.dims[operand, 0], factors):  # no softmax or product has a group of factors
                names, kind = {axes.find(atom.name) for atom in dim}, rule.kind(factor)
                if rule.normalizes and kind == "replicate":
                    normalized |= names
                elif kind == "sum" and len(call.operands) > 1 and names & normalized:
                    yield node, tuple(atom for atom in dim if axes.find(atom.name) in normalized)


def mask_predicate(call: OpCall) -> str | None:
    """Return an attention's mask as a condition on query position q and key position k, such as "k <= q".

    The result is "" for an attention without a mask, and None for a mask that is known as a tensor only. For an
    attention with both a predicate and a mask tensor, it is the predicate.
    """
    if call.get("attn_mask") is not None:
        return call.get("predicate") or None
    if "predicate" in call.args:  # sp::masked_attention
        return str(call["predicate"])
    return "k <= q" if call["is_causal"] else ""


def has_query_position(call: OpCall) -> bool:
    """Return True if the mask's condition reads the query position, directly or as the index of a vector.

    "k <= q" does, and so does "row0 == col0", where row0 is the document id of the query.
    """
    names = predicate_symbols(mask_predicate(call) or "")
    return any(name == "q" or name.startswith("row") for name in names)


def has_absorbing_sinks(call: OpCall) -> bool:
    """Return True if masked keys have weight 0 even for a query whose keys are all masked.

    Masked keys have a fill, a large finite negative number, as their score. If all scores of a row are fills, the
    softmax is uniform, so that masked keys have weight. A learned sink is an additional score of each row. If it is no
    fill itself, it has all of the weight of such a row.
    """
    sinks = call.get("sinks")
    return sinks is not None and sinks not in fill_nodes(sinks.graph.owning_module)


aten = torch.ops.aten
# products with learned weights, or averages: constants before them, such as those of each layer, do not add up
_WEIGHTED_SUMS = {aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum, aten.softmax}
# ops with a number that is a term of the result, or all of it
_SUMS = {aten.add, aten.sub, aten.rsub, aten.subtract}
_CONSTANT_TERMS = _SUMS | {
    aten.where, aten.masked_fill, aten.full, aten.full_like, aten.new_full, aten.fill, aten.scalar_tensor,
}  # fmt: skip
SLICE_ENDS = 2**40  # minimum magnitude of an int that is the open end of a slice, as in x[:, 1:], and not a fill


def fill_nodes(gm: GraphModule) -> set[Node]:
    """Return the values that may contain fills: large finite negative numbers, such as finfo.min, in place of -inf.

    These are float inputs without gradients, which may be masks, large constants, products with constants that are
    large together (`constant_factors`), and all values computed from them, except conditions.
    """
    fills: set[Node] = set()
    factors = constant_factors(gm.graph)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            requires_grad = node_info(node).requires_grad
            if requires_grad is None:  # not known: attributes are usually parameters
                requires_grad = node.op == "get_attr"
            if is_tensor(node) and node.meta["val"].is_floating_point() and not requires_grad:
                fills.add(node)
        elif node.op == "call_function" and not _has_bool_result(node):
            leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
            has_fill = not fills.isdisjoint(node.all_input_nodes) or any(map(_can_be_fill, leaves))
            if has_fill or factors[node] >= MIN_FILL:
                fills.add(node)
    return fills


def constant_factors(graph: Graph) -> dict[Node, float]:
    """Estimate the largest magnitude that the program's constants give each value, if all inputs are within -1 and 1.

    It is 10**9 for (mask - 1) * 1000 * 1000 * 1000, for (mask - 1) / 1e-9, and for (mask * 1e4) * (mask * -1e5). The
    nodes need no metadata.
    """
    factors: dict[Node, float] = {}
    for node in graph.nodes:
        packet = node_packet(node)
        factor = max((factors[x] for x in node.all_input_nodes), default=1.0)
        # Sizes and indices, which are in lists or operands of other ops, are not in a value.
        numbers = [abs(float(x)) for x in (*node.args, *node.kwargs.values()) if _is_finite_nonzero(x)]
        if packet in _WEIGHTED_SUMS or _has_bool_result(node):
            factor = 1.0
        elif packet in (aten.mul, aten.multiply):
            factor = math.prod(factors[x] for x in node.args if isinstance(x, Node)) * math.prod(numbers)
        elif packet in (aten.div, aten.divide, aten.true_divide):
            factor /= math.prod(numbers)
        elif packet in _CONSTANT_TERMS and not (packet in _SUMS and _is_integer(node)):  # an integer may be a position
            factor = max(factor, *numbers, 1.0)
            alpha = node.kwargs.get("alpha", 1)
            factor *= abs(float(alpha)) if _is_finite_nonzero(alpha) else 1.0
        factors[node] = factor
    return factors


def _is_finite_nonzero(x: Any) -> bool:
    """Return True for a Python number other than 0, infinity, NaN and a bool."""
    return isinstance(x, int | float) and not isinstance(x, bool) and x != 0 and math.isfinite(x)


def _has_bool_result(node: Node) -> bool:
    """Return True for a tensor of bools."""
    return is_tensor(node) and node.meta["val"].dtype == torch.bool


def _is_integer(node: Node) -> bool:
    """Return True for a tensor of integers; False if the node has no metadata."""
    return is_tensor(node) and not has_gradient_dtype(node.meta["val"])


def _can_be_fill(leaf: Any) -> bool:
    """Return True if a Python scalar may be a fill, or become one by a product, as in (mask - 1) * 1e9.

    These are large floats of either sign and large negative ints. Even larger ints are no fills, but ends of slices.
    """
    if isinstance(leaf, float):
        return math.isfinite(leaf) and abs(leaf) >= MIN_FILL
    return isinstance(leaf, int) and -SLICE_ENDS < leaf <= -MIN_FILL
