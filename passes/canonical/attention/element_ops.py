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
from torch.fx import Node

from sp_compile.lowering.torch_compat import schema_of
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.sizes import Size, is_same_size

from .elements import (
    Cases,
    Coords,
    Element,
    ElementReader,
    NotSymbolic,
    apply_by_cases,
    as_cases,
    as_number,
    as_truth,
    cast_cases,
    cast_number,
    choose_element,
    element_handler,
    exact_range,
)
from .proofs import SUMMED_ROW, IndexBox

# Creation.


@element_handler("arange")
def _arange_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of arange(start, end, step) at the coordinate i: start + step * i."""
    start = reader.integer(as_number(call.get("start", 0)))  # arange(end) has neither a start nor a step
    step = reader.integer(as_number(call.get("step", 1)))
    (i,) = coords
    return ((sympy.true, sympy.expand(start + step * i)),)


@element_handler("full", "new_full", "full_like", "scalar_tensor")
def _full_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of full(size, fill_value): the fill value, at any coordinates."""
    return as_number(call["fill_value"] if "fill_value" in call.args else call["s"])  # s: of scalar_tensor


@element_handler("eye")
def _eye_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of an identity matrix: the condition that row and column are equal."""
    row, column = coords
    return reader.box.equals_zero(row - column)


# Movement.


@element_handler("slice", "narrow")
def _slice_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of a slice: that of the operand at start + step * coordinate along the sliced dim."""
    dim, step = call.dim(), call.get("step", 1)
    start = _normalize_index(reader, call["start"] if call["start"] is not None else 0, call.shape()[dim])
    return reader.at(call.operands[0], (*coords[:dim], start + step * coords[dim], *coords[dim + 1 :]))


@element_handler("select")
def _select_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of x.select(dim, index): that of the operand at the index along the removed dim."""
    dim = call.dim()
    index = _normalize_index(reader, call["index"], call.shape()[dim])
    return reader.at(call.operands[0], (*coords[:dim], index, *coords[dim:]))


@element_handler("flip")
def _flip_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of a flip: that of the operand at coordinates counted from the end of the flipped dims."""
    dims = {d % len(coords) for d in call["dims"]}
    x_coords = [size - 1 - coord if d in dims else coord for d, (size, coord) in enumerate(zip(call.shape(), coords))]
    return reader.at(call.operands[0], x_coords)


def _normalize_index(reader: ElementReader, index: Any, extent: Size) -> sympy.Expr:
    """Return an index or slice bound of a dim of size `extent` as a non-negative expression.

    Raises NotSymbolic if it may be out of range: torch clamps such a bound, which the expression does not.
    """
    position = reader.integer(as_number(index))
    if reader.box.is_nonnegative(-position - 1):  # negative: counted from the end
        position = position + extent
    if not reader.box.is_nonnegative(position) or not reader.box.is_nonnegative(extent - position):
        raise NotSymbolic(f"cuts at {position}, which may be out of range for its {extent} rows")
    return position


@element_handler("cat")
def _cat_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of a cat: that of the operand which contains the coordinate along the joined dim."""
    return _joined_element(reader, call.operands, coords, int(call["dim"]) % len(coords))


@element_handler("stack")
def _stack_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of a stack: that of operand number i, where i is the coordinate along the new dim."""
    dim = int(call["dim"]) % len(coords)
    pieces = [reader.at(x, (*coords[:dim], *coords[dim + 1 :])) for x in call.operands]
    # The first operand i with coordinate <= i is the one with coordinate == i.
    return _first_match([(reader.box.at_least_zero(i - coords[dim]), piece) for i, piece in enumerate(pieces)])


