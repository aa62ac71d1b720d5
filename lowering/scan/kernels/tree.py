"""Scan by an up-sweep and a down-sweep of a binary tree, the work-efficient reference algorithm.

``combine`` is any associative function, commutative or not. Over n states there are fewer than 2n combinations, of
which at most 2 log2(n) are sequential.

    states      a    b    c    d    e           level 0
    up-sweep      ab        cd      e           level 1: neighbors are combined; one without a neighbor moves up
                      abcd          e           level 2
                           abcde                level 3: the total, and the prefix that ends at it
    down-sweep        abcd         abcde        a right child, or an only one, ends where its parent ends;
                  ab       abcd    abcde        a left child combines the prefix to the left of its parent
              a   ab  abc  abcd    abcde        with its own state, and the first has no such prefix

Blelloch passes exclusive prefixes down from an identity at the root. Inclusive ones need no identity; shifted by a
row, with an identity in the first, they are the exclusive ones. Source: G. E. Blelloch, "Prefix sums and their
applications", CMU-CS-90-190.
"""

from typing import Any

from sp_compile.lowering.scan.monoids import Combine

from .generic import concat_rows, interleave_rows, num_rows, slice_rows


def tree_inclusive(combine: Combine, states: Any, dim: int) -> Any:
    """Return each state combined with all before it along ``dim``.

    It consists of functional torch ops, so it is differentiable as often as `combine`, in linear memory.

    Args:
        combine: An associative function of two such pytrees, row by row; the left one is the earlier.
        states: A pytree of tensors with one size in ``dim``, which may be 0. `combine` defines the other sizes and
            dtypes.
        dim: The dim of the rows.

    Returns:
        A pytree with the structure, shapes and dtypes of `states`.
    """
    levels = up_sweep(combine, states, dim)
    prefixes = levels.pop()
    while levels:
        prefixes = down_sweep(combine, levels.pop(), prefixes, dim)
    return prefixes


def up_sweep(combine: Combine, states: Any, dim: int) -> list[Any]:
    """Return all levels of the tree, from the states to the total."""
    levels = [states]
    n = num_rows(states, dim)
    while n > 1:
        paired = n - n % 2
        left, right = slice_rows(levels[-1], dim, 0, paired, 2), slice_rows(levels[-1], dim, 1, paired, 2)
        unpaired_row = slice_rows(levels[-1], dim, paired, None)  # no rows if n is even
        levels.append(concat_rows(combine(left, right), unpaired_row, dim))
        n = num_rows(levels[-1], dim)
    return levels


def down_sweep(combine: Combine, states: Any, parents: Any, dim: int) -> Any:
    """Return the prefixes that end at the states of one level, from those of the level above.

    Args:
        combine: The associative function.
        states: The states of the level, as `up_sweep` returned them.
        parents: The prefixes that end at the states of the level above.
        dim: The dim of the rows.
    """
    n = num_rows(states, dim)
    # `slice_rows` has the bounds of slice(): a single one is the stop. For 5 states, which have 3 parents, `before` are
    # parents 0 and 1, for the states 2 and 4; the right children 1 and 3 end where parents 0 and 1 end.
    lefts = slice_rows(states, dim, 0, 1)  # prefixes of left children: that of the first is its own state
    if n > 2:
        before = slice_rows(parents, dim, (n - 1) // 2)  # prefixes that end before the other left children
        lefts = concat_rows(lefts, combine(before, slice_rows(states, dim, 2, None, 2)), dim)
    return interleave_rows(lefts, slice_rows(parents, dim, n // 2), dim)  # a right child ends where its parent ends
