"""Parse and evaluate mask predicates, which describe as text the keys that a query attends to.

A predicate is the ``str`` of a sympy Boolean over integer symbols: ``q`` and ``k``, the indices of the query
and the key; ``row0, row1, ...``, a vector's value at this query; ``col0, col1, ...``, a vector's value at
this key; ``n0, n1, ...``, sizes. True: may attend. ``""`` allows every pair. Bool vectors count as 0 and 1.

>>> evaluate_over("(k <= q) & (q - k < 4)", {"q": (8, 11), "k": (0, 3)})  # inclusive bounds: no pair
False

Two tables of operations (`Algebra`) evaluate a predicate. With INTERVALS a symbol's value is its inclusive bounds, and
a condition holds for all values (True), for none (False) or perhaps for some (None). With TENSORS it is a bool tensor.
"""

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

from .pieces import FAR_VALUE

Bounds = tuple[Any, Any]  # minimum and maximum value, both inclusive
Verdict = bool | None  # True if a condition holds for all pairs, False if for none, None if unknown
Evaluator = Callable[[Mapping[str, Any]], Any]  # a function from the symbols' values to the expression's value


class Algebra(NamedTuple):
    """Operations on values of one kind: bounds or tensors. Keys are sympy classes.

    Every function has two operands; that of a unary operation ignores the second. The algebra has no ``>`` and ``>=``,
    because `_split_relation` swaps the sides.
    """

    constant: Callable[[int], Any]  # converts an integer to a value
    functions: dict[type, Callable[[Any, Any], Any]]  # arithmetic operations on two values
    relations: dict[type, Callable[[Any, Any], Any]]  # comparisons of two values, whose results are conditions
    conjunction: Callable[[Any, Any], Any]  # "and" of two conditions
    disjunction: Callable[[Any, Any], Any]  # "or" of two conditions
    negation: Callable[[Any], Any]  # "not" of a condition


def _compile_condition(expr: Any, algebra: Algebra) -> Evaluator:
    """Return a function that evaluates a sympy Boolean for given values of its symbols.

    The algebra determines what values are: tensors, or bounds of integers.

    Raises:
        SpError: If the algebra does not support a node.
    """
    if expr in (sympy.true, sympy.false):
        constant = bool(expr)
        return lambda values: constant
    if isinstance(expr, sympy.And | sympy.Or):
        join = algebra.conjunction if isinstance(expr, sympy.And) else algebra.disjunction
        return _compile_operation(join, [_compile_condition(arg, algebra) for arg in expr.args])
    if isinstance(expr, sympy.Not):
        inner = _compile_condition(expr.args[0], algebra)
        return lambda values: algebra.negation(inner(values))
    if not isinstance(expr, Relational):
        raise _unsupported_node_error(expr)
    kind, *sides = _split_relation(expr)
    return _compile_operation(algebra.relations[kind], [_compile_number(side, algebra) for side in sides])


def _split_relation(expr: Any) -> tuple[type, Any, Any]:
    """Return a relation as (class, left side, right side), without fractions, and with all query terms on one side.

    `k - q >= n0 / 2` becomes (LessThan, n0 - 2*k, -2*q). Each symbol of a linear condition then occurs once, so that
    intervals are exact. With tensors, each side has a value per query or per key; only their comparison has one per
    pair.
    """
    terms = sympy.Add.make_args(sympy.expand(expr.lhs - expr.rhs))
    coefficients = [term.as_coeff_Mul()[0] for term in terms]
    denominator = sympy.ilcm(1, *(coefficient.q for coefficient in coefficients))  # q: the denominator of a Rational
    query_terms = [term for term in terms if any(is_query_symbol(str(s)) for s in term.free_symbols)]
    other_terms = [-term for term in terms if term not in query_terms]
    left, right = (sympy.expand(denominator * sympy.Add(*side)) for side in (query_terms, other_terms))
    if isinstance(expr, sympy.StrictGreaterThan | sympy.GreaterThan):  # an algebra has only < and <=
        return type(expr.reversed), right, left
    return type(expr), left, right


