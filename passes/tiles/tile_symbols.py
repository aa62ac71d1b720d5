"""Sizes of a region beside its number of rows that are symbols, as a batch is: read off the operands of each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
from torch.fx import Node

from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import Size, as_sizes, is_same_size
from sp_compile.passes.sharding.placement import Shard

from .tile_regions import TileRegion
from .tile_view import TokenView

SymbolPlaces = dict[sympy.Symbol, tuple[int, int]]
"""The operand, and its dim, of which each is the size; with rows in a dim of their own."""


def row_dim(have: Shard) -> int:
    """Where the rows are alone in a dim, once `split_row_dim` has had the value."""
    return have.dim if is_same_size(have.outer, 1) else have.dim + 1


def split_row_dim(shape: Sequence[Any], have: Shard, rows: Any) -> list[Any]:
    """The shape with rows (so many) in a dim of their own."""
    before, behind = ([x] if not is_same_size(x, 1) else [] for x in (have.outer, have.inner))
    return [*shape[: have.dim], *before, rows, *behind, *shape[have.dim + 1 :]]


def sizes_without_rows(view: TokenView, x: Node) -> list[Size]:
    """The shape, 1 in the place of the rows."""
    have, shape = view.rows(x), list(as_sizes(x.meta["val"].shape))
    return shape if have is None else list(as_sizes(split_row_dim(shape, have, 1)))


def symbol_places(view: TokenView, region: TileRegion) -> SymbolPlaces | None:
    """Where each symbol is the size of a dim of an operand; None where one is nowhere."""
    found: SymbolPlaces = {}
    for i, x in enumerate((*region.rows, *region.replicated)):
        for d, extent in enumerate(sizes_without_rows(view, x)):
            if isinstance(extent, sympy.Symbol):
                found.setdefault(extent, (i, d))
    wanted = set(_free_symbols(view, region))
    return {s: found[s] for s in found if s in wanted} if wanted <= found.keys() else None


def _free_symbols(view: TokenView, region: TileRegion) -> Iterator[sympy.Symbol]:
    for x in filter(is_tensor, (*region.nodes, *region.rows, *region.replicated)):
        for extent in sizes_without_rows(view, x):
            if not isinstance(extent, int):
                yield from extent.free_symbols


def has_symbolic_length(view: TokenView, region: TileRegion) -> bool:
    """Is its number of rows a symbol?"""
    return not all(isinstance(have.frame.size, int) for x in region.rows if (have := view.rows(x)))


def has_symbols(view: TokenView, region: TileRegion) -> bool:
    """Is any of its sizes one?"""
    return has_symbolic_length(view, region) or any(_free_symbols(view, region))
