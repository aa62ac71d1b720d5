"""The language of masks: which query attends to which key, as text that is never a tensor of S x S.

A predicate is the ``str`` of a sympy Boolean over integer symbols: ``q`` and ``k``, the indices of the query
and the key; ``row0, row1, ...``, a vector's value at this query; ``col0, col1, ...``, a vector's value at
this key; ``n0, n1, ...``, sizes. True: may attend. ``""`` forbids nothing. Bool vectors count as 0 and 1.

>>> over("(k <= q) & (q - k < 4)", {"q": (8, 11), "k": (0, 3)})  # inclusive bounds: no pair
False
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, reduce
from typing import Any

import sympy
import torch
from torch import Tensor

from .errors import SpError

Bounds = tuple[Any, Any]
"""The least and the greatest value, both inclusive."""
Box = Mapping[str, Bounds]
Verdict = bool | None
Values = Mapping[str, Tensor | int]

_SYMBOL = re.compile(r"q|k|(row|col|n)\d+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = {"PythonMod": sympy.Mod, "FloorDiv": lambda a, b: sympy.floor(a / b)}


@lru_cache(maxsize=1024)
def parse(text: str) -> Any:
    """The sympy Boolean of ``text``. SpError when it is not a predicate or names an unknown symbol."""
    names = {name: sympy.Symbol(name, integer=True) for name in _NAME.findall(text) if _SYMBOL.fullmatch(name)}
    try:
        expr = sympy.sympify(text, locals={**_FUNCTIONS, **names}) if text else sympy.true
        boolean = isinstance(expr, sympy.logic.boolalg.Boolean) and not expr.is_Symbol
    except (sympy.SympifyError, SyntaxError, TypeError, AttributeError) as error:
        raise SpError(f"not a mask predicate: {text!r} ({error})") from error
    unknown = sorted(str(s) for s in expr.free_symbols if not _SYMBOL.fullmatch(str(s))) if boolean else []
    if not boolean or unknown:
        why = f"unknown symbols {', '.join(unknown)}" if unknown else "it is not a condition"
        raise SpError(f"not a mask predicate: {text!r}: {why}; known are q, k, row<i>, col<i> and n<i>")
    return expr


@lru_cache(maxsize=1024)
def conjuncts(text: str) -> tuple[str, ...]:
    """The conditions that must all hold, as predicates."""
    expr = parse(text)
    parts = expr.args if isinstance(expr, sympy.And) else (expr,)
    return tuple(sorted(str(part) for part in parts if part != sympy.true))


@lru_cache(maxsize=1024)
def symbols(text: str) -> frozenset[str]:
    """The names of the symbols that the predicate reads."""
    return frozenset(str(symbol) for symbol in parse(text).free_symbols)


def check_known(text: str, known: Collection[str]) -> None:
    """SpError when the predicate reads a symbol that has no value."""
    if missing := sorted(symbols(text) - set(known)):
        raise SpError(f"mask predicate {text!r}: no vector or size is given for {', '.join(missing)}")


def is_causal(text: str) -> bool:
    """Whether the predicate is exactly ``k <= q``."""
    return causal_shift(text, ()) == 0


@lru_cache(maxsize=1024)
def causal_shift(text: str, sizes: tuple[int, ...]) -> int | None:
    """The c of a predicate that says ``k <= q + c``; None for every other one."""
    expr = parse(text)
    if not isinstance(expr, sympy.LessThan | sympy.StrictLessThan | sympy.GreaterThan | sympy.StrictGreaterThan):
        return None
    less = expr.gts - expr.lts - (1 if isinstance(expr, sympy.StrictLessThan | sympy.StrictGreaterThan) else 0)
    q, k = sympy.symbols("q k", integer=True)
    known = {sympy.Symbol(f"n{i}", integer=True): size for i, size in enumerate(sizes)}
    rest = sympy.expand((less - q + k).subs(known))
    return int(rest) if rest.is_Integer else None


def always_attends(text: str, same: Collection[tuple[int, int]] = ()) -> bool:
    """Whether every query provably may attend to the key of its own index (which must exist).

    ``same`` holds the pairs (i, j) for which row<i> and col<j> are one and the same vector.
    """
    names = {f"col{j}": f"row{i}" for i, j in same} | {"k": "q"}
    swaps = {sympy.Symbol(a, integer=True): sympy.Symbol(b, integer=True) for a, b in names.items()}
    return parse(text).subs(swaps, simultaneous=True) == sympy.true


def over(text: str, box: Box) -> Verdict:
    """Three-valued: True when all pairs of the box may attend, False when none may, None when unsure.

    ``box`` gives every symbol of the predicate its inclusive bounds. Exact for a linear condition; a
    conjunction of conditions on q - k is exact too; elsewhere None may stand for True or False.
    """
    return _verdict(text)(box)


def evaluate(text: str, values: Values) -> Tensor | bool:
    """The mask of one block: bool, of the shape to which the values broadcast; a bool if it reads none."""
    return _mask(text)(values)


# Verdicts: interval arithmetic, compiled to closures once.


@lru_cache(maxsize=1024)
def _verdict(text: str) -> Callable[[Box], Verdict]:
    return _decide(parse(text))


def _decide(expr: Any) -> Callable[[Box], Verdict]:
    if expr in (sympy.true, sympy.false):
        constant = bool(expr)
        return lambda box: constant
    if isinstance(expr, sympy.And | sympy.Or):
        return _decide_all([_decide(arg) for arg in expr.args], isinstance(expr, sympy.Or))
    if isinstance(expr, sympy.Not):
        inner = _decide(expr.args[0])
        return lambda box: None if (known := inner(box)) is None else not known
    if isinstance(expr, sympy.core.relational.Relational):
        return _decide_relation(type(expr), _bounds(sympy.expand(expr.lhs - expr.rhs)))
    raise SpError(f"a mask predicate can not use {type(expr).__name__}: {expr}")


def _decide_all(parts: list[Callable[[Box], Verdict]], dominant: bool) -> Callable[[Box], Verdict]:
    """And (a False decides) or Or (a True decides)."""

    def decide(box: Box) -> Verdict:
        result: Verdict = not dominant
        for part in parts:
            known = part(box)
            if known is dominant:
                return dominant
            if known is None:
                result = None
        return result

    return decide


def _no_zero(low: Any, high: Any) -> Verdict:
    return True if low > 0 or high < 0 else False if low == high == 0 else None


def _not(verdict: Verdict) -> Verdict:
    return None if verdict is None else not verdict


_SIGN: dict[type, Callable[[Any, Any], Verdict]] = {
    sympy.StrictLessThan: lambda low, high: True if high < 0 else False if low >= 0 else None,
    sympy.LessThan: lambda low, high: True if high <= 0 else False if low > 0 else None,
    sympy.StrictGreaterThan: lambda low, high: True if low > 0 else False if high <= 0 else None,
    sympy.GreaterThan: lambda low, high: True if low >= 0 else False if high < 0 else None,
    sympy.Ne: _no_zero,
    sympy.Eq: lambda low, high: _not(_no_zero(low, high)),
}


def _decide_relation(kind: type, difference: Callable[[Box], Bounds]) -> Callable[[Box], Verdict]:
    sign = _SIGN[kind]
    return lambda box: sign(*difference(box))


def _bounds(expr: Any) -> Callable[[Box], Bounds]:
    if expr.is_Symbol:
        return operator.itemgetter(str(expr))
    if expr.is_Rational:
        value = int(expr) if expr.is_Integer else expr
        return lambda box: (value, value)
    rule = next((rule for kind, rule in _INTERVALS.items() if isinstance(expr, kind)), None)
    if rule is None:
        raise SpError(f"a mask predicate can not use {type(expr).__name__}: {expr}")
    parts = [_bounds(arg) for arg in expr.args]
    return lambda box: reduce(rule, [part(box) for part in parts[1:]], parts[0](box)) if len(
        parts
    ) > 1 else rule(parts[0](box), (0, 0))


def _product(a: Bounds, b: Bounds) -> Bounds:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    low, high = b
    if low != high or low <= 0:
        bound = max(abs(low), abs(high))
        return -bound, bound
    return (a[0] % low, a[1] % low) if a[0] // low == a[1] // low else (0, low - 1)


def _magnitude(a: Bounds, _: Bounds) -> Bounds:
    return max(a[0], -a[1], 0), max(-a[0], a[1])


_INTERVALS: dict[type, Callable[[Bounds, Bounds], Bounds]] = {
    sympy.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    sympy.Mul: _product,
    sympy.Min: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    sympy.Max: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    sympy.Mod: _remainder,
    sympy.Abs: _magnitude,
    sympy.floor: lambda a, _: (int(a[0] // 1), int(a[1] // 1)),
}


# Masks: the same expressions over tensors. Conditions compare a column with a row, so that the one
# operation of the block's size is the comparison.


@lru_cache(maxsize=1024)
def _mask(text: str) -> Callable[[Values], Any]:
    return _condition(parse(text))


_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    sympy.StrictLessThan: operator.lt,
    sympy.LessThan: operator.le,
    sympy.StrictGreaterThan: operator.gt,
    sympy.GreaterThan: operator.ge,
    sympy.Ne: operator.ne,
    sympy.Eq: operator.eq,
}


def _condition(expr: Any) -> Callable[[Values], Any]:
    if expr in (sympy.true, sympy.false):
        constant = bool(expr)
        return lambda values: constant
    if isinstance(expr, sympy.And | sympy.Or):
        join = operator.and_ if isinstance(expr, sympy.And) else operator.or_
        parts = [_condition(arg) for arg in expr.args]
        return lambda values: reduce(join, [part(values) for part in parts])
    if isinstance(expr, sympy.Not):
        inner = _condition(expr.args[0])
        return lambda values: ~inner(values)
    if not isinstance(expr, sympy.core.relational.Relational):
        raise SpError(f"a mask predicate can not use {type(expr).__name__}: {expr}")
    left, right = _sides(expr)
    compare = _COMPARE[type(expr)]
    return lambda values: compare(left(values), right(values))


def _sides(expr: Any) -> tuple[Callable[[Values], Any], Callable[[Values], Any]]:
    """The terms of the query on the left, all others on the right, without fractions."""
    difference = sympy.expand(expr.lhs - expr.rhs)
    denominator = sympy.ilcm(1, *(term.as_coeff_Mul()[0].q for term in sympy.Add.make_args(difference)))
    terms = [term * denominator for term in sympy.Add.make_args(difference)]
    of_query = [term for term in terms if any(_of_query(str(s)) for s in term.free_symbols)]
    rest = [-term for term in terms if term not in of_query]
    return _value(sympy.Add(*of_query)), _value(sympy.Add(*rest))


def _of_query(name: str) -> bool:
    return name == "q" or name.startswith("row")


def _value(expr: Any) -> Callable[[Values], Any]:
    if expr.is_Symbol:
        return operator.itemgetter(str(expr))
    if expr.is_Integer:
        constant = int(expr)
        return lambda values: constant
    if isinstance(expr, sympy.floor):
        above, below = (_value(part) for part in sympy.together(expr.args[0]).as_numer_denom())
        return lambda values: above(values) // below(values)
    parts = [_value(arg) for arg in expr.args]
    rule = next((rule for kind, rule in _ARITHMETIC.items() if isinstance(expr, kind)), None)
    if rule is None:
        raise SpError(f"a mask predicate can not use {type(expr).__name__}: {expr}")
    return lambda values: reduce(rule, [part(values) for part in parts]) if len(parts) > 1 else rule(
        parts[0](values), 0
    )


def _pick(choose: Callable[[Tensor, Tensor], Tensor], number: Callable[[int, int], int]) -> Callable[..., Any]:
    def pick(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return number(a, b)
        return choose(torch.as_tensor(a), torch.as_tensor(b))

    return pick


_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Mod: operator.mod,
    sympy.Min: _pick(torch.minimum, min),
    sympy.Max: _pick(torch.maximum, max),
    sympy.Abs: lambda a, _: abs(a),
}
