"""The language of masks: which query attends to which key, as text that is never a tensor of S x S.

A predicate is the ``str`` of a sympy Boolean over integer symbols: ``q`` and ``k``, the indices of the query
and the key; ``row0, row1, ...``, a vector's value at this query; ``col0, col1, ...``, a vector's value at
this key; ``n0, n1, ...``, sizes. True: may attend. ``""`` forbids nothing. Bool vectors count as 0 and 1.

>>> over("(k <= q) & (q - k < 4)", {"q": (8, 11), "k": (0, 3)})  # inclusive bounds: no pair
False
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import sympy
from torch import Tensor

from .algebra import INTERVALS, TENSORS, Bounds, Meaning, Verdict, condition
from .errors import SpError

_SYMBOL = re.compile(r"q|k|(row|col|n)\d+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_STRICT = (sympy.StrictLessThan, sympy.StrictGreaterThan)
_WEAK = (sympy.LessThan, sympy.GreaterThan)
_FUNCTIONS = {"PythonMod": sympy.Mod, "FloorDiv": lambda a, b: sympy.floor(a / b)}


@lru_cache(maxsize=1024)
def parse(text: str) -> Any:
    """The sympy Boolean of ``text``. SpError when it is not a predicate or names an unknown symbol."""
    names = {
        name: sympy.Symbol(name, integer=True) for name in _NAME.findall(text) if _SYMBOL.fullmatch(name)
    }
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
    if not isinstance(expr, _STRICT + _WEAK):
        return None
    least = expr.gts - expr.lts - (1 if isinstance(expr, _STRICT) else 0)
    q, k = sympy.symbols("q k", integer=True)
    known = {sympy.Symbol(f"n{i}", integer=True): size for i, size in enumerate(sizes)}
    rest = sympy.expand((least - q + k).subs(known))
    return int(rest) if rest.is_Integer else None


def always_attends(text: str, same: Collection[tuple[int, int]] = ()) -> bool:
    """Whether every query provably may attend to the key of its own index (which must exist).

    ``same`` holds the pairs (i, j) for which row<i> and col<j> are one and the same vector.
    """
    names = {f"col{j}": f"row{i}" for i, j in same} | {"k": "q"}
    swaps = {sympy.Symbol(a, integer=True): sympy.Symbol(b, integer=True) for a, b in names.items()}
    return parse(text).subs(swaps, simultaneous=True) == sympy.true


def over(text: str, box: Mapping[str, Bounds]) -> Verdict:
    """Three-valued: True when all pairs of the box may attend, False when none may, None when unsure.

    ``box`` gives every symbol of the predicate its inclusive bounds. Exact for a condition in which every symbol
    stands once, as linear ones, and for a conjunction of bounds on q - k; elsewhere None may stand for either.
    """
    return _verdict(text)(box)


def evaluate(text: str, values: Mapping[str, Tensor | int]) -> Tensor | bool:
    """The mask of one block: bool, of the shape to which the values broadcast; a bool if it reads no tensor."""
    return _mask(text)(values)


@lru_cache(maxsize=1024)
def _verdict(text: str) -> Meaning:
    return condition(parse(text), INTERVALS)


@lru_cache(maxsize=1024)
def _mask(text: str) -> Meaning:
    return condition(parse(text), TENSORS)
