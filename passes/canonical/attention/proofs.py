"""Prove integer relations between indices, over 0 <= q < Q, 0 <= k < K, ... for every size.

    IndexBox({q: S, k: S}).at_least_zero(S - k)              true
    IndexBox({q: S, k: S}).at_least_zero(q - k)              k <= q

Sizes may be symbols (at least 1). A relation without a proof is kept in one normal form, `k <= q` or `-k + q < 4`, so
that equal predicates have equal text. The indices b, h, q and k
count batch entries, heads, queries and keys. A *leaf* is a function of them with unknown values, such as leaf0(k). A
*term* is a product of a number and one symbol or leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeAlias

import sympy
from sympy import And, Eq, Ge, Le, Lt, Ne, Not, Or
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from sp_compile.lowering.masks.predicate import Bounds
from sp_compile.passes.graph.sizes import Size

BATCH_INDEX, HEAD_INDEX, QUERY_INDEX, KEY_INDEX = INDICES = sympy.symbols("b h q k", integer=True)
Boolean: TypeAlias = sympy.logic.boolalg.Boolean
SUMMED_ROW = "row_of_"  # prefix of a symbol that counts all rows of a dim, whose size follows
MAX_SIZE = 1 << 24  # assumed maximum of a symbolic size, an index below which is exact in float32


class IndexBox:
    """Ranges of the indices, for proofs.

    Each index is at least 0, and at most its entry of `last`, its size - 1.
    """

    def __init__(self, sizes: Mapping[sympy.Symbol, Size]) -> None:
        self.last = {index: sympy.sympify(size) - 1 for index, size in sizes.items()}
        self.leaf_ranges: dict[str, Bounds] = {}  # least and greatest value of a leaf, by the name of its function

    def is_nonnegative(self, e: sympy.Expr) -> bool:
        """Return True if e >= 0 provably for all indices and sizes.

        The proof is the minimum of e over the indices, an expression of sizes. It exists if e is linear in the indices.
        """
        minimum = sympy.Integer(0)
        for term, factor in sympy.expand(e).as_coefficients_dict().items():
            if term in self.last:  # an index: its least value is 0, its greatest one `last`
                minimum += factor * self.last[term] if factor < 0 else 0
            elif term.has(*self.last, AppliedUndef):  # another function of an index, or data
                return False
            else:
                minimum += factor * term
        return _is_nonnegative_size(minimum)

    def is_within(self, e: sympy.Expr, extent: Size) -> bool:
        """Return True if 0 <= e < extent provably for all indices and sizes."""
        return self.is_nonnegative(e) and self.is_nonnegative(extent - 1 - e)

    def is_bounded(self, e: sympy.Expr, least: int, greatest: int) -> bool:
        """Return True if least <= e <= greatest provably for all indices, leaves, and sizes up to MAX_SIZE."""
        bounds = self._bounds(e)
        if bounds is None:
            return False
        minimum, maximum = bounds
        return bool(least <= minimum and maximum <= greatest)

    def _bounds(self, e: sympy.Expr) -> Bounds | None:
        """Return bounds of an expression, or None if they are not known."""
        if e.is_Rational:
            return e, e
        if e in self.last:
            bounds_of_last = self._bounds(self.last[e])
            if bounds_of_last is None:
                return None
            _, greatest_index = bounds_of_last
            return 0, greatest_index
        if isinstance(e, AppliedUndef):
            return self.leaf_ranges.get(e.func.__name__)
        if e.is_Symbol:  # a size, or another integer of the program
            return -MAX_SIZE, MAX_SIZE
        function: Any = e.func
        args: Any = e.args
        if e.is_Pow and e.exp.is_Integer and e.exp > 0:  # a product of equal factors
            function, args = sympy.Mul, [e.base] * int(e.exp)
        operands = [self._bounds(x) for x in args]
        known = [bounds for bounds in operands if bounds is not None]
        if not known or len(known) < len(operands):
            return None
        return _bounds_of_call(function, known, is_of_sizes=not e.has(*self.last, AppliedUndef))

    def at_least_zero(self, e: sympy.Expr) -> Boolean:
        """Return the condition e >= 0: true or false if that is proven, else a relation in normal form, as k <= q."""
        e = sympy.expand(e)
        if self.is_nonnegative(e):
            return sympy.true
        return sympy.false if self.is_nonnegative(-e - 1) else _normalize_inequality(e)

    def equals_zero(self, e: sympy.Expr) -> Boolean:
        """Return the condition e == 0: true or false if that is proven, else an equation in normal form."""
        e = sympy.expand(e)
        if e == 0:
            return sympy.true
        if self.is_nonnegative(e - 1) or self.is_nonnegative(-e - 1):
            return sympy.false
        added, subtracted, number = _split_terms(e)  # e = added - subtracted + number
        return Eq(subtracted - number, added) if subtracted != 0 else Eq(added, -number)

    def simplify(self, p: Boolean) -> Boolean:
        """Return an equivalent predicate in which each relation is proven (true or false) or in normal form.

        Conditions of an And or Or that others make redundant are removed.
        """
        if isinstance(p, (Eq, Ne)):
            is_equal = self.equals_zero(p.lhs - p.rhs)
            return is_equal if isinstance(p, Eq) else Not(is_equal)
        if isinstance(p, Relational):
            return self.at_least_zero(_margin(p))
        if isinstance(p, Not):
            return Not(self.simplify(p.args[0]))
        if not isinstance(p, (And, Or)):
            return p
        conditions = [self.simplify(a) for a in p.args]
        return p.func(*self._drop_implied(conditions, conjunction=isinstance(p, And)))

    def _drop_implied(self, conditions: list[Boolean], conjunction: bool) -> list[Boolean]:
        """Return the conditions of an And or Or without the redundant ones.

        k <= q is redundant in (k <= q) & (k < q), because k < q implies it; in an Or, k < q is redundant.

        Args:
            conditions: The simplified conditions.
            conjunction: True for an And, False for an Or.
        """
        needed = list(dict.fromkeys(conditions))
        for condition in list(needed):
            others = [p for p in needed if p is not condition]
            if conjunction:
                is_redundant = any(self._is_stronger(p, condition) for p in others)
            else:
                is_redundant = any(self._is_stronger(condition, p) for p in others)
            needed = others if is_redundant else needed
        return needed

    def _is_stronger(self, a: Boolean, b: Boolean) -> bool:
        """Return True if inequality `a` provably implies inequality `b`; False for other conditions."""
        if not all(isinstance(p, Relational) and not isinstance(p, (Eq, Ne)) for p in (a, b)):
            return False
        return self.is_nonnegative(_margin(b) - _margin(a))  # margin(a) >= 0 is `a`, so margin(b) >= margin(a) >= 0


def _bounds_of_call(function: Any, operands: list[Bounds], is_of_sizes: bool) -> Bounds | None:
    """Return bounds of a function's value from those of its operands, or None for an unknown function.

    An unknown function of sizes, such as FloorDiv(S, 2), is at most as large as its largest operand.
    """
    least, greatest = zip(*operands)
    if function is sympy.Add:
        return sum(least), sum(greatest)
    if function is sympy.Mul:
        return reduce(_multiply_bounds, operands)
    if function in (sympy.Max, sympy.Min):
        select = max if function is sympy.Max else min
        return select(least), select(greatest)
    if function is sympy.floor:
        ((minimum, maximum),) = operands
        return sympy.floor(minimum), sympy.floor(maximum)
    largest = max(map(abs, (*least, *greatest)))
    if function is sympy.Abs:
        return 0, largest
    if function is sympy.Mod:
        _, (least_divisor, greatest_divisor) = operands
        if least_divisor > 0:
            return 0, greatest_divisor - 1
    return (-largest, largest) if is_of_sizes else None


def _multiply_bounds(a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of a product."""
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _is_nonnegative_size(e: sympy.Expr) -> bool:
    """Return True if an expression of sizes, which are at least 1, is provably never negative."""
    # A size is s = s' + 1 with s' >= 0. It suffices that no term is negative in s': S * T - S = S' * T' + T'.
    shifted = sympy.expand(e.subs({size: size + 1 for size in e.free_symbols}))
    terms = shifted.as_coefficients_dict().items()
    return all(factor >= 0 and term.is_nonnegative for term, factor in terms if factor != 0)


