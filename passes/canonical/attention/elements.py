"""Express an element of a tensor as a function of its coordinates, from its graph.

    arange(S)[:, None] >= arange(S)     at (q, k):     k <= q
    padding[:, None, None]              at (b, h, q, k): leaf0(b, k) != 0

Nothing is executed: `at` derives the element of an op from the elements of its operands. A value without a rule is a
*leaf*, a function of its coordinates, if it has an integer or bool dtype and is indexed by a query or a key. Floats are
supported only if they are exact: integers and infinities, never values whose rounding could matter.
"""

from __future__ import annotations

import itertools
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
from sp_compile.passes.graph.sizes import as_size, as_sizes, is_same_size
from sp_compile.passes.sharding.matchers import SlicePiece, constant_value, map_coordinates, match_piece, value_origin

from .proofs import BATCH_INDEX, INDICES, KEY_INDEX, QUERY_INDEX, Boolean, IndexBox

Cases: TypeAlias = tuple[tuple[Boolean, sympy.Expr], ...]  # disjoint conditions that cover everything
Element: TypeAlias = Boolean | Cases
Coords: TypeAlias = tuple[sympy.Expr, ...]
Handler: TypeAlias = Callable[["ElementReader", OpCall, Coords], Element]
HANDLERS: Table[Handler] = Table("elements of ops")
MAX_CASES = 8
LEAF_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
POSITION_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)  # can represent any position; half cannot


class NotSymbolic(Exception):
    """Error for an element without an expression, with the reason and the innermost such node."""

    def __init__(self, why: str, node: Node | None = None) -> None:
        self.cause = why if node is None else f"{node.name} ({node.target}) {why}"
        super().__init__(self.cause)
        self.node = node

    def of(self, node: Node) -> NotSymbolic:
        """Return the same error for `node`, unless it has a node already."""
        return self if self.node is not None else NotSymbolic(str(self), node)


