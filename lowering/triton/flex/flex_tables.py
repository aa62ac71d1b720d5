"""Which tiles of queries x keys a fused kernel visits: from a plan of blocks to the tables of torch's BlockMask.

A tile is EMPTY (no pair attends), FULL (all do: nobody asks the predicate) or PARTIAL (it is asked pair by pair). All
rows of a FULL tile are valid: padding is never in one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.masks.blocks import Block, BlockPlan, Kind
from sp_compile.lowering.masks.pieces import copy_async

EMPTY_TILE, PARTIAL_TILE, FULL_TILE = 0, 1, 2
FLEX_TILE = 128
"""Rows and keys of the smallest tile. A kernel's own blocks divide it."""
MAX_TILES = 1 << 20
"""Of one table, which has four bytes a tile; larger tiles where there would be more."""


class BlockTables(NamedTuple):
    """Tiles of a call, int32 on its device: how many of a row or column there are, and which, ascending; all others
    behind them. Shapes: numbers (1, 1, rows), indices (1, 1, rows, columns), or the other way round."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def tile_size(queries: int, keys: int) -> int:
    """Rows and keys of a tile, so that the tables stay small."""
    tile = FLEX_TILE
    while -(-queries // tile) * -(-keys // tile) > MAX_TILES:
        tile *= 2
    return tile


@lru_cache(maxsize=16)
def build_tables(plan: BlockPlan, queries: int, keys: int, ask: bool, device: torch.device) -> BlockTables:
    """Of so many local queries and keys. ask: have the predicate asked in every tile. Nothing waits for the device."""
    states = tile_kinds(plan, queries, keys, tile_size(queries, keys))
    states = states.clamp(max=PARTIAL_TILE) if ask else states
    states = copy_async(states, device)
    found = [_sort_chosen(side == kind) for side in (states, states.T) for kind in (PARTIAL_TILE, FULL_TILE)]
    return BlockTables(*(table for both in found for table in both))


def tile_kinds(plan: BlockPlan, queries: int, keys: int, tile: int) -> Tensor:
    """uint8 (tiles of queries, tiles of keys), on the host."""
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
            below = _is_below_diagonal(block, full_rows, full_columns, tile)
            states[full_rows, full_columns] = states[full_rows, full_columns].masked_fill(below, FULL_TILE)
    return states


def _covered_tiles(offset: int, length: int, of: int, tile: int) -> tuple[slice, slice]:
    """The tiles that a stretch of rows touches, and those of which it is all rows; the last may have fewer."""
    end = offset + length
    first, behind = -(-offset // tile), -(-end // tile) if end == of else end // tile
    return slice(offset // tile, -(-end // tile)), slice(first, max(first, behind))


def _touches_diagonal(block: Block, rows: slice, columns: slice, tile: int) -> Tensor:
    """1 where a tile's last query of a causal block comes to its first key."""
    last = torch.arange(rows.start + 1, rows.stop + 1) * tile - 1
    first = torch.arange(columns.start, columns.stop) * tile
    last = last.clamp(max=block.q_off + block.q_len - 1) - block.q_off
    first = first.clamp(min=block.k_off) - block.k_off
    return (first <= last[:, None]).to(torch.uint8)


def _is_below_diagonal(block: Block, rows: slice, columns: slice, tile: int) -> Tensor:
    """Whether a tile's first query of a causal block sees its last key."""
    first = torch.arange(rows.start, rows.stop) * tile - block.q_off
    last = (torch.arange(columns.start + 1, columns.stop + 1) * tile).clamp(max=block.k_off + block.k_len) - 1
    return (last - block.k_off) <= first[:, None]


def _sort_chosen(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many are chosen in each row, and their columns in front: int32 (1, 1, rows) and (1, 1, rows, columns)."""
    columns = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    numbers = chosen.sum(-1, dtype=torch.int32)
    return numbers[None, None], columns.to(torch.int32)[None, None].contiguous()
