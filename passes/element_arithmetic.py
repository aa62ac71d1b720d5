"""How ATen ops that compute get their elements (see positions.py): arithmetic, comparisons, logic, choices.

Leaves out, so that they become leaves or stay data: whatever rounds, draws, sorts or reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy import And, Not, Or, Xor

from .._compat import schema_of
from ..call import Call
from .positions import Coords, Opaque, Positions, Value, cases, choose, combine, handles, number, truth

Compare = Callable[[Any, sympy.Expr, sympy.Expr], Any]


def _pointwise(function: Callable[..., Any], *names: str) -> None:
    def handler(p: Positions, call: Call, at: Coords) -> Value:
        return combine(function, *(p.operand(call[n], at) for n in ("self", "other") if n in call.args))

    handles(*names)(handler)


@handles("add", "sub", "rsub")
def _add(p: Positions, call: Call, at: Coords) -> Value:
    a, b = p.operand(call["self"], at), p.operand(call["other"], at)
    alpha = p.integer(number(call["alpha"]))
    name = schema_of(call.node.target).name
    if "rsub" in name:
        return combine(lambda x, y: y - alpha * x, a, b)
    return combine(lambda x, y: x + (-alpha if "sub" in name else alpha) * y, a, b)


_pointwise(lambda a, b: a * b, "mul", "multiply")
_pointwise(lambda a: -a, "neg")
_pointwise(sympy.Abs, "abs")
_pointwise(sympy.Max, "maximum")
_pointwise(sympy.Min, "minimum")


def _positive(value: Value) -> bool:
    return all(v.is_Integer and v > 0 for _, v in cases(value))


@handles("floor_divide", "div", "remainder")
def _divide(p: Positions, call: Call, at: Coords) -> Value:
    a, b = p.operand(call["self"], at), p.operand(call["other"], at)
    name = schema_of(call.node.target).name
    rounds = call.get("rounding_mode") == "floor" or "div" not in name or "floor" in name
    if call.node.meta["val"].dtype.is_floating_point or not _positive(b):
        raise Opaque
    if not rounds and not (call.get("rounding_mode") == "trunc" and _nonnegative(p, a)):
        raise Opaque
    return combine(lambda x, y: sympy.Mod(x, y) if "rem" in name else sympy.floor(x / y), a, b)


def _nonnegative(p: Positions, value: Value) -> bool:
    return all(p.box.nonnegative(v) for _, v in cases(value))


def _compare(relation: Compare, *names: str) -> None:
    def handler(p: Positions, call: Call, at: Coords) -> Value:
        a, b = p.operand(call["self"], at), p.operand(call["other"], at)
        pairs = [(And(c, d), x, y) for c, x in cases(a) for d, y in cases(b)]
        return Or(*(And(c, _related(p, relation, x, y)) for c, x, y in pairs if c != sympy.false))

    handles(*names)(handler)


def _related(p: Positions, relation: Compare, x: sympy.Expr, y: sympy.Expr) -> Any:
    if x.is_infinite or y.is_infinite:
        sign = 0 if x == y else 1 if x == sympy.oo or y == -sympy.oo else -1
        x, y = sympy.Integer(sign), sympy.Integer(0)
    return relation(p.box, x, y)


_compare(lambda box, x, y: box.zero(x - y), "eq")
_compare(lambda box, x, y: Not(box.zero(x - y)), "ne", "not_equal")
_compare(lambda box, x, y: box.at_least_zero(y - x), "le", "less_equal")
_compare(lambda box, x, y: box.at_least_zero(y - x - 1), "lt", "less")
_compare(lambda box, x, y: box.at_least_zero(x - y), "ge", "greater_equal")
_compare(lambda box, x, y: box.at_least_zero(x - y - 1), "gt", "greater")


def _logical(function: Callable[..., Any], *names: str) -> None:
    def handler(p: Positions, call: Call, at: Coords) -> Value:
        bitwise = not schema_of(call.node.target).name.startswith("aten::logical")
        if bitwise and call.node.meta["val"].dtype != torch.bool:
            raise Opaque
        return function(*(truth(p.operand(call[n], at)) for n in ("self", "other") if n in call.args))

    handles(*names)(handler)


_logical(And, "__and__", "bitwise_and", "logical_and")
_logical(Or, "__or__", "bitwise_or", "logical_or")
_logical(Xor, "__xor__", "bitwise_xor", "logical_xor")
_logical(Not, "bitwise_not", "logical_not")


@handles("where")
def _where(p: Positions, call: Call, at: Coords) -> Value:
    if "self" not in call.args:
        raise Opaque
    yes, no = (p.operand(call[name], at) for name in ("self", "other"))
    return choose(truth(p.operand(call["condition"], at)), yes, no)


@handles("masked_fill")
def _masked_fill(p: Positions, call: Call, at: Coords) -> Value:
    fill = p.operand(call["value"], ())
    return choose(truth(p.operand(call["mask"], at)), fill, p.operand(call["self"], at))
