"""Define the elements of ATen ops (see elements.py): creation, movement, arithmetic, selection.

A *handler* is a function (reader, call, coords) that returns the element of the call's result at the coordinates: a
condition, or cases of numbers, pairs (condition, number). `ElementReader` calls it for the ops with its names.
`reader.at` and `reader.operand` return elements of operands, and `reader.box` proves relations between indices.
Handlers raise `NotSymbolic`, with a reason for the report, if no expression is exact. Omitted: ops that round, draw
random numbers, sort or reduce. Their results become leaves or remain data.
"""

from __future__ import annotations

import itertools
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
from .proofs import IndexBox

# Creation.


@element_handler("arange")
def _arange_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return start + step * i."""
    start, step = (reader.integer(as_number(call.get(name, value))) for name, value in (("start", 0), ("step", 1)))
    return ((sympy.true, sympy.expand(start + step * coords[0])),)


@element_handler("full", "new_full", "full_like", "scalar_tensor")
def _full_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the fill value, which is independent of the coordinates."""
    return as_number(call["fill_value"] if "fill_value" in call.args else call["s"])


@element_handler("eye")
def _eye_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the condition that row and column are equal."""
    return reader.box.equals_zero(coords[0] - coords[1])


# Movement.


@element_handler("slice", "narrow")
def _slice_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of the operand at start + step * coordinate."""
    dim, step = call.dim(), call.get("step", 1)
    start = _normalize_index(reader, call["start"] if call["start"] is not None else 0, call.shape()[dim])
    return reader.at(call.operands[0], (*coords[:dim], start + step * coords[dim], *coords[dim + 1 :]))


@element_handler("select")
def _select_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of the operand at the selected index."""
    dim = call.dim()
    index = _normalize_index(reader, call["index"], call.shape()[dim])
    return reader.at(call.operands[0], (*coords[:dim], index, *coords[dim:]))


@element_handler("flip")
def _flip_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of the operand at the mirrored coordinates."""
    dims = {d % len(coords) for d in call["dims"]}
    mirrored = [n - 1 - c if d in dims else c for d, (n, c) in enumerate(zip(call.shape(), coords))]
    return reader.at(call.operands[0], mirrored)


def _normalize_index(reader: ElementReader, index: Any, extent: Size) -> sympy.Expr:
    """Return a non-negative index or bound of a dim; raise NotSymbolic if it may be out of range."""
    position = reader.integer(as_number(index))
    if reader.box.is_nonnegative(-position - 1):
        position = position + extent
    if not reader.box.is_nonnegative(position) or not reader.box.is_nonnegative(extent - position):  # torch clamps it
        raise NotSymbolic(f"cuts at {position}, which may be out of range for its {extent} rows")
    return position


@element_handler("cat")
def _cat_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of the operand that contains the coordinate."""
    return _joined_element(reader, call.operands, coords, int(call["dim"]) % len(coords))


@element_handler("stack")
def _stack_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of operand number i, where i is the coordinate along the new dim."""
    dim = int(call["dim"]) % len(coords)
    pieces = [reader.at(x, (*coords[:dim], *coords[dim + 1 :])) for x in call.operands]
    return _first_match([(reader.box.at_least_zero(i - coords[dim]), piece) for i, piece in enumerate(pieces)])


def _joined_element(reader: ElementReader, parts: list[Any], coords: Coords, dim: int) -> Element:
    """Return the element of tensors that are joined along `dim`.

    Parts that the coordinate cannot reach are omitted.
    """
    start: Size = 0
    pieces: list[tuple[Any, Element]] = []
    for part in parts:
        extent = node_shape(part)[dim]
        before_end = reader.box.at_least_zero(start + extent - 1 - coords[dim])
        after_start = reader.box.at_least_zero(coords[dim] - start)
        if And(before_end, after_start) != sympy.false:
            offset = 0 if is_same_size(extent, 1) else coords[dim] - start
            pieces.append((before_end, reader.at(part, (*coords[:dim], offset, *coords[dim + 1 :]))))
        start = start + extent
    return _first_match(pieces)


