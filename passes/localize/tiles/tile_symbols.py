"""Find operands from which a tile reads symbolic sizes, such as a batch size.

A tile (a part of the rows) is traced with symbolic sizes. At run time it reads each from a dim of an operand, its
place. A tile's operand has its rows in a separate dim: a value (B * S, D) whose rows are S is passed as (B, S, D).
A region (`tile_regions.py`) has operands with rows and replicated ones, which are counted in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx import Node

from sp_compile.passes.graph.call import is_tensor, node_shape
from sp_compile.passes.graph.sizes import is_same_size

from .tile_regions import TileRegion
from .tile_view import TokenView

# the operand and dim of each symbol, with the rows in a separate dim
SymbolPlaces = dict[sympy.Symbol, tuple[int, int]]


def row_dim(view: TokenView, x: Node) -> int:
    """Return the dim of the rows in the shape that `split_row_dim` returns for a value with rows.

    It follows the dim of the factors before the rows, which exists if their size is not 1.
    """
    shard = view.rows(x)
    assert shard is not None
    return shard.dim if is_same_size(shard.outer, 1) else shard.dim + 1


def split_row_dim(view: TokenView, x: Node, rows: Any) -> list[Any]:
    """Return the shape of a value with its rows in a separate dim, which a loop over tiles can slice.

    A shape [B * S, D] whose rows are S becomes [B, rows, D]. The shape of a value without rows is unchanged.

    Args:
        view: The token view.
        x: The node of the value.
        rows: The size of the new dim: the number of rows of a tile or of all tiles, or 1.
    """
    shard, shape = view.rows(x), list(node_shape(x))
    if shard is None:
        return shape
    before, after = ([] if is_same_size(factor, 1) else [factor] for factor in (shard.outer, shard.inner))
    return [*shape[: shard.dim], *before, rows, *after, *shape[shard.dim + 1 :]]


def symbol_places(view: TokenView, region: TileRegion) -> SymbolPlaces | None:
    """Return the operand and dim from which a tile reads each symbolic size of the region, except its number of rows.

    None if a symbol is the size of no dim of an operand; the region is then not tiled. Operands with rows are counted
    first, then the replicated ones, each with its rows in a separate dim (`split_row_dim`).
    """
    places: SymbolPlaces = {}
    for i, x in enumerate((*region.rows, *region.replicated)):
        # With 1 row: the number of rows differs between tiles, so that no size may be read from it.
        for d, extent in enumerate(split_row_dim(view, x, 1)):
            if isinstance(extent, sympy.Symbol):
                places.setdefault(extent, (i, d))
    symbols = set(_free_symbols(view, region))
    if not symbols <= places.keys():
        return None
    return {symbol: place for symbol, place in places.items() if symbol in symbols}


def _free_symbols(view: TokenView, region: TileRegion) -> Iterator[sympy.Symbol]:
    """Yield the symbols in the sizes of all tensors of a region, except for the number of rows."""
    for x in filter(is_tensor, (*region.nodes, *region.rows, *region.replicated)):
        for extent in split_row_dim(view, x, 1):  # with 1 in place of the number of rows
            if not isinstance(extent, int):
                yield from extent.free_symbols


def has_symbolic_length(view: TokenView, region: TileRegion) -> bool:
    """Return True if the number of rows is symbolic, so that one program supports tiles of any length."""
    shards = map(view.rows, region.rows)
    return not all(isinstance(shard.frame.size, int) for shard in shards if shard is not None)


def has_symbols(view: TokenView, region: TileRegion) -> bool:
    """Return True if any size is symbolic."""
    return has_symbolic_length(view, region) or any(_free_symbols(view, region))
