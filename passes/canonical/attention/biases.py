"""Parse biases of positions and heads into an expression and a mask, without an S x S tensor.

    slopes[:, None, None] * (i - i[:, None])                    s + head0*(k - q), and slopes
    where(i[:, None] >= i, slopes * (i - i[:, None]), -inf)     the same, k <= q
    slopes * i + additive mask of fills                         s + head0*k, and the predicate of the mask

Here i is arange(S), and s, q, k and head0 are the score, the positions of its query and its key, and the number of its
head. A *fill* is a large negative number that removes a key's weight. `BiasReader.at` derives the element of an op from
the elements of its operands. A per-head number may be computed from anything. Unchanged: learned biases, whose gradient
is not implemented; lookups by query, key or batch entry; biases rounded to another dtype than that of q, or that sympy
rounds differently ((k - q) / 7 becomes k / 7 - q / 7); and biases no larger than a row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import And, Not, Or
from sympy.core.function import AppliedUndef
from torch.fx import Node

from sp_compile.lowering.base.dtypes import HALF
from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.graph.call import OpCall, is_tensor, node_packet, node_shape
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.matchers import carries_gradient, constant_value, map_coordinates, value_origin

from .elements import Coords, ElementReader, NotSymbolic, as_cases, as_truth
from .proofs import HEAD_INDEX, KEY_INDEX, QUERY_INDEX, Boolean
from .score_functions import head_symbol

aten = torch.ops.aten
_BIAS_OPS: dict[Any, Callable[..., Any]] = {
    aten.mul: operator.mul,
    aten.div: operator.truediv,
    aten.neg: operator.neg,
    aten.abs: sympy.Abs,
    aten.tanh: sympy.tanh,
    aten.exp: sympy.exp,
}


@dataclass
class BiasElement:
    """Element of a bias: the term that it adds to the score of a query and a key."""

    value: sympy.Expr  # term, where attention is allowed
    allowed: Boolean = sympy.true  # condition for attention
    finite: bool = False  # True if masked scores get a large negative number, not -inf


class BiasReader:
    """Reader of the elements of one bias of scores (B, H, Q, K).

    Its methods raise `NotSymbolic` for values without an expression.

    Args:
        positions: The reader of values that depend on positions only.
        dtype: The dtype of q.
        max_fill: The greatest number that is a fill.

    Attributes:
        heads: The values that expressions name head0, head1, ...
    """

    def __init__(self, positions: ElementReader, dtype: torch.dtype, max_fill: float) -> None:
        self.positions, self.dtype, self.max_fill = positions, dtype, max_fill
        self.heads: list[Node] = []

    def at(self, x: Any, coords: Sequence[Any]) -> BiasElement:
        """Return the element of a value at the coordinates.

        Args:
            x: A node or a Python scalar.
            coords: One expression per dim of `x`.

        Returns:
            The term and its condition.

        Raises:
            NotSymbolic: No expression describes the element.
        """
        if not is_tensor(x):
            return BiasElement(_parse_number(x))
        node, exact_coords = value_origin(x), tuple(map(sympy.sympify, coords))
        constant = constant_value(node)
        if constant is not None:
            return BiasElement(_parse_number(constant))
        try:
            return self._position_element(node, exact_coords)
        except NotSymbolic:
            if self._has_number_per_head(node, exact_coords):
                return BiasElement(self._head_element(node))
        return self._computed_element(node, exact_coords)

    def _position_element(self, node: Node, coords: Coords) -> BiasElement:
        """Return the element of a value that positions determine: an integer, or zeros and fills (a mask)."""
        cases = as_cases(self.positions.at(node, coords))
        if len(cases) == 1 and cases[0][1].is_integer:
            value = cases[0][1]
            if value.has(AppliedUndef) or value.free_symbols - {QUERY_INDEX, KEY_INDEX}:
                raise NotSymbolic("reads more than the positions of a query and a key", node)
            return BiasElement(value)
        if not all(v == 0 or self._is_fill(v) for _, v in cases):
            raise NotSymbolic("has cases other than zeros and fills", node)
        allowed = Or(*(condition for condition, v in cases if v == 0))
        return BiasElement(sympy.Integer(0), allowed, any(v.is_finite for _, v in cases if v != 0))

    def _is_fill(self, value: sympy.Expr) -> bool:
        """Return True for a number that removes the weight of a key."""
        return bool(value.is_number and value <= self.max_fill)

    def _has_number_per_head(self, node: Node, coords: Coords) -> bool:
        """Return True if the value has one number per head at these coordinates, or one for all heads."""
        num_heads = self.positions.sizes[HEAD_INDEX]
        extents = zip(coords, node_shape(node))
        return all(is_same_size(n, 1) or (c == HEAD_INDEX and is_same_size(n, num_heads)) for c, n in extents)

    def _head_element(self, node: Node) -> sympy.Expr:
        """Return the symbol head0, head1, ... of a per-head value, which is added to `heads`."""
        if carries_gradient(node):
            raise NotSymbolic("may need a gradient, which an expression does not support", node)
        if node not in self.heads:
            self.heads.append(node)
        return head_symbol(self.heads.index(node))

    def _computed_element(self, node: Node, coords: Coords) -> BiasElement:
        """Return the element of an op, from those of its operands."""
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            raise NotSymbolic("does not depend on positions and heads only", node)
        if node.meta["val"].dtype != self.dtype or self.dtype in HALF:
            raise NotSymbolic(f"is rounded to {node.meta['val'].dtype}", node)
        moved = map_coordinates(node, coords)
        if moved is not None:
            return self.at(*moved)
        call, op = OpCall(node), node_packet(node)

        def operand(name: str) -> BiasElement:
            """Return the element of an operand, at its broadcast coordinates."""
            x = call[name]
            if not is_tensor(x):
                return self.at(x, ())
            shape = node_shape(x)
            pairs = zip(coords[len(coords) - len(shape) :], shape)
            return self.at(x, [0 if is_same_size(extent, 1) else coord for coord, extent in pairs])

        if op in (aten.add, aten.sub, aten.rsub):
            x, y = operand("self"), operand("other")
            alpha = _parse_number(call["alpha"]) * (1 if op is aten.add else -1)
            return self._sum(y, x, alpha, node) if op is aten.rsub else self._sum(x, y, alpha, node)
        if op is aten.where and "self" in call.args:
            return self._select(call["condition"], coords, operand("self"), operand("other"), node)
        if op is aten.masked_fill:
            return self._select(call["mask"], coords, operand("value"), operand("self"), node)
        if op not in _BIAS_OPS or call.get("rounding_mode") is not None:
            raise NotSymbolic("is not a sum, product or where of positions and heads", node)
        return _apply_op(op, [operand(name) for name in ("self", "other") if name in call.args], node)

    def _sum(self, x: BiasElement, y: BiasElement, alpha: sympy.Expr, node: Node) -> BiasElement:
        """Return the element of x + alpha * y."""
        if y.allowed != sympy.true and alpha != 1:
            raise NotSymbolic("subtracts fills", node)
        return BiasElement(x.value + alpha * y.value, And(x.allowed, y.allowed), x.finite or y.finite)

    def _select(self, mask: Node, coords: Coords, yes: BiasElement, no: BiasElement, node: Node) -> BiasElement:
        """Return the element of where(mask, yes, no): the one that is no fill, allowed where it is selected."""
        condition = as_truth(self.positions.operand(mask, coords))
        for fill, term, allowed in ((yes, no, Not(condition)), (no, yes, condition)):
            if self._is_fill(fill.value):
                return BiasElement(term.value, And(term.allowed, allowed), term.finite or bool(fill.value.is_finite))
        raise NotSymbolic("selects one of two biases", node)


def _apply_op(op: Any, operands: list[BiasElement], node: Node) -> BiasElement:
    """Return the element of an op of `_BIAS_OPS`. Raises NotSymbolic for fills and rounded expressions."""
    if any(x.allowed != sympy.true for x in operands):
        raise NotSymbolic("computes with fills", node)
    if op is aten.div and operands[1].value.has(QUERY_INDEX, KEY_INDEX):
        raise NotSymbolic("divides by a position", node)
    value = _BIAS_OPS[op](*(x.value for x in operands))
    if any(_may_round(term) for terms in value.atoms(sympy.Add) for term in terms.args):
        raise NotSymbolic("would be rounded differently as an expression", node)
    return BiasElement(value)


def _may_round(term: sympy.Expr) -> bool:
    """Return True if a position is scaled by a fraction with another denominator than a power of two.

    The scaled term and the scaled sum that it belongs to are then rounded differently.
    """
    factor, position = term.as_coeff_Mul()
    return position in (QUERY_INDEX, KEY_INDEX) and int(factor.q).bit_count() != 1


def _parse_number(x: Any) -> sympy.Expr:
    """Convert a Python scalar to an expression. Raises NotSymbolic for NaN and other types."""
    if isinstance(x, bool) or not isinstance(x, int | float) or math.isnan(x):
        raise NotSymbolic(f"a bias has the operand {x!r}")
    if math.isinf(x):
        return sympy.oo if x > 0 else -sympy.oo
    return sympy.Rational(repr(x))
