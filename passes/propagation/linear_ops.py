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
    """Return the terms of an add or sub: x and y for x + y, x for x + 0; [] for any other node.

    If each term is a partial sum (each rank has a summand), so is the result. A constant other than 0 would be added
    by every rank, so x + 1 has no terms here.
    """
    terms = _operands_like_result(node) if node.target in ADD_OPS else []
    if len(terms) != 1:
        return terms
    second = OpCall(node)["other"]  # a Node if one of the two operands broadcasts or is cast, else a number
    return terms if not isinstance(second, Node) and second == 0 else []


def scaled_operands(node: Node) -> list[Node]:
    """Return the operands in which a node is linear: x for x / y, -x or x * 2, both for x * y; [] for any other node.

    If such an operand is a partial sum (each rank has a summand) and the others are replicated, so is the result.
    """
    call = OpCall(node) if node.target in SCALE_OPS else None
    if call is None:
        return []
    factors = _operands_like_result(node)
    if node.target not in PRODUCT_OPS:  # a quotient is not linear in its divisor
        factors = [x for x in factors if x is call["self"]]
    return [x for x in factors if call.operands.count(x) == 1]  # x * x is not linear in x


def _operands_like_result(node: Node) -> list[Node]:
    """Return the floating operands with the shape and the dtype of the result: neither broadcast nor cast.

    A partial sum that broadcasts would be added more than once; one that is cast would be rounded on each rank.
    """
    value, shape = node.meta["val"], node_shape(node)
    if not value.is_floating_point():
        return []
    same_dtype = [x for x in OpCall(node).operands if x.meta["val"].dtype == value.dtype]
    return [x for x in same_dtype if is_same_shape(node_shape(x), shape)]


def is_partial_sum(call: OpCall, have: Sequence[Placement]) -> bool:
    """Return True if a linear op may run on partial sums, so that its result is partial and is reduced later.

    It adds partial sums only, or scales one of them by a replicated value.

    Args:
        call: The call of the op.
        have: The placements of its operands.
    """
    sums = [x for x, p in zip(call.operands, have) if isinstance(p, Partial)]
    if not sums or not all(isinstance(p, Partial | Replicate) for p in have):
        return False
    adds_sums = sums == summed_operands(call.node)
    return adds_sums or (len(sums) == 1 and sums[0] in scaled_operands(call.node))
