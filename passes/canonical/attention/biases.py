"""Parse biases of positions and heads into an expression and a mask, without an S x S tensor.

    slopes[:, None, None] * (i - i[:, None])                    s + head0*(k - q), and slopes
    where(i[:, None] >= i, slopes * (i - i[:, None]), -inf)     the same, k <= q
    slopes * i + additive mask of fills                         s + head0*k, and the predicate of the mask

Here i is arange(S), and s, q, k and head0 are the score, the positions of its query and its key, and the number of its
head. A *fill* is a large negative number that removes a key's weight. `BiasReader.at` derives the element of an op from
the elements of its operands. A per-head number may be computed from anything. Unchanged: learned biases, whose gradient
is not implemented; lookups by query, key or batch entry; biases rounded to another dtype than that of q, or whose
products are rounded differently as an expression ((k - q) / 7 becomes k / 7 - q / 7, and x / 7 becomes x * 0.142...);
and biases no larger than a row.
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
from sp_compile.passes.sharding.matchers import constant_value, map_coordinates, may_carry_gradient, value_origin

from .elements import Coords, ElementReader, NotSymbolic, as_cases, as_truth, broadcast_coords
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

    value: sympy.Expr  # term that is added where attention is allowed, an expression of q, k and head0, head1, ...
    allowed: Boolean = sympy.true  # condition under which the query attends to the key
    finite: bool = False  # True if the other scores get a large negative number, not -inf


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
        """Return the element of a value at the coordinates, as an expression.

        slopes * (arange(S) - arange(S)[:, None]) at (h, q, k), for example, is head0*(k - q).

        Args:
            x: A node of the graph, a bias or an operand of one; or a Python scalar.
            coords: One expression per dim of `x`.

        Returns:
            The term that is added to the score, and the condition under which it is no fill.

        Raises:
            NotSymbolic: No expression describes the element.
        """
        if not is_tensor(x):
            return BiasElement(_parse_number(x))
        node, exact_coords = value_origin(x), tuple(map(sympy.sympify, coords))
        constant = constant_value(node)
        if constant is not None:
            return BiasElement(_parse_number(constant))
        # Tried in this order: a function of positions, a number per head, an op on such values.
        try:
            return self._position_element(node, exact_coords)
        except NotSymbolic:
            if self._has_number_per_head(node, exact_coords):
                return BiasElement(self._head_element(node))
        return self._computed_element(node, exact_coords)

    def _position_element(self, node: Node, coords: Coords) -> BiasElement:
        """Return the element of a value that positions determine: an integer, or zeros and fills (a mask).

        Raises NotSymbolic for other values.
        """
        cases = as_cases(self.positions.at(node, coords))  # pairs (condition, number)
        numbers = [number for _, number in cases]
        if len(numbers) == 1 and numbers[0].is_integer:
            value = numbers[0]
            # An AppliedUndef is an element of a tensor of data, such as leaf0(k).
            if value.has(AppliedUndef) or value.free_symbols - {QUERY_INDEX, KEY_INDEX}:
                raise NotSymbolic("reads more than the positions of a query and a key", node)
            return BiasElement(value)
        if not all(number == 0 or self._is_fill(number) for number in numbers):
            raise NotSymbolic("has cases other than zeros and fills", node)
        allowed = Or(*(condition for condition, number in cases if number == 0))
        has_finite_fills = any(number.is_finite for number in numbers if number != 0)
        return BiasElement(sympy.Integer(0), allowed, has_finite_fills)

    def _is_fill(self, value: sympy.Expr) -> bool:
        """Return True for a number that removes the weight of a key when it is added to the score, such as -inf."""
        return bool(value.is_number and value <= self.max_fill)

    def _has_number_per_head(self, node: Node, coords: Coords) -> bool:
        """Return True if the value has one number per head, or one for all heads.

        Then each of its dims has the size 1, or is the dim of heads (its coordinate is the index of the head).
        """
        num_heads = self.positions.sizes[HEAD_INDEX]
        dims = zip(coords, node_shape(node))
        return all(
            is_same_size(size, 1) or (coord == HEAD_INDEX and is_same_size(size, num_heads)) for coord, size in dims
        )

    def _head_element(self, node: Node) -> sympy.Expr:
        """Return the symbol head0, head1, ... that represents a number per head, and add the value to `heads`.

        Equal values have one symbol. Raises NotSymbolic for a value with a gradient, which an expression would lose.
        """
        if may_carry_gradient(node):
            raise NotSymbolic("may need a gradient, which an expression does not support", node)
        if node not in self.heads:
            self.heads.append(node)
        return head_symbol(self.heads.index(node))

    def _computed_element(self, node: Node, coords: Coords) -> BiasElement:
        """Return the element of the result of an op, from the elements of its operands.

        Raises NotSymbolic for an op that is not supported, and for a result that is rounded to another dtype.
        """
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            raise NotSymbolic("does not depend on positions and heads only", node)
        # An op of another dtype than that of q rounds its result, and so does each op in half precision: an expression
        # is computed in the dtype of q, or in float32 for half precision, without rounding in between.
        if node.meta["val"].dtype != self.dtype or self.dtype in HALF:
            raise NotSymbolic(f"is rounded to {node.meta['val'].dtype}", node)
        moved = map_coordinates(node, coords)  # (operand, its coordinates) of an op that only moves elements
        if moved is not None:
            return self.at(*moved)
        call, op = OpCall(node), node_packet(node)

        def operand(name: str) -> BiasElement:
            """Return the element of an operand at the coordinates of the result, to which it broadcasts."""
            x = call[name]
            return self.at(x, broadcast_coords(x, coords) if is_tensor(x) else ())

        if op in (aten.add, aten.sub, aten.rsub):
            x, y = operand("self"), operand("other")
            if op is aten.rsub:  # other - alpha * self
                x, y = y, x
            sign = 1 if op is aten.add else -1
            return self._sum(x, y, sign * _parse_number(call["alpha"]), node)
        if op is aten.where and "self" in call.args:  # without operands, where(condition) returns indices
            return self._select(call["condition"], coords, operand("self"), operand("other"), node)
        if op is aten.masked_fill:
            return self._select(call["mask"], coords, operand("value"), operand("self"), node)
        if op not in _BIAS_OPS or call.get("rounding_mode") is not None:
            raise NotSymbolic("is not a sum, product or where of positions and heads", node)
        return _apply_op(op, [operand(name) for name in ("self", "other") if name in call.args], node)

    def _sum(self, x: BiasElement, y: BiasElement, alpha: sympy.Expr, node: Node) -> BiasElement:
        """Return the element of x + alpha * y, of which a key is masked if either operand masks it."""
        if y.allowed != sympy.true and alpha != 1:  # y has fills, which remain fills only if added unscaled
            raise NotSymbolic("subtracts fills", node)
        # `finite`: masked keys get a large negative number in place of -inf, in one of the operands.
        value = _require_exact(x.value + alpha * y.value, node)
        return BiasElement(value, And(x.allowed, y.allowed), x.finite or y.finite)

    def _select(self, mask: Node, coords: Coords, yes: BiasElement, no: BiasElement, node: Node) -> BiasElement:
        """Return the element of where(mask, yes, no), where `yes` or `no` is a fill.

        Its value is the other operand, and attention is allowed where the mask selects that one.
        """
        condition = as_truth(self.positions.operand(mask, coords))
        for fill, term, selects_term in ((yes, no, Not(condition)), (no, yes, condition)):
            if self._is_fill(fill.value):
                is_finite = term.finite or bool(fill.value.is_finite)  # True if the fill is finite, not -inf
                return BiasElement(term.value, And(term.allowed, selects_term), is_finite)
        raise NotSymbolic("selects one of two biases", node)


def _apply_op(op: Any, operands: list[BiasElement], node: Node) -> BiasElement:
    """Return the element of an op of `_BIAS_OPS`, such as a product, from the elements of its operands.

    Raises NotSymbolic for operands with fills, and for a value that is not exactly the op's result.
    """
    if any(x.allowed != sympy.true for x in operands):
        raise NotSymbolic("computes with fills", node)
    if op is aten.div and not _is_power_of_two(operands[1].value):  # an expression multiplies by the reciprocal
        raise NotSymbolic("divides by another number than a power of two", node)
    return BiasElement(_require_exact(_BIAS_OPS[op](*(x.value for x in operands)), node))


def _require_exact(value: sympy.Expr, node: Node) -> sympy.Expr:
    """Return the value of an op, or raise NotSymbolic if its products are rounded differently as an expression.

    sympy distributes numbers over sums, (k - q) * 0.1 becomes k / 10 - q / 10, and reorders products of more than two
    factors. A product with a power of two is exact.
    """
    products, sums = value.atoms(sympy.Mul), value.atoms(sympy.Add)
    numbers_of_inexact_factors = [sum(not _is_power_of_two(x) for x in product.args) for product in products]
    terms = [term for total in sums for term in total.args]
    if any(number > 2 for number in numbers_of_inexact_factors) or any(map(_may_round, terms)):
        raise NotSymbolic("would be rounded differently as an expression", node)
    return value


def _is_power_of_two(x: sympy.Expr) -> bool:
    """Return True for a number 2**n or -2**n with an integer n, such as -1 or 1 / 8."""
    return bool(x.is_Rational) and all(int(part).bit_count() == 1 for part in (x.p, x.q))  # numerator and denominator


def _may_round(term: sympy.Expr) -> bool:
    """Return True for a term like k / 7: a position times a fraction whose denominator is no power of two.

    In floats, k / 7 - q / 7 is rounded differently than (k - q) / 7.
    """
    factor, position = term.as_coeff_Mul()
    return position in (QUERY_INDEX, KEY_INDEX) and int(factor.q).bit_count() != 1  # `q` is the denominator


def _parse_number(x: Any) -> sympy.Expr:
    """Convert an int or float to an exact expression. Raises NotSymbolic for NaN, bools and other types."""
    if isinstance(x, bool) or not isinstance(x, int | float) or math.isnan(x):
        raise NotSymbolic(f"a bias has the operand {x!r}")
    if math.isinf(x):
        return sympy.oo if x > 0 else -sympy.oo
    return sympy.Rational(repr(x))
