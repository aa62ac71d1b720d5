"""Parse text to sympy expressions by a table of allowed nodes.

The text may come from a file, so it is never executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SHOWN_CHARACTERS = 1000  # characters of a text, in an error message


def bounded_power(base: Any, exponent: Any) -> Any:
    """Return base**exponent if numbers are small; large ones could fill the memory.

    Raises:
        ValueError: If the base or the exponent is too large.
    """
    if base.is_Rational and exponent.is_Rational and (abs(exponent) > 64 or max(abs(base.p), base.q) >= 1 << 64):
        raise ValueError("unsupported power")
    return base**exponent


ARITHMETIC_NODES: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: bounded_power,
    ast.USub: operator.neg,
}
"""Arithmetic operations, by AST class."""


@dataclass(frozen=True)
class Language:
    """Symbols, constants, operations and functions that a text may use."""

    symbol: Callable[[str], Any]
    """Return the symbol of a name; raise ValueError for unknown names."""
    number: Callable[[Any], Any]
    """Return the value of a constant; raise ValueError for unsupported ones."""
    operations: Mapping[type[ast.AST], Callable[..., Any]]
    """Operations, by AST class of the operator."""
    functions: Mapping[str, Callable[..., Any]]
    """Functions, by name."""


def read_text(text: str, language: Language) -> Any:
    """Parse a text to a sympy expression.

    Raises:
        ValueError: If the text is not in the language.
    """
    try:
        return _read_node(ast.parse(text.strip(), mode="eval").body, language)
    except (SyntaxError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _read_node(node: ast.AST, language: Language) -> Any:
    match node:
        case ast.Constant(value=value):
            return language.number(value)
        case ast.Name(id=name):
            return language.symbol(name)
        case ast.UnaryOp(op=op, operand=one) if type(op) in language.operations:
            return language.operations[type(op)](_read_node(one, language))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in language.operations
        ):
            return language.operations[type(op)](_read_node(left, language), _read_node(right, language))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in language.functions:
            return language.functions[name](*[_read_node(one, language) for one in args])
    raise ValueError(f"no {type(node).__name__} is supported")
