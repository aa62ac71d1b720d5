"""Sizes of a region beside its number of rows that are symbols, as a batch is: read off the operands of each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
from torch.fx import Node

from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import Size, same, sizes
from sp_compile.passes.sharding.placement import Shard

from .tile_regions import Region
from .tile_view import TokenView

SymbolPlaces = dict[sympy.Symbol, tuple[int, int]]
"""The operand, and its dim, of which each is the size; with rows in a dim of their own."""


def row_dim(have: Shard) -> int:
    """Where the rows are alone in a dim, once `rows_apart` has had the value."""
    return have.dim if same(have.outer, 1) else have.dim + 1


def rows_apart(shape: Sequence[Any], have: Shard, rows: Any) -> list[Any]:
    """The shape with rows (so many) in a dim of their own."""
    before, behind = ([x] if not same(x, 1) else [] for x in (have.outer, have.inner))
    return [*shape[: have.dim], *before, rows, *behind, *shape[have.dim + 1 :]]


def other_sizes(view: TokenView, x: Node) -> list[Size]:
    """The shape, 1 in the place of the rows."""
    have, shape = view.rows(x), list(sizes(x.meta["val"].shape))
    return shape if have is None else list(sizes(rows_apart(shape, have, 1)))


def symbol_places(view: TokenView, region: Region) -> SymbolPlaces | None:
    """Where each symbol is the size of a dim of an operand; None where one is nowhere."""
    found: SymbolPlaces = {}
    for i, x in enumerate((*region.rows, *region.whole)):
        for d, extent in enumerate(other_sizes(view, x)):
            if isinstance(extent, sympy.Symbol):
                found.setdefault(extent, (i, d))
    wanted = set(_symbols(view, region))
    return {s: found[s] for s in found if s in wanted} if wanted <= found.keys() else None


def _symbols(view: TokenView, region: Region) -> Iterator[sympy.Symbol]:
    for x in filter(is_tensor, (*region.nodes, *region.rows, *region.whole)):
        for extent in other_sizes(view, x):
            if not isinstance(extent, int):
                yield from extent.free_symbols


def is_of_any_length(view: TokenView, region: Region) -> bool:
    """Is its number of rows a symbol?"""
    return not all(isinstance(have.frame.size, int) for x in region.rows if (have := view.rows(x)))


def has_symbols(view: TokenView, region: Region) -> bool:
    """Is any of its sizes one?"""
    return is_of_any_length(view, region) or any(_symbols(view, region))
