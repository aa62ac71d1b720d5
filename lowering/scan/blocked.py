"""The scan in blocks: few torch operations, each over one row of all blocks.

Where the tree combines two states at a node, this one combines BLOCK, one after another: the blocks are reduced,
their totals scanned in the same way, and the blocks scanned again, each from what the totals carry into it. Over n
states that is fewer than 2n(1 + 2/BLOCK) combinations, of which about 2 * BLOCK for each of log_BLOCK(n) levels follow
one another, and the states are read twice and written once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._compat import pytree
from .kernels import Kernels
from .monoids import Combine
from .problem import Problem
from .states import joined, length, rows

BLOCK = 16


def inclusive(combine: Combine, states: Any, dim: int) -> Any:
    """Each state combined with all before it along ``dim``; see `tree.inclusive`."""
    n = length(states, dim)
    if n <= 1:
        return states
    run = rows(states, dim, 0, None, BLOCK)
    if n > BLOCK:
        carries = inclusive(combine, _totals(combine, states, dim), dim)
        others = rows(run, dim, 1, None)
        others = combine(rows(carries, dim, length(others, dim)), others)
        run = joined(rows(run, dim, 1), others, dim)
    results = pytree.tree_map(lambda leaf: _empty(leaf, dim, n), run)
    _write(results, 0, run, dim)
    for row in range(1, min(n, BLOCK)):
        others = rows(states, dim, row, None, BLOCK)
        run = combine(rows(run, dim, length(others, dim)), others)
        _write(results, row, run, dim)
    return results


def total(combine: Combine, states: Any, dim: int) -> Any:
    """The combination of all states; see `tree.total`."""
    n = length(states, dim)
    if n > BLOCK:
        last = n // BLOCK * BLOCK
        run = total(combine, _totals(combine, states, dim), dim)
    else:
        last = 1
        run = rows(states, dim, 1)
    for row in range(last, n):
        run = combine(run, rows(states, dim, row, row + 1))
    return run


def _totals(combine: Combine, states: Any, dim: int) -> Any:
    """Of the whole blocks."""
    whole = length(states, dim) // BLOCK * BLOCK
    run = rows(states, dim, 0, whole, BLOCK)
    for row in range(1, BLOCK):
        run = combine(run, rows(states, dim, row, whole, BLOCK))
    return run


def _empty(leaf: Tensor, dim: int, n: int) -> Tensor:
    shape = list(leaf.shape)
    shape[dim] = n
    return leaf.new_empty(shape)


def _write(results: Any, first: int, run: Any, dim: int) -> None:
    """The row of each block: `first` within the block."""
    pytree.tree_map(Tensor.copy_, rows(results, dim, first, None, BLOCK), run)


def fits(problem: Problem) -> bool:
    """Every problem."""
    return True


_KERNELS = Kernels(inclusive, total)
scan, extremes, linear, linear_total = (
    _KERNELS.scan,
    _KERNELS.extremes,
    _KERNELS.linear,
    _KERNELS.linear_total,
)