def _joined_element(reader: ElementReader, parts: list[Any], coords: Coords, dim: int) -> Element:
    """Return the element of the tensors `parts` joined along `dim`, such as by cat.

    For two parts, of which the first has 3 rows, and the coordinate k, it is the element of the first part at k where
    k <= 2, else that of the second part at k - 3.
    """
    start: Size = 0  # first row of the part in the result
    pieces: list[tuple[Any, Element]] = []  # (condition that the row is in the part or before it, element)
    for part in parts:
        extent = node_shape(part)[dim]
        is_before_end = reader.box.at_least_zero(start + extent - 1 - coords[dim])
        is_after_start = reader.box.at_least_zero(coords[dim] - start)
        if And(is_before_end, is_after_start) != sympy.false:  # else the coordinate is never in the part
            row = 0 if is_same_size(extent, 1) else coords[dim] - start
            pieces.append((is_before_end, reader.at(part, (*coords[:dim], row, *coords[dim + 1 :]))))
        start = start + extent
    return _first_match(pieces)


def _first_match(pieces: list[tuple[Any, Element]]) -> Element:
    """Return the element of the first pair (condition, element) whose condition holds, else that of the last pair.

    The pieces are the operands of a cat or stack that the coordinate may be in. There are none if it is beyond the last
    operand; NotSymbolic is raised then.
    """
    if not pieces:
        raise NotSymbolic("is read after its last piece")
    element = pieces[-1][1]
    for condition, piece in reversed(pieces[:-1]):
        element = choose_element(condition, piece, element)
    return element


@element_handler("index")
def _index_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of x[i, j, ...]: that of x at the elements of the index tensors, which broadcast together.

    A dim without an index tensor (None) keeps its coordinate. For x[:, i, j] with i and j of shape (N,), the element at
    (a, n) is that of x at (a, i[n], j[n]).
    """
    indices = list(call["indices"]) + [None] * (call.ndim("self") - len(call["indices"]))
    if any(not is_tensor(i) or i.meta["val"].dtype == torch.bool for i in indices if i is not None):
        raise NotSymbolic("is indexed by a bool mask")
    # The dims of the broadcast index are in place of the indexed dims if these are adjacent, else they come first.
    indexed_dims = [d for d, i in enumerate(indices) if i is not None]
    index_ndim = len(coords) - (len(indices) - len(indexed_dims))  # of the broadcast index
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
    """Return the element of tril or triu: that of the operand on one side of a diagonal, else 0."""
    *_, row, column = coords
    distance_below = row + reader.integer(as_number(call["diagonal"])) - column  # >= 0 on the diagonal and below it
    distance = distance_below if "tril" in schema_of(call.node.target).name else -distance_below
    return choose_element(reader.box.at_least_zero(distance), reader.at(call.operands[0], coords), as_number(0))


@element_handler("diff")
def _diff_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of a diff: x[i + 1] - x[i], where x is the operand with its prepended and appended rows.

    Higher orders (n > 1) are not supported, nor are appended rows without prepended ones.
    """
    dim = call.dim()
    if call["n"] != 1 or (call["append"] is not None and call["prepend"] is None):
        raise NotSymbolic("computes differences of differences, or only with appended rows")
    parts = [x for x in (call["prepend"], call["self"], call["append"]) if x is not None]
    next_coords = (*coords[:dim], coords[dim] + 1, *coords[dim + 1 :])
    element = _joined_element(reader, parts, coords, dim)
    next_element = _joined_element(reader, parts, next_coords, dim)
    return apply_by_cases(lambda x, next_x: next_x - x, element, next_element)


