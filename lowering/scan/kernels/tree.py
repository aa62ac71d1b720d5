"""The work-efficient scan as it is written down: an up-sweep and a down-sweep of a binary tree.

For any associative ``combine``, not only one that commutes. Over n states: fewer than 2n combinations, of which no
more than 2 log2(n) follow one another.

    states      a    b    c    d    e           level 0
    up-sweep      ab        cd      e           level 1: neighbours are combined; one without a neighbour moves up
                      abcd          e           level 2
                           abcde                level 3: the total, and the prefix that ends at it
    down-sweep        abcd         abcde        a right child, or an only one, ends where its parent ends;
                  ab       abcd    abcde        a left child combines the prefix to the left of its parent
              a   ab  abc  abcd    abcde        with its own state, and the first has no such prefix

Blelloch hands exclusive prefixes down from an identity at the root. Inclusive ones need no identity; where there is
one, shifted by a row they are the exclusive ones. Source: G. E. Blelloch, "Prefix sums and their applications",
CMU-CS-90-190.
"""

from __future__ import annotations

from typing import Any

from sp_compile.lowering.scan.monoids import Combine

from .generic import concat_rows, interleave_rows, num_rows, slice_rows


def tree_inclusive(combine: Combine, states: Any, dim: int) -> Any:
    """Each state combined with all before it along ``dim``.

    states: a pytree of tensors with one size in ``dim``, any (0 too); the other sizes and the dtypes are combine's
    affair. combine(left, right): an associative function of two such trees, row by row, left the earlier.
    Returns a tree like states. Made of functional torch ops: differentiable as often as combine, in linear memory.
    """
    levels = up_sweep(combine, states, dim)
    prefixes = levels.pop()
    while levels:
        prefixes = down_sweep(combine, levels.pop(), prefixes, dim)
    return prefixes


def up_sweep(combine: Combine, states: Any, dim: int) -> list[Any]:
    """All levels of the tree, from the states to the total."""
    levels = [states]
    while (n := num_rows(levels[-1], dim)) > 1:
        paired = n - n % 2
        left, right = slice_rows(levels[-1], dim, 0, paired, 2), slice_rows(levels[-1], dim, 1, paired, 2)
        alone = slice_rows(levels[-1], dim, paired, None)
        levels.append(concat_rows(combine(left, right), alone, dim))
    return levels


def down_sweep(combine: Combine, states: Any, parents: Any, dim: int) -> Any:
    """The prefixes that end at the states of one level, from those of the level above."""
    n = num_rows(states, dim)
    lefts = slice_rows(states, dim, 0, 1)
    if n > 2:
        before = slice_rows(parents, dim, (n - 1) // 2)
        lefts = concat_rows(lefts, combine(before, slice_rows(states, dim, 2, None, 2)), dim)
    return interleave_rows(lefts, slice_rows(parents, dim, n // 2), dim)
