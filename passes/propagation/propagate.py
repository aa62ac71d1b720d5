"""Propagate placements through a graph: compute a PlacementPlan with open demands.

The graph is not changed. One forward sweep visits all nodes. A node with a sharded operand runs on shards if its rule
lets the factor pass; otherwise it states a demand. A node with replicated operands stays replicated, unless a sequence
of floats starts there (an embedding, the first pointwise op on an input): then its operands are demanded sharded, which
is a local slice. Propagation never inserts a collective. It follows Shardy's factor propagation.

    x: S(1), linear(x, w) -> S(1); mean(x, 1) -> Partial(), with a demand of kind "mean" for a later pass

`node_steps.py` computes the placements of one node. In the end, `demanded_shards.py` shards some replicated values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.buckets import bucket_source
from sp_compile.passes.graph.call import OpCall, is_tensor, result_number
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.propagation.linear_ops import is_partial_sum
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.factors import BoundRule
from sp_compile.passes.sharding.output_rules import gather_reason, output_options
from sp_compile.passes.sharding.placement import (
    REPLICATE,
    VARYING,
    Demand,
    Frame,
    Partial,
    Placement,
    PlacementPlan,
    Shard,
)
from sp_compile.passes.sharding.rule import has_rule, lookup_rule, transfer_of
from sp_compile.passes.sharding.rules.exchange_rules import has_expected_placement

from .demanded_shards import shard_demanded
from .node_steps import (
    SUMMAND_GRAD,
    NodeStep,
    make_demands,
    place_as_written,
    propagate_factors,
    replicate_operands,
    start_sharding,
)
from .row_units import express_in_rows
from .side_rows import LEAVES_REGION, is_side_step, leaving_operands, switch_rows


def mask_values(gm: GraphModule) -> set[Node]:
    """Return the values that are used only as masks, or to compute masks: no sequence starts at them.

    An op such as attention indexes a mask by position, so that it can read a replicated one as it is
    (`BoundRule.masks`).
    """
    masks: set[Node] = set()
    for node in reversed(gm.graph.nodes):  # users first
        is_used = node.op == "call_function" and bool(node.users)
        if is_used and all(user in masks or _is_mask_use(node, user) for user in node.users):
            masks.add(node)
    return masks


def _is_mask_use(node: Node, user: Node) -> bool:
    """Return True if the user reads the node, and only as operands that its rule declares to be masks."""
    call, rule = lookup_rule(user) or (None, None)
    if call is None or rule is None:
        return False
    indices = [i for i, operand in enumerate(call.operands) if operand is node]
    return bool(indices) and all(i in rule.masks for i in indices)


DIFFERENT_VALUES = "another operand differs between ranks, so every rank needs all rows of this one"
INVARIANT = "it is replicated, so the gradient that it returns is replicated, too"
# returns the reason why a call with operands of these placements should not run on shards, or None
DeclineRule = Callable[[OpCall, BoundRule | None, Sequence[Placement]], str | None]


def propagate(
    gm: GraphModule,
    axes: Axes,
    n: int,
    inputs: Mapping[Node, Placement] | None = None,
    outputs: str | Sequence[str] = "gather",
    starts_sequences: bool = True,
    declines: DeclineRule | None = None,
    window_starts: Mapping[Node, Frame] | None = None,
) -> PlacementPlan:
    """Return the placement plan of a graph for `n` ranks.

    Args:
        gm: The graph, which is not changed.
        axes: The dims of the graph's values, and which of them are sequences.
        n: The number of ranks.
        inputs: The placements of placeholders and attributes that are not replicated.
        outputs: The outputs that stay sharded, see `output_options`.
        starts_sequences: True if replicated values may be sharded; else only inputs and exchanges start shards.
        declines: Returns a reason for which a node should not run on shards, or None.
        window_starts: Nodes at which a sequence starts as a window of another one (`sharding/window_starts.py`).

    Returns:
        The plan, with a demand for each operand whose placement its op cannot use.
    """
    plan = PlacementPlan()
    # Nodes with replicated operands that stay replicated.
    replicated = mask_values(gm) if starts_sequences else frozenset(gm.graph.nodes)
    sides: set[Node] = set()  # values that are sharded along a dim of a side region
    for node in gm.graph.nodes:
        # If the program computes the sequence in chunks, x.view(B, chunks, rows, D), no chunk may be on two ranks:
        # `express_in_rows` adds this to the frames.
        if node.op in ("placeholder", "get_attr"):
            plan.placements[node] = (express_in_rows(axes, node, 0, (inputs or {}).get(node, REPLICATE)),)
        elif node.op == "output":
            _visit_output(plan, node, outputs, sides)
        elif node.op == "call_function":
            window = (window_starts or {}).get(node)
            step = _visit(plan, axes, node, n, node in replicated, declines, window, sides)
            if step.wants is not None:
                plan.wants[node] = step.wants
            plan.placements[node] = tuple(express_in_rows(axes, node, i, p) for i, p in enumerate(step.results))
            plan.demands.extend(step.demands)
    shard_demanded(plan, gm, axes, n, starts_sequences, outputs)
    return plan


def _visit_output(plan: PlacementPlan, node: Node, outputs: str | Sequence[str], sides: set[Node]) -> None:
    """Add a demand to the plan for each output that may not be returned as it is placed.

    A partial sum is reduced. A sharded value is gathered, unless the option `outputs` keeps it sharded; one of a side
    region always is. A replicated value whose gradient must be a summand on each rank has a demand "invariant": the
    caller returns the same full gradient on every rank.
    """
    options = output_options(node, outputs)
    for i, source in enumerate(node.all_input_nodes):
        have = plan.of(source)
        if isinstance(have, Partial):
            plan.demands.append(Demand(node, i, "reduce", have, why="a result of the model"))
        elif have == SUMMAND_GRAD:
            plan.demands.append(Demand(node, i, "invariant", have, why=INVARIANT))
        elif isinstance(have, Shard):
            why = gather_reason(source.meta["val"], options[source])
            why = why or (LEAVES_REGION if source in sides else "")
            if why:
                plan.demands.append(Demand(node, i, "gathered", have, why=why))


def _visit(
    plan: PlacementPlan,
    axes: Axes,
    node: Node,
    n: int,
    keep_replicated: bool,
    declines: DeclineRule | None,
    window: Frame | None,
    sides: set[Node],
) -> NodeStep:
    """Return the step of a node: the placements of its operands and results, and its demands.

    Args:
        plan: The plan so far.
        axes: The dims of the graph's values, and which of them are sequences.
        node: A node that is no input or output.
        n: The number of ranks.
        keep_replicated: If True, no sequence starts at the node.
        declines: As in `propagate`.
        window: The frame by which a sequence that starts at the node is sharded, if it is not its own: that of h[:, 1:]
            for an embedding that is added to it. Each rank then has the same rows of both. None for other nodes.
        sides: The values so far that are sharded along a dim of a side region; extended by the node if its result is.
    """
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        sides.update([node] if node.args[0] in sides else [])
        return NodeStep(None, (_item_placement(plan, node, node.args[0]),))
    call, rule = lookup_rule(node) or (None, None)
    if is_written(node):  # in place: it runs on replicated operands
        rule = None
    operands = call.operands if call is not None else [x for x in node.all_input_nodes if is_tensor(x)]
    have = [plan.of(x) for x in operands]
    # An exchange determines the placement of its result.
    transfer = transfer_of(node.target)
    if transfer is not None and call is not None:
        why = "the exchange was written for another placement of its operand"
        stale = [i for i, p in enumerate(have) if not has_expected_placement(call, p)]
        return NodeStep(tuple(have), transfer(call), tuple(Demand(node, i, "stale", have[i], why=why) for i in stale))
    # A linear op that `MarkPartialSums` has marked runs on partial sums. Its other operands are replicated, and each
    # rank computes only a summand of their gradients (SUMMAND_GRAD).
    if node_info(node).combines and call is not None and is_partial_sum(call, have):
        return NodeStep(tuple(p if isinstance(p, Partial) else SUMMAND_GRAD for p in have), (Partial(),))
    # All other ops run on reduced sums.
    demands = [Demand(node, i, "reduce", p) for i, p in enumerate(have) if isinstance(p, Partial)]
    have = [REPLICATE if isinstance(p, Partial) else p for p in have]
    step = _region_step(axes, node, call, rule, operands, have, n, keep_replicated, window, sides)
    declined = declines(call, rule, have) if declines and call and step.wants else None  # a reason, or None
    if declined is not None:
        step = replicate_operands(node, have, kind="gathered", why=declined, num_results=len(step.results))
    step = _mark_varying(node, rule, have, step)
    # A step on replicated operands must have equal gradients and random draws on all ranks. SUMMAND_GRAD is the
    # placement of a replicated value of whose gradient each rank computes one summand.
    if step.wants is None and VARYING not in step.results:
        demands += [Demand(node, i, "invariant", p, why=INVARIANT) for i, p in enumerate(have) if p == SUMMAND_GRAD]
    demands += step.demands
    if step.wants is None and n > 1 and is_random(node) and not _is_broadcast_draw(node):
        why = "a random draw that must be equal on every rank"
        # A demand of the op itself: the index 0 refers to no operand, since draws such as randn have none.
        demands.append(Demand(node, 0, "draw", REPLICATE, why=why))
    return NodeStep(step.wants, step.results, tuple(demands))


def _region_step(
    axes: Axes, node: Node, call: OpCall | None, rule: BoundRule | None, operands: Sequence[Node],
    have: Sequence[Placement], n: int, keep_replicated: bool, window: Frame | None, sides: set[Node],
) -> NodeStep:  # fmt: skip
    """Return the step of a node, and add it to `sides` if its result is sharded along a dim of a side region.

    Operands with rows of a side region are gathered if the node has rows of a sequence, unless no element moves. The
    arguments are those of `_node_step` and `_visit`, and the operands of the node.
    """
    crosses = call is not None and (rule is None or rule.operand_placements is None)
    left = leaving_operands(axes, node, operands, have, sides) if crosses else []
    enters = node_info(node).side is not None and sides.isdisjoint(operands)
    step = switch_rows(axes, call, rule, have, n) if call is not None and crosses and (left or enters) else None
    if step is None:
        kept = [REPLICATE if i in left else p for i, p in enumerate(have)]
        step = _node_step(axes, node, call, rule, kept, n, keep_replicated, window)
        wants = step.wants or kept  # each rank has a summand of the gradient of an operand that it does not slice
        gathers = [Demand(node, i, "gathered", have[i], wants[i] == SUMMAND_GRAD, LEAVES_REGION) for i in left]
        step = NodeStep(step.wants, step.results, (*gathers, *step.demands))
    staying = [x for i, x in enumerate(operands) if x in sides and i not in left]
    if is_side_step(axes, node, have, step, staying):
        sides.add(node)
    return step


def _mark_varying(node: Node, rule: BoundRule | None, have: Sequence[Placement], step: NodeStep) -> NodeStep:
    """Return the step of a node with results that differ by rank (Varying) if an operand does; else `step`.

    A rule may expect such operands, and then defines the results itself. A pass may have set the placement of the
    result of a collective of the user's program (`NodeInfo.result`). Every rank then needs all rows of the sharded
    operands, because it combines them with other values.

    Args:
        node: The node.
        rule: Its rule, if any.
        have: The placements of its operands.
        step: The step by its rule.
    """
    expected = (rule.operand_placements if rule is not None else None) or (REPLICATE,) * len(have)
    has_varying = any(p == VARYING and want != VARYING for want, p in zip(expected, have))
    result = node_info(node).result or (VARYING if has_varying else None)
    if result is None:
        return step
    # `keeps_sharding` states that the gradient of a gathered operand is partial: each rank combines the gathered rows
    # with other values, and thus computes another summand of it.
    demands = make_demands(node, have, kind="varying", why=DIFFERENT_VALUES, keeps_sharding=True)
    return NodeStep(None, (result,) * len(step.results), demands)


def _item_placement(plan: PlacementPlan, node: Node, source: Node) -> Placement:
    """Return the placement of a getitem of `source`, a node with several results.

    A bucket, split(all_reduce(cat(vectors))), reduces several vectors at once, so that all of it is Varying if one of
    them is. Each of its pieces has the placement of its own vector.
    """
    placements = plan.placements.get(source, ())
    vector = bucket_source(node) if VARYING in placements else None
    if vector is None and len(placements) > 1 and isinstance(node.args[1], int):
        return placements[result_number(node)]
    return plan.of(vector or source)


def random_results(node: Node) -> list[Node]:
    """Return the tensors that a random op returns: its node, or the getitems that select them from a tuple."""
    if is_tensor(node):
        return [node]
    return [user for user in node.users if user.target is operator.getitem and is_tensor(user)]


def _is_broadcast_draw(node: Node) -> bool:
    """Return True if every result of a random op is already broadcast from one rank."""
    users = [user for result in random_results(node) for user in result.users]
    return all(user.target is torch.ops.sp.broadcast.default for user in users)


def _node_step(
    axes: Axes, node: Node, call: OpCall | None, rule: BoundRule | None, have: Sequence[Placement], n: int,
    keep_replicated: bool, window: Frame | None,
) -> NodeStep:  # fmt: skip
    """Return the step of an op by its rule: the placements of its operands and results, and its demands.

    Without a rule, the op runs on replicated operands. `_visit` has removed the rule of an op whose result is changed
    in place.

    Args:
        axes: The dims of the graph's values, and which of them are sequences.
        node: Node of the op.
        call: Its call; None for a node that is no call of an op.
        rule: Its rule; None without one.
        have: Placements of the operands, none of which is partial.
        n: Number of ranks.
        keep_replicated: If True, no sequence starts at the node.
        window: A frame of another sequence, if a sequence that starts at the node is a window of that one.

    Returns:
        The step. Its `wants` is None if the node does not run on shards.
    """
    num_results = max(1, len(call.results())) if call is not None else 1
    if call is None or rule is None or node_info(node).no_rule is not None:
        qualifier = " for such operands" if has_rule(node.target) else ""
        why = node_info(node).no_rule or f"{node.target} has no sharding rule{qualifier}"
        if is_written(node):
            why = "its result is changed in place"
        return replicate_operands(node, have, kind="no rule", why=why, num_results=num_results)
    if rule.operand_placements is not None:  # it runs on shards already
        return place_as_written(call, rule, have)
    if any(isinstance(p, Shard) for p in have):
        return propagate_factors(call, rule, have, n)
    started = None if keep_replicated else start_sharding(axes, call, rule, n, window)
    return started or NodeStep(None, (REPLICATE,) * num_results)