@element_handler("cumsum")
def _cumsum_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of the cumulative sum of a constant c: c * (i + 1) at row i."""
    dim = call.dim()
    extent = sympy.sympify(call.shape()[dim])
    row = sympy.Symbol(f"{SUMMED_ROW}{extent}", integer=True)  # counts all summed rows, also those that are not read
    reader.box.last[row] = extent - 1
    cases = as_cases(reader.at(call.operands[0], (*coords[:dim], row, *coords[dim + 1 :])))
    numbers = [number for _, number in cases]
    if len(numbers) != 1 or not numbers[0].is_number:
        raise NotSymbolic("sums a value that is not constant")
    (constant,) = numbers
    total = constant * extent  # the last sum, which has the greatest magnitude
    _require_exact_integers(reader, ((sympy.true, total),), call.node)
    return ((sympy.true, sympy.expand(constant * (coords[dim] + 1))),)


def _operands(reader: ElementReader, call: OpCall, coords: Coords) -> list[Element]:
    """Return the elements of the operands (`self` and `other`) of a unary or binary pointwise op."""
    return [reader.operand(call[name], coords) for name in ("self", "other") if name in call.args]


def _cast_operands(reader: ElementReader, call: OpCall, coords: Coords) -> list[Cases]:
    """Return the elements of the operands of an arithmetic op, which casts them to the dtype of its result."""
    dtype = call.node.meta["val"].dtype
    return [cast_cases(as_cases(x), dtype, reader.box) for x in _operands(reader, call, coords)]


def _require_exact_integers(reader: ElementReader, cases: Cases, node: Node) -> None:
    """Raise NotSymbolic unless numbers are exact integers in the dtype of a node, which computes with them."""
    dtype = node.meta["val"].dtype
    if not all(reader.box.is_bounded(number, *exact_range(dtype)) for _, number in cases):
        raise NotSymbolic(f"may round or overflow in {dtype}")


def _register_pointwise(function: Callable[..., Any], *names: str) -> None:
    """Register a handler for the pointwise ops with these names: `function` computes their result from numbers."""

    def handler(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
        """Return the element of the result of the pointwise op."""
        return apply_by_cases(function, *_cast_operands(reader, call, coords))

    element_handler(*names)(handler)


@element_handler("add", "sub", "rsub")
def _add_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of add, a + alpha * b; of sub, a - alpha * b; or of rsub, b - alpha * a."""
    a, b = _cast_operands(reader, call, coords)
    alpha, name = reader.integer(as_number(call["alpha"])), schema_of(call.node.target).name
    if alpha != 1:  # a product, which may be rounded
        _require_exact_integers(reader, apply_by_cases(lambda x: alpha * x, a if "rsub" in name else b), call.node)
    if "rsub" in name:
        return apply_by_cases(lambda x, y: y - alpha * x, a, b)
    factor = -alpha if "sub" in name else alpha
    return apply_by_cases(lambda x, y: x + factor * y, a, b)


_register_pointwise(lambda a, b: a * b, "mul")
_register_pointwise(lambda a: -a, "neg")
_register_pointwise(sympy.Abs, "abs")
_register_pointwise(sympy.Max, "maximum")
_register_pointwise(sympy.Min, "minimum")


