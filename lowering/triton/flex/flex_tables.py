"""Build the tables of torch's BlockMask from a plan of blocks.

A pair is a query and a key; it attends if the mask allows it. A block is a rectangle of the pairs of a call with one
kind of mask; the plan has all blocks with pairs that attend (``masks/blocks.py``). The kernel skips or masks by tiles.
A tile of queries x keys is EMPTY (no pair attends), FULL (all pairs do, and the predicate is not evaluated) or PARTIAL
(the predicate is evaluated for each pair). All rows of a FULL tile are valid: it contains no padding.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.masks.blocks import Block, BlockPlan, Kind
from sp_compile.lowering.masks.pieces import copy_async

EMPTY_TILE, PARTIAL_TILE, FULL_TILE = 0, 1, 2  # kinds of tiles
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
    """Return the number of queries, and of keys, of a tile: FLEX_TILE, doubled until there are at most MAX_TILES."""
    tile = FLEX_TILE
    while -(-queries // tile) * -(-keys // tile) > MAX_TILES:
        tile *= 2
    return tile


@lru_cache(maxsize=16)
def build_tables(plan: BlockPlan, queries: int, keys: int, has_mask: bool, device: torch.device) -> BlockTables:
    """Return the tables of a plan, without synchronizing with the device.

    Args:
        plan: Blocks of the pairs that attend.
        queries: Number of local queries.
        keys: Number of local keys.
        has_mask: Whether a mask tensor is read in every tile, so that no tile is FULL.
        device: Device of the tables.
    """
    kinds = tile_kinds(plan, queries, keys, tile_size(queries, keys))
    if has_mask:
        kinds = kinds.clamp(max=PARTIAL_TILE)  # FULL, the greatest kind, becomes PARTIAL
    kinds = copy_async(kinds, device)
    # The PARTIAL and FULL tiles by query tile, then by key tile. Each selection has a number table and an index table,
    # which are the next two fields of BlockTables.
    selections = (kinds == PARTIAL_TILE, kinds == FULL_TILE, kinds.T == PARTIAL_TILE, kinds.T == FULL_TILE)
    tables = [table for is_selected in selections for table in _sort_selected(is_selected)]
    return BlockTables(*tables)


def tile_kinds(plan: BlockPlan, queries: int, keys: int, tile: int) -> Tensor:
    """Return the kind of every tile, such as FULL: uint8 (tiles of queries, tiles of keys), on the CPU."""
    kinds = torch.zeros(-(-queries // tile), -(-keys // tile), dtype=torch.uint8, device="cpu")
    for block in plan.blocks:
        # Tiles that the block touches, and tiles that it covers completely.
        rows, full_rows = _covered_tiles(*block.query_rows, queries, tile)
        columns, full_columns = _covered_tiles(*block.key_rows, keys, tile)
        touched, covered = kinds[rows, columns], kinds[full_rows, full_columns]  # views, which are written to
        if block.kind is Kind.CAUSAL:
            torch.maximum(touched, _touches_diagonal(block, rows, columns, tile), out=touched)
            covered.masked_fill_(_is_below_diagonal(block, full_rows, full_columns, tile), FULL_TILE)
        else:
            touched.clamp_(min=PARTIAL_TILE)
            if block.kind is Kind.FULL:
                covered.fill_(FULL_TILE)
    return kinds


def _covered_tiles(offset: int, length: int, num_rows: int, tile: int) -> tuple[slice, slice]:
    """Return the tiles that a range of rows touches, and the tiles of which it contains all rows.

    Both are slices of the tiles of one side, the queries or the keys: with tiles of 4 rows, the rows 2 to 9 touch the
    tiles 0 to 2 and contain tile 1.

    Args:
        offset: First row of the range.
        length: Number of rows of the range.
        num_rows: Number of rows of the side; its last tile may have fewer than `tile`.
        tile: Rows of a tile.
    """
    end = offset + length
    touched_stop = -(-end // tile)  # rounded up
    full_start = -(-offset // tile)
    full_stop = touched_stop if end == num_rows else end // tile  # the last tile is complete without its missing rows
    return slice(offset // tile, touched_stop), slice(full_start, max(full_start, full_stop))


def _touches_diagonal(block: Block, rows: slice, columns: slice, tile: int) -> Tensor:
    """Return uint8 (rows, columns): 1 (PARTIAL_TILE) for tiles of a causal block in which any pair attends, else 0.

    That holds if the tile's last query attends to its first key. These are counted from the block's first query and
    first key, so that query i attends to the keys 0 to i.
    """
    last_query = torch.arange(rows.start + 1, rows.stop + 1) * tile - 1
    last_query = last_query.clamp(max=block.q_off + block.q_len - 1) - block.q_off
    first_key = (torch.arange(columns.start, columns.stop) * tile).clamp(min=block.k_off) - block.k_off
    return (first_key <= last_query[:, None]).to(torch.uint8)


def _is_below_diagonal(block: Block, rows: slice, columns: slice, tile: int) -> Tensor:
    """Return bool (rows, columns): True for tiles of a causal block in which all pairs attend.

    That holds if the tile's first query attends to its last key, counted from the block's first query and first key.
    """
    first_query = torch.arange(rows.start, rows.stop) * tile - block.q_off
    last_key = (torch.arange(columns.start + 1, columns.stop + 1) * tile).clamp(max=block.k_off + block.k_len) - 1
    return (last_key - block.k_off) <= first_query[:, None]


def _sort_selected(is_selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number table and the index table of the selected tiles, as in `BlockTables`, int32.

    For each row these are the number of selected columns, (1, 1, rows), and all columns, the selected ones first,
    (1, 1, rows, columns).

    Args:
        is_selected: Bool (rows, columns), True for the tiles of one kind.
    """
    columns = is_selected.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    numbers = is_selected.sum(-1, dtype=torch.int32)
    return numbers[None, None], columns.to(torch.int32)[None, None].contiguous()
