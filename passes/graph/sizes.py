"""Exact arithmetic on sizes: Python ints for known sizes, sympy expressions for symbolic ones.

Sizes are compared as expressions, never as SymInts, because comparing SymInts would add guards to the user's program.
`SizeBuilder` turns symbolic sizes into nodes: `S*B` becomes sym_size and mul nodes over the inputs of the graph.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Graph, Node, map_arg

from sp_compile.lowering.base.errors import CaptureError
from sp_compile.lowering.torch_compat import FloorDiv, Max, detect_fake_mode, is_guaranteed, size_hint

Size: TypeAlias = int | sympy.Expr


def as_size(value: Any) -> Size:
    """Convert an int, a SymInt, a sympy expression or the Node of a size to a size."""
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Expr):
        return int(value) if value.is_Integer else value
    return int(value)


def as_sizes(values: Iterable[Any]) -> tuple[Size, ...]:
    """Convert several values, such as a shape or strides, by `as_size`."""
    return tuple(v if type(v) is int else as_size(v) for v in values)


def current_bytes(value: torch.Tensor, min_element_size: int = 0) -> int:
    """Return the bytes of a value in the current call, without adding a guard.

    Args:
        value: Tensor, any dtype.
        min_element_size: Bytes to count for each element of a smaller dtype.
    """
    return size_hint(value.numel()) * max(value.element_size(), min_element_size)


def size_product(values: Iterable[Size]) -> Size:
    """Return the product of the sizes; 1 for an empty iterable."""
    return math.prod(values)


def is_same_size(a: Size, b: Size) -> bool:
    """Return True if the sizes are equal for all values of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a == b or sympy.expand(a - b) == 0


def nonempty_size(value: Size) -> Size:
    """Replace Max(1, size) by the size, assuming that no dim is empty; torch computes strides with such terms."""
    if isinstance(value, int):
        return value

    def simplify_max(*operands: sympy.Expr) -> sympy.Expr:
        """Return Max of the operands, or the other operand of Max(1, size), which is at least 1 if no dim is empty."""
        if len(operands) == 2 and 1 in operands:
            return operands[0] * operands[1]  # 1 * size
        return Max(*operands)

    return as_size(value.replace(Max, simplify_max))


def is_same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Return True if two shapes are equal for all values of the symbols."""
    return len(a) == len(b) and all(map(is_same_size, a, b))


def exact_quotient(a: Size, b: Size) -> Size | None:
    """Return a / b if it is provably an integer, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return _symbolic_quotient(sympy.sympify(a), sympy.sympify(b))


@lru_cache(maxsize=4096)
def _symbolic_quotient(a: sympy.Expr, b: sympy.Expr) -> Size | None:
    """Return a / b if it is a polynomial in the symbols with integer coefficients, hence an integer, else None."""
    if a == b:
        return 1
    if b == 1:
        return as_size(a)
    quotient = a / b
    _, denominator = quotient.as_numer_denom()
    if denominator != 1:
        if not (a.has(sympy.Add) or b.has(sympy.Add)):  # products are cancelled already
            return None
        quotient = sympy.cancel(quotient)
    numerator, denominator = quotient.as_numer_denom()
    is_integral = all(c.is_Integer for c in sympy.expand(numerator).as_coefficients_dict().values())
    return as_size(quotient) if denominator == 1 and is_integral else None


def size_gcd(a: Size, b: Size) -> Size:
    """Return the provable greatest common divisor; for symbolic sizes, that of the polynomials."""
    if isinstance(a, int) and isinstance(b, int):
        return math.gcd(a, b)
    if exact_quotient(b, a) is not None:
        return a
    if exact_quotient(a, b) is not None:
        return b
    return as_size(sympy.gcd(a, b))


def size_lcm(a: Size, b: Size) -> Size:
    """Return the least common multiple a * b / gcd(a, b), or a * b if that is not provably an integer."""
    quotient = exact_quotient(a * b, size_gcd(a, b))
    return a * b if quotient is None else quotient