def _first_match(pieces: list[tuple[Any, Element]]) -> Element:
    """Return the element of the first pair (condition, element) whose condition holds, else the last one."""
    if not pieces:
        raise NotSymbolic("is read after its last piece")
    value = pieces[-1][1]
    for condition, piece in reversed(pieces[:-1]):
        value = select_element(condition, piece, value)
    return value


@element_handler("index")
def _index_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return an element of x[i, j, ...] for index tensors that broadcast together; None keeps a dim."""
    indices = list(call["indices"]) + [None] * (call.ndim("self") - len(call["indices"]))
    if any(not is_tensor(i) or i.meta["val"].dtype == torch.bool for i in indices if i is not None):
        raise NotSymbolic("is indexed by a bool mask")
    # The dims of the broadcast index are in place of the indexed dims if these are adjacent, else they come first.
    indexed_dims = [d for d, i in enumerate(indices) if i is not None]
    index_ndim = len(coords) - (len(indices) - len(indexed_dims))
    is_adjacent = indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1))
    first = indexed_dims[0] if is_adjacent else 0
    index_coords = coords[first : first + index_ndim]
    other_coords = iter((*coords[:first], *coords[first + index_ndim :]))
    x_coords: list[sympy.Expr] = []
    for index, extent in zip(indices, call.shape("self")):
        if index is None:
            x_coords.append(next(other_coords))
            continue
        x_coords.append(reader.integer(reader.operand(index, index_coords)))
        if not reader.box.is_within(x_coords[-1], extent):
            raise NotSymbolic(f"is indexed by {x_coords[-1]}, which may be out of range for its {extent} rows")
    return reader.at(call["self"], x_coords)


@element_handler("tril", "triu")
def _triangle_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the operand's element on one side of a diagonal, else 0."""
    below = coords[-2] + reader.integer(as_number(call["diagonal"])) - coords[-1]
    side = below if "tril" in schema_of(call.node.target).name else -below
    return select_element(reader.box.at_least_zero(side), reader.at(call.operands[0], coords), as_number(0))


@element_handler("diff")
def _diff_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return x[i + 1] - x[i], of the operand joined with its prepended and appended rows."""
    dim = call.dim()
    if call["n"] != 1 or (call["append"] is not None and call["prepend"] is None):
        raise NotSymbolic("computes differences of differences, or only with appended rows")
    parts = [x for x in (call["prepend"], call["self"], call["append"]) if x is not None]
    row, next_row = (
        _joined_element(reader, parts, (*coords[:dim], coords[dim] + i, *coords[dim + 1 :]), dim) for i in (0, 1)
    )
    return apply_by_cases(lambda a, b: b - a, row, next_row)


@element_handler("cumsum")
def _cumsum_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return an element of the cumulative sum of a constant."""
    cases = as_cases(reader.at(call.operands[0], coords))
    if len(cases) != 1 or not cases[0][1].is_number:
        raise NotSymbolic("sums a value that is not constant")
    return ((sympy.true, sympy.expand(cases[0][1] * (coords[call.dim()] + 1))),)


def _operands(reader: ElementReader, call: OpCall, coords: Coords) -> list[Element]:
    """Return the elements of the operands of a unary or binary pointwise op."""
    return [reader.operand(call[name], coords) for name in ("self", "other") if name in call.args]