def element_handler(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a handler for the aten ops with these names (every overload)."""
    return HANDLERS.of(*names)


class ElementReader:
    """Reader of the elements of one graph; `leaves` maps function names to unexplained values."""

    def __init__(self, box: IndexBox, sizes: dict[sympy.Symbol, Any]) -> None:
        self.box, self.sizes = box, sizes
        self.leaves: dict[str, Node] = {}
        self.known: dict[tuple[Node, Coords], Element] = {}

    def at(self, node: Node, coords: Sequence[Any]) -> Element:
        """Return the element of a tensor at the coordinates.

        Args:
            node: A tensor of the graph.
            coords: One expression per dim of the tensor.

        Returns:
            The element.

        Raises:
            NotSymbolic: No expression describes the element.
        """
        key = (value_origin(node), tuple(sympy.sympify(c) for c in coords))
        if key not in self.known:
            self.known[key] = self._element(*key)
        return self.known[key]

    def _element(self, node: Node, coords: Coords) -> Element:
        why: NotSymbolic | None = None
        try:
            computed = self._computed_element(node, coords)
            if computed is not None:
                return cast_element(computed, node.meta["val"].dtype)
        except NotSymbolic as error:  # one lookup may still replace everything that has no expression
            why = error
        try:
            const = constant_value(node)
            return self._leaf(node, coords) if const is None else cast_element(as_number(const), node.meta["val"].dtype)
        except NotSymbolic as error:
            raise (why or error).of(node) from None
        finally:
            del why  # avoids a reference cycle between the error and this frame

    def _computed_element(self, node: Node, coords: Coords) -> Element | None:
        """Return the element that an op computes from its operands, or None for an unknown op."""
        if node.target is operator.getitem:
            return self._piece_element(piece, coords) if (piece := match_piece(node)) is not None else None
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return None
        handler = HANDLERS.get(str(schema_of(node.target).name).removeprefix("aten::"))
        if handler is not None:
            return handler(self, OpCall(node), coords)
        moved = map_coordinates(node, coords)  # by the op's rule, for ops that only move or cast
        return None if moved is None else self.at(*moved)

    def _piece_element(self, piece: SlicePiece, coords: Coords) -> Element:
        """Return an element of one result of a split, a chunk or an unbind."""
        dim, start = piece.dim, piece.start
        if not isinstance(start, int):
            raise NotSymbolic(f"starts at {start}")
        here, rest = (
            (start + coords[dim], coords[dim + 1 :]) if piece.keeps_dim else (sympy.Integer(start), coords[dim:])
        )
        return self.at(piece.source, (*coords[:dim], here, *rest))

    def _leaf(self, node: Node, coords: Coords) -> Element:
        value = node.meta["val"]
        if value.dtype not in LEAF_DTYPES:
            raise NotSymbolic(f"contains {value.dtype} values that do not depend on a position")
        which = [self._index(c, s) for c, s in zip(coords, as_sizes(value.shape))]
        used = [index for index in which if index is not None]
        if len(set(used)) < len(used) or {QUERY_INDEX, KEY_INDEX} <= set(used):
            raise NotSymbolic("depends on a query and a key")
        function = sympy.Function(f"leaf_{node.name}", integer=True)
        self.leaves[f"leaf_{node.name}"] = node
        element = function(*coords)
        return Ne(element, 0) if value.dtype == torch.bool else ((sympy.true, element),)

    def _index(self, coord: sympy.Expr, extent: Any) -> sympy.Symbol | None:
        """Return the index that the coordinate runs over, or None if it is constant. Raises NotSymbolic."""
        outside = NotSymbolic(f"is read at {coord} of {extent}, which is not the index of a query, a key or a batch")
        for index in (QUERY_INDEX, KEY_INDEX):
            if coord.has(index):
                if (coord - index).has(*INDICES, AppliedUndef) or not self.box.is_within(coord, extent):
                    raise outside
                return index
        if coord == BATCH_INDEX and is_same_size(self.sizes[BATCH_INDEX], extent):
            return BATCH_INDEX
        if coord.has(*INDICES, AppliedUndef) or not self.box.is_nonnegative(extent - 1 - coord):
            raise outside
        return None

    def operand(self, x: Any, coords: Coords) -> Element:
        """Return the element of an operand of a pointwise op; it may broadcast or be a Python scalar."""
        if not is_tensor(x):
            return as_number(x)
        shape = node_shape(x)
        own = coords[len(coords) - len(shape) :]
        return self.at(x, tuple(0 if s == 1 else c for s, c in zip(shape, own)))

    def integer(self, value: Element) -> sympy.Expr:
        """Return the value as one integer expression. Raises NotSymbolic."""
        found = as_cases(value)
        if len(found) != 1 or not found[0][1].is_integer:
            raise NotSymbolic("has an operand that is not an integer, or an integer with cases")
        return found[0][1]


def as_number(x: Any) -> Element:
    """Convert a Python scalar, or the node or symbol of a size, to an element. Raises NotSymbolic for NaN."""
    if isinstance(x, bool):
        return sympy.true if x else sympy.false
    if isinstance(x, float):
        if x != x:
            raise NotSymbolic("contains NaN")
        return ((sympy.true, sympy.Rational(x) if abs(x) != float("inf") else sympy.oo * (1 if x > 0 else -1)),)
    if isinstance(x, Node):
        x = x.meta["val"]
    if not isinstance(x, (int, torch.SymInt, sympy.Expr)):
        raise NotSymbolic(f"has a {type(x).__name__} operand in place of a number")
    return ((sympy.true, sympy.sympify(as_size(x))),)


def as_cases(value: Element) -> Cases:
    """Return a number as cases; bools become 1 and 0."""
    if isinstance(value, tuple):
        return value
    both = ((value, sympy.Integer(1)), (Not(value), sympy.Integer(0)))
    return tuple((c, v) for c, v in both if c != sympy.false)


def as_truth(value: Element) -> Boolean:
    """Return a bool; numbers are true unless they are 0."""
    if not isinstance(value, tuple):
        return value
    return Or(*(And(c, Ne(v, 0)) for c, v in value))


def cast_element(value: Element, dtype: torch.dtype) -> Element:
    """Return the value in another dtype. Raises NotSymbolic if the cast could round or wrap."""
    if dtype == torch.bool:
        return as_truth(value)
    found = as_cases(value)
    for _, v in found:
        const = v.is_infinite or (v.is_Integer and (dtype.is_floating_point or abs(v) < 128))
        position = v.is_integer and dtype in POSITION_DTYPES and not (dtype == torch.float32 and v.has(AppliedUndef))
        if not const and not position:
            raise NotSymbolic(f"may round or overflow in {dtype}")
    return found


def apply_by_cases(function: Callable[..., Any], *values: Element) -> Cases:
    """Apply a function to every combination of cases and merge equal results.

    Raises:
        NotSymbolic: There are more than MAX_CASES results, or a result is NaN.
    """
    out: dict[sympy.Expr, Boolean] = {}
    for chosen in itertools.product(*map(as_cases, values)):
        condition = And(*(c for c, _ in chosen))
        if condition == sympy.false:
            continue
        result = sympy.expand(function(*(v for _, v in chosen))).subs(_pinned_indices(condition))
        if result is sympy.nan:
            raise NotSymbolic("contains NaN")
        out[result] = Or(out.get(result, sympy.false), condition)
    if len(out) > MAX_CASES:
        raise NotSymbolic(f"has {len(out)} cases, more than {MAX_CASES}")
    return ((sympy.true, next(iter(out))),) if len(out) == 1 else tuple((c, v) for v, c in out.items())


def _pinned_indices(condition: Boolean) -> dict[sympy.Symbol, int]:
    """Return the indices that the condition fixes to one value, as q < 1 does."""
    return {i: 0 for i in INDICES if any(term == (i < 1) for term in And.make_args(condition))}


def select_element(condition: Boolean, yes: Element, no: Element) -> Element:
    """Return `yes` where the condition holds, else `no`."""
    if condition in (sympy.true, sympy.false):
        return yes if condition == sympy.true else no
    if not isinstance(yes, tuple) and not isinstance(no, tuple):
        return Or(And(condition, yes), And(Not(condition), no))
    return apply_by_cases(lambda c, a, b: a if c == 1 else b, condition, yes, no)
