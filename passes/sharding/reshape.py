"""Derive the rule of a view: the factors that two shapes share, in row-major order.

Both shapes have the same elements.

[2, 12] -> [2, 4, 3]    d0 (d1 d2) -> d0 d1 d2
[6, 10] -> [4, 15]      (d0 old2) (old3 d1) -> (d0 new4) (new5 d1)    factors that are not shared must be gathered
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import sympy

from sp_compile.passes.graph.sizes import Size, as_size, assume_large, exact_quotient, is_same_size, size_gcd, size_lcm

from .factors import BoundRule, Dims, dim_factors, group_factors

_EMPTY_RULE = sympy.Symbol("empty", integer=True, positive=True)  # replaces 0, which every size divides


class DimCut(NamedTuple):
    """Factor of a dim, between two offsets.

    An offset is the number of positions that all slower factors of the shape have.
    """

    factor: str  # name, or "" for the end of the dim
    start: Size  # product of the slower factors
    end: Size  # the same with this factor


@lru_cache(maxsize=4096)
def reshape_rule(before: tuple[Size, ...], after: tuple[Size, ...]) -> BoundRule:
    """Return the rule of a reshape.

    Args:
        before: Shape of the operand.
        after: Shape of the result.
    """
    old, new = _dim_offsets(before), _dim_offsets(after)
    old_cuts: list[list[DimCut]] = [[] for _ in before]
    new_cuts: list[list[DimCut]] = [[] for _ in after]
    extents: dict[str, Size] = {}
    for i, j, start, end, extent in _shared_factors(old, new):
        cut = DimCut(f"d{len(extents)}", start, end)
        extents[cut.factor] = extent
        old_cuts[i].append(cut)
        new_cuts[j].append(cut)
    num_shared = len(extents)
    operand, result = _group_dims(old, old_cuts, "old", extents), _group_dims(new, new_cuts, "new", extents)
    gathered = dict.fromkeys([*extents][num_shared:], "whole")
    grouped = {f for dim in (*operand, *result) if dim[:1] == "(" for f in dim_factors(dim)}
    sizes = {f: as_size(sympy.sympify(s).subs(_EMPTY_RULE, 0)) for f, s in extents.items() if f in grouped}
    return BoundRule((operand,), (result,), gathered, lazy=True, reshapes=True, extents=sizes)


def _dim_offsets(shape: Sequence[Size]) -> list[Size]:
    """Return the offset of each dim, the product of the slower dims before it, and the total size."""
    return list(accumulate((_EMPTY_RULE if s == 0 else s for s in shape), mul, initial=1))


def _shared_factors(old: Sequence[Size], new: Sequence[Size]) -> Iterator[tuple[int, int, Size, Size, Size]]:
    """Yield (old dim, new dim, start, end, extent) of every factor that is complete in both.

    `old` and `new` are the offsets of the dims. Like a merge of two sorted lists, each step compares one dim of each
    shape and advances in the one that ends first.
    """
    i = j = 0
    while i + 1 < len(old) and j + 1 < len(new):
        ends = old[i + 1], new[j + 1]
        start, end = size_lcm(old[i], new[j]), size_gcd(*ends)
        extent = exact_quotient(end, start)
        if extent is not None and not is_same_size(extent, 1):
            yield i, j, start, end, extent
        old_ends, new_ends = (is_same_size(end, e) for e in ends)
        if not (old_ends or new_ends):  # neither divides the other: continue with the longer one
            lengths = [assume_large(e) for e in ends]
            old_ends, new_ends = lengths[0] <= lengths[1], lengths[0] >= lengths[1]
        i, j = i + old_ends, j + new_ends


def _group_dims(offsets: Sequence[Size], cuts: Sequence[Sequence[DimCut]], name: str, extents: dict[str, Size]) -> Dims:
    """Return the dims as groups of shared factors and of the factors between them.

    The factors between them are added to `extents`.

    Args:
        offsets: Offsets of the dims.
        cuts: Shared factors of each dim.
        name: Prefix of the names of the other factors.
        extents: Sizes by factor.
    """
    dims = []
    for (offset, dim_end), dim_cuts in zip(pairwise(offsets), cuts):
        factors = []
        for cut in (*dim_cuts, DimCut("", dim_end, dim_end)):
            if not is_same_size(offset, cut.start):
                factors.append(f"{name}{len(extents)}")
                extents[factors[-1]] = exact_quotient(cut.start, offset) or cut.start / offset
            factors.append(cut.factor)
            offset = cut.end
        dims.append(group_factors(factors))
    return tuple(dims)