def _pointwise_element(function: Callable[..., Any], *names: str) -> None:
    """Register a handler of pointwise ops that applies `function` to the numbers of the operands."""

    def handler(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
        """Return one element of a pointwise operation."""
        return apply_by_cases(function, *_operands(reader, call, coords))

    element_handler(*names)(handler)


@element_handler("add", "sub", "rsub")
def _add_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return a + alpha * b or a - alpha * b; rsub subtracts its first operand."""
    a, b = _operands(reader, call, coords)
    alpha, name = reader.integer(as_number(call["alpha"])), schema_of(call.node.target).name
    if "rsub" in name:
        return apply_by_cases(lambda x, y: y - alpha * x, a, b)
    return apply_by_cases(lambda x, y: x + (-alpha if "sub" in name else alpha) * y, a, b)


_pointwise_element(lambda a, b: a * b, "mul")
_pointwise_element(lambda a: -a, "neg")
_pointwise_element(sympy.Abs, "abs")
_pointwise_element(sympy.Max, "maximum")
_pointwise_element(sympy.Min, "minimum")


@element_handler("floor_divide", "div", "remainder")
def _divide_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the rounded quotient of integers, or the remainder, for positive constant divisors."""
    a, b = _operands(reader, call, coords)
    name, rounding = schema_of(call.node.target).name, call.get("rounding_mode")
    if call.node.meta["val"].dtype.is_floating_point or not all(v.is_Integer and v > 0 for _, v in as_cases(b)):
        raise NotSymbolic("divides floats, or by a value that is not a positive constant")
    is_floor = rounding == "floor" or "div" not in name or "floor" in name
    if not is_floor and not (rounding == "trunc" and all(reader.box.is_nonnegative(v) for _, v in as_cases(a))):
        raise NotSymbolic("truncates a value that may be negative")
    return apply_by_cases(lambda x, y: sympy.Mod(x, y) if "rem" in name else sympy.floor(x / y), a, b)


Compare = Callable[[IndexBox, sympy.Expr], Any]


def _compare_element(compare: Compare, *names: str) -> None:
    """Register a handler of comparisons; `compare` returns the condition on the difference x - y."""

    def handler(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
        """Return one element of a comparison, as a condition."""
        conditions = []
        a, b = map(as_cases, _operands(reader, call, coords))
        for (x_condition, x), (y_condition, y) in itertools.product(a, b):
            if And(x_condition, y_condition) != sympy.false:
                conditions.append(And(x_condition, y_condition, compare(reader.box, _difference(x, y))))
        return Or(*conditions)

    element_handler(*names)(handler)


def _difference(x: sympy.Expr, y: sympy.Expr) -> sympy.Expr:
    """Return x - y to be compared with 0, or its sign if a number is infinite."""
    if not x.is_infinite and not y.is_infinite:
        return x - y
    if x == y:
        return sympy.Integer(0)
    return sympy.Integer(1 if x == sympy.oo or y == -sympy.oo else -1)


_compare_element(lambda box, d: box.equals_zero(d), "eq")
_compare_element(lambda box, d: Not(box.equals_zero(d)), "ne")
_compare_element(lambda box, d: box.at_least_zero(-d), "le")
_compare_element(lambda box, d: box.at_least_zero(-d - 1), "lt")
_compare_element(lambda box, d: box.at_least_zero(d), "ge")
_compare_element(lambda box, d: box.at_least_zero(d - 1), "gt")


def _logical_element(function: Callable[..., Any], *names: str) -> None:
    """Register a handler of logical ops that applies `function` to the conditions of the operands."""

    def handler(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
        """Return one element of a logical operation, as a condition."""
        is_bitwise = not schema_of(call.node.target).name.startswith("aten::logical")
        if is_bitwise and call.node.meta["val"].dtype != torch.bool:
            raise NotSymbolic("is a bitwise op on integers")
        return function(*map(as_truth, _operands(reader, call, coords)))

    element_handler(*names)(handler)


_logical_element(And, "__and__", "bitwise_and", "logical_and")
_logical_element(Or, "__or__", "bitwise_or", "logical_or")
_logical_element(Xor, "__xor__", "bitwise_xor", "logical_xor")
_logical_element(Not, "bitwise_not", "logical_not")


@element_handler("where")
def _where_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of one operand where the condition holds, else that of the other."""
    if "self" not in call.args:
        raise NotSymbolic("returns the indices of a condition")
    yes, no = _operands(reader, call, coords)
    return select_element(as_truth(reader.operand(call["condition"], coords)), yes, no)


@element_handler("masked_fill")
def _masked_fill_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the fill where the mask holds, else the operand's element."""
    fill = reader.operand(call["value"], ())
    return select_element(as_truth(reader.operand(call["mask"], coords)), fill, reader.operand(call["self"], coords))
