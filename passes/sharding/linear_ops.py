"""Find the operands that linear ops add or scale, for sums that remain partial.

    add(x, y), sub(x, y)   adds x and y          mul(x, 2), x / n, neg(x)   scales x

A value is a partial sum if each rank has a summand of it. A linear op on partial sums has a partial result, so that the
ranks sum only once, after it. Operands that broadcast or are cast are excluded: they would be added more than once, or
rounded on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall, node_shape, parse_overloads
from sp_compile.passes.graph.sizes import is_same_shape
from sp_compile.passes.sharding.placement import Partial, Placement, Replicate

PRODUCT_OPS = (torch.ops.aten.mul.Tensor,)
SCALE_OPS = (*PRODUCT_OPS, *parse_overloads("div.Scalar div.Tensor mul.Scalar neg"))
ADD_OPS = parse_overloads("add.Tensor sub.Tensor")
LINEAR_OPS = (*ADD_OPS, *SCALE_OPS)


def summed_operands(node: Node) -> list[Node]:
    """Return the operands that the node adds, or [] for any other node.

    They are two tensors, or one tensor to which it adds 0.
    """
    terms = _operands_like_result(node) if node.target in ADD_OPS else []
    if len(terms) != 1:
        return terms
    second = OpCall(node)["other"]
    return terms if not isinstance(second, Node) and second == 0 else []


def scaled_operands(node: Node) -> list[Node]:
    """Return the operands that the node scales by its other operand; [] for any other node."""
    factors = _operands_like_result(node) if node.target in SCALE_OPS else []
    factors = factors if node.target in PRODUCT_OPS else [x for x in factors if x is OpCall(node)["self"]]
    return [x for x in factors if OpCall(node).operands.count(x) == 1]  # not a square


def _operands_like_result(node: Node) -> list[Node]:
    """Return the floating operands with the shape and the dtype of the result."""
    value, shape = node.meta["val"], node_shape(node)
    if not value.is_floating_point():
        return []
    same_dtype = [x for x in OpCall(node).operands if x.meta["val"].dtype == value.dtype]
    return [x for x in same_dtype if is_same_shape(node_shape(x), shape)]


def is_partial_sum(call: OpCall, have: Sequence[Placement]) -> bool:
    """Return True if the terms are partial sums and all other operands are replicated."""
    sums = [x for x, p in zip(call.operands, have) if isinstance(p, Partial)]
    if not sums or not all(isinstance(p, Partial | Replicate) for p in have):
        return False
    return sums == summed_operands(call.node) or (len(sums) == 1 and sums[0] in scaled_operands(call.node))