@element_handler("floor_divide", "div", "remainder")
def _divide_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of an integer division, rounded down, or of a remainder, for positive constant divisors."""
    a, b = _cast_operands(reader, call, coords)
    name, rounding = schema_of(call.node.target).name, call.get("rounding_mode")
    if call.node.meta["val"].dtype.is_floating_point or not all(v.is_Integer and v > 0 for _, v in as_cases(b)):
        raise NotSymbolic("divides floats, or by a value that is not a positive constant")
    if "remainder" in name:
        return apply_by_cases(sympy.Mod, a, b)
    rounds_down = rounding == "floor" or "floor" in name
    # Truncation rounds down, too, where the dividend is not negative.
    if not rounds_down and not (rounding == "trunc" and all(reader.box.is_nonnegative(v) for _, v in as_cases(a))):
        raise NotSymbolic("truncates a value that may be negative")
    return apply_by_cases(lambda x, y: sympy.floor(x / y), a, b)


Compare = Callable[[IndexBox, sympy.Expr], Any]


def _register_comparison(compare: Compare, *names: str) -> None:
    """Register a handler for the comparisons with these names.

    Args:
        compare: Returns the condition under which the comparison holds, from the extents of the indices and the
            difference x - y of the operands.
        names: The names of the ops.
    """

    def handler(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
        """Return the element of the comparison, as a condition: it holds for one of the combinations of cases."""
        conditions = []
        values = [x.meta["val"] if isinstance(x, Node) else x for x in (call["self"], call["other"])]
        dtype = torch.result_type(*values)  # in which torch compares
        x_cases, y_cases = map(as_cases, _operands(reader, call, coords))
        for (x_condition, x), (y_condition, y) in itertools.product(x_cases, y_cases):
            if And(x_condition, y_condition) != sympy.false:
                difference = _difference(*_cast_pair(x, y, dtype, reader.box))
                if not reader.box.is_bounded(difference, *exact_range(torch.int64)):  # in which predicates are computed
                    raise NotSymbolic("compares numbers whose difference may overflow")
                conditions.append(And(x_condition, y_condition, compare(reader.box, difference)))
        return Or(*conditions)

    element_handler(*names)(handler)


def _cast_pair(x: sympy.Expr, y: sympy.Expr, dtype: torch.dtype, box: IndexBox) -> tuple[sympy.Expr, sympy.Expr]:
    """Return two numbers as they are compared in their common dtype: of 256 and 257 in bfloat16, none is larger.

    Raises NotSymbolic if rounding could change the result.
    """
    # A cast to float never reverses an order. If one number is a constant of magnitude below `limit`, the other needs
    # no proof that it is exact: for n > 2.5, the integer n is at least 3, and so is its representation.
    limit = max(exact_range(dtype)) if dtype.is_floating_point else 0
    numbers = [cast_number(number, dtype, box) if number.is_number else number for number in (x, y)]
    if any(number.is_Rational and abs(number) < limit for number in numbers):
        return numbers[0], numbers[1]
    return cast_number(numbers[0], dtype, box), cast_number(numbers[1], dtype, box)


def _difference(x: sympy.Expr, y: sympy.Expr) -> sympy.Expr:
    """Return an integer expression with the sign of x - y.

    It is x - y times the common denominator of its coefficients, or 1, 0 or -1 if x or y is infinite. Callers compare
    integers: d > 0 is d - 1 >= 0.
    """
    if not x.is_infinite and not y.is_infinite:
        difference = sympy.expand(x - y)
        denominators = [factor.as_numer_denom()[1] for factor in difference.as_coefficients_dict().values()]
        return sympy.expand(difference * sympy.ilcm(1, *denominators))
    if x == y:
        return sympy.Integer(0)
    is_greater = x == sympy.oo or y == -sympy.oo
    return sympy.Integer(1 if is_greater else -1)


_register_comparison(lambda box, d: box.equals_zero(d), "eq")
_register_comparison(lambda box, d: Not(box.equals_zero(d)), "ne")
_register_comparison(lambda box, d: box.at_least_zero(-d), "le")
_register_comparison(lambda box, d: box.at_least_zero(-d - 1), "lt")
_register_comparison(lambda box, d: box.at_least_zero(d), "ge")
_register_comparison(lambda box, d: box.at_least_zero(d - 1), "gt")


def _register_logical(function: Callable[..., Any], *names: str) -> None:
    """Register a handler for the logical ops with these names: `function` combines the conditions of the operands."""

    def handler(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
        """Return the element of the logical op, as a condition."""
        is_bitwise = not schema_of(call.node.target).name.startswith("aten::logical")
        if is_bitwise and call.node.meta["val"].dtype != torch.bool:
            raise NotSymbolic("is a bitwise op on integers")
        return function(*map(as_truth, _operands(reader, call, coords)))

    element_handler(*names)(handler)


_register_logical(And, "__and__", "bitwise_and", "logical_and")
_register_logical(Or, "__or__", "bitwise_or", "logical_or")
_register_logical(Xor, "__xor__", "bitwise_xor", "logical_xor")
_register_logical(Not, "bitwise_not", "logical_not")


@element_handler("where")
def _where_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of where(condition, a, b): that of a where the condition holds, else that of b."""
    if "self" not in call.args:
        raise NotSymbolic("returns the indices of a condition")
    yes, no = _operands(reader, call, coords)
    return choose_element(as_truth(reader.operand(call["condition"], coords)), yes, no)


@element_handler("masked_fill")
def _masked_fill_element(reader: ElementReader, call: OpCall, coords: Coords) -> Element:
    """Return the element of x.masked_fill(mask, value): the value where the mask holds, else the element of x."""
    fill = reader.operand(call["value"], ())
    return choose_element(as_truth(reader.operand(call["mask"], coords)), fill, reader.operand(call["self"], coords))
