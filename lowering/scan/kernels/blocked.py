"""The scan in blocks: few torch operations, each over one row of all blocks.

Where the tree combines two states at a node, this one combines BLOCK, one after another: the blocks are reduced,
their totals scanned in the same way, and the blocks scanned again, each from what the totals carry into it. Over n
states that is at most 2n(1 + 2/BLOCK) combinations, of which about 2 * BLOCK for each of log_BLOCK(n) levels follow
one another, and the states are read twice and written once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sp_compile.lowering.scan.monoids import Combine
from sp_compile.lowering.scan.scan_table import register
from sp_compile.lowering.torch_compat import pytree

from .generic import Kernels, Map, as_is, joined, length, rows

BLOCK = 32


def inclusive(combine: Combine, states: Any, dim: int, lift: Map = as_is, lower: Map = as_is) -> tuple[Any, Any]:
    """lower(each state combined with all before it along ``dim``), and the last of these not lowered.

    As `tree.inclusive`, of lift(rows of states).
    """
    n = length(states, dim)
    run = lift(rows(states, dim, 0, None, BLOCK))
    if n > BLOCK:
        carries, _ = inclusive(combine, _totals(combine, states, dim, lift), dim)
        others = rows(run, dim, 1, None)
        others = combine(rows(carries, dim, length(others, dim)), others)
        run = joined(rows(run, dim, 1), others, dim)
    results, last = _results(lower(run), dim, n), run
    for row in range(min(n, BLOCK)):
        if row:
            added = lift(rows(states, dim, row, None, BLOCK))
            run = combine(rows(run, dim, length(added, dim)), added)
        pytree.tree_map(Tensor.copy_, rows(results, dim, row, None, BLOCK), lower(run))
        last = run if row == (n - 1) % BLOCK else last
    return results, rows(last, dim, -1, None)


def combination(combine: Combine, states: Any, dim: int, lift: Map = as_is) -> Any:
    """The combination of all states, of lift(rows of states): a tree like these with one row in ``dim``."""
    n = length(states, dim)
    if n > BLOCK:
        done = n // BLOCK * BLOCK
        run = combination(combine, _totals(combine, states, dim, lift), dim)
    else:
        done = 1
        run = lift(rows(states, dim, 1))
    for row in range(done, n):
        run = combine(run, lift(rows(states, dim, row, row + 1)))
    return run


def _totals(combine: Combine, states: Any, dim: int, lift: Map) -> Any:
    """Of the whole blocks."""
    whole = length(states, dim) // BLOCK * BLOCK
    run = lift(rows(states, dim, 0, whole, BLOCK))
    for row in range(1, BLOCK):
        run = combine(run, lift(rows(states, dim, row, whole, BLOCK)))
    return run


def _results(like: Any, dim: int, n: int) -> Any:
    """Uninitialised, with n rows."""

    def empty(leaf: Tensor) -> Tensor:
        shape = list(leaf.shape)
        shape[dim] = n
        return leaf.new_empty(shape)

    return pytree.tree_map(empty, like)


register("blocked", Kernels(inclusive, combination), rank=lambda problem: 40)
