"""In how many tiles each region goes with tiles="auto": the fewest that leave it no larger than what lies beside it.

Where the device's memory is known, a region that ends in a number goes in tiles if the step does not fit without, or if
its inside is a large share of the device; one that ends in rows, whose backward would do its work again, only if the
step does not fit with those. What is there beside them: weights, gradients, and what is kept for the backward
(`passes/cost/attention_memory.py`). Where it is not known, as of a CPU, only what ends in a number, by a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.fx import Node

from sp_compile.passes.cost.attention_memory import RankMemory
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import current_bytes

from .tile_regions import MAX_THIN_WIDTH, TileRegion, row_width
from .tile_view import TokenView

LARGE_BYTES = 1 << 30
"""Bytes of the inside of a region that is cut up where nobody knows the device."""
TILE_BYTES = 1 << 28
"""Bytes of a tile's inside: no smaller ones, and these where nothing fits anyhow."""
MEMORY_SHARE = 1 / 8
"""Of a device: insides of more are cut up even where they fit."""


def inner_bytes(region: TileRegion) -> int:
    """Bytes of what the region makes of narrow rows."""
    return sum(map(node_bytes, region.seed_products))


def node_bytes(node: Node, least: int = 0) -> int:
    """Of a node's value, elements of `least` bytes or more."""
    return current_bytes(node.meta["val"], least) if is_tensor(node) else 0


def is_scalar_loss(view: TokenView, region: TileRegion) -> bool:
    """Does it end in sums over the tokens, and a few numbers for each?"""
    thin = all(view.is_sum(x) or row_width(view, x) * MAX_THIN_WIDTH <= region.narrow for x in region.results)
    return thin and all(view.is_sum(x) or not x.meta["val"].is_floating_point() for x in region.results)


def choose_tile_counts(
    view: TokenView, regions: Sequence[TileRegion], memory: RankMemory | None, times: Callable[[Node], int]
) -> list[int]:
    """Tiles of each region; 0: it stays as it is. times: how many nodes a node stands for."""
    numbers = [is_scalar_loss(view, region) for region in regions]
    if memory is None or math.isinf(memory.device):
        return [
            -(-inner_bytes(region) // TILE_BYTES) if number and inner_bytes(region) >= LARGE_BYTES else 0
            for region, number in zip(regions, numbers)
        ]
    kept = [_saved_bytes(view, region, number) for region, number in zip(regions, numbers)]
    of_all = [nbytes * times(view.source[region.seed_products[0]]) for region, nbytes in zip(regions, kept)]
    beside = memory.used - sum(nbytes for nbytes, number in zip(of_all, numbers) if number)
    whole = [2 * nbytes if number else 2 * inner_bytes(one) for one, nbytes, number in zip(regions, kept, numbers)]
    again = beside + max((w for w, number in zip(whole, numbers) if not number), default=0) > memory.device
    if again:
        beside -= sum(nbytes for nbytes, number in zip(of_all, numbers) if not number)

    def amount(region: TileRegion, nbytes: int, number: bool) -> int:
        wanted = beside + nbytes > memory.device or nbytes > MEMORY_SHARE * memory.device if number else again
        room = min(beside, memory.device - beside)
        most = -(-inner_bytes(region) // TILE_BYTES)
        return (min(most, max(2, math.ceil(nbytes / room))) if room > 0 else most) if wanted and most > 1 else 0

    return [amount(*one) for one in zip(regions, whole, numbers)]


def _saved_bytes(view: TokenView, region: TileRegion, number: bool) -> int:
    """Bytes of its inside that are kept for the backward: a loss's logarithms; what the last product reads."""
    if number:
        return sum(node_bytes(node, 4) for node in region.seed_products)
    again = "ac_graph_id" in view.source[region.seed_products[0]].meta
    return 0 if again else inner_bytes(region) // len(region.seed_products)
