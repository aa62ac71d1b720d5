"""Shard replicated values that are only demanded as one shard, from the last one to the first.

A mask `cols <= rows` on every rank, of which attention reads the rank's rows, becomes `cols <= shard(rows)`. If the
graph also returns the value, as a layer of T5 its position bias for the next layers, the result is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from sp_compile.passes.graph.call import is_tensor, node_shape, parse_overloads
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.output_rules import gather_reason, output_options
from sp_compile.passes.sharding.placement import REPLICATE, Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import lookup_rule, transfer_of

from .node_steps import NodeStep, shard_factor

FACTORIES = parse_overloads("full ones zeros")


def shard_demanded(
    plan: PlacementPlan, gm: GraphModule, axes: Axes, n: int, starts_sequences: bool, outputs: str | Sequence[str]
) -> None:
    """Change the plan: compute only a shard of replicated values of which all users read the same shard.

    This saves memory for constants with one value, such as zeros, and for squares, such as masks: values with a row and
    a column for every position, computed from replicated operands.

    Args:
        plan: The plan of the graph, which is changed.
        gm: The graph.
        axes: The dims of the graph's values, and which of them are sequences.
        n: The number of ranks.
        starts_sequences: True if replicated values other than constants may be sharded.
        outputs: The outputs that stay sharded, see `output_options`.
    """
    options = output_options(gm.graph.output_node(), outputs)
    for node in reversed(gm.graph.nodes):  # users first: a node that becomes sharded demands shards of its operands
        is_constant = node.target in FACTORIES
        if not is_constant and not (starts_sequences and n > 1 and _can_be_divided(plan, node)):
            continue
        # A user that does not run on shards reads all rows.
        readers = [user for user in node.users if user.op != "output" or not _may_be_sharded(node, options[node])]
        demanded = {p for user in readers for p in demanded_placements(node, user, plan) or [REPLICATE]}
        if len(demanded) != 1:
            continue
        (shard,) = demanded
        if not isinstance(shard, Shard) or not (is_constant or _is_square(axes, node, shard)):
            continue
        # The step of a constant has no operands: `wants` is ().
        step = NodeStep((), (shard,)) if is_constant else _shard_result(plan, node, shard, n)
        if step is not None and step.wants is not None:  # no `wants`: the node cannot run on shards
            plan.wants[node], plan.placements[node] = step.wants, step.results


def _may_be_sharded(node: Node, options: Sequence[str]) -> bool:
    """Return True for an output that its callers may get as a full tensor or as a sharded one (`outputs="lazy"`).

    With "local", they expect the rows of a rank if the value is sharded, and a full tensor if it is not.
    """
    return "local" not in options and not gather_reason(node.meta["val"], options)


def _can_be_divided(plan: PlacementPlan, node: Node) -> bool:
    """Return True for an op with a replicated result of which each rank may compute only a shard.

    It is no random draw, write or exchange. It is not in `plan.wants`, the nodes for whose operands propagation has
    chosen placements: only a node that runs on replicated operands so far can be changed to run on shards.
    """
    if node.op != "call_function" or not is_tensor(node) or node in plan.wants or plan.of(node) != REPLICATE:
        return False
    return transfer_of(node.target) is None and not is_written(node) and not is_random(node)


def _is_square(axes: Axes, node: Node, shard: Shard) -> bool:
    """Return True if a value has a second dim that is a sequence, or is as long as its sharded dim."""
    sequence_dims = axes.sequence_dims(node)
    return any(
        d != shard.dim and (d in sequence_dims or is_same_size(size, shard.frame.length))
        for d, size in enumerate(node_shape(node))
    )


def _shard_result(plan: PlacementPlan, node: Node, shard: Shard, n: int) -> NodeStep | None:
    """Return the step (placements of operands and results) with which a node computes only a shard of its result.

    The result is None if its operands are not all replicated, or if its rule does not pass the sharded dim.
    """
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None:
        return None
    if rule.operand_placements is not None or rule.lenders:  # fixed placements, or operands read for their shape only
        return None
    # `no_rule` is the reason of an earlier pass why the node needs full operands, or None.
    if node_info(node).no_rule is not None or any(plan.of(x) != REPLICATE for x in call.operands):
        return None
    # The factor of the result's dim that is sharded, such as s of "(b s)", and the shard as one of that factor alone.
    factor, shard_of_factor = rule.local_part(rule.results[0], shard)
    if not factor or rule.kind(factor) != "pass":
        return None
    have = [REPLICATE] * len(call.operands)
    return shard_factor(call, rule, have, factor, shard_of_factor, n, demands=())


def demanded_placements(node: Node, user: Node, plan: PlacementPlan) -> list[Placement]:
    """Return the placements in which a user reads a node, one for each read; [] if the user does not run on shards."""
    # An exchange was written for the present placement of its operand, so it counts as a user that is not on shards.
    if user not in plan.wants or transfer_of(user.target) is not None:
        return []
    ruled_call = lookup_rule(user)
    operands = [] if ruled_call is None else ruled_call.call.operands
    return [want for x, want in zip(operands, plan.wants[user]) if x is node]
