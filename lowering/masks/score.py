"""What becomes of a scaled score before the softmax, as text: soft-caps, and biases that positions and heads give.

    30.0*tanh(s/30.0)             the scores of Gemma 2
    s + head0*(k - q)             ALiBi: head0 has a slope for each query head

A text is the ``str`` of a sympy expression over ``s``, the score; ``q`` and ``k``, the indices of the query and the
key; ``head0, head1, ...``, a vector's value at the query head; ``row<i>`` and ``col<i>``, a vector's value at the query
and at the key. ``""`` leaves scores as they are. What no expression says is a program (`score_program.py`), which the
functions here take as well.
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
_SCORE_SYMBOL = re.compile(r"s|q|k|(head|row|col)\d+")
_SCORE_FUNCTIONS: dict[str, tuple[type, Callable[[Any], Tensor]]] = {
    "tanh": (sympy.tanh, torch.tanh),
    "exp": (sympy.exp, torch.exp),
    "Abs": (sympy.Abs, torch.abs),
    "sign": (sympy.sign, torch.sign),
}
FUNCTIONS: dict[str, type] = {name: function for name, (function, _) in _SCORE_FUNCTIONS.items()}
"""What a text may call."""


def score_symbol(name: str) -> sympy.Symbol:
    """The symbol of a name; all are real. Raises ValueError for one that no text has."""
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
    """The sympy expression of ``text``. SpError when it is none; nothing of it is ever executed."""
    try:
        return read_text(text, _SCORE_LANGUAGE)
    except ValueError as error:
        raise SpError("SP444", f"score text: {text[:SHOWN_CHARACTERS]!r} is malformed: {error}.") from error


@lru_cache(maxsize=1024)
def score_symbols(text: str) -> frozenset[str]:
    """The symbols that a text reads, but for the score itself."""
    if program.is_program(text):
        return program.program_names(text)
    return frozenset(str(one) for one in parse_score(text).free_symbols - {SCORE_NAME}) if text else frozenset()


def num_saved_tensors(text: str) -> int:
    """How many times the tensors of scores that a kernel keeps by itself a backward keeps of the text's."""
    return max(1, len(program.parse_program(text)) // 4) if program.is_program(text) else 1


def rename_score(text: str, names: Mapping[str, str]) -> str:
    """The text with other symbols."""
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
    """The scores that the softmax reads, of the scaled ones; ``values`` broadcast to them.

    functions: what computes one of `FUNCTIONS` in the place of torch's. lookup: what reads a table.
    """
    if program.is_program(text):
        return program.run_program(text, score, values, lookup)
    return _evaluate_expr(parse_score(text), {**values, "s": score}, score, functions)


def score_vjp(
    text: str, score: Tensor, values: Mapping[str, Tensor], grad: Tensor, totals: Mapping[str, Tensor]
) -> Tensor:
    """The gradient of the scaled scores, given that of what the softmax reads. Those of tables are added to totals."""
    if program.is_program(text):
        return program.program_vjp(text, score, values, grad, totals)
    return grad * score_slope(text, score, values)


def score_slope(text: str, score: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """How much these change with the scaled ones: the derivative, which broadcasts to the scores."""
    return _evaluate_expr(_derivative(text), {**values, "s": score}, score)


@lru_cache(maxsize=1024)
def _derivative(text: str) -> Any:
    """SpError for what has none that can be computed."""
    found = parse_score(text).diff(SCORE_NAME)
    known = (sympy.Add, sympy.Mul, sympy.Pow, *FUNCTIONS.values())
    strange = [one for one in sympy.preorder_traversal(found) if one.args and not isinstance(one, known)]
    if strange:
        raise SpError("SP445", f"score text: the derivative of {text!r} has {strange[0]}, which cannot be computed.")
    return found


def check_score(text: str) -> None:
    """SpError for a text that is none, or that has no derivative."""
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
