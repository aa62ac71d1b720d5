"""Prove integer relations between indices, over 0 <= q < Q, 0 <= k < K, ... for every size.

Sizes may be symbols (at least 1). A relation without a proof is kept in one normal form, `k <= q` or `-k + q < 4`, so
that equal predicates have equal text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import sympy
from sympy import And, Eq, Ge, Le, Lt, Ne, Not, Or
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from sp_compile.passes.graph.sizes import Size

BATCH_INDEX, HEAD_INDEX, QUERY_INDEX, KEY_INDEX = INDICES = sympy.symbols("b h q k", integer=True, is_nonnegative=True)
Boolean: TypeAlias = sympy.logic.boolalg.Boolean


class IndexBox:
    """Extents of the indices: each index is at least 0 and less than its size."""

    def __init__(self, sizes: Mapping[sympy.Symbol, Size]) -> None:
        self.last = {index: sympy.sympify(size) - 1 for index, size in sizes.items()}

    def is_nonnegative(self, e: sympy.Expr) -> bool:
        """Return True if e >= 0 provably for all indices and sizes."""
        least = sympy.Integer(0)
        for term, factor in sympy.expand(e).as_coefficients_dict().items():
            if term in self.last:
                least += factor * self.last[term] if factor < 0 else 0
            elif term.has(*self.last, AppliedUndef):
                return False
            else:
                least += factor * term
        return _is_nonnegative_size(least)

    def is_within(self, e: sympy.Expr, extent: Size) -> bool:
        """Return True if 0 <= e < extent provably for all indices and sizes."""
        return self.is_nonnegative(e) and self.is_nonnegative(extent - 1 - e)

    def at_least_zero(self, e: sympy.Expr) -> Boolean:
        """Return e >= 0 as true, false, or a relation."""
        e = sympy.expand(e)
        if self.is_nonnegative(e):
            return sympy.true
        return sympy.false if self.is_nonnegative(-e - 1) else _normalize_inequality(e)

    def equals_zero(self, e: sympy.Expr) -> Boolean:
        """Return e == 0 as true, false, or an equation."""
        e = sympy.expand(e)
        if e == 0 or self.is_nonnegative(e - 1) or self.is_nonnegative(-e - 1):
            return sympy.true if e == 0 else sympy.false
        more, less, rest = _split_terms(e)
        return Eq(less - rest, more) if less != 0 else Eq(more, -rest)

    def simplify(self, p: Boolean) -> Boolean:
        """Return the predicate with its relations decided or normalized and implied terms removed."""
        if isinstance(p, Relational):
            return self._relation(p)
        if isinstance(p, Not):
            return Not(self.simplify(p.args[0]))
        if not isinstance(p, (And, Or)):
            return p
        terms = [self.simplify(a) for a in p.args]
        needed = self._drop_implied(terms, conjunction=isinstance(p, And))
        return p.func(*needed)

    def _relation(self, p: Relational) -> Boolean:
        if isinstance(p, (Eq, Ne)):
            equal = self.equals_zero(p.lhs - p.rhs)
            return equal if isinstance(p, Eq) else Not(equal)
        return self.at_least_zero(_margin(p))

    def _drop_implied(self, terms: list[Boolean], conjunction: bool) -> list[Boolean]:
        """Drop terms of a conjunction that others imply, or terms of a disjunction that imply others."""
        needed = list(dict.fromkeys(terms))
        for term in list(needed):
            others = [o for o in needed if o is not term]
            if any(self._implies(*((o, term) if conjunction else (term, o))) for o in others):
                needed = others
        return needed

    def _implies(self, a: Boolean, b: Boolean) -> bool:
        if not all(isinstance(p, Relational) and not isinstance(p, (Eq, Ne)) for p in (a, b)):
            return False
        return self.is_nonnegative(_margin(b) - _margin(a))


def _is_nonnegative_size(e: sympy.Expr) -> bool:
    """Return True if an expression of sizes, which are at least 1, is never negative."""
    shifted = sympy.expand(e.subs({s: s + 1 for s in e.free_symbols}))
    return all(c >= 0 and t.is_nonnegative for t, c in shifted.as_coefficients_dict().items() if c != 0)


def _margin(p: Relational) -> sympy.Expr:
    """Return e such that an inequality of integers is equivalent to e >= 0."""
    more, less = (p.lhs, p.rhs) if p.rel_op in (">", ">=") else (p.rhs, p.lhs)
    return sympy.expand(more - less - (0 if p.rel_op in (">=", "<=") else 1))


def _split_terms(e: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Return (added, subtracted, rest) with e = added - subtracted + rest; `rest` has no indices."""
    added, subtracted, rest = [sympy.Integer(0)] * 3
    for term, factor in e.as_coefficients_dict().items():
        if not term.has(*INDICES, AppliedUndef):
            rest += factor * term
        elif factor > 0:
            added += factor * term
        else:
            subtracted -= factor * term
    return added, subtracted, rest


def _normalize_inequality(e: sympy.Expr) -> Boolean:
    """Return e >= 0 with indices on the left and numbers on the right, or an index on each side."""
    added, subtracted, rest = _split_terms(e)
    if added != 0 and subtracted != 0 and rest in (0, -1):
        return (Le if rest == 0 else Lt)(subtracted, added)
    if subtracted == 0 or (rest.is_number and rest < 0):
        return Ge(added - subtracted, -rest)
    return Lt(subtracted - added, rest + 1)
