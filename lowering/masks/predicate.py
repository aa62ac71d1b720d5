"""Parse and evaluate mask predicates, which describe as text the keys that a query attends to.

A predicate is the ``str`` of a sympy Boolean over integer symbols: ``q`` and ``k``, the indices of the query
and the key; ``row0, row1, ...``, a vector's value at this query; ``col0, col1, ...``, a vector's value at
this key; ``n0, n1, ...``, sizes. True: may attend. ``""`` allows every pair. Bool vectors count as 0 and 1.

>>> evaluate_over("(k <= q) & (q - k < 4)", {"q": (8, 11), "k": (0, 3)})  # inclusive bounds: no pair
False

One traversal of the expression evaluates a predicate with one of two algebras. With *intervals* a symbol has
inclusive bounds, and a condition holds for all values (True), for none (False) or perhaps for some (None). With
*tensors* a condition is a bool tensor.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import sympy
import torch
from sympy.core.relational import Relational
from torch import Tensor

from sp_compile.lowering.base.errors import SpError

Bounds = tuple[Any, Any]  # minimum and maximum value, both inclusive
Verdict = bool | None  # true if a condition holds for all pairs, False if for none, None if unknown
Meaning = Callable[[Mapping[str, Any]], Any]  # A function from the symbols' values to the expression's value


class Algebra(NamedTuple):
    """Operations on values of one kind, by sympy class. Functions of one operand ignore the second."""

    number: Callable[[int], Any]  # return the value of an integer
    functions: dict[type, Callable[[Any, Any], Any]]  # arithmetic operations
    relations: dict[type, Callable[[Any, Any], Any]]  # comparisons
    both: Callable[[Any, Any], Any]  # return the conjunction of two conditions
    either: Callable[[Any, Any], Any]  # return the disjunction of two conditions
    negated: Callable[[Any], Any]  # return the negation of a condition


def evaluate_condition(expr: Any, algebra: Algebra) -> Meaning:
    """Compile a sympy Boolean to a function of the symbols' values.

    Raises:
        SpError: If the algebra does not support a node.
    """
    if expr in (sympy.true, sympy.false):
        constant = bool(expr)
        return lambda values: constant
    if isinstance(expr, sympy.And | sympy.Or):
        join = algebra.both if isinstance(expr, sympy.And) else algebra.either
        return _fold_operands(join, [evaluate_condition(arg, algebra) for arg in expr.args])
    if isinstance(expr, sympy.Not):
        inner = evaluate_condition(expr.args[0], algebra)
        return lambda values: algebra.negated(inner(values))
    if not isinstance(expr, Relational):
        raise _unknown_node_error(expr)
    return _fold_operands(
        algebra.relations[type(expr)], [_evaluate_number(side, algebra) for side in _split_relation(expr)]
    )


def _split_relation(expr: Any) -> tuple[Any, Any]:
    """Split a relation into query terms on the left and other terms on the right, without fractions.

    Each symbol of a linear condition then occurs once, so intervals are exact. The only tensor operation of the size of
    a block is the comparison of a column with a row.
    """
    terms = sympy.Add.make_args(sympy.expand(expr.lhs - expr.rhs))
    denominator = sympy.ilcm(1, *(term.as_coeff_Mul()[0].q for term in terms))
    of_query = [term for term in terms if any(is_query_symbol(str(s)) for s in term.free_symbols)]
    others = [-term for term in terms if term not in of_query]
    return tuple(sympy.expand(denominator * sympy.Add(*side)) for side in (of_query, others))


def is_query_symbol(name: str) -> bool:
    """Return True if a symbol has a value for each query."""
    return name == "q" or name.startswith("row")


def _evaluate_number(expr: Any, algebra: Algebra) -> Meaning:
    """Compile an integer expression to a function of the symbols' values."""
    if expr.is_Symbol:
        return operator.itemgetter(str(expr))
    if expr.is_Integer:
        constant = algebra.number(int(expr))
        return lambda values: constant
    kind = next((kind for kind in algebra.functions if isinstance(expr, kind)), None)
    if kind is None:
        raise _unknown_node_error(expr)
    args = sympy.together(expr.args[0]).as_numer_denom() if kind is sympy.floor else expr.args
    return _fold_operands(algebra.functions[kind], [_evaluate_number(arg, algebra) for arg in args])


