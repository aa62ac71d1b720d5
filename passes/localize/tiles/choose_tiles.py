"""Choose the number of tiles of each region for tiles="auto".

A region computes wide values (its inside) from narrow rows, such as logits (`tile_regions.py`). It ends in a number,
such as a loss, or in narrow rows. A tile is a part of the rows: only its part of the inside is in memory.

The number is the smallest one for which a region is no larger than the other values in memory. If the device memory is
known, a region that ends in a number (a loss) is tiled in two cases: the step does not fit without tiles, or its inside
is a large share of the device. A region that ends in rows, whose backward would recompute it, is tiled only if the step
does not fit otherwise. The other values are weights, gradients and saved values (`passes/cost/attention_memory.py`).
With unknown memory, as of a CPU, only regions that end in a number are tiled, by a fixed size.

Of code that runs in chunks of rows itself (`IN_CHUNKS`), as a fused loss of a package does, a tile has about TILE_BYTES
in all cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.fx import Node

from sp_compile.passes.cost.attention_memory import RankMemory
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.node_info import is_in_chunks
from sp_compile.passes.graph.sizes import current_bytes

from .tile_regions import TileRegion, has_thin_results
from .tile_view import TokenView

LARGE_BYTES = 1 << 30  # bytes of the inside of a region that is tiled if the device memory is unknown
TILE_BYTES = 1 << 28  # minimum bytes of a tile's inside, which is also used where no number of tiles fits
MEMORY_SHARE = 1 / 8  # share of the device memory above which an inside is tiled even if it fits


def inner_bytes(region: TileRegion) -> int:
    """Return the bytes of the region's inside, such as logits: the results of the products that widen its rows."""
    return sum(map(node_bytes, region.seed_products))


def node_bytes(node: Node, min_itemsize: int = 0) -> int:
    """Return the bytes of a node's value.

    Args:
        node: Any node; a non-tensor has 0 bytes.
        min_itemsize: The minimum bytes of an element, as for a value that is cast to float32 (4).
    """
    return current_bytes(node.meta["val"], min_itemsize) if is_tensor(node) else 0


def is_scalar_loss(view: TokenView, region: TileRegion) -> bool:
    """Return True if the region ends in numbers, as a loss does.

    Its results are then sums over the tokens, and at most a few integers per token, such as the predicted class.
    """
    return has_thin_results(view, region) and all(
        view.is_sum(x) or not x.meta["val"].is_floating_point() for x in region.results
    )


def choose_tile_counts(
    view: TokenView, regions: Sequence[TileRegion], memory: RankMemory | None, times: Callable[[Node], int]
) -> list[int]:
    """Return the number of tiles of each region for tiles="auto"; 0 for a region that is not tiled.

    A region computes wide values (its inside) from rows; a tile has a part of the rows, and only its part of the inside
    is in memory. A region that ends in a loss is tiled if a step does not fit in memory otherwise, or if its inside is
    a large share of the device. A region that ends in rows, which the backward recomputes, is tiled only in the first
    case. If the memory is unknown, large losses are tiled.

    Args:
        view: The token view: a copy of the local graph, with the placement of the rows of each value.
        regions: The regions of the view.
        memory: The predicted memory of a rank, or None.
        times: Returns the number of equal nodes (of equal layers) that a node of the local graph represents.
    """
    losses = [is_scalar_loss(view, region) for region in regions]
    chunked = [any(is_in_chunks(view.to_local[x]) for x in region.seed_products) for region in regions]
    if memory is None or math.isinf(memory.device):
        return list(map(_count_without_memory, regions, losses, chunked))
    # For each region, the bytes of its inside that the forward saves for the backward if the region is not tiled.
    saved_bytes = [_saved_bytes(view, region, is_loss) for region, is_loss in zip(regions, losses)]
    # A region may represent regions of several equal layers (`times`), whose saved values are in memory together.
    layer_bytes = [size * times(view.to_local[region.seed_products[0]]) for region, size in zip(regions, saved_bytes)]
    loss_bytes = sum(nbytes for nbytes, is_loss in zip(layer_bytes, losses) if is_loss)
    other_bytes = memory.used - loss_bytes  # bytes in memory while a region runs, besides its inside
    # The peak of a region without tiles: its inside and the gradients of the inside, hence twice. A loss computes both
    # in float32, the dtype of the log-probabilities in `saved_bytes`.
    peaks = [
        2 * (nbytes if is_loss else inner_bytes(region))
        for region, nbytes, is_loss in zip(regions, saved_bytes, losses)
    ]
    peaks_of_rows = [peak for peak, is_loss in zip(peaks, losses) if not is_loss]  # of regions that end in rows
    must_tile_rows = other_bytes + max(peaks_of_rows, default=0) > memory.device
    if must_tile_rows:  # tiled regions that end in rows save nothing of their inside
        other_bytes -= sum(layer_bytes) - loss_bytes

    def count_tiles(region: TileRegion, peak: int, is_loss: bool, is_chunked: bool) -> int:
        """Return the number of tiles of a region; 0 if it is small or the step fits in memory without tiles.

        Args:
            region: The region.
            peak: Bytes that the region needs without tiles.
            is_loss: True if the region ends in a number. Others are tiled only if `must_tile_rows`.
            is_chunked: True if the code of the user computes the region in chunks.
        """
        if is_chunked:
            return _chunk_count(region)
        fits = other_bytes + peak <= memory.device and peak <= MEMORY_SHARE * memory.device
        is_needed = not fits if is_loss else must_tile_rows
        max_tiles = _max_tiles(region)
        if max_tiles <= 1 or not is_needed:
            return 0
        # A tile may use the free memory, but no more than all other values.
        limit = min(other_bytes, memory.device - other_bytes)
        if limit <= 0:  # no memory is free
            return max_tiles
        return min(max_tiles, max(2, math.ceil(peak / limit)))

    return [count_tiles(*arguments) for arguments in zip(regions, peaks, losses, chunked)]


def _count_without_memory(region: TileRegion, is_loss: bool, is_chunked: bool) -> int:
    """Return the number of tiles of a region if the memory is unknown; 0 if it is not tiled.

    A large loss is tiled, and so is code that computes the region in chunks itself.
    """
    if is_chunked:
        return _chunk_count(region)
    return _max_tiles(region) if is_loss and inner_bytes(region) >= LARGE_BYTES else 0


def _max_tiles(region: TileRegion) -> int:
    """Return the largest useful number of tiles: with it, the inside of a tile has about TILE_BYTES, the minimum."""
    return -(-inner_bytes(region) // TILE_BYTES)  # rounded up


def _chunk_count(region: TileRegion) -> int:
    """Return the number of tiles of a region that the user's code computes in chunks; 0 if one tile is enough."""
    tiles = _max_tiles(region)
    return tiles if tiles > 1 else 0


def _saved_bytes(view: TokenView, region: TileRegion, is_loss: bool) -> int:
    """Return the bytes of the region's inside that are saved for the backward if it is not tiled.

    A loss saves its log-probabilities, of the size of its logits, in float32. A checkpointed region saves nothing.
    Other regions, such as an MLP with a gate and an up projection, save about one of their wide values. `seed_products`
    are the products that compute the wide values: of a loss the logits, of this MLP both projections.
    """
    if is_loss:
        return sum(node_bytes(node, min_itemsize=4) for node in region.seed_products)
    is_checkpointed = "ac_graph_id" in view.to_local[region.seed_products[0]].meta  # set in checkpointed regions only
    return 0 if is_checkpointed else inner_bytes(region) // len(region.seed_products)
