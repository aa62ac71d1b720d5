"""Express an element of a tensor as a function of its coordinates, from its graph.

    arange(S)[:, None] >= arange(S)     at (q, k):     k <= q
    padding[:, None, None]              at (b, h, q, k): leaf0(b, k) != 0

The *element* of a tensor at *coordinates*, one expression per dim, is a condition (of a bool tensor), or *cases*: pairs
(condition, number) of which exactly one holds. Nothing is executed: `ElementReader.at` derives the element of an op
from the elements of its operands, by the handlers of `element_ops.py` or by the op's rule. A value without either is a
*leaf*, a function of its coordinates, if it has an integer or bool dtype and is indexed by a query or a key. Floats are
supported only if they are exact: integers and infinities, never values whose rounding could matter. The bounds of an
expression prove that no op of the program rounds it or wraps around in its dtype.

The indices b, h, q and k count batch entries, heads, queries and keys; expressions are over these. Readers raise
`NotSymbolic` at any depth if an element has no expression. The passes catch it, leave the tensor in the
graph, and report the reason.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from sympy import And, Ne, Not, Or
from sympy.core.function import AppliedUndef
from torch.fx import Node

from sp_compile.lowering.base.registry import Table
from sp_compile.lowering.torch_compat import OpOverload, schema_of
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.sizes import as_size, is_same_size
from sp_compile.passes.sharding.matchers import (
    SlicePiece,
    constant_value,
    map_coordinates,
    match_piece,
    round_to_dtype,
    value_origin,
)

from .proofs import BATCH_INDEX, INDICES, KEY_INDEX, QUERY_INDEX, SUMMED_ROW, Boolean, IndexBox

Cases: TypeAlias = tuple[tuple[Boolean, sympy.Expr], ...]  # disjoint conditions that cover everything
Element: TypeAlias = Boolean | Cases
Coords: TypeAlias = tuple[sympy.Expr, ...]
Handler: TypeAlias = Callable[["ElementReader", OpCall, Coords], Element]
HANDLERS: Table[Handler] = Table("elements of ops")
MAX_CASES = 8  # maximum number of cases of an element
# Assumed ranges of data such as positions and numbers of documents, whose sums and differences then do not overflow.
LEAF_RANGES = {torch.int64: (-(1 << 40), 1 << 40), torch.int32: (-(1 << 29), 1 << 29)}
LEAF_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class NotSymbolic(Exception):
    """Error for an element without an expression, with the reason and the innermost such node."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        self.cause = reason if node is None else f"{node.name} ({node.target}) {reason}"
        super().__init__(self.cause)
        self.node = node

    def with_node(self, node: Node) -> NotSymbolic:
        """Return the error with the name of `node` in its text; the error itself if it has that of a node already.

        `ElementReader` calls it at each level of its recursion, so that the error names the innermost node.
        """
        return self if self.node is not None else NotSymbolic(str(self), node)