def _fold_operands(join: Callable[[Any, Any], Any], parts: list[Meaning]) -> Meaning:
    first, *others = parts
    if not others:
        return lambda values: join(first(values), None)
    if len(others) == 1:
        second = others[0]
        return lambda values: join(first(values), second(values))
    return lambda values: reduce(join, [part(values) for part in parts])


def _unknown_node_error(expr: Any) -> SpError:
    return SpError("SP442", f"mask predicate: {type(expr).__name__} is not supported: {expr}.")


# Intervals.

_FAR_BOUND = 1 << 62  # greater than every index, size and value


def _interval_extremes(operation: Callable[[Any, Any], Any], a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of an operation that is monotone in each operand."""
    ends = [operation(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _interval_quotient(a: Bounds, b: Bounds) -> Bounds:
    if b[0] <= 0 <= b[1]:
        return -_FAR_BOUND, _FAR_BOUND
    return _interval_extremes(operator.floordiv, a, b)


def _interval_remainder(a: Bounds, b: Bounds) -> Bounds:
    if b[0] != b[1] or b[0] <= 0:
        most = max(abs(b[0]), abs(b[1]))
        return -most, most
    return (a[0] % b[0], a[1] % b[0]) if a[0] // b[0] == a[1] // b[0] else (0, b[0] - 1)


def _interval_less(a: Bounds, b: Bounds) -> Verdict:
    return True if a[1] < b[0] else False if a[0] >= b[1] else None


def _interval_equal(a: Bounds, b: Bounds) -> Verdict:
    if a[1] < b[0] or b[1] < a[0]:
        return False
    return True if a[0] == a[1] == b[0] == b[1] else None


def _interval_not(verdict: Verdict) -> Verdict:
    return None if verdict is None else not verdict


# algebra of inclusive bounds
INTERVALS = Algebra(
    number=lambda value: (value, value),
    functions={
        sympy.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
        sympy.Mul: partial(_interval_extremes, operator.mul),
        sympy.Min: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
        sympy.Max: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
        sympy.Mod: _interval_remainder,
        sympy.Abs: lambda a, _: (max(a[0], -a[1], 0), max(-a[0], a[1])),
        sympy.floor: _interval_quotient,
    },
    relations={
        sympy.StrictLessThan: _interval_less,
        sympy.LessThan: lambda a, b: _interval_not(_interval_less(b, a)),
        sympy.StrictGreaterThan: lambda a, b: _interval_less(b, a),
        sympy.GreaterThan: lambda a, b: _interval_not(_interval_less(a, b)),
        sympy.Eq: _interval_equal,
        sympy.Ne: lambda a, b: _interval_not(_interval_equal(a, b)),
    },
    both=lambda a, b: False if a is False or b is False else a and b,
    either=lambda a, b: True if a or b else None if a is None or b is None else False,
    negated=_interval_not,
)


# Tensors, and ints for sizes.


def _negate_mask(mask: Any) -> Any:
    return not mask if isinstance(mask, bool) else ~mask


def _choose_tensor(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    def chosen(a: Any, b: Any) -> Tensor:
        """Apply the operation to tensors; convert numbers first."""
        if isinstance(a, Tensor) != isinstance(b, Tensor):  # in a traced kernel the number must be on its device
            a, b = (a, a.new_full((), b)) if isinstance(a, Tensor) else (b.new_full((), a), b)
        return choose(torch.as_tensor(a), torch.as_tensor(b))

    return chosen


# algebra of tensors, and of ints for sizes
TENSORS = Algebra(
    number=lambda value: value,
    functions={
        sympy.Add: operator.add,
        sympy.Mul: operator.mul,
        sympy.Min: _choose_tensor(torch.minimum),
        sympy.Max: _choose_tensor(torch.maximum),
        sympy.Mod: operator.mod,
        sympy.Abs: lambda a, _: abs(a),
        sympy.floor: operator.floordiv,
    },
    relations={
        sympy.StrictLessThan: operator.lt,
        sympy.LessThan: operator.le,
        sympy.StrictGreaterThan: operator.gt,
        sympy.GreaterThan: operator.ge,
        sympy.Eq: operator.eq,
        sympy.Ne: operator.ne,
    },
    both=operator.and_,
    either=operator.or_,
    negated=_negate_mask,
)


_PREDICATE_SYMBOL = re.compile(r"q|k|(row|col|n)\d+")
_STRICT = (sympy.StrictLessThan, sympy.StrictGreaterThan)
_WEAK = (sympy.LessThan, sympy.GreaterThan)
_LINEAR = {(*_STRICT, *_WEAK): "<=", (sympy.Eq,): "==", (sympy.Ne,): "!="}
_PARSE_ERRORS = SyntaxError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError
SHOWN_CHARACTERS = 1000  # characters of a text, in an error message
_FACTOR_NODES, _CONSTANT_NODE = 16, 1 << 58  # limits, so that int64 sums do not overflow


def _power(base: Any, exponent: Any) -> Any:
    if not exponent.is_Integer or not 0 <= exponent <= 8:
        raise ValueError("powers are from 0 to 8")
    if base.is_Rational and max(abs(base.p), base.q) >= 1 << 64:  # large numbers could fill the memory
        raise ValueError("no such power")
    return base**exponent


def _symbol(name: str) -> sympy.Symbol:
    if not _PREDICATE_SYMBOL.fullmatch(name):
        raise ValueError(f"unknown symbol {name}; known are q, k, row<i>, col<i> and n<i>")
    return sympy.Symbol(name, integer=True)


def _predicate_constant(value: Any) -> Any:
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is not an integer")
    return sympy.Integer(value)


_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.Pow: _power,
    ast.FloorDiv: lambda a, b: sympy.floor(a / b),
    ast.Mod: sympy.Mod,
    ast.BitAnd: sympy.And,
    ast.BitOr: sympy.Or,
    ast.Invert: sympy.Not,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}
_PREDICATE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{one.__name__: one for one in (sympy.Mod, sympy.Min, sympy.Max, sympy.Abs, sympy.floor)},
    **{name: getattr(sympy, name) for name in ("And", "Or", "Not", "Eq", "Ne", "Lt", "Le", "Gt", "Ge")},
    "PythonMod": sympy.Mod,
    "FloorDiv": _OPERATIONS[ast.FloorDiv],
}


def _read_node(node: ast.AST) -> Any:
    """Convert a node of the grammar to an expression. The text may come from a file, so it is never executed."""
    match node:
        case ast.Constant(value=value):
            return _predicate_constant(value)
        case ast.Name(id=name):
            return _symbol(name)
        case ast.UnaryOp(op=op, operand=one) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_read_node(one))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _OPERATIONS
        ):
            return _OPERATIONS[type(op)](_read_node(left), _read_node(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _PREDICATE_FUNCTIONS:
            return _PREDICATE_FUNCTIONS[name](*map(_read_node, args))
    raise ValueError(f"no {type(node).__name__} is in the language")


@lru_cache(maxsize=1024)
def parse_predicate(text: str) -> Any:
    """Parse a predicate to a sympy Boolean.

    Raises:
        SpError: If the text is not a predicate or uses an unknown symbol.
    """
    if not text:
        return sympy.true
    try:
        expr = _read_node(ast.parse(text.strip(), mode="eval").body)
    except _PARSE_ERRORS as error:
        raise _syntax_error(text, error) from error
    compared = [side for relation in expr.atoms(sympy.core.relational.Relational) for side in relation.args]
    if not _is_condition(expr) or any(map(_is_condition, compared)):
        why = "it compares conditions" if any(map(_is_condition, compared)) else "it is not a condition"
        raise _syntax_error(text, why)
    return expr


def _syntax_error(text: str, why: object) -> SpError:
    return SpError("SP441", f"mask predicate: {text[:SHOWN_CHARACTERS]!r} is malformed: {why}.")


def _is_condition(expr: Any) -> bool:
    return isinstance(expr, sympy.logic.boolalg.Boolean) and not expr.is_Symbol


@lru_cache(maxsize=1024)
def split_conjuncts(text: str) -> tuple[str, ...]:
    """Return the conditions that must all hold, as sorted predicates."""
    expr = parse_predicate(text)
    parts = expr.args if isinstance(expr, sympy.And) else (expr,)
    return tuple(sorted(str(part) for part in parts if part != sympy.true))


@lru_cache(maxsize=1024)
def predicate_symbols(text: str) -> frozenset[str]:
    """Return the names of the symbols that the predicate reads."""
    return frozenset(str(symbol) for symbol in parse_predicate(text).free_symbols)


@lru_cache(maxsize=1024)
def position_conditions(text: str) -> str:
    """Return the conditions that read no vector, for a mask whose vectors have no values."""
    known = [
        c for c in split_conjuncts(text) if not any(name.startswith(("row", "col")) for name in predicate_symbols(c))
    ]
    return " & ".join(f"({c})" for c in known)


@lru_cache(maxsize=1024)
def is_within_documents(text: str) -> bool:
    """Return True if a query value must equal a key value, as document numbers do."""
    return any(_compares_lookups(part) for part in split_conjuncts(text) if isinstance(parse_predicate(part), sympy.Eq))


def _compares_lookups(text: str) -> bool:
    vectors = [name for name in predicate_symbols(text) if name.startswith(("row", "col"))]
    return len({name[:3] for name in vectors}) == 2


def check_known(text: str, known: Collection[str]) -> None:
    """Raise SpError if the predicate reads a symbol that has no value."""
    if missing := sorted(predicate_symbols(text) - set(known)):
        raise SpError("SP443", f"mask predicate: {text!r} reads {', '.join(missing)}, which has no value.")


class Linear(NamedTuple):
    """A linear condition: query terms + key terms + constant is <= 0, == 0 or != 0."""

    relation: str  # "<=", "==" or "!="
    of_query: tuple[tuple[str, int], ...]  # query terms (symbol, coefficient)
    of_key: tuple[tuple[str, int], ...]  # key terms (symbol, coefficient)
    constant: int


@lru_cache(maxsize=1024)
def as_linear(text: str, sizes: tuple[int, ...]) -> Linear | None:
    """Return the predicate as one linear condition on the symbols of a query and a key, or None.

    >>> as_linear("(k - q)/2 < n0", (3,))
    Linear(relation='<=', of_query=(('q', -1),), of_key=(('k', 1),), constant=-5)
    """
    expr = parse_predicate(text)
    relation = next((name for kinds, name in _LINEAR.items() if isinstance(expr, kinds)), None)
    if relation is None:
        return None
    known = {sympy.Symbol(f"n{i}", integer=True): size for i, size in enumerate(sizes)}
    less, more = (expr.lts, expr.gts) if relation == "<=" else (expr.lhs, expr.rhs)
    terms = sympy.expand((less - more).subs(known)).as_coefficients_dict()
    scale = sympy.ilcm(1, *(factor.q for factor in terms.values()))
    constant = int(terms.pop(sympy.S.One, 0) * scale) + isinstance(expr, _STRICT)
    factors = {str(term): int(factor * scale) for term, factor in terms.items() if term.is_Symbol}
    if len(factors) < len(terms) or sum(map(abs, factors.values())) > _FACTOR_NODES or abs(constant) > _CONSTANT_NODE:
        return None
    terms_of = [
        [(s, c) for s, c in sorted(factors.items()) if is_query_symbol(s) == wanted] for wanted in (True, False)
    ]
    return Linear(relation, tuple(terms_of[0]), tuple(terms_of[1]), constant)


@lru_cache(maxsize=1024)
def depends_on_distance(text: str, sizes: tuple[int, ...]) -> bool:
    """Return True if all conditions depend only on the distance of key and query."""
    found = [as_linear(c, sizes) for c in split_conjuncts(text)]
    return all(
        one is not None
        and [*dict(one.of_query), *dict(one.of_key)] == ["q", "k"]
        and one.of_query[0][1] == -one.of_key[0][1]
        for one in found
    )


def evaluate_over(text: str, box: Mapping[str, Bounds]) -> Verdict:
    """Return True if all pairs of the box may attend, False if none may, None if unknown.

    Exact for a condition in which every symbol occurs once, such as a linear one, and for a conjunction of bounds on q
    - k; otherwise the result may be None instead of True or False.

    Args:
        text: The predicate.
        box: The inclusive bounds of every symbol of the predicate.
    """
    return _evaluate_text(text, tensors=False)(box)


def evaluate_mask(text: str, values: Mapping[str, Tensor | int]) -> Tensor | bool:
    """Evaluate the mask of one block.

    Args:
        text: The predicate.
        values: The values of its symbols, which broadcast.

    Returns:
        A bool tensor of the broadcast shape, or a bool if the predicate reads no tensor.
    """
    return _evaluate_text(text, tensors=True)(values)


@lru_cache(maxsize=1024)
def _evaluate_text(text: str, tensors: bool) -> Meaning:
    return evaluate_condition(parse_predicate(text), TENSORS if tensors else INTERVALS)
