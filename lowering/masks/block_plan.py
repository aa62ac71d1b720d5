"""Plan the blocks of (queries x keys) to compute: few large ones, never a mask of S x S.

    k <= q on 8 x 8 rows, one rank          one CAUSAL block
    the same, rank 1 of 2, all keys         a FULL block of 4 x 4 and a CAUSAL one of 4 x 4

The plan is pure Python over run-time numbers, and is computed once for all layers, forward and backward
(``block_planner.py``). If the pieces of the mask vectors determine which cells meet (packed documents), its time grows
with their number (``cells.py``). Otherwise rows x keys are halved as long as that saves work: bounds of the symbols
decide a part, True or False.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from . import predicate as language
from .block_planner import TILE_ROWS, BlockPlanner, Vectors
from .blocks import Block, BlockPlan, Kind, halve_block, has_masked
from .cells import MAX_PARTS
from .spans import Rows


@lru_cache(maxsize=1024)
def plan_blocks(
    predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...] = (), rows: Vectors = (), cols: Vectors = ()
) -> BlockPlan:
    """Return the plan of an attention of local queries and keys: the blocks in which pairs attend.

    Args:
        predicate: The mask predicate.
        q_rows: The valid local query rows.
        k_rows: The valid local key rows.
        sizes: The values n<i> of the predicate.
        rows: Tables of the vectors row<i>, whose values belong to queries.
        cols: Tables of the vectors col<i>, whose values belong to keys.

    Raises:
        SpError: If the predicate reads a symbol without a value.
    """
    if not q_rows or not k_rows:
        return BlockPlan()
    return BlockPlanner(predicate, q_rows, k_rows, sizes, rows, cols).plan()


def tiles_by_position(predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...] = ()) -> BlockPlan:
    """Return a small plan for a predicate that reads no vectors, with which FLOP counters count pairs.

    Its blocks are for counting only: they may have windows that kernels do not support. The first possible form is
    used: few FULL and CAUSAL blocks, blocks with windows, or one MASKED block for each range of keys without padding.
    All are `others`: none is a part of a packed call.
    """
    if not q_rows or not k_rows:
        return BlockPlan()
    planner = BlockPlanner(predicate, q_rows, k_rows, sizes, (), ())  # without vectors of queries and of keys
    first_blocks = tuple(islice(planner.all_blocks(), MAX_PARTS + 1))  # all blocks, if they are few
    if len(first_blocks) <= MAX_PARTS and not has_masked(first_blocks):
        return BlockPlan(others=first_blocks)
    bands = planner.band_blocks()
    if bands:
        return BlockPlan(others=bands)
    conditions = language.split_conjuncts(predicate)
    return BlockPlan(others=tuple(Block.of(q, k, Kind.MASKED, conditions) for q, k in planner.split_at_padding()))


def count_decided_pairs(blocks: Sequence[Block], limit: int, *args: Any) -> tuple[float, list[tuple[float, Block]]]:
    """Count the attending pairs of masked blocks as far as bounds of the symbols decide whole blocks.

    Bounds decide a block if all of its pairs attend, or none does. Undecided blocks are halved, round by round, down to
    TILE_ROWS x TILE_ROWS; the caller evaluates the remaining ones pair by pair.

    Args:
        blocks: Masked blocks.
        limit: The maximum number of blocks that a round examines. Of more, every k-th one is examined, with k times
            the weight.
        *args: The arguments of `plan_blocks`.

    Returns:
        The number of attending pairs in decided blocks, and the undecided blocks of at most TILE_ROWS x TILE_ROWS with
        their weights: the number of blocks that each represents (1 without sampling).
    """
    planner, attending_pairs, undecided = BlockPlanner(*args), 0.0, list[tuple[float, Block]]()
    remaining, weight = list(blocks), 1.0
    while remaining:
        samples = remaining[:: -(-len(remaining) // limit)]  # every k-th block, so that they are at most `limit`
        weight, remaining = weight * len(remaining) / len(samples), []
        for block in samples:
            verdict = planner.verdict(block.query_range, block.key_range)
            if verdict:
                attending_pairs += weight * block.q_len * block.k_len
            elif verdict is None and max(block.q_len, block.k_len) <= TILE_ROWS:
                undecided.append((weight, block))
            elif verdict is None:
                remaining += halve_block(block)
    return attending_pairs, undecided