def is_query_symbol(name: str) -> bool:
    """Return True if a symbol of a predicate has a value for each query: q, or a vector row<i>."""
    return name == "q" or name.startswith("row")


def _compile_number(expr: Any, algebra: Algebra) -> Evaluator:
    """Return a function that evaluates an integer expression for given values of its symbols.

    Raises:
        SpError: If the algebra does not support a node.
    """
    if expr.is_Symbol:
        return operator.itemgetter(str(expr))
    if expr.is_Integer:
        constant = algebra.constant(int(expr))
        return lambda values: constant
    kind = next((kind for kind in algebra.functions if isinstance(expr, kind)), None)
    if kind is None:
        raise _unsupported_node_error(expr)
    # floor(a / b) is an operation on the two integers a and b.
    operands = sympy.together(expr.args[0]).as_numer_denom() if kind is sympy.floor else expr.args
    return _compile_operation(algebra.functions[kind], [_compile_number(operand, algebra) for operand in operands])


def _compile_operation(operation: Callable[[Any, Any], Any], operands: list[Evaluator]) -> Evaluator:
    """Return a function that evaluates the operands and combines their values, from left to right.

    An operation has two arguments; a unary one ignores the second.
    """
    if len(operands) == 1:
        (only,) = operands
        return lambda values: operation(only(values), None)
    if len(operands) == 2:  # faster than `reduce`
        first, second = operands
        return lambda values: operation(first(values), second(values))
    return lambda values: reduce(operation, [operand(values) for operand in operands])


def _unsupported_node_error(expr: Any) -> SpError:
    """Return the error of a predicate with a sympy node that cannot be evaluated."""
    return SpError("SP442", f"mask predicate: the operation {type(expr).__name__} in {expr} is not supported.")


# Intervals.

_FAR_BOUND = 1 << 80  # greater than every product of two int64


def _interval_extremes(operation: Callable[[Any, Any], Any], a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of operation(x, y) for x and y within these bounds, if it is monotone in each operand."""
    ends = [operation(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _interval_quotient(a: Bounds, b: Bounds) -> Bounds:
    """Return bounds of a // b, without limit if b may be 0."""
    if b[0] <= 0 <= b[1]:
        return -_FAR_BOUND, _FAR_BOUND
    return _interval_extremes(operator.floordiv, a, b)


def _interval_remainder(a: Bounds, b: Bounds) -> Bounds:
    """Return bounds of a % b: exact if b is a positive constant and all values of a have the same quotient a // b."""
    low, high = b
    if low != high or low <= 0:
        largest = max(abs(low), abs(high))
        return -largest, largest
    divisor = low
    has_one_quotient = a[0] // divisor == a[1] // divisor
    return (a[0] % divisor, a[1] % divisor) if has_one_quotient else (0, divisor - 1)


def _interval_less(a: Bounds, b: Bounds) -> Verdict:
    """Return True if x < y for all x and y within these bounds, False if for none, None if for some."""
    if a[1] < b[0]:
        return True
    return False if a[0] >= b[1] else None


def _interval_equal(a: Bounds, b: Bounds) -> Verdict:
    """Return True if x == y for all x and y within these bounds, False if for none, None if for some."""
    if a[1] < b[0] or b[1] < a[0]:
        return False
    return True if a[0] == a[1] == b[0] == b[1] else None


def _interval_not(verdict: Verdict) -> Verdict:
    """Return the verdict of the negated condition; None (unknown) remains None."""
    return None if verdict is None else not verdict


def _interval_and(a: Verdict, b: Verdict) -> Verdict:
    """Return False if either condition never holds, True if both always hold, else None (unknown)."""
    if a is False or b is False:
        return False
    return a and b


# Algebra of inclusive bounds.
INTERVALS = Algebra(
    constant=lambda number: (number, number),
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
        sympy.Eq: _interval_equal,
        sympy.Ne: lambda a, b: _interval_not(_interval_equal(a, b)),
    },
    conjunction=_interval_and,
    disjunction=lambda a, b: _interval_not(_interval_and(_interval_not(a), _interval_not(b))),
    negation=_interval_not,
)


