"""Parse biases of positions and heads into an expression and a mask, without an S x S tensor.

    slopes[:, None, None] * (i - i[:, None])                    s + head0*(k - q), and slopes
    where(i[:, None] >= i, slopes * (i - i[:, None]), -inf)     the same, k <= q
    slopes * i + additive mask of fills                         s + head0*k, and the predicate of the mask

A per-head number may be computed from anything. Unchanged: learned biases, whose gradient is not implemented; lookups
by query, key or batch entry; biases rounded to another dtype than that of q, or that sympy rounds differently
((k - q) / 7 becomes k / 7 - q / 7); and biases no larger than a row.
"""

from __future__ import annotations

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
    """Term added to a score by a bias."""

    value: sympy.Expr  # term, where attention is allowed
    allowed: Boolean = sympy.true  # condition for attention
    finite: bool = False  # masked scores get a large negative number, not -inf


class BiasReader:
    """Reader of the elements of one bias of scores (B, H, Q, K).

    `heads` lists the values that expressions name head0, head1, ...
    """

    def __init__(self, positions: ElementReader, dtype: torch.dtype, least: float) -> None:
        self.positions, self.dtype, self.least = positions, dtype, least
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
        node, at = value_origin(x), tuple(sympy.sympify(c) for c in coords)
        constant, count = constant_value(node), self.positions.sizes[HEAD_INDEX]
        if constant is not None:
            return BiasElement(_parse_number(constant))
        try:
            return self._position_element(node, at)
        except NotSymbolic:
            if all(
                is_same_size(extent, 1) or (c == HEAD_INDEX and is_same_size(extent, count))
                for c, extent in zip(at, node_shape(node))
            ):
                return BiasElement(self._head_element(node))
        return self._computed_element(node, at)

    def _position_element(self, node: Node, at: Coords) -> BiasElement:
        """Return an integer that the positions determine, or zeros and fills."""
        found = as_cases(self.positions.at(node, at))
        if len(found) == 1 and found[0][1].is_integer:
            value = found[0][1]
            if value.has(AppliedUndef) or value.free_symbols - {QUERY_INDEX, KEY_INDEX}:
                raise NotSymbolic("reads more than the positions of a query and a key", node)
            return BiasElement(value)
        if not all(v == 0 or (v.is_number and v <= self.least) for _, v in found):
            raise NotSymbolic("has cases other than zeros and fills", node)
        allowed = Or(*(c for c, v in found if v == 0))
        return BiasElement(sympy.Integer(0), allowed, any(v.is_finite for _, v in found if v != 0))

    def _head_element(self, node: Node) -> sympy.Expr:
        if carries_gradient(node):
            raise NotSymbolic("may need a gradient, which an expression does not support", node)
        if node not in self.heads:
            self.heads.append(node)
        return head_symbol(self.heads.index(node))

    def _computed_element(self, node: Node, at: Coords) -> BiasElement:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            raise NotSymbolic("does not depend on positions and heads only", node)
        if node.meta["val"].dtype != self.dtype or self.dtype in HALF:
            raise NotSymbolic(f"is rounded to {node.meta['val'].dtype}", node)
        moved = map_coordinates(node, at)
        if moved is not None:
            return self.at(*moved)
        call, name = OpCall(node), node_packet(node)

        def operand(name: str) -> BiasElement:
            """Return the element of an operand, at its broadcast coordinates."""
            x = call[name]
            own = at[len(at) - len(node_shape(x)) :] if is_tensor(x) else ()
            return self.at(
                x, [0 if is_same_size(extent, 1) else c for c, extent in zip(own, node_shape(x))] if own else []
            )

        if name in (aten.add, aten.sub, aten.rsub):
            a, b = operand("self"), operand("other")
            a, b = (b, a) if name is aten.rsub else (a, b)
            times = _parse_number(call["alpha"]) if name is aten.add else -_parse_number(call["alpha"])
            return self._sum(a, b, times, node)
        if name is aten.where and "self" in call.args:
            return self._chosen_element(self._condition(call["condition"], at), operand("self"), operand("other"), node)
        if name is aten.masked_fill:
            return self._chosen_element(self._condition(call["mask"], at), operand("value"), operand("self"), node)
        if name not in _BIAS_OPS or call.get("rounding_mode") is not None:
            raise NotSymbolic("is not a sum, product or where of positions and heads", node)
        operands = [operand(n) for n in ("self", "other") if n in call.args]
        if any(x.allowed != sympy.true for x in operands):
            raise NotSymbolic("computes with fills", node)
        if name is aten.div and operands[1].value.has(QUERY_INDEX, KEY_INDEX):
            raise NotSymbolic("divides by a position", node)
        value = _BIAS_OPS[name](*(x.value for x in operands))
        if any(_may_round(term) for each in value.atoms(sympy.Add) for term in each.args):
            raise NotSymbolic("would be rounded differently as an expression", node)
        return BiasElement(value)

    def _condition(self, x: Node, at: Coords) -> Boolean:
        return as_truth(self.positions.operand(x, at))

    def _sum(self, a: BiasElement, b: BiasElement, times: sympy.Expr, node: Node) -> BiasElement:
        if b.allowed != sympy.true and times != 1:
            raise NotSymbolic("subtracts fills", node)
        return BiasElement(a.value + times * b.value, And(a.allowed, b.allowed), a.finite or b.finite)

    def _chosen_element(self, condition: Boolean, yes: BiasElement, no: BiasElement, node: Node) -> BiasElement:
        """Return the operand that is not a fill."""
        for fill, other, allowed in ((yes, no, Not(condition)), (no, yes, condition)):
            if fill.value.is_number and fill.value <= self.least:
                return BiasElement(other.value, And(other.allowed, allowed), other.finite or bool(fill.value.is_finite))
        raise NotSymbolic("selects one of two biases", node)


def _may_round(term: sympy.Expr) -> bool:
    """Return True if a position is scaled by a fraction whose denominator is not a power of two."""
    factor, rest = term.as_coeff_Mul()
    return rest in (QUERY_INDEX, KEY_INDEX) and bool(int(factor.q) & (int(factor.q) - 1))


def _parse_number(x: Any) -> sympy.Expr:
    """Convert a Python scalar to an expression. Raises NotSymbolic for NaN and other types."""
    if isinstance(x, bool) or not isinstance(x, int | float) or x != x:
        raise NotSymbolic(f"a bias has the operand {x!r}")
    if isinstance(x, float):
        return sympy.Rational(repr(x)) if abs(x) != float("inf") else sympy.oo * (1 if x > 0 else -1)
    return sympy.Integer(x)
