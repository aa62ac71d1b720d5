"""Count the FLOPs of tiled work: those of a tile, times the number of tiles.

torch.utils.flop_counter and the cost model use these functions. A program has one body per length of a tile, and a body
two parts: the graphs "forward" and "gradients" (`tile_program.py`).
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg
from torch.utils.flop_counter import flop_registry, register_flop_formula

from sp_compile.lowering.torch_compat import OpOverload, schema_of, size_hint

from . import tile_ops as ops  # noqa: F401  (registers the operators)
from .tile_program import PROGRAMS, TilePart
from .tile_sums import TILE_SUMS, TileSum

# The number of grouped products that a call of each op computes. torch has no formula for them; none is registered,
# because its counters belong to the user.
NUM_GROUPED_PRODUCTS = {
    "aten::_grouped_mm": 1,
    "transformers::grouped_mm_fallback": 1,
    "transformers::grouped_mm_fallback_backward": 2,
}


@register_flop_formula(torch.ops.sp.run_tiles, get_raw=True)
def tiled_flops(
    kinds: Sequence[str], cotangents: Any, rows: list[Tensor], shared: Any, tiles: int, name: str, *_: Any, **_meta: Any
) -> int:
    """Return the FLOPs of ``sp::run_tiles``: those of the longest tile, scaled to the number of rows.

    The arguments are those of the operator. The graph of the gradients also recomputes the forward.
    """
    program = PROGRAMS[name]
    body = program.bodies[max(program.bodies)]  # `bodies` has one body for each length of a tile
    tile_part = body.part(kinds)
    row_dim = program.rows[0]  # the dim of the first operand that is cut into tiles
    tile_rows, all_rows = size_hint(tile_part.inputs[0].shape[row_dim]), size_hint(rows[0].shape[row_dim])
    # How the loop adds each gradient of a tile to its sum, possibly by a matrix product.
    sums = [TILE_SUMS[value.adds] for value in program.gradients] if "gradients" in kinds else []
    return (_graph_flops(tile_part) + _accumulated_flops(tile_part, sums)) * all_rows // tile_rows


def _accumulated_flops(part: TilePart, sums: list[TileSum]) -> int:
    """Return the FLOPs of adding the gradients of one tile to the sums over all tiles, such as `total += a @ b`.

    The last results of the part's graph are the summands, such as a and b: `num_summands` for each of `sums`, in order.
    """
    results = part.graph.graph.output_node().args[0]
    num_summands = sum(tile_sum.num_summands for tile_sum in sums)
    summands = iter(results[len(results) - num_summands :])
    flops = 0
    for tile_sum in sums:
        shapes = [x.meta["val"].shape for x in islice(summands, tile_sum.num_summands)]
        flops += tile_sum.flops(*shapes)
    return flops


@cache
def _graph_flops(part: TilePart) -> int:
    """Return the FLOPs of the matrix products of a tile's graph."""
    return sum(map(node_flops, part.graph.graph.nodes))


def node_flops(node: Node) -> int:
    """Return the FLOPs of a matrix product or an attention, as torch counts them, of a grouped product or a solve.

    Recurrences of matrices have formulas of their own in torch's table. All other nodes count as 0.
    """
    if node.target is torch.ops.aten.linalg_solve_triangular.default:  # torch has no formula for it
        matrix, result = node.args[0].meta["val"], node.meta["val"]
        return size_hint(result.numel() * matrix.shape[-1])
    if is_grouped_product(node):
        return NUM_GROUPED_PRODUCTS[schema_of(node.target).name] * _grouped_flops(*node.args[:2])
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket not in flop_registry:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    return size_hint(flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=node.meta["val"]))


def is_grouped_product(node: Node) -> bool:
    """Return True if a node multiplies each group of rows by its own matrix.

    Products that reduce each group of rows to a matrix, as gradients of weights do, count, too.
    """
    return isinstance(node.target, OpOverload) and schema_of(node.target).name in NUM_GROUPED_PRODUCTS


def _grouped_flops(a: Node, b: Node) -> int:
    """Return the FLOPs of a grouped product of a and b, with E groups, R rows, and I and O columns.

    For the shapes (E, R, I) and (E, I, O), each group multiplies R rows: the FLOPs of E products. In all other forms,
    (R, I) and (E, I, O), or (I, R) and (R, O), or (E, O, I) and (I, R), the R rows are divided among the groups: the
    FLOPs of one product.
    """
    a_shape, b_shape = (list(map(size_hint, n.meta["val"].shape)) for n in (a, b))
    num_products = a_shape[0] if len(a_shape) == len(b_shape) == 3 else 1
    return num_products * 2 * math.prod([*a_shape[-2:], b_shape[-1]])
