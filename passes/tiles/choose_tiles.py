"""Choose the number of tiles of each region for tiles="auto".

The number is the smallest one for which a region is no larger than the other values in memory. If the device memory is
known, a region that ends in a number is tiled in two cases: the step does not fit without tiles, or its inside is a
large share of the device. A region that ends in rows, whose backward would recompute it, is tiled only if the step does
not fit otherwise. The other values are weights, gradients and saved values (`passes/cost/attention_memory.py`). With
unknown memory, as of a CPU, only regions that end in a number are tiled, by a fixed size.
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
"""Bytes of the inside of a region that is tiled if the device memory is unknown."""
TILE_BYTES = 1 << 28
"""Minimum bytes of a tile's inside, which is also used where no number of tiles fits."""
MEMORY_SHARE = 1 / 8
"""Share of the device memory above which an inside is tiled even if it fits."""


def inner_bytes(region: TileRegion) -> int:
    """Return the bytes of the wide values that the region computes from narrow rows."""
    return sum(map(node_bytes, region.seed_products))


def node_bytes(node: Node, least: int = 0) -> int:
    """Return the bytes of a node's value.

    Args:
        node: Any node; a non-tensor has 0 bytes.
        least: The minimum size of an element in bytes, for dtypes that are cast.
    """
    return current_bytes(node.meta["val"], least) if is_tensor(node) else 0


def is_scalar_loss(view: TokenView, region: TileRegion) -> bool:
    """Return True if the region ends in sums over the tokens and a few numbers per token."""
    thin = all(view.is_sum(x) or row_width(view, x) * MAX_THIN_WIDTH <= region.narrow for x in region.results)
    return thin and all(view.is_sum(x) or not x.meta["val"].is_floating_point() for x in region.results)


def choose_tile_counts(
    view: TokenView, regions: Sequence[TileRegion], memory: RankMemory | None, times: Callable[[Node], int]
) -> list[int]:
    """Return the number of tiles of each region; 0 for a region that is not tiled.

    Args:
        view: The token view of the local graph.
        regions: The regions.
        memory: The predicted memory of a rank, or None.
        times: Returns the number of nodes that a node represents.
    """
    numbers = [is_scalar_loss(view, region) for region in regions]
    if memory is None or math.isinf(memory.device):
        return [
            -(-inner_bytes(region) // TILE_BYTES) if number and inner_bytes(region) >= LARGE_BYTES else 0
            for region, number in zip(regions, numbers)
        ]
    kept_bytes = [_saved_bytes(view, region, number) for region, number in zip(regions, numbers)]
    of_all = [nbytes * times(view.source[region.seed_products[0]]) for region, nbytes in zip(regions, kept_bytes)]
    other_bytes = memory.used - sum(nbytes for nbytes, number in zip(of_all, numbers) if number)
    inner = [
        2 * nbytes if number else 2 * inner_bytes(one) for one, nbytes, number in zip(regions, kept_bytes, numbers)
    ]
    recompute = other_bytes + max((w for w, number in zip(inner, numbers) if not number), default=0) > memory.device
    if recompute:
        other_bytes -= sum(nbytes for nbytes, number in zip(of_all, numbers) if not number)

    def amount(region: TileRegion, nbytes: int, number: bool) -> int:
        """Return the number of tiles of a region with `nbytes` inside; 0 if it is not tiled."""
        wanted = other_bytes + nbytes > memory.device or nbytes > MEMORY_SHARE * memory.device if number else recompute
        limit = min(other_bytes, memory.device - other_bytes)
        most = -(-inner_bytes(region) // TILE_BYTES)
        return (min(most, max(2, math.ceil(nbytes / limit))) if limit > 0 else most) if wanted and most > 1 else 0

    return [amount(*one) for one in zip(regions, inner, numbers)]


def _saved_bytes(view: TokenView, region: TileRegion, number: bool) -> int:
    """Return the bytes of the inside that are saved for the backward: of a loss, its log-probabilities."""
    if number:
        return sum(node_bytes(node, 4) for node in region.seed_products)
    recompute = "ac_graph_id" in view.source[region.seed_products[0]].meta
    return 0 if recompute else inner_bytes(region) // len(region.seed_products)