def ceil_div(a: Size, n: int) -> Size:
    """Return ceil(a / n), such as the number of rows per rank of a dim with `a` rows on `n` ranks."""
    if isinstance(a, int):
        return -(-a // n)
    exact = exact_quotient(a, n)
    return exact if exact is not None else FloorDiv(a + (n - 1), sympy.Integer(n))


def is_divisor(n: int, a: Size) -> bool:
    """Return True if n provably divides a."""
    return exact_quotient(a, n) is not None


def is_most_of(part: Size, total: Size) -> bool:
    """Return True if `part` is at least half of `total` if all symbols are large; a heuristic for costs only."""
    return 2 * assume_large(part) >= assume_large(total)


def normalize_position(position: Size, extent: Size) -> Size:
    """Return a non-negative position in a dim; negative ints count from the end."""
    return extent + position if isinstance(position, int) and position < 0 else position


def position_from_start(position: Size, extent: Size, value: torch.Tensor) -> Size | None:
    """Return a position in a dim of a value, which may be symbolic, as a non-negative one; None if its sign is unknown.

    Negative positions count from the end: -k of S rows, with a size k, is S - k.
    """
    mode = detect_fake_mode([value])
    for is_negative, sign in ((False, position >= 0), (True, position < 0)):
        if sign in (True, sympy.true) or (isinstance(sign, sympy.Basic) and is_guaranteed(mode, sign)):
            return extent + position if is_negative else position
    return None


def assume_large(a: Size) -> int:
    """Return the size with 2**20 for every symbol; a heuristic for costs, not a proof.

    16 // (16 // s), a number of heads for heads of a size s, is undefined for large s. Then a symbol is the largest
    power of 2 for which the size is defined; if there is none, all symbols are. The size is 2**20 if that is undefined.
    """
    if isinstance(a, int):
        return a
    symbols = sorted(a.free_symbols, key=str)
    powers = [1 << exponent for exponent in range(20, -1, -1)]
    large = dict.fromkeys(symbols, powers[0])
    one_smaller = ({**large, symbol: power} for power in powers for symbol in symbols)
    for values in (*one_smaller, *(dict.fromkeys(symbols, power) for power in powers)):
        with contextlib.suppress(ZeroDivisionError):
            return int(a.subs(values))
    return powers[0]


def symbolic_sizes(node: Node) -> set[sympy.Expr]:
    """Return the symbolic sizes of an input that is a tensor, or its value if it is a size."""
    value = node.meta.get("val")
    sizes: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        sizes = value.shape
    elif isinstance(value, torch.SymInt):
        sizes = (value,)
    return {size for size in as_sizes(sizes) if isinstance(size, sympy.Expr)}


class SizeBuilder:
    """Builder of size arguments for graph nodes; each expression is computed once, after the inputs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[Size, Node] = {}  # node of each size that is an input or was computed
        self.sources: dict[sympy.Symbol, tuple[Node, int]] = {}  # input and dim of each symbol
        self.last: Node | None = None  # last input or size node; the next size node is inserted after it
        for node in graph.find_nodes(op="placeholder"):
            self.last, value = node, node.meta.get("val")
            if isinstance(value, torch.SymInt) and isinstance(as_size(value), sympy.Expr):
                self.known.setdefault(as_size(value), node)
            elif isinstance(value, torch.Tensor):
                for d, extent in enumerate(as_sizes(value.shape)):
                    if isinstance(extent, sympy.Symbol):
                        self.sources.setdefault(extent, (node, d))

    def __call__(self, value: Size) -> int | Node:
        """Return the int, or the node that computes the expression at run time."""
        if isinstance(value, int):
            return value
        if value not in self.known:
            self.known[value] = self._build(value)
        return self.known[value]

    def list(self, values: Any) -> list[int | Node]:
        """Convert each value to an int or a node, as `__call__` does."""
        return [self(v) for v in values]

    def _build(self, expr: sympy.Expr) -> Node:
        """Append the nodes that compute an expression.

        It may contain sums, products, powers, floor divisions and remainders.
        """
        if isinstance(expr, sympy.Symbol):
            if expr in self.sources:
                return self._emit(torch.ops.aten.sym_size.int, self.sources[expr])
            # With the option inputs="local" a known size may be n * s0, of an input of n shards: s0 is that // n.
            for known_size, node in list(self.known.items()):
                factor, symbol = sympy.sympify(known_size).as_coeff_Mul()
                if symbol == expr and factor.is_Integer and factor > 1:
                    return self._emit(operator.floordiv, (node, int(factor)))
            raise CaptureError("SP219", f"expected a size that follows from the sizes of inputs, got {expr}.")
        if isinstance(expr, FloorDiv) or type(expr).__name__ in ("Mod", "PythonMod"):
            op = operator.floordiv if isinstance(expr, FloorDiv) else operator.mod
            return self._emit(op, tuple(self(as_size(a)) for a in expr.args))
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return self._fold(operator.mul, [expr.base] * int(expr.exp))
        if isinstance(expr, sympy.Add | sympy.Mul):
            return self._fold(operator.add if isinstance(expr, sympy.Add) else operator.mul, expr.args)
        # For the message: where the symbols are from.
        sources = {x: self.sources[x] for x in sorted(expr.free_symbols, key=str) if x in self.sources}
        known = "".join(f"; {x} is {node.name}.shape[{dim}]" for x, (node, dim) in sources.items())
        raise CaptureError("SP219", f"{type(expr).__name__} is not supported in the size {expr}{known}.")

    def _fold(self, op: Any, terms: Any) -> Node:
        """Append the nodes that combine two or more terms by a binary operator: a + b + c as add(add(a, b), c)."""
        total = self(as_size(terms[0]))
        for term in terms[1:]:
            total = self._emit(op, (total, self(as_size(term))))
        assert isinstance(total, Node), terms
        return total

    def _emit(self, target: Any, args: tuple[Any, ...]) -> Node:
        """Insert a call after the last size node, or at the end of a graph without inputs."""
        if self.last is not None:
            insertion_point = self.graph.inserting_after(self.last)
        else:
            insertion_point = self.graph.inserting_before(None)  # None: at the end
        with insertion_point:
            node = self.graph.call_function(target, args)
        node.meta["val"] = target(*map_arg(args, lambda x: x.meta["val"]))
        self.last = node
        return node


def read_sizes_from_inputs(graph: Graph) -> None:
    """Compute sizes of intermediate values from sizes of inputs, so that no value stays alive for its size alone."""
    builder, placeholders = SizeBuilder(graph), graph.find_nodes(op="placeholder")
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        extent = as_size(node.meta["val"])
        is_computable = isinstance(extent, sympy.Expr) and extent.free_symbols <= builder.sources.keys()
        if is_computable and node.args[0] not in placeholders:
            node.replace_all_uses_with(builder(extent))
            graph.erase_node(node)
