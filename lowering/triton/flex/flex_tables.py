"""Build the tables of torch's BlockMask from a plan of blocks.

A tile of queries x keys is EMPTY (no pair attends), FULL (all pairs do, and the predicate is not evaluated) or PARTIAL
(the predicate is evaluated for each pair). All rows of a FULL tile are valid: it contains no padding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.masks.blocks import Block, BlockPlan, Kind
from sp_compile.lowering.masks.pieces import copy_async

EMPTY_TILE, PARTIAL_TILE, FULL_TILE = 0, 1, 2
FLEX_TILE = 128  # Rows and keys of the smallest tile. The blocks of a kernel divide it.
MAX_TILES = 1 << 20  # Maximum number of tiles of a table, of four bytes per tile. Larger problems use larger tiles.


class BlockTables(NamedTuple):
    """Tiles of a call as in torch's BlockMask, int32 on its device.

    Number tables have shape (1, 1, rows), index tables (1, 1, rows, columns), or the transpose for ``q_*``. In each row
    the selected columns come first, ascending, followed by all others.
    """

    kv_num_blocks: Tensor  # number of PARTIAL tiles of each row
    kv_indices: Tensor  # columns of PARTIAL tiles of each row
    full_kv_num_blocks: Tensor  # number of FULL tiles of each row
    full_kv_indices: Tensor  # columns of FULL tiles of each row
    q_num_blocks: Tensor  # number of PARTIAL tiles of each column
    q_indices: Tensor  # rows of PARTIAL tiles of each column
    full_q_num_blocks: Tensor  # number of FULL tiles of each column
    full_q_indices: Tensor  # rows of FULL tiles of each column


def tile_size(queries: int, keys: int) -> int:
    """Return the rows and keys of a tile, chosen such that the tables stay small."""
    tile = FLEX_TILE
    while -(-queries // tile) * -(-keys // tile) > MAX_TILES:
        tile *= 2
    return tile


@lru_cache(maxsize=16)
def build_tables(plan: BlockPlan, queries: int, keys: int, check_data: bool, device: torch.device) -> BlockTables:
    """Return the tables of a plan, without synchronizing with the device.

    Args:
        plan: Blocks of the pairs that attend.
        queries: Number of local queries.
        keys: Number of local keys.
        check_data: True to evaluate the predicate in every tile.
        device: Device of the tables.
    """
    states = tile_kinds(plan, queries, keys, tile_size(queries, keys))
    states = states.clamp(max=PARTIAL_TILE) if check_data else states
    states = copy_async(states, device)
    found = [_sort_chosen(side == kind) for side in (states, states.T) for kind in (PARTIAL_TILE, FULL_TILE)]
    return BlockTables(*(table for both in found for table in both))


def tile_kinds(plan: BlockPlan, queries: int, keys: int, tile: int) -> Tensor:
    """Return the kind of every tile, uint8 (tiles of queries, tiles of keys), on the CPU."""
    states = torch.zeros(-(-queries // tile), -(-keys // tile), dtype=torch.uint8, device="cpu")
    for block in plan.blocks:
        rows, full_rows = _covered_tiles(*block.query_rows, queries, tile)
        columns, full_columns = _covered_tiles(*block.key_rows, keys, tile)
        part = states[rows, columns]
        if block.kind is Kind.CAUSAL:
            part.copy_(torch.maximum(part, _touches_diagonal(block, rows, columns, tile)))
        else:
            part.clamp_(min=PARTIAL_TILE)
        if block.kind is Kind.FULL:
            states[full_rows, full_columns] = FULL_TILE
        elif block.kind is Kind.CAUSAL:
            below = _mark_below_diagonal(block, full_rows, full_columns, tile)
            states[full_rows, full_columns] = states[full_rows, full_columns].masked_fill(below, FULL_TILE)
    return states


def _covered_tiles(offset: int, length: int, of: int, tile: int) -> tuple[slice, slice]:
    """Return the tiles that a range of rows touches, and those that it covers; the last may be partial."""
    end = offset + length
    first, stop = -(-offset // tile), -(-end // tile) if end == of else end // tile
    return slice(offset // tile, -(-end // tile)), slice(first, max(first, stop))


def _touches_diagonal(block: Block, rows: slice, columns: slice, tile: int) -> Tensor:
    """Return 1 for tiles whose last query of a causal block is at or after its first key."""
    last = torch.arange(rows.start + 1, rows.stop + 1) * tile - 1
    first = torch.arange(columns.start, columns.stop) * tile
    last = last.clamp(max=block.q_off + block.q_len - 1) - block.q_off
    first = first.clamp(min=block.k_off) - block.k_off
    return (first <= last[:, None]).to(torch.uint8)


def _mark_below_diagonal(block: Block, rows: slice, columns: slice, tile: int) -> Tensor:
    """Return True for tiles whose first query of a causal block attends to its last key."""
    first = torch.arange(rows.start, rows.stop) * tile - block.q_off
    last = (torch.arange(columns.start + 1, columns.stop + 1) * tile).clamp(max=block.k_off + block.k_len) - 1
    return (last - block.k_off) <= first[:, None]


def _sort_chosen(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen columns per row, (1, 1, rows), and the columns, chosen ones first.

    Both tensors are int32; the columns are (1, 1, rows, columns).
    """
    columns = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    numbers = chosen.sum(-1, dtype=torch.int32)
    return numbers[None, None], columns.to(torch.int32)[None, None].contiguous()
