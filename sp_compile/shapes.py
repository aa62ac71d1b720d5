"""Exact arithmetic on sizes: Python ints where a size is known, sympy expressions where it is symbolic.

Sizes are compared as expressions, never as SymInts: comparing SymInts would add guards to the user's program.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from ._compat import FloorDiv

Size: TypeAlias = int | sympy.Expr


def size(value: Any) -> Size:
    """The size that a graph argument stands for: an int, a SymInt, a sympy expression or the Node of one."""
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Expr):
        return int(value) if value.is_Integer else value
    return int(value)


def sizes(values: Iterable[Any]) -> tuple[Size, ...]:
    """`size` of each, such as a tensor's shape or strides."""
    return tuple(size(v) for v in values)


def product(values: Iterable[Size]) -> Size:
    """The product of the sizes; 1 if there are none."""
    out: Size = 1
    for v in values:
        out = out * v
    return out


def same(a: Size, b: Size) -> bool:
    """Are the sizes equal whatever the symbols are?"""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a == b or sympy.expand(a - b) == 0


def quotient(a: Size, b: Size) -> Size | None:
    """a / b where that is provably an integer, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return _symbolic_quotient(sympy.sympify(a), sympy.sympify(b))


@lru_cache(maxsize=4096)
def _symbolic_quotient(a: sympy.Expr, b: sympy.Expr) -> Size | None:
    if a == b:
        return 1
    if b == 1:
        return size(a)
    q = a / b
    if q.as_numer_denom()[1] != 1:
        if not (a.has(sympy.Add) or b.has(sympy.Add)):
            return None
        q = sympy.cancel(q)
    numerator, denominator = q.as_numer_denom()
    integral = all(c.is_Integer for c in sympy.expand(numerator).as_coefficients_dict().values())
    return size(q) if denominator == 1 and integral else None


def ceil_div(a: Size, n: int) -> Size:
    """ceil(a / n): the local length of an axis of `a` positions over `n` ranks."""
    if isinstance(a, int):
        return -(-a // n)
    exact = quotient(a, n)
    return exact if exact is not None else FloorDiv(a + (n - 1), sympy.Integer(n))


def divides(n: int, a: Size) -> bool:
    """Does n provably divide a?"""
    return quotient(a, n) is not None


def mostly(part: Size, whole: Size) -> bool:
    """Is part at least half of whole for long sequences? Decides cost, never correctness."""
    return 2 * typical(part) >= typical(whole)


def typical(a: Size) -> int:
    """The size for long sequences (every symbol is 2**20): to weigh costs, never to prove anything."""
    if isinstance(a, int):
        return a
    return int(a.subs({s: 1 << 20 for s in a.free_symbols}))
