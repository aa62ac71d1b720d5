"""Which ops are attention, and what the passes and the analyses ask of one, whatever its mask is written in.

Which values may hold fills: large finite negative numbers, such as finfo.min, that stand for "never".

A softmax over a row of nothing but fills is the mean of its values, and its log-sum-exp is the fill itself: log of the
count is lost in rounding. So blocks of such a row cannot be merged, nor its gradient taken from the log-sum-exp. What
comes from outside as floats without a gradient (a mask made by the user, a buffer) may hold anything.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import MIN_FILL
from sp_compile.lowering.base.ranks import STRATEGIES
from sp_compile.lowering.masks.predicate import predicate_symbols
from sp_compile.lowering.torch_compat import flex_attention_op, pytree, varlen_attention
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info

ATTENTION = (torch.ops.aten.scaled_dot_product_attention.default, torch.ops.sp.masked_attention.default)
"""q, k, v are their first three tensor operands; both take dropout_p, scale and enable_gqa."""

ATTENTION_OF_TORCH = {op: dim for op, dim in ((flex_attention_op, -2), (varlen_attention, 0)) if op is not None}
"""Attention that no spelling took: it runs on whole values. Of q, k and v, its first arguments, the dim of tokens."""


def op_strategy(op: Any) -> Any:
    """The strategy whose op this is, made of an attention: q, k, v first, and exchanges of its own. None for others."""
    return next((s for s in STRATEGIES.values() if s.op is not None and s.op == op), None)


def attention_nodes(gm: GraphModule) -> list[Node]:
    """Every attention of the graph that no pass has sharded yet, in its order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in ATTENTION]


def all_attention_nodes(gm: GraphModule) -> list[Node]:
    """Every attention of the graph, sharded or not, in its order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and (n.target in ATTENTION or op_strategy(n.target))]


def mask_predicate(call: OpCall) -> str | None:
    """The predicate of an attention's mask; None if data describes it, and nothing beside that."""
    if call.get("attn_mask") is not None:
        return call.get("predicate") or None
    if "predicate" in call.args:
        return str(call["predicate"])
    return "k <= q" if call["is_causal"] else ""


def depends_on_query(call: OpCall) -> bool:
    """Does the mask read the index of the query, directly or through a vector that is looked up by it?"""
    names = predicate_symbols(mask_predicate(call) or "")
    return any(name == "q" or name.startswith("row") for name in names)


def masks_all_weight(call: OpCall) -> bool:
    """Does a fill leave nothing of a weight even where all keys have one, as learned sinks are no fills?"""
    sinks = call.get("sinks")
    return sinks is not None and sinks not in fill_nodes(sinks.graph.owning_module)


SLICE_ENDS = 2**40


def fill_nodes(gm: GraphModule) -> set[Node]:
    """The float values of the graph that may hold fills, by one sweep: constants, sources, and what depends on them."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            grad = node_info(node).requires_grad
            if _has_floats(node) and not (node.op == "get_attr" if grad is None else grad):
                found.add(node)
        elif node.op == "call_function":
            leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
            if any(a in found for a in node.all_input_nodes) or any(map(_is_large, leaves)):
                found.add(node)
    return found


def _has_floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_large(leaf: Any) -> bool:
    """A float of either sign, for `(mask - 1) * 1e9`; an int only if it is negative and no end of a slice."""
    if isinstance(leaf, float):
        return math.isfinite(leaf) and abs(leaf) >= MIN_FILL
    return isinstance(leaf, int) and -SLICE_ENDS < leaf <= -MIN_FILL
