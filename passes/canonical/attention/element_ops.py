"""Define the elements of ATen ops (see elements.py): creation, movement, arithmetic, selection.

Omitted: ops that round, draw random numbers, sort or reduce. Their results become leaves or remain data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy import And, Not, Or, Xor

from sp_compile.lowering.torch_compat import schema_of
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.sizes import Size, is_same_size

from .elements import (
    Coords,
    Element,
    ElementReader,
    NotSymbolic,
    apply_by_cases,
    as_cases,
    as_number,
    as_truth,
    element_handler,
    select_element,
)

# Creation.


@element_handler("arange")
def _arange_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    start, step = (p.integer(as_number(call.get(name, default))) for name, default in (("start", 0), ("step", 1)))
    return ((sympy.true, sympy.expand(start + step * at[0])),)


@element_handler("full", "new_full", "full_like", "scalar_tensor")
def _full_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    return as_number(call["fill_value"] if "fill_value" in call.args else call["s"])


@element_handler("eye")
def _eye_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    return p.box.equals_zero(at[0] - at[1])


# Movement.


@element_handler("slice", "narrow")
def _slice_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    dim, step = call.dim(), call.get("step", 1)
    start = _normalize_index(p, call["start"] if call["start"] is not None else 0, call.shape()[dim])
    return p.at(call.operands[0], (*at[:dim], start + step * at[dim], *at[dim + 1 :]))


@element_handler("select")
def _select_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    dim = call.dim()
    return p.at(call.operands[0], (*at[:dim], _normalize_index(p, call["index"], call.shape()[dim]), *at[dim:]))


@element_handler("flip")
def _flip_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    dims = {d % len(at) for d in call["dims"]}
    return p.at(
        call.operands[0], tuple(s - 1 - c if d in dims else c for d, (s, c) in enumerate(zip(call.shape(), at)))
    )


def _normalize_index(p: ElementReader, index: Any, extent: Size) -> sympy.Expr:
    at = p.integer(as_number(index))
    if p.box.is_nonnegative(-at - 1):
        at = at + extent
    if not p.box.is_nonnegative(at) or not p.box.is_nonnegative(extent - at):  # torch would clamp it
        raise NotSymbolic(f"cuts at {at}, which may be out of range for its {extent} rows")
    return at


@element_handler("cat")
def _cat_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    return _piecewise_element(p, call.operands, at, int(call["dim"]) % len(at))


@element_handler("stack")
def _stack_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    dim = int(call["dim"]) % len(at)
    pieces = [p.at(x, (*at[:dim], *at[dim + 1 :])) for x in call.operands]
    return _first_match([(p.box.at_least_zero(i - at[dim]), piece) for i, piece in enumerate(pieces)])


def _piecewise_element(p: ElementReader, parts: list[Any], at: Coords, dim: int) -> Element:
    """Concatenate elements along `dim`; skip pieces that the coordinate cannot reach."""
    start: Size = 0
    found: list[tuple[Any, Element]] = []
    for part in parts:
        extent = node_shape(part)[dim]
        before_end = p.box.at_least_zero(start + extent - 1 - at[dim])
        after_start = p.box.at_least_zero(at[dim] - start)
        if And(before_end, after_start) != sympy.false:
            offset = 0 if is_same_size(extent, 1) else at[dim] - start
            found.append((before_end, p.at(part, (*at[:dim], offset, *at[dim + 1 :]))))
        start = start + extent
    return _first_match(found)


def _first_match(found: list[tuple[Any, Element]]) -> Element:
    """Return the value of the first condition that holds; the last value is the default."""
    if not found:
        raise NotSymbolic("is read after its last piece")
    value = found[-1][1]
    for condition, piece in reversed(found[:-1]):
        value = select_element(condition, piece, value)
    return value


@element_handler("index")
def _index_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    """Return an element of x[i, j, ...] for index tensors that broadcast together; None keeps a dim."""
    indices = list(call["indices"]) + [None] * (call.ndim("self") - len(call["indices"]))
    indexed_dims = [d for d, i in enumerate(indices) if i is not None]
    depth = len(at) - (len(indices) - len(indexed_dims))
    if any(not is_tensor(i) or i.meta["val"].dtype == torch.bool for i in indices if i is not None):
        raise NotSymbolic("is indexed by a bool mask")
    together = indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1))
    first = indexed_dims[0] if together else 0
    chosen, remaining = at[first : first + depth], iter((*at[:first], *at[first + depth :]))
    coords = []
    for index, extent in zip(indices, call.shape("self")):
        coords.append(next(remaining) if index is None else p.integer(p.operand(index, chosen)))
        if index is not None and not p.box.is_within(coords[-1], extent):
            raise NotSymbolic(f"is indexed by {coords[-1]}, which may be out of range for its {extent} rows")
    return p.at(call["self"], coords)


@element_handler("tril", "triu")
def _triangle_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    below = at[-2] + p.integer(as_number(call["diagonal"])) - at[-1]
    lower = "tril" in schema_of(call.node.target).name
    return select_element(p.box.at_least_zero(below if lower else -below), p.at(call.operands[0], at), as_number(0))


@element_handler("diff")
def _diff_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    dim = call.dim()
    if call["n"] != 1 or (call["append"] is not None and call["prepend"] is None):
        raise NotSymbolic("computes differences of differences, or only with appended rows")
    parts = [x for x in (call["prepend"], call["self"], call["append"]) if x is not None]
    here, there = ((*at[:dim], at[dim] + i, *at[dim + 1 :]) for i in (0, 1))
    return apply_by_cases(
        lambda a, b: b - a, _piecewise_element(p, parts, here, dim), _piecewise_element(p, parts, there, dim)
    )


@element_handler("cumsum")
def _cumsum_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    """Return an element of the cumulative sum of a constant."""
    dim = call.dim()
    each = as_cases(p.at(call.operands[0], at))
    if len(each) != 1 or not each[0][1].is_number:
        raise NotSymbolic("sums a value that is not constant")
    return ((sympy.true, sympy.expand(each[0][1] * (at[dim] + 1))),)


def _pointwise_element(function: Callable[..., Any], *names: str) -> None:
    def handler(p: ElementReader, call: OpCall, at: Coords) -> Element:
        """Return one element of a pointwise operation."""
        return apply_by_cases(function, *(p.operand(call[n], at) for n in ("self", "other") if n in call.args))

    element_handler(*names)(handler)


@element_handler("add", "sub", "rsub")
def _add_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    a, b = p.operand(call["self"], at), p.operand(call["other"], at)
    alpha = p.integer(as_number(call["alpha"]))
    name = schema_of(call.node.target).name
    if "rsub" in name:
        return apply_by_cases(lambda x, y: y - alpha * x, a, b)
    return apply_by_cases(lambda x, y: x + (-alpha if "sub" in name else alpha) * y, a, b)


_pointwise_element(lambda a, b: a * b, "mul")
_pointwise_element(lambda a: -a, "neg")
_pointwise_element(sympy.Abs, "abs")
_pointwise_element(sympy.Max, "maximum")
_pointwise_element(sympy.Min, "minimum")


@element_handler("floor_divide", "div", "remainder")
def _divide_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    a, b = p.operand(call["self"], at), p.operand(call["other"], at)
    name = schema_of(call.node.target).name
    rounds = call.get("rounding_mode") == "floor" or "div" not in name or "floor" in name
    if call.node.meta["val"].dtype.is_floating_point or not all(v.is_Integer and v > 0 for _, v in as_cases(b)):
        raise NotSymbolic("divides floats, or by a value that is not a positive constant")
    truncates = call.get("rounding_mode") == "trunc" and all(p.box.is_nonnegative(v) for _, v in as_cases(a))
    if not rounds and not truncates:
        raise NotSymbolic("truncates a value that may be negative")
    return apply_by_cases(lambda x, y: sympy.Mod(x, y) if "rem" in name else sympy.floor(x / y), a, b)


Compare = Callable[[Any, sympy.Expr, sympy.Expr], Any]


def _compare_element(relation: Compare, *names: str) -> None:
    def handler(p: ElementReader, call: OpCall, at: Coords) -> Element:
        """Return one element of a comparison, as a condition."""
        a, b = p.operand(call["self"], at), p.operand(call["other"], at)
        pairs = [(And(c, d), x, y) for c, x in as_cases(a) for d, y in as_cases(b)]
        return Or(*(And(c, _relate(p, relation, x, y)) for c, x, y in pairs if c != sympy.false))

    element_handler(*names)(handler)


def _relate(p: ElementReader, relation: Compare, x: sympy.Expr, y: sympy.Expr) -> Any:
    if x.is_infinite or y.is_infinite:
        sign = 0 if x == y else 1 if x == sympy.oo or y == -sympy.oo else -1
        x, y = sympy.Integer(sign), sympy.Integer(0)
    return relation(p.box, x, y)


_compare_element(lambda box, x, y: box.equals_zero(x - y), "eq")
_compare_element(lambda box, x, y: Not(box.equals_zero(x - y)), "ne")
_compare_element(lambda box, x, y: box.at_least_zero(y - x), "le")
_compare_element(lambda box, x, y: box.at_least_zero(y - x - 1), "lt")
_compare_element(lambda box, x, y: box.at_least_zero(x - y), "ge")
_compare_element(lambda box, x, y: box.at_least_zero(x - y - 1), "gt")


def _logical_element(function: Callable[..., Any], *names: str) -> None:
    def handler(p: ElementReader, call: OpCall, at: Coords) -> Element:
        """Return one element of a logical operation, as a condition."""
        bitwise = not schema_of(call.node.target).name.startswith("aten::logical")
        if bitwise and call.node.meta["val"].dtype != torch.bool:
            raise NotSymbolic("is a bitwise op on integers")
        return function(*(as_truth(p.operand(call[n], at)) for n in ("self", "other") if n in call.args))

    element_handler(*names)(handler)


_logical_element(And, "__and__", "bitwise_and", "logical_and")
_logical_element(Or, "__or__", "bitwise_or", "logical_or")
_logical_element(Xor, "__xor__", "bitwise_xor", "logical_xor")
_logical_element(Not, "bitwise_not", "logical_not")


@element_handler("where")
def _where_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    if "self" not in call.args:
        raise NotSymbolic("returns the indices of a condition")
    yes, no = (p.operand(call[name], at) for name in ("self", "other"))
    return select_element(as_truth(p.operand(call["condition"], at)), yes, no)


@element_handler("masked_fill")
def _masked_fill_element(p: ElementReader, call: OpCall, at: Coords) -> Element:
    fill = p.operand(call["value"], ())
    return select_element(as_truth(p.operand(call["mask"], at)), fill, p.operand(call["self"], at))
