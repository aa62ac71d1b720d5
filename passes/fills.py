"""Which values may hold fills: large finite negative numbers, such as finfo.min, that stand for "never".

A softmax over a row of nothing but fills is the mean of its values, and its log-sum-exp is the fill itself: log of the
count is lost in rounding. So blocks of such a row cannot be merged, nor its gradient taken from the log-sum-exp. What
comes from outside as floats without a gradient (a mask made by the user, a buffer) may hold anything.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .._compat import pytree

LARGE = 1e4  # from here on a float32 loses some of log(count)
SLICE_ENDS = 2**40


def filling_nodes(gm: GraphModule) -> set[Node]:
    """The float values of the graph that may hold fills, by one sweep: constants, sources, and what depends on them."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if _floats(node) and not node.meta.get("sp_grad", node.op == "get_attr"):
                found.add(node)
        elif node.op == "call_function" and (any(a in found for a in node.all_input_nodes) or _fills(node)):
            found.add(node)
    return found


def _floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _fills(node: Node) -> bool:
    return any(_large(leaf) for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))))


def _large(leaf: Any) -> bool:
    """A float of either sign, for `(mask - 1) * 1e9`; an int only if it is negative and no end of a slice."""
    if isinstance(leaf, float):
        return math.isfinite(leaf) and abs(leaf) >= LARGE
    return isinstance(leaf, int) and -SLICE_ENDS < leaf <= -LARGE