def _margin(p: Relational) -> sympy.Expr:
    """Return e such that an inequality of integers is equivalent to e >= 0: q - k - 1 for k < q."""
    greater, smaller = (p.lhs, p.rhs) if p.rel_op in (">", ">=") else (p.rhs, p.lhs)
    is_strict = p.rel_op not in (">=", "<=")
    return sympy.expand(greater - smaller - (1 if is_strict else 0))


def _split_terms(e: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Return (added, subtracted, number) with e = added - subtracted + number: (q, 2*k, S) for q - 2*k + S.

    `added` and `subtracted` are terms of indices and leaves with positive factors; `number` is an expression of sizes.
    """
    added, subtracted, number = [sympy.Integer(0)] * 3
    for term, factor in e.as_coefficients_dict().items():
        is_row = any(x.name.startswith(SUMMED_ROW) for x in term.free_symbols)  # another index, which INDICES lacks
        if not is_row and not term.has(*INDICES, AppliedUndef):
            number += factor * term
        elif factor > 0:
            added += factor * term
        else:
            subtracted -= factor * term
    return added, subtracted, number


def _normalize_inequality(e: sympy.Expr) -> Boolean:
    """Return the inequality e >= 0 in a form that depends only on e, so that equal predicates have equal text.

    It is k <= q or k < q, or else has indices on the left and a number on the right, as -k + q < 4. That number is
    positive if its sign is known.
    """
    added, subtracted, number = _split_terms(e)  # e = added - subtracted + number
    # e >= 0 is subtracted - added <= number. All terms are integers, so this is subtracted - added < number + 1, and
    # subtracted < added if the number is -1.
    if added != 0 and subtracted != 0 and number in (0, -1):
        return Le(subtracted, added) if number == 0 else Lt(subtracted, added)
    if subtracted == 0 or (number.is_number and number < 0):
        return Ge(added - subtracted, -number)
    return Lt(subtracted - added, number + 1)