def element_handler(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a handler for the aten ops with these names (every overload).

    A handler returns the element of a call's result from those of its operands, as `ElementReader.at` needs it.
    """
    return HANDLERS.of(*names)


class ElementReader:
    """Reader of the elements of one graph.

    Its methods raise `NotSymbolic` if no expression describes an element.

    Args:
        box: The extents of the indices, for proofs.
        sizes: The size of the scores along each index.

    Attributes:
        leaves: The values without an expression, by function name.
    """

    def __init__(self, box: IndexBox, sizes: dict[sympy.Symbol, Any]) -> None:
        self.box, self.sizes = box, sizes
        self.leaves: dict[str, Node] = {}
        self._elements: dict[tuple[Node, Coords], Element] = {}

    def at(self, node: Node, coords: Sequence[Any]) -> Element:
        """Return the element of a tensor at the coordinates, as a function of these.

        arange(S)[:, None] >= arange(S) at (q, k), for example, is the condition k <= q.

        Args:
            node: A tensor of the graph.
            coords: One expression per dim of the tensor.

        Returns:
            A condition, or pairs (condition, number) of which exactly one holds.

        Raises:
            NotSymbolic: No expression describes the element.
        """
        key = (value_origin(node), tuple(sympy.sympify(c) for c in coords))
        if key not in self._elements:
            self._elements[key] = self._element(*key)
        return self._elements[key]

    def _element(self, node: Node, coords: Coords) -> Element:
        """Return the element that the op computes, or else that of a constant or of a leaf.

        A leaf is a tensor without an expression, such as a padding mask: its element is a function leaf(b, k). If the
        element is none of these, the reason why the op has none is raised, or else that of the leaf.
        """
        op_error: NotSymbolic | None = None  # None for an unknown op or an input
        try:
            computed = self._computed_element(node, coords)
            if computed is not None:
                return cast_element(computed, node.meta["val"].dtype, self.box)
        except NotSymbolic as error:  # the result may still be a leaf
            op_error = error
        try:
            constant = constant_value(node)
            if constant is None:
                return self._add_leaf(node, coords)
            return cast_element(as_number(constant), node.meta["val"].dtype, self.box)
        except NotSymbolic as error:
            raise (op_error or error).with_node(node) from None
        finally:
            del op_error  # avoids a reference cycle between the error and this frame

    def _computed_element(self, node: Node, coords: Coords) -> Element | None:
        """Return the element that an op computes from its operands, or None for an unknown op or an input."""
        if node.target is operator.getitem:
            piece = match_piece(node)
            return self._piece_element(piece, coords) if piece is not None else None
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return None
        handler = HANDLERS.get(str(schema_of(node.target).name).removeprefix("aten::"))
        if handler is not None:
            return handler(self, OpCall(node), coords)
        moved = map_coordinates(node, coords)  # (operand, its coordinates) of an op that only moves or casts elements
        return None if moved is None else self.at(*moved)

    def _piece_element(self, piece: SlicePiece, coords: Coords) -> Element:
        """Return the element of one result of a split, chunk or unbind: that of the source, shifted by its start."""
        dim, start = piece.dim, piece.start
        if not isinstance(start, int):
            raise NotSymbolic(f"starts at {start}")
        if piece.keeps_dim:
            return self.at(piece.source, (*coords[:dim], start + coords[dim], *coords[dim + 1 :]))
        return self.at(piece.source, (*coords[:dim], start, *coords[dim:]))

    def _add_leaf(self, node: Node, coords: Coords) -> Element:
        """Return the element of a tensor of data as an unknown function of its coordinates, and add it to `leaves`.

        An attention op reads a leaf as a vector over queries or over keys, so that its coordinates must be the index of
        a query or that of a key, besides batch entries and constants. Raises NotSymbolic for others.
        """
        value, name = node.meta["val"], f"leaf_{node.name}"
        if value.dtype not in LEAF_DTYPES:
            raise NotSymbolic(f"contains {value.dtype} values that do not depend on a position")
        indices = [self._leaf_index(c, extent) for c, extent in zip(coords, node_shape(node))]
        indices = [index for index in indices if index is not None]
        # One index twice, as in leaf[q, q], or both q and k: such a leaf is no vector.
        if len(set(indices)) < len(indices) or {QUERY_INDEX, KEY_INDEX} <= set(indices):
            raise NotSymbolic("depends on a query and a key")
        self.leaves[name] = node
        self.box.leaf_ranges[name] = LEAF_RANGES.get(value.dtype) or exact_range(value.dtype)
        element = sympy.Function(name, integer=True)(*coords)
        return Ne(element, 0) if value.dtype == torch.bool else ((sympy.true, element),)

    def _leaf_index(self, coord: sympy.Expr, extent: Any) -> sympy.Symbol | None:
        """Return the index (b, q or k) that a coordinate of a leaf consists of, or None if it is constant.

        A coordinate may be a query or key index plus an offset, such as q + 1.

        Args:
            coord: The coordinate.
            extent: The size of the leaf's dim. Raises NotSymbolic if the coordinate may be outside of it.
        """
        error = NotSymbolic(f"is read at {coord} of {extent}, which is not the index of a query, a key or a batch")
        for index in (QUERY_INDEX, KEY_INDEX):
            if coord.has(index):
                if (coord - index).has(*INDICES, AppliedUndef) or not self.box.is_within(coord, extent):
                    raise error
                return index
        if coord == BATCH_INDEX and is_same_size(self.sizes[BATCH_INDEX], extent):
            return BATCH_INDEX
        if coord.has(*INDICES, AppliedUndef) or not self.box.is_nonnegative(extent - 1 - coord):
            raise error
        return None

    def operand(self, x: Any, coords: Coords) -> Element:
        """Return the element of an operand of a pointwise op at coordinates of the result.

        The operand may broadcast to the result, or be a Python scalar.
        """
        if not is_tensor(x):
            return as_number(x)
        return self.at(x, broadcast_coords(x, coords))

    def integer(self, value: Element) -> sympy.Expr:
        """Return an element as one integer expression, such as q + 1, for use as a coordinate.

        Raises NotSymbolic if it has several cases or is no integer.
        """
        numbers = [number for _, number in as_cases(value)]
        if len(numbers) != 1 or not numbers[0].is_integer:
            raise NotSymbolic("has an operand that is not an integer, or an integer with cases")
        return numbers[0]


def broadcast_coords(x: Node, coords: Coords) -> Coords:
    """Return the coordinates at which an element of a result reads an operand that broadcasts to the result.

    For an operand (H, 1) and the coordinates (b, h, q), these are (h, 0).
    """
    shape = node_shape(x)
    return tuple(0 if size == 1 else coord for size, coord in zip(shape, coords[len(coords) - len(shape) :]))


def as_number(x: Any) -> Element:
    """Convert a Python scalar, or the node or symbol of a size, to an element: one case that always holds.

    A bool becomes a condition. Raises NotSymbolic for NaN and other types.
    """
    if isinstance(x, bool):
        return sympy.true if x else sympy.false
    if isinstance(x, float):
        if math.isnan(x):
            raise NotSymbolic("contains NaN")
        if math.isinf(x):
            return ((sympy.true, sympy.oo if x > 0 else -sympy.oo),)
        return ((sympy.true, sympy.Rational(x)),)
    if isinstance(x, Node):
        x = x.meta["val"]
    if not isinstance(x, (int, torch.SymInt, sympy.Expr)):
        raise NotSymbolic(f"has a {type(x).__name__} operand in place of a number")
    return ((sympy.true, sympy.sympify(as_size(x))),)


def as_cases(value: Element) -> Cases:
    """Return an element as cases, pairs (condition, number); a condition becomes 1 where it holds, else 0."""
    if isinstance(value, tuple):
        return value
    cases = ((value, sympy.Integer(1)), (Not(value), sympy.Integer(0)))
    return tuple((condition, number) for condition, number in cases if condition != sympy.false)


def as_truth(value: Element) -> Boolean:
    """Return an element as a condition; numbers are true unless they are 0."""
    if not isinstance(value, tuple):
        return value
    return Or(*(And(condition, Ne(number, 0)) for condition, number in value))


def cast_element(value: Element, dtype: torch.dtype, box: IndexBox) -> Element:
    """Return an element in another dtype.

    Raises NotSymbolic if the cast could round a position, or wrap a number, or for a fraction.
    """
    if dtype == torch.bool:
        return as_truth(value)
    cases = cast_cases(as_cases(value), dtype, box)
    if not all(number.is_infinite or number.is_integer for _, number in cases):
        raise NotSymbolic(f"may be a fraction in {dtype}")
    return cases


def cast_cases(cases: Cases, dtype: torch.dtype, box: IndexBox) -> Cases:
    """Return cases as a tensor of the dtype represents them: in bfloat16, the constant 257 is 256.

    Raises NotSymbolic for a constant that does not fit, and for an expression, such as q + 1, that is not an integer
    within the exact integers of the dtype for all indices.
    """
    return tuple((condition, cast_number(number, dtype, box)) for condition, number in cases)


def cast_number(number: sympy.Expr, dtype: torch.dtype, box: IndexBox) -> sympy.Expr:
    """Return a number of `cast_cases` as the dtype represents it; expressions are returned unchanged."""
    if dtype.is_floating_point and number.is_infinite:
        return number
    if dtype.is_floating_point and number.is_Rational:
        try:
            represented = round_to_dtype(number.p / number.q, dtype)  # a division of ints is rounded correctly
        except OverflowError:
            represented = None
        if represented is None:
            raise NotSymbolic(f"overflows in {dtype}")
        if math.isinf(represented):  # -1e9 is -inf in float16
            return sympy.oo if represented > 0 else -sympy.oo
        return sympy.Rational(represented)
    if not number.is_integer or not box.is_bounded(number, *exact_range(dtype)):
        raise NotSymbolic(f"may round or overflow in {dtype}")
    return number


def exact_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the greatest of the consecutive integers that a dtype represents exactly.

    Raises NotSymbolic for a complex dtype.
    """
    if dtype.is_complex:
        raise NotSymbolic("is complex")
    if dtype.is_floating_point:
        limit = int(2 / torch.finfo(dtype).eps)  # 2**24 in float32
        return -limit, limit
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def apply_by_cases(function: Callable[..., Any], *values: Element) -> Cases:
    """Apply a function of numbers to elements: to each combination of their cases.

    Args:
        function: A function of one number per element.
        values: The elements.

    Returns:
        The cases of the result, pairs (condition, number) with distinct numbers.

    Raises:
        NotSymbolic: There are more than MAX_CASES results, or a result is NaN.
    """
    conditions: dict[sympy.Expr, Boolean] = {}  # by result
    for combination in itertools.product(*map(as_cases, values)):
        condition = And(*(case_condition for case_condition, _ in combination))
        if condition == sympy.false:
            continue
        numbers = [number for _, number in combination]
        # Under a condition such as q < 1 the index q is 0, also in the result.
        result = sympy.expand(function(*numbers)).subs(_fixed_indices(condition))
        if result is sympy.nan:
            raise NotSymbolic("contains NaN")
        conditions[result] = Or(conditions.get(result, sympy.false), condition)
    if len(conditions) > MAX_CASES:
        raise NotSymbolic(f"has {len(conditions)} cases, more than {MAX_CASES}")
    if len(conditions) == 1:
        return ((sympy.true, next(iter(conditions))),)
    return tuple((condition, result) for result, condition in conditions.items())


def _fixed_indices(condition: Boolean) -> dict[sympy.Symbol, int]:
    """Return {index: 0} for the indices that a condition requires to be 0, written as q < 1.

    The caller substitutes them in the result, which is needed only under the condition.
    """
    terms = And.make_args(condition)
    indices = [x for x in condition.free_symbols if x in INDICES or x.name.startswith(SUMMED_ROW)]
    return {index: 0 for index in indices if any(term == (index < 1) for term in terms)}


def choose_element(condition: Boolean, yes: Element, no: Element) -> Element:
    """Return the element that is `yes` where the condition holds, else `no`.

    It is a condition if `yes` and `no` are conditions, else cases of numbers.
    """
    if condition in (sympy.true, sympy.false):
        return yes if condition == sympy.true else no
    if not isinstance(yes, tuple) and not isinstance(no, tuple):
        return Or(And(condition, yes), And(Not(condition), no))
    # The cases of a condition are the numbers 1, where it holds, and 0.
    return apply_by_cases(lambda holds, a, b: a if holds == 1 else b, condition, yes, no)
