"""Evaluate and differentiate score functions, which modify scaled scores before the softmax.

    30.0*tanh(s/30.0)             the soft-cap of Gemma 2
    s + head0*(k - q)             ALiBi: head0 is a slope per query head

A text is the ``str`` of a sympy expression over ``s``, the score; ``q`` and ``k``, the indices of the query and the
key; ``head0, head1, ...``, a vector's value at the query head; ``row<i>`` and ``col<i>``, a vector's value at the query
and at the key. ``""`` does not change scores. Functions without such an expression are programs (`score_program.py`),
which the functions here accept as well.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from typing import Any

import sympy
import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError

from . import score_program as program
from .mask_text import ARITHMETIC_NODES, SHOWN_CHARACTERS, Language, read_text

SCORE_NAME = sympy.Symbol("s", real=True)
"""Symbol of the score."""
_SCORE_SYMBOL = re.compile(r"s|q|k|(head|row|col)\d+")
_SCORE_FUNCTIONS: dict[str, tuple[type, Callable[[Any], Tensor]]] = {
    "tanh": (sympy.tanh, torch.tanh),
    "exp": (sympy.exp, torch.exp),
    "Abs": (sympy.Abs, torch.abs),
    "sign": (sympy.sign, torch.sign),
}
FUNCTIONS: dict[str, type] = {name: function for name, (function, _) in _SCORE_FUNCTIONS.items()}
"""Functions that a text may call."""


def score_symbol(name: str) -> sympy.Symbol:
    """Return the real symbol of a name.

    Raises:
        ValueError: If no text may use the name.
    """
    if not _SCORE_SYMBOL.fullmatch(name):
        raise ValueError(f"unknown symbol {name}; known are s, q, k, head<i>, row<i> and col<i>")
    return sympy.Symbol(name, real=True)


def _score_constant(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return sympy.sympify(value)


_SCORE_LANGUAGE = Language(score_symbol, _score_constant, ARITHMETIC_NODES, FUNCTIONS)


@lru_cache(maxsize=1024)
def parse_score(text: str) -> Any:
    """Parse a text to a sympy expression without executing it.

    Raises:
        SpError: If the text is malformed.
    """
    try:
        return read_text(text, _SCORE_LANGUAGE)
    except ValueError as error:
        raise SpError("SP444", f"score text: {text[:SHOWN_CHARACTERS]!r} is malformed: {error}.") from error


@lru_cache(maxsize=1024)
def score_symbols(text: str) -> frozenset[str]:
    """Return the names of the symbols that a text reads, except the score."""
    if program.is_program(text):
        return program.program_names(text)
    return frozenset(str(one) for one in parse_score(text).free_symbols - {SCORE_NAME}) if text else frozenset()


def num_saved_tensors(text: str) -> int:
    """Return the factor by which a text multiplies the score tensors that a backward saves."""
    return max(1, len(program.parse_program(text)) // 4) if program.is_program(text) else 1


def rename_score(text: str, names: Mapping[str, str]) -> str:
    """Rename the symbols of a text."""
    if program.is_program(text):
        return program.rename_program(text, names)
    return (
        str(parse_score(text).xreplace({score_symbol(old): score_symbol(new) for old, new in names.items()}))
        if text
        else ""
    )


def evaluate_score(
    text: str,
    score: Tensor,
    values: Mapping[str, Tensor],
    functions: Mapping[str, Callable[[Tensor], Tensor]] = {},
    lookup: program.TableLookup = torch.ops.aten.index.Tensor,
) -> Tensor:
    """Evaluate a score function.

    Args:
        text: The score function.
        score: The scaled scores, any floating dtype.
        values: Values of the other symbols, which broadcast to the scores.
        functions: Replacements of torch's implementations of `FUNCTIONS`.
        lookup: A replacement of the table lookup.

    Returns:
        The modified scores.
    """
    if program.is_program(text):
        return program.run_program(text, score, values, lookup)
    return _evaluate_expr(parse_score(text), {**values, "s": score}, score, functions)


def score_vjp(
    text: str, score: Tensor, values: Mapping[str, Tensor], grad: Tensor, totals: Mapping[str, Tensor]
) -> Tensor:
    """Return the gradient of the scaled scores, and add the gradients of tables to ``totals``.

    Args:
        text: The score function.
        score: The scaled scores, any floating dtype.
        values: Values of the other symbols.
        grad: The gradient of the modified scores.
        totals: Tensors to which the gradients of tables are added, by name.
    """
    if program.is_program(text):
        return program.program_vjp(text, score, values, grad, totals)
    return grad * score_slope(text, score, values)


def score_slope(text: str, score: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Return the derivative of the modified scores by the scaled ones, which broadcasts to the scores.

    Args:
        text: The score function, an expression.
        score: The scaled scores, any floating dtype.
        values: Values of the other symbols.
    """
    return _evaluate_expr(_derivative(text), {**values, "s": score}, score)


@lru_cache(maxsize=1024)
def _derivative(text: str) -> Any:
    """Return the derivative as an expression; raise SpError if it cannot be computed."""
    found = parse_score(text).diff(SCORE_NAME)
    known = (sympy.Add, sympy.Mul, sympy.Pow, *FUNCTIONS.values())
    strange = [one for one in sympy.preorder_traversal(found) if one.args and not isinstance(one, known)]
    if strange:
        raise SpError("SP445", f"score text: the derivative of {text!r} has {strange[0]}, which cannot be computed.")
    return found


def check_score(text: str) -> None:
    """Raise SpError if a text is malformed or has no derivative."""
    if not program.is_program(text):
        _derivative(text)
        return
    try:
        program.parse_program(text)
    except ValueError as error:
        raise SpError("SP444", f"score text: {error}.") from error


def _evaluate_expr(
    expr: Any, values: Mapping[str, Tensor], like: Tensor, functions: Mapping[str, Callable[[Tensor], Tensor]] = {}
) -> Tensor:
    if expr.is_Symbol:
        found = values[str(expr)]
        return found.to(like.dtype) if found.is_floating_point() else found
    if expr.is_number:
        return torch.full((), float(expr), dtype=like.dtype, device=like.device)
    if isinstance(expr, sympy.Add | sympy.Mul):
        join = operator.add if isinstance(expr, sympy.Add) else operator.mul
        return reduce(join, [_evaluate_expr(arg, values, like, functions) for arg in expr.args])
    if isinstance(expr, sympy.Pow) and expr.exp.is_number:
        return _evaluate_expr(expr.base, values, like, functions) ** float(expr.exp)
    name = next((name for name, (kind, _) in _SCORE_FUNCTIONS.items() if isinstance(expr, kind)), None)
    if name is None:
        raise SpError("SP446", f"score text: {type(expr).__name__} is not supported: {expr}.")
    function = functions.get(name, _SCORE_FUNCTIONS[name][1])
    return function(_evaluate_expr(expr.args[0], values, like, functions))
