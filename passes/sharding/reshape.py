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

_EMPTY_SIZE = sympy.Symbol("empty", integer=True, positive=True)  # replaces 0, which every size divides


class SharedFactor(NamedTuple):
    """Factor that a dim before a reshape and one after it share: the positions between two offsets.

    An offset is the product of the sizes of all slower factors of the shape. In (2, 12), the 3 of 12 = 4 * 3 is between
    the offsets 8 and 24.
    """

    factor: str  # name, or "" for the end of the dim
    start: Size  # product of the slower factors
    end: Size  # the same with this factor


@lru_cache(maxsize=4096)
def reshape_rule(before: tuple[Size, ...], after: tuple[Size, ...]) -> BoundRule:
    """Return the rule of a reshape: the factors that are complete in both shapes pass, all others are gathered.

    The rule of (2, 12) -> (2, 4, 3) is "d0 (d1 d2) -> d0 d1 d2". That of (6, 10) -> (4, 15) is
    "(d0 old2) (old3 d1) -> (d0 new4) (new5 d1)", in which d0 has size 2, d1 has size 5, and the rest is gathered.

    Args:
        before: Shape of the operand.
        after: Shape of the result.
    """
    old_offsets, new_offsets = _dim_offsets(before), _dim_offsets(after)
    old_shared: list[list[SharedFactor]] = [[] for _ in before]  # by dim of the operand
    new_shared: list[list[SharedFactor]] = [[] for _ in after]  # by dim of the result
    extents: dict[str, Size] = {}
    for old_dim, new_dim, start, end, extent in _shared_factors(old_offsets, new_offsets):
        shared = SharedFactor(f"d{len(extents)}", start, end)
        extents[shared.factor] = extent
        old_shared[old_dim].append(shared)
        new_shared[new_dim].append(shared)
    num_shared = len(extents)
    operand = _group_dims(old_offsets, old_shared, "old", extents)  # adds the other factors to `extents`
    result = _group_dims(new_offsets, new_shared, "new", extents)
    gathered = dict.fromkeys([*extents][num_shared:], "replicate")  # the kind of factors that must be gathered
    # A rule states the sizes of factors that share a dim with others; those of other factors are the sizes of dims. The
    # symbol _EMPTY_SIZE stands for the size 0, by which offsets cannot be divided.
    grouped = {f for dim in (*operand, *result) if dim[:1] == "(" for f in dim_factors(dim)}
    sizes = {f: as_size(sympy.sympify(s).subs(_EMPTY_SIZE, 0)) for f, s in extents.items() if f in grouped}
    # lazy: the op only moves data.
    return BoundRule((operand,), (result,), gathered, lazy=True, reshapes=True, extents=sizes)


def _dim_offsets(shape: Sequence[Size]) -> list[Size]:
    """Return the product of the dims before each dim, and of all dims: [1, 2, 24] for the shape (2, 12).

    A symbol replaces a dim of size 0, because all offsets after it would be 0.
    """
    return list(accumulate((_EMPTY_SIZE if s == 0 else s for s in shape), mul, initial=1))


def _shared_factors(old: Sequence[Size], new: Sequence[Size]) -> Iterator[tuple[int, int, Size, Size, Size]]:
    """Yield (old dim, new dim, start, end, extent) of every factor that is complete in both shapes.

    `old` and `new` are the offsets of the dims (`_dim_offsets`). Offsets divide the later ones, so two dims share the
    factor from the lcm of their starts to the gcd of their ends, if the former divides the latter. The second dim of
    (2, 12) is between the offsets 2 and 24, the first one of (8, 3) between 1 and 8: they share a factor 4, from 2 to
    8. As in a merge of two sorted lists, each step compares one dim of each shape, and continues with the next dim of
    the one that ends first.
    """
    i = j = 0
    while i + 1 < len(old) and j + 1 < len(new):
        ends = old[i + 1], new[j + 1]
        start, end = size_lcm(old[i], new[j]), size_gcd(*ends)
        extent = exact_quotient(end, start)
        if extent is not None and not is_same_size(extent, 1):
            yield i, j, start, end, extent
        old_ends, new_ends = (is_same_size(end, e) for e in ends)
        if not (old_ends or new_ends):  # neither end divides the other: the dim with the smaller one ends first
            lengths = [assume_large(e) for e in ends]
            old_ends, new_ends = lengths[0] <= lengths[1], lengths[0] >= lengths[1]
        i, j = i + int(old_ends), j + int(new_ends)


def _group_dims(
    offsets: Sequence[Size], shared: Sequence[Sequence[SharedFactor]], prefix: str, extents: dict[str, Size]
) -> Dims:
    """Return the dims of a shape in a rule: each is a group of its shared factors and of new factors between them.

    A dim of 6 positions whose first 2 are the shared factor "d0" is "(d0 old2)", and `extents` gets old2 = 3.

    Args:
        offsets: Offsets of the dims: the product of the dims before each, and of all dims.
        shared: Shared factors of each dim.
        prefix: Prefix of the names of new factors.
        extents: Sizes by factor; the new ones are added.
    """
    dims = []
    for (offset, dim_end), factors_of_dim in zip(pairwise(offsets), shared):
        names = []
        for known in (*factors_of_dim, SharedFactor("", dim_end, dim_end)):  # the last one is the end of the dim
            if not is_same_size(offset, known.start):  # positions before the shared factor
                names.append(f"{prefix}{len(extents)}")
                # a fraction for symbolic sizes whose quotient is not proved to be an integer
                extents[names[-1]] = exact_quotient(known.start, offset) or known.start / offset
            names.append(known.factor)  # `group_factors` ignores the "" of the end
            offset = known.end
        dims.append(group_factors(names))
    return tuple(dims)
