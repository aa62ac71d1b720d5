"""Move values between the shards of a sequence and those of a side region, which no sequence reaches.

Convolutions before or after the tokens have no dim of the sequence: (B, C, H, W) in place of (B, H * W, C).
`ShardSideRegions` chooses one of their dims, such as H, and marks their values (`NodeInfo.side`). Propagation starts
shards at marked values as at those of a sequence. A value with a dim of the sequence has the shards of the sequence:
there, those of the region are gathered, unless each rank has the same elements in both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, is_same_size, size_product
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.factors import BoundRule
from sp_compile.passes.sharding.placement import Placement, Shard

from .node_steps import NodeStep

LEAVES_REGION = "its rows are those of a region without a sequence"


def leaving_operands(
    axes: Axes, node: Node, operands: Sequence[Node], have: Sequence[Placement], sides: Collection[Node]
) -> list[int]:
    """Return the indices of the operands that a node gathers, as they are sharded along a dim of a side region.

    The node has rows of a sequence, in its result or in another operand.

    Args:
        axes: The axes.
        node: The node.
        operands: Its operands.
        have: Their placements.
        sides: The values that are sharded along a dim of a side region.
    """
    sharded = [i for i, placement in enumerate(have) if isinstance(placement, Shard)]
    leaving = [i for i in sharded if operands[i] in sides]
    return leaving if len(leaving) < len(sharded) or axes.shard(node) is not None else []


def switch_rows(axes: Axes, call: OpCall, rule: BoundRule | None, have: Sequence[Placement], n: int) -> NodeStep | None:
    """Return the step of a reshape from rows of a sequence to those of a side region, or back, if no element moves.

    For 8 rows of 6 patches on 2 ranks, a rank has 4 rows, which are 24 of the 48 patches. The result is None for other
    ops, and if a rank has different elements in the two, as for 9 rows.

    Args:
        axes: The axes.
        call: The call.
        rule: Its rule.
        have: The placement of its operand.
        n: The number of ranks.
    """
    target = axes.shard(call.node) or node_info(call.node).side
    if rule is None or not rule.reshapes or len(have) != 1 or target is None or not isinstance(have[0], Shard):
        return None
    before, after = _count_blocks(call.shape(), have[0], n), _count_blocks(call.result_shapes()[0], target, n)
    return NodeStep(tuple(have), (target,)) if before and after and is_same_size(before, after) else None


def _count_blocks(shape: Sequence[Size], shard: Shard, n: int) -> Size:
    """Return the number of equal parts of a value that are each split over the ranks, or 0 with padding.

    A shard along dim 2 of (2, 3, 8, 6) has 2 * 3 parts, of each of which a rank has adjacent elements.
    """
    has_equal_rows = shard.frame.is_exact(n) and shard.frame.order.is_in_order
    return size_product((*shape[: shard.dim], shard.outer)) if has_equal_rows else 0


def is_side_step(
    axes: Axes, node: Node, have: Sequence[Placement], step: NodeStep, operand_sides: Collection[Node]
) -> bool:
    """Return True if the result of a step is sharded along a dim of a side region.

    Args:
        axes: The axes.
        node: The node.
        have: The placements of its operands.
        step: Its step.
        operand_sides: The operands of which this is True.
    """
    if axes.shard(node) is not None or not any(isinstance(placement, Shard) for placement in step.results):
        return False
    starts = not any(isinstance(placement, Shard) for placement in have)
    side = node_info(node).side
    return bool(operand_sides) or (side is not None and (starts or step.results == (side,)))
