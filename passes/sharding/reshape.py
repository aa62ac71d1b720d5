"""Derive the rule of a view: the factors that two shapes of the same elements share, in row-major order.

[2, 12] -> [2, 4, 3]    d0 (d1 d2) -> d0 d1 d2
[6, 10] -> [4, 15]      (d0 old2) (old3 d1) -> (d0 new4) (new5 d1)    factors that are not shared must be gathered
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul

import sympy

from sp_compile.passes.graph.sizes import Size, as_size, assume_large, exact_quotient, is_same_size, size_gcd, size_lcm

from .factors import BoundRule, Dims, dim_factors, group_factors

_EMPTY_RULE = sympy.Symbol("empty", integer=True, positive=True)  # replaces 0, which every size divides
DimCut = tuple[str, Size, Size]  # factor, and the number of elements of the slower factors without and with it


@lru_cache(maxsize=4096)
def reshape_rule(before: tuple[Size, ...], after: tuple[Size, ...]) -> BoundRule:
    """Return the rule of a reshape.

    Args:
        before: Shape of the operand.
        after: Shape of the result.
    """
    old, new = _dim_strides(before), _dim_strides(after)
    cuts: tuple[list[list[DimCut]], list[list[DimCut]]] = ([[] for _ in before], [[] for _ in after])
    extents: dict[str, Size] = {}
    for i, j, start, end, extent in _shared_factors(old, new):
        factor = f"d{len(extents)}"
        extents[factor] = extent
        cuts[0][i].append((factor, start, end))
        cuts[1][j].append((factor, start, end))
    shared = len(extents)
    operand, result = _group_dims(old, cuts[0], "old", extents), _group_dims(new, cuts[1], "new", extents)
    across = dict.fromkeys([*extents][shared:], "whole")
    grouped = {f for dim in (*operand, *result) if dim[:1] == "(" for f in dim_factors(dim)}
    sizes = {f: as_size(sympy.sympify(s).subs(_EMPTY_RULE, 0)) for f, s in extents.items() if f in grouped}
    return BoundRule((operand,), (result,), across, lazy=True, reshapes=True, extents=sizes)


def _dim_strides(shape: Sequence[Size]) -> list[Size]:
    """Return the cumulative products of the slower dims before each dim, and the total."""
    return list(accumulate((_EMPTY_RULE if s == 0 else s for s in shape), mul, initial=1))


def _shared_factors(old: Sequence[Size], new: Sequence[Size]) -> Iterator[tuple[int, int, Size, Size, Size]]:
    """Yield (old dim, new dim, start, end, extent) of every factor that is complete in both."""
    i = j = 0
    while i + 1 < len(old) and j + 1 < len(new):
        ends = old[i + 1], new[j + 1]
        start, end = size_lcm(old[i], new[j]), size_gcd(*ends)
        extent = exact_quotient(end, start)
        if extent is not None and not is_same_size(extent, 1):
            yield i, j, start, end, extent
        first, second = (is_same_size(end, e) for e in ends)
        if not (first or second):  # neither divides the other: continue with the longer one
            lengths = [assume_large(e) for e in ends]
            first, second = lengths[0] <= lengths[1], lengths[0] >= lengths[1]
        i, j = i + first, j + second


def _group_dims(ends: Sequence[Size], cuts: Sequence[Sequence[DimCut]], name: str, extents: dict[str, Size]) -> Dims:
    """Return the dims as groups of shared factors and of the factors between them, which are named and sized here."""
    dims = []
    for (at, end), own in zip(pairwise(ends), cuts):
        factors = []
        for factor, start, stop in (*own, ("", end, end)):
            if not is_same_size(at, start):
                factors.append(f"{name}{len(extents)}")
                extents[factors[-1]] = exact_quotient(start, at) or start / at
            factors.append(factor)
            at = stop
        dims.append(group_factors(factors))
    return tuple(dims)
