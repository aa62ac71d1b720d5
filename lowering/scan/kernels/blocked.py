"""Scan in blocks: few torch operations, each over one row of all blocks.

States are pytrees of rows; `lift` and `lower` convert operands to states and states to results (`generic.py`).

This algorithm combines the BLOCK_ROWS states of a block one after another, of all blocks at once: it reduces the
blocks, scans their totals in the same way, and scans the blocks again, each from the carry of the totals.
Over n states, with B = BLOCK_ROWS, that is at most 2n(1 + 2/B) combinations, of which about 2B for each of log_B(n)
levels are sequential. The states are read twice and written once.
"""

from typing import Any

from torch import Tensor

from sp_compile.lowering.scan.monoids import Combine
from sp_compile.lowering.scan.scan_table import register_lowering
from sp_compile.lowering.torch_compat import pytree

from .generic import GenericKernels, Map, concat_rows, identity, num_rows, slice_rows

BLOCK_ROWS = 32  # rows of a block


def blocked_inclusive(
    combine: Combine, states: Any, dim: int, lift: Map = identity, lower: Map = identity
) -> tuple[Any, Any]:
    """Return each state combined with all before it along ``dim``, lowered, and the last state unlowered.

    All blocks of BLOCK_ROWS rows are scanned at once: step i combines row i of each block with the result at row i - 1,
    after the first rows of later blocks were combined with the totals of all earlier blocks.

    Args:
        combine: An associative function of two such pytrees, row by row; the left one is the earlier.
        states: A pytree of tensors with one size in ``dim``, which may be 0.
        dim: The dim of the rows.
        lift: Converts rows of states before they are combined.
        lower: Converts the results; if it returns (), only the last state is stored.
    """
    n = num_rows(states, dim)
    # `running` has one row per block: the result at the current row of each block. It starts with the first rows.
    # `slice_rows` takes the arguments of `slice`: (stop), or (start, stop, step).
    running = lift(slice_rows(states, dim, 0, None, BLOCK_ROWS))
    if n > BLOCK_ROWS:  # add the totals of all earlier blocks to the first rows of later blocks
        totals = _block_totals(combine, states, dim, lift)  # these are lifted, and the carries must not be lowered
        carries, _ = blocked_inclusive(combine, totals, dim)
        later_blocks = slice_rows(running, dim, 1, None)
        later_blocks = combine(slice_rows(carries, dim, num_rows(later_blocks, dim)), later_blocks)
        running = concat_rows(slice_rows(running, dim, 1), later_blocks, dim)
    results, last = _empty_results(lower(running), dim, n), running
    for row in range(min(n, BLOCK_ROWS)):
        if row:
            added = lift(slice_rows(states, dim, row, None, BLOCK_ROWS))
            running = combine(slice_rows(running, dim, num_rows(added, dim)), added)  # the last block may end earlier
        pytree.tree_map(Tensor.copy_, slice_rows(results, dim, row, None, BLOCK_ROWS), lower(running))
        if row == (n - 1) % BLOCK_ROWS:  # the last row of all, at the end of `running`
            last = running
    return results, slice_rows(last, dim, -1, None)


def _block_totals(combine: Combine, states: Any, dim: int, lift: Map) -> Any:
    """Return the combination of the rows of each block of BLOCK_ROWS rows, except an incomplete last one."""
    full_blocks = num_rows(states, dim) // BLOCK_ROWS * BLOCK_ROWS
    totals = lift(slice_rows(states, dim, 0, full_blocks, BLOCK_ROWS))
    for row in range(1, BLOCK_ROWS):
        totals = combine(totals, lift(slice_rows(states, dim, row, full_blocks, BLOCK_ROWS)))
    return totals


def _empty_results(like: Any, dim: int, n: int) -> Any:
    """Return uninitialized memory for n rows of results like these; the scan copies its rows there."""

    def empty(leaf: Tensor) -> Tensor:
        """Return an uninitialized tensor with n rows."""
        shape = list(leaf.shape)
        shape[dim] = n
        return leaf.new_empty(shape)

    return pytree.tree_map(empty, like)


register_lowering("blocked", GenericKernels(blocked_inclusive), priority=lambda problem: 40)