# Tensors, and ints for sizes.


def _accept_numbers(select: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return `select`, torch.minimum or torch.maximum, as a function whose operands may also be numbers."""

    def select_values(a: Any, b: Any) -> Tensor:
        """Apply `select`; a number becomes a tensor on the device of the other operand, as traced kernels require."""
        if isinstance(a, Tensor) and not isinstance(b, Tensor):
            b = a.new_full((), b)
        elif isinstance(b, Tensor) and not isinstance(a, Tensor):
            a = b.new_full((), a)
        return select(torch.as_tensor(a), torch.as_tensor(b))

    return select_values


# Algebra of tensors, and of ints for sizes.
TENSORS = Algebra(
    constant=lambda number: number,
    functions={
        sympy.Add: operator.add,
        sympy.Mul: operator.mul,
        sympy.Min: _accept_numbers(torch.minimum),
        sympy.Max: _accept_numbers(torch.maximum),
        sympy.Mod: operator.mod,
        sympy.Abs: lambda a, _: abs(a),
        sympy.floor: operator.floordiv,
    },
    relations={
        sympy.StrictLessThan: operator.lt,
        sympy.LessThan: operator.le,
        sympy.Eq: operator.eq,
        sympy.Ne: operator.ne,
    },
    conjunction=operator.and_,
    disjunction=operator.or_,
    negation=lambda mask: not mask if isinstance(mask, bool) else ~mask,
)


# The text.

_PREDICATE_SYMBOL = re.compile(r"q|k|(row|col|n)\d+")
# Errors of `ast.parse` and sympy for a text that is no predicate.
_PARSE_ERRORS = SyntaxError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError
SHOWN_CHARACTERS = 1000  # characters of a text, in an error message


def _power(base: Any, exponent: Any) -> Any:
    """Return base**exponent, with limits so that the number of a text such as 9**9**9 cannot fill the memory.

    Raises:
        SyntaxError: If the base or the exponent is too large.
    """
    if not exponent.is_Integer or not 0 <= exponent <= 8:
        raise SyntaxError(f"expected an exponent from 0 to 8, got ({base})**{exponent}")
    if base.is_Rational and max(abs(base.p), base.q) >= 1 << 64:
        raise SyntaxError(f"expected a base below 2**64, got ({base})**{exponent}")
    return base**exponent


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
    **{name: getattr(sympy, name) for name in "Mod Min Max Abs floor And Or Not Eq Ne Lt Le Gt Ge".split()},
    "PythonMod": sympy.Mod,
    "FloorDiv": _OPERATIONS[ast.FloorDiv],
}


def _read_node(node: ast.AST) -> Any:
    """Return a node of a predicate's syntax tree as a sympy expression.

    The text may come from a file, so it is never executed: only the syntax below is accepted.

    Raises:
        SyntaxError: If the node has other syntax.
    """
    match node:
        case ast.Constant(value=bool() as truth):
            return sympy.true if truth else sympy.false
        case ast.Constant(value=int() as number):
            return sympy.Integer(number)
        case ast.Name(id=name):
            if not _PREDICATE_SYMBOL.fullmatch(name):
                raise SyntaxError(f"expected the symbols q, k, row<i>, col<i> or n<i>, got {name!r}")
            return sympy.Symbol(name, integer=True)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_read_node(operand))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _OPERATIONS
        ):
            return _OPERATIONS[type(op)](_read_node(left), _read_node(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _PREDICATE_FUNCTIONS:
            return _PREDICATE_FUNCTIONS[name](*map(_read_node, args))
    expected = f"integers, + - * / // % **, comparisons, & | ~ or {', '.join(_PREDICATE_FUNCTIONS)}"
    raise SyntaxError(f"expected {expected}, got {ast.unparse(node)!r}")


@lru_cache(maxsize=1024)
def parse_predicate(text: str) -> Any:
    """Return a predicate, the text of a mask such as "(k <= q) & (q - k < 4)", as a sympy Boolean.

    Raises:
        SpError: If the text is not a predicate or uses an unknown symbol.
    """
    if not text:
        return sympy.true
    try:
        expr = _read_node(ast.parse(text.strip(), mode="eval").body)
    except _PARSE_ERRORS as error:
        raise _syntax_error(text, getattr(error, "msg", error)) from error  # msg: without "(<unknown>, line 1)"
    if any(_is_condition(side) for relation in expr.atoms(Relational) for side in relation.args):
        raise _syntax_error(text, "expected comparisons of numbers, got a comparison of conditions")
    if not _is_condition(expr):
        raise _syntax_error(text, "expected a condition, got a number")
    return expr


def _syntax_error(text: str, cause: object) -> SpError:
    """Return the error of a predicate that cannot be parsed."""
    return SpError("SP441", f"mask predicate: cannot parse {text[:SHOWN_CHARACTERS]!r}: {cause}.")


def _is_condition(expr: Any) -> bool:
    """Return True for a comparison or a Boolean of comparisons; a symbol is a number, although sympy permits both."""
    return isinstance(expr, sympy.logic.boolalg.Boolean) and not expr.is_Symbol


@lru_cache(maxsize=1024)
def split_conjuncts(text: str) -> tuple[str, ...]:
    """Return the conditions that must all hold (the operands of "and"), as sorted predicates; none for ""."""
    conditions = sympy.And.make_args(parse_predicate(text))
    return tuple(sorted(str(condition) for condition in conditions if condition != sympy.true))


@lru_cache(maxsize=1024)
def predicate_symbols(text: str) -> frozenset[str]:
    """Return the names of the symbols that the predicate reads."""
    return frozenset(str(symbol) for symbol in parse_predicate(text).free_symbols)


def _vector_kinds(text: str) -> set[str]:
    """Return "row" if the predicate reads a vector per query, and "col" if it reads one per key."""
    return {name[:3] for name in predicate_symbols(text) if name.startswith(("row", "col"))}


@lru_cache(maxsize=1024)
def position_conditions(text: str) -> str:
    """Return the conditions that read no vector, as one predicate, for a mask whose vectors are fake tensors."""
    return " & ".join(f"({condition})" for condition in split_conjuncts(text) if not _vector_kinds(condition))


@lru_cache(maxsize=1024)
def is_within_documents(text: str) -> bool:
    """Return True if a vector's value at the query must equal one at the key, as for document numbers."""
    equations = [part for part in split_conjuncts(text) if isinstance(parse_predicate(part), sympy.Eq)]
    return any(len(_vector_kinds(equation)) == 2 for equation in equations)


def check_known(text: str, known: Collection[str]) -> None:
    """Raise SpError if the predicate reads a symbol that is not in ``known``, the symbols that have a value."""
    missing = sorted(predicate_symbols(text) - set(known))
    if missing:
        names = ", ".join(missing)
        raise SpError("SP443", f"mask predicate {text!r}: expected a value for each symbol, got none for {names}.")


# Linear conditions.

_MAX_FACTOR_SUM, _MAX_CONSTANT = 16, 1 << 58  # limits of a linear condition, so that int64 sums do not overflow


class Linear(NamedTuple):
    """A linear condition: query terms + key terms + constant is <= 0, == 0 or != 0."""

    relation: str  # "<=", "==" or "!="
    of_query: tuple[tuple[str, int], ...]  # query terms (symbol, coefficient)
    of_key: tuple[tuple[str, int], ...]  # key terms (symbol, coefficient)
    constant: int  # includes the sizes n<i>


@lru_cache(maxsize=1024)
def as_linear(text: str, sizes: tuple[int, ...]) -> Linear | None:
    """Return the predicate as one linear condition on the symbols of a query and a key; None if it is not linear.

    Sizes n<i> become part of the constant.

    >>> as_linear("(k - q)/2 < n0", (3,))
    Linear(relation='<=', of_query=(('q', -1),), of_key=(('k', 1),), constant=-5)
    """
    expr = parse_predicate(text)
    if isinstance(expr, sympy.Eq | sympy.Ne):
        relation, difference = expr.rel_op, expr.lhs - expr.rhs
    elif isinstance(expr, Relational):
        relation, difference = "<=", expr.lts - expr.gts  # the smaller side minus the greater one
    else:
        return None
    size_values = {sympy.Symbol(f"n{i}", integer=True): size for i, size in enumerate(sizes)}
    terms = sympy.expand(difference.subs(size_values)).as_coefficients_dict()
    scale = sympy.ilcm(1, *(factor.q for factor in terms.values()))  # the common denominator of all factors
    is_strict = isinstance(expr, sympy.StrictLessThan | sympy.StrictGreaterThan)
    constant = int(terms.pop(sympy.S.One, 0) * scale) + is_strict  # of integers, x < 0 is x + 1 <= 0
    factors = sorted((str(term), int(factor * scale)) for term, factor in terms.items() if term.is_Symbol)
    if len(factors) < len(terms):  # a term is not linear
        return None
    if sum(abs(factor) for _, factor in factors) > _MAX_FACTOR_SUM or abs(constant) > _MAX_CONSTANT:
        return None
    query_terms = tuple(term for term in factors if is_query_symbol(term[0]))
    key_terms = tuple(term for term in factors if not is_query_symbol(term[0]))
    return Linear(relation, query_terms, key_terms, constant)


@lru_cache(maxsize=1024)
def is_distance_only(text: str, sizes: tuple[int, ...]) -> bool:
    """Return True if all conditions of a predicate depend only on the distance k - q, as those of windows do."""
    return all(_is_distance(as_linear(condition, sizes)) for condition in split_conjuncts(text))


def _is_distance(linear: Linear | None) -> bool:
    """Return True if a linear condition depends only on the distance k - q; False for None, which is not linear."""
    if linear is None or [name for name, _ in linear.of_query + linear.of_key] != ["q", "k"]:
        return False
    ((_, query_factor),), ((_, key_factor),) = linear.of_query, linear.of_key
    return query_factor == -key_factor


def evaluate_over(text: str, box: Mapping[str, Bounds]) -> Verdict:
    """Return True if the predicate holds for all values of its symbols within bounds, False if for none, else None.

    None means that it may hold for some of them. Planners skip a block of queries x keys by a False. The result is
    exact for a condition in which every symbol occurs once, such as a linear one, and for a conjunction of bounds on
    q - k; otherwise it may be None instead of True or False.

    Args:
        text: The predicate.
        box: The inclusive bounds of every symbol of the predicate. From `FAR_VALUE` on they mean that a value has no
            bound (`pieces.py`).
    """
    known = {
        name: (low if low > -FAR_VALUE else -_FAR_BOUND, high if high < FAR_VALUE else _FAR_BOUND)
        for name, (low, high) in box.items()
    }
    return _compile_predicate(text, for_tensors=False)(known)


def evaluate_mask(text: str, values: Mapping[str, Tensor | int]) -> Tensor | bool:
    """Return the mask of the pairs of one block.

    Args:
        text: The predicate.
        values: The values of its symbols, which broadcast.

    Returns:
        A bool tensor of the broadcast shape, or a bool if the predicate reads no tensor.
    """
    return _compile_predicate(text, for_tensors=True)(values)


def check_operations(text: str) -> None:
    """Raise an SpError if a predicate has an operation that cannot be evaluated, such as a power."""
    _compile_predicate(text, for_tensors=True)


@lru_cache(maxsize=1024)
def _compile_predicate(text: str, for_tensors: bool) -> Evaluator:
    """Return a function that evaluates a predicate: for tensors of its symbols, or else for their bounds."""
    return _compile_condition(parse_predicate(text), TENSORS if for_tensors else INTERVALS)
