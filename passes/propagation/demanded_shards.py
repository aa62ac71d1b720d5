"""Shard replicated values that are only demanded as one shard, from the last one to the first.

A mask `cols <= rows` on every rank, of which attention reads the rank's rows, becomes `cols <= shard(rows)`.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from sp_compile.passes.graph.call import is_tensor, node_shape, parse_overloads
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.placement import REPLICATE, Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import lookup_rule, transfer_of

from .node_steps import NodeStep, shard_factor

FACTORIES = parse_overloads("full ones zeros")


def shard_demanded(plan: PlacementPlan, gm: GraphModule, axes: Axes, n: int, starts_sequences: bool) -> None:
    """Shard replicated values that are only demanded as one shard, if this saves memory.

    These are constants with one value, such as zeros, and squares: values with a row and a column for every position,
    such as masks of attention, that are computed from replicated operands.
    """
    for node in reversed(gm.graph.nodes):
        if not (node.target in FACTORIES or (starts_sequences and n > 1 and _is_equal_everywhere(plan, node))):
            continue
        demanded = {p for user in node.users for p in demanded_placements(node, user, plan) or [REPLICATE]}
        shard = next(iter(demanded), None)
        if len(demanded) != 1 or not isinstance(shard, Shard):  # all reads must demand the same shard
            continue
        is_constant = node.target in FACTORIES
        if is_constant or _is_square(axes, node, shard):
            step = NodeStep((), (shard,)) if is_constant else _shard_result(plan, node, shard, n)
            if step is not None and step.wants is not None:
                plan.wants[node], plan.placements[node] = step.wants, step.results


def _is_equal_everywhere(plan: PlacementPlan, node: Node) -> bool:
    """Return True if every rank computes the same value at a node, without draws and writes."""
    if node.op != "call_function" or not is_tensor(node) or node in plan.wants or plan.of(node) != REPLICATE:
        return False
    return transfer_of(node.target) is None and not is_written(node) and not is_random(node)


def _is_square(axes: Axes, node: Node, shard: Shard) -> bool:
    """Return True if a value has another dim for the positions of its sharded dim."""
    sequence_dims, shape = axes.sequence_dims(node), node_shape(node)
    return any(
        d != shard.dim and (d in sequence_dims or is_same_size(size, shard.frame.length))
        for d, size in enumerate(shape)
    )


def _shard_result(plan: PlacementPlan, node: Node, shard: Shard, n: int) -> NodeStep | None:
    """Return the step of a node with replicated operands that computes one shard of its result, or None."""
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or rule.operand_placements is not None or rule.lenders:
        return None
    if node_info(node).no_rule is not None or any(plan.of(x) != REPLICATE for x in call.operands):
        return None
    factor, base = rule.local_part(rule.results[0], shard)
    if not factor or rule.kind(factor) != "pass":
        return None
    return shard_factor(call, rule, [REPLICATE] * len(call.operands), factor, base, n, ())


def demanded_placements(node: Node, user: Node, plan: PlacementPlan) -> list[Placement]:
    """Return the placements in which a user on shards reads a node, one for each read."""
    if user not in plan.wants or transfer_of(user.target) is not None:
        return []
    call, _ = lookup_rule(user) or (None, None)
    return [want for x, want in zip(call.operands, plan.wants[user]) if x is node] if call is not None else []
