"""Propagate placements through a graph: compute a PlacementPlan with open demands.

The graph is not changed. One forward sweep visits all nodes. A node with a sharded operand runs on shards if its rule
lets the factor pass; otherwise it states a demand. A node with replicated operands stays replicated, unless a sequence
of floats starts there (an embedding, the first pointwise op on an input): then its operands are demanded sharded, which
is a local slice. Propagation never inserts a collective. It follows Shardy's factor propagation.

    x: S(1), linear(x, w) -> S(1); mean(x, 1) -> Partial(), with a demand of kind "mean" for a later pass
Names: `have` are the placements of a node's operands, `wants` those with which it runs on shards; n is the number of
ranks. A factor is a named index of a rule ("b s d, d e -> b s e"), of kind "pass" if the op runs row by row along it. A
step is the `wants`, results and demands of one node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.buckets import bucket_source
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, parse_overloads, result_number
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import Size, assume_large, divides, is_same_size, size_product
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.factors import BoundRule, Dims, dim_factors, flatten_dims
from sp_compile.passes.sharding.linear_ops import is_partial_sum
from sp_compile.passes.sharding.output_rules import gather_reason, output_options
from sp_compile.passes.sharding.placement import (
    REPLICATE,
    VARYING,
    Demand,
    Frame,
    Partial,
    Placement,
    PlacementPlan,
    Replicate,
    Shard,
)
from sp_compile.passes.sharding.rule import has_rule, lookup_rule, transfer_of
from sp_compile.passes.sharding.rules.exchange_rules import has_expected_placement
from sp_compile.passes.sharding.window_rules import place_window


def shard_of_factor(
    rule: BoundRule, base: Shard, dims: Dims, shape: Sequence[Size], factor: str, n: int
) -> Shard | None:
    """Return the placement of an operand or result if `factor` is sharded as in `base`, or None.

    Args:
        rule: The rule of the op.
        base: The placement of another tensor with the factor.
        dims: The tensor's dims in the rule.
        shape: The tensor's shape.
        factor: The name of the factor.
        n: The number of ranks.
    """
    for i, dim in enumerate(dims):
        if dim == factor:
            return _scale_shard(base, i, shape[i], n)
        if factor in dim_factors(dim):  # one of several factors of the dim
            factor_shard = _scale_shard(base, i, rule.extents[factor], n)
            return factor_shard and rule.dim_shard(dim, factor, factor_shard)
    return None


def _scale_shard(base: Shard, dim: int, extent: Size, n: int) -> Shard | None:
    """Return the shard of a factor in a dim with `extent` elements, or None.

    The extent of another operand's dim may differ from that of `base` (8 heads of keys, 32 of queries). Its blocks then
    correspond to those of `base` only if the rows are contiguous and n divides both extents.
    """
    if is_same_size(extent, size_product((base.outer, base.frame.length, base.inner))):
        return base.on_dim(dim)
    base_extent = size_product((base.outer, base.frame.size, base.inner))
    is_contiguous = base.frame.order.is_in_order and base.frame.is_exact(n) and is_same_size(base.outer, 1)
    return Shard(dim, Frame.full(extent)) if is_contiguous and divides(n, base_extent) and divides(n, extent) else None


SUMMAND_DEMAND = Replicate(partial_grad=True)  # the placement of a replicated operand of a node on shards
SCANNED_DEMAND = "every position needs the reduction of all positions before it"
NEIGHBORS_DEMAND = "every position needs its neighbors"
NO_PLACEMENT = "the sequence is not a single dim of the result"
DIFFERENT_PLACEMENT = "another operand differs between ranks, so every rank needs all rows of this one"
Demands = tuple[Demand, ...]
FACTORIES = parse_overloads("full ones zeros")


@dataclass(frozen=True)
class NodeStep:
    """Placements of one node: of its operands and results, and the demands that passes must discharge."""

    wants: tuple[Placement, ...] | None  # placements of the operands; None if the node does not run on shards
    results: tuple[Placement, ...]  # placement of each result
    demands: Demands = ()  # demands that passes must discharge


def place_as_written(call: OpCall, rule: BoundRule, have: Sequence[Placement]) -> NodeStep:
    """Return the step of an op whose rule fixes the placements of its operands and results.

    An operand with another placement is gathered first and sharded again.
    """
    assert rule.operand_placements is not None
    assert rule.result_placements is not None
    demands = []
    for i, (placement, want) in enumerate(zip(have, rule.operand_placements)):
        if not isinstance(placement, Shard):
            continue
        if not (isinstance(want, Shard) and placement.dim == want.dim and placement.has_same_positions(want)):
            why = "the op was written for another placement of it"
            demands.append(Demand(call.node, i, "align", placement, why=why))
    return NodeStep(tuple(rule.operand_placements), (rule.result_placements,) * len(rule.results), tuple(demands))


def varying_result(node: Node, have: Sequence[Placement], result: Placement, results: int) -> NodeStep:
    """Return the step of a node with varying (rank-specific) values; it demands all rows of its shards."""
    return NodeStep(
        None, (result,) * results, _make_demands(node, have, "varying", DIFFERENT_PLACEMENT, keeps_sharding=True)
    )


def replicate_operands(node: Node, have: Sequence[Placement], kind: str, why: str, results: int) -> NodeStep:
    """Return the step of a node that runs on replicated operands, with a demand for each sharded one."""
    return NodeStep(None, (REPLICATE,) * results, _make_demands(node, have, kind, why))


def _make_demands(node: Node, have: Sequence[Placement], kind: str, why: str, keeps_sharding: bool = False) -> Demands:
    """Return one demand of the kind for each sharded operand."""
    shards = [(i, p) for i, p in enumerate(have) if isinstance(p, Shard)]
    return tuple(Demand(node, i, kind, p, keeps_sharding, why) for i, p in shards)


def start_sharding(axes: Axes, call: OpCall, rule: BoundRule, n: int, window: Frame | None = None) -> NodeStep | None:
    """Return a step on shards if a sequence of floats starts at a replicated node, else None.

    A sequence also starts at draws and at results much larger than the operands, but not at ops that only move data.

    Args:
        axes: The axes of the graph.
        call: The call of the node.
        rule: The rule of the op.
        n: The number of ranks.
        window: The window of another sequence as which it starts, if any.
    """
    node, value = call.node, next(iter(call.results()), None)
    is_draw = is_random(node)
    if value is None or (rule.lazy and not is_draw and not node_info(node).starts_sequence):
        return None
    is_number = value.is_floating_point() or value.is_complex()
    starts = is_number or is_draw or rule.starts_sequence or _is_large_broadcast(call)
    shard = axes.shard(node) if starts else None
    if shard is None:
        return None
    if window is not None and is_same_size(window.length, shard.frame.length):
        shard = replace(shard, frame=window)
    # A rank would compute more rows than a short part of a joint sequence has; only the longest sequence is balanced.
    is_short = n > 1 and assume_large(shard.frame.size) >= n * assume_large(shard.frame.length)
    if is_short or (shard.frame.order.is_balanced and not is_same_size(shard.frame.size, axes.longest_sequence())):
        return None
    factor, shard = rule.local_part(rule.results[0], shard)
    if not factor or rule.kind(factor) in ("whole", "attend"):  # causal attention counts from its first query
        return None
    if rule.kind(factor) == "halo":  # its operand starts the sequence
        operand = axes.shard(call.operands[0])
        step = _place_window(call, rule, [REPLICATE] * len(call.operands), operand, n) if operand else None
        return step if step is not None and step.wants is not None and not node_info(node).replicated else None
    demands: Demands = ()
    if rule.kind(factor) == "scan":
        if node_info(node).replicated or not (is_same_size(shard.outer, 1) and is_same_size(shard.inner, 1)):
            return None
        single_rank = n == 1 and shard.frame.is_exact(1)
        demands = () if single_rank else (Demand(node, 0, "scan", REPLICATE, why=SCANNED_DEMAND),)
    return _shard_factor(call, rule, [REPLICATE] * len(call.operands), factor, shard, n, demands)


MIN_BROADCAST = 8  # minimum ratio of elements, results to operands: an index per token becomes a row of a vocabulary


def _is_large_broadcast(call: OpCall) -> bool:
    """Return True if operands broadcast to far more elements, such as tokens compared with all classes."""
    results, operands = (
        sum(assume_large(size_product(s)) for s in shapes)
        for shapes in (call.result_shapes(), map(node_shape, call.operands))
    )
    return bool(operands) and results >= MIN_BROADCAST * operands


def through_factors(call: OpCall, rule: BoundRule, have: Sequence[Placement], n: int) -> NodeStep:
    """Return the step of a node with sharded operands: it runs on shards if the factor passes.

    Args:
        call: The call of the node.
        rule: The rule of the op.
        have: The placements of the operands.
        n: The number of ranks.
    """
    node, demands = call.node, []
    # The sharded factor of each sharded operand ("" if a dim is sharded that no factor describes), and its shard.
    shards = {i: p for i, p in enumerate(have) if isinstance(p, Shard) and i not in rule.lenders}
    factors = {i: rule.local_part(rule.operands[i], p) for i, p in shards.items()}
    # Windows over the rows of the first operand.
    first_kind = rule.kind(factors[0][0]) if 0 in factors else ""
    if first_kind == "halo":
        return _place_window(call, rule, have, shards[0], n)
    if first_kind == "window":
        placed = rule.window_shard(shards[0])
        if placed:
            return NodeStep(tuple(have), placed)
        return replicate_operands(node, have, "whole", NO_PLACEMENT, len(rule.results))
    # The factor of one operand is propagated; other operands state demands where theirs does not pass with it.
    leading = _leading_operand(call, rule, {i: factor for i, (factor, _) in factors.items()})
    main_factor, base = factors[leading] if leading is not None else ("", None)
    for i, (factor, shard) in factors.items():
        keeps_sharding = leading is not None and main_factor not in flatten_dims(rule.operands[i])
        if not factor or rule.kind(factor) == "whole":
            why = f"needs all of {factor!r}" if factor and not rule.reshapes else NO_PLACEMENT
            demands.append(Demand(node, i, "whole", shards[i], keeps_sharding, why))
        elif rule.kind(factor) == "scan" and not (n == 1 and shard.frame.is_exact(1)):
            demands.append(Demand(node, i, "scan", shards[i], keeps_sharding, SCANNED_DEMAND))
        elif rule.kind(factor) == "attend":
            demands.append(Demand(node, i, "attend", shards[i], keeps_sharding, "attention mixes the sequence"))
        elif base is None or factor != main_factor or not _has_same_positions(call, rule, i, factor, shard, base, n):
            is_pairs = _reads_pairs(rule, leading, i, main_factor, factor)
            why = f"every row of operand {leading} reads it" if is_pairs else f"operand {leading} is sharded differently"
            demands.append(Demand(node, i, "pairs" if is_pairs else "align", shards[i], keeps_sharding, why))
    if base is not None:
        return _shard_factor(call, rule, have, main_factor, base, n, tuple(demands))
    # Operands of which the op reads any local rows, such as the shape (`lenders`), do not shard the result.
    only_lenders = not demands and any(isinstance(have[i], Shard) for i in rule.lenders)
    return NodeStep(tuple(have) if only_lenders else None, (REPLICATE,) * len(rule.results), tuple(demands))


def _reads_pairs(rule: BoundRule, leading: int | None, i: int, main_factor: str, factor: str) -> bool:
    """Return True if an op computes something for each pair of a row of one operand and a row of another.

    The result has a value for each pair, as q @ k.T has, or sums over the second row, as weights @ v.

    Args:
        rule: The rule of the op.
        leading: The index of the operand whose sharding is propagated, if any.
        i: The index of the other operand.
        main_factor: The sharded factor of the first operand.
        factor: That of the other one.
    """
    if leading is None or factor == main_factor or main_factor in flatten_dims(rule.operands[i]):
        return False
    pair_dims = rule.results if rule.kind(factor) == "pass" else (rule.operands[leading],)
    has_pairs = any({main_factor, factor} <= set(flatten_dims(dims)) for dims in pair_dims)
    return has_pairs and rule.kind(factor) in ("pass", "sum")


def _has_same_positions(call: OpCall, rule: BoundRule, i: int, factor: str, have: Shard, base: Shard, n: int) -> bool:
    """Return True if an operand's shards of the factor have the same positions as those of `base`."""
    extent = call.shape(i)[have.dim] if factor in rule.operands[i] else rule.extents[factor]
    return have.has_same_positions(base) or have.has_same_positions(_scale_shard(base, have.dim, extent, n) or base)


def _place_window(call: OpCall, rule: BoundRule, have: Sequence[Placement], base: Shard, n: int) -> NodeStep:
    """Return the step of windows over the first operand's rows, placed as `base`; others are replicated."""
    node, factor = call.node, rule.operands[0][base.dim]
    placed = place_window(rule.slides[factor], base, n)
    weights, why = (REPLICATE, *have[1:]), "every window reads all of it"  # of the other operands
    weight_demands = _make_demands(node, weights, "whole", why, keeps_sharding=not isinstance(placed, str))
    if isinstance(placed, str):  # the reason why the windows cannot be placed
        why = f"every position needs its neighbors, and {placed}"
        demand = Demand(node, 0, "halo", have[0], why=why)
        return NodeStep(None, (REPLICATE,) * len(rule.results), (demand, *weight_demands))
    single_rank = n == 1 and base.frame.is_exact(1) and placed.frame.is_exact(1)
    demands = () if single_rank else (Demand(node, 0, "halo", have[0], why=NEIGHBORS_DEMAND),)
    return NodeStep((base, *[SUMMAND_DEMAND] * (len(have) - 1)), (placed,), (*demands, *weight_demands))


def _leading_operand(call: OpCall, rule: BoundRule, sharded: Mapping[int, str]) -> int | None:
    """Return the index of the operand whose sharding is propagated, or None.

    It is one whose factor is in the result, if there is one; of several, the largest.

    Args:
        call: The call of the node.
        rule: The rule of the op.
        sharded: The sharded factor of each sharded operand, by index.
    """

    def is_in_result(i: int) -> bool:
        """Return True if a result has the sharded factor of operand i."""
        return any(sharded[i] in flatten_dims(dims) for dims in rule.results)

    def priority(i: int) -> tuple[bool, int, int, int]:
        """Return the key of an operand; the largest is selected."""
        kind_priority = {"pass": 3, "attend": 2}.get(rule.kind(sharded[i]), 1)
        return is_in_result(i), kind_priority, assume_large(size_product(call.shape(i))), -i

    candidates = [i for i, factor in sharded.items() if factor and rule.kind(factor) != "whole"]
    candidates = [i for i in candidates if rule.kind(sharded[i]) != "attend" or is_in_result(i)]
    return max(candidates, key=priority, default=None)


def _shard_factor(
    call: OpCall, rule: BoundRule, have: Sequence[Placement], factor: str, base: Shard, n: int, demands: Demands
) -> NodeStep:
    """Return the step, with `demands`, that runs the node on shards of `factor`, placed as in `base`.

    The node runs replicated if the factor has different lengths in its tensors.
    """
    wants: list[Placement] = [
        shard_of_factor(rule, base, dims, call.shape(i), factor, n) or SUMMAND_DEMAND
        for i, dims in enumerate(rule.operands)
    ]
    results = [shard_of_factor(rule, base, d, s, factor, n) for d, s in zip(rule.results, call.result_shapes())]
    dims_and_placements = zip((*rule.operands, *rule.results), (*wants, *results))
    if any(factor in flatten_dims(dims) and not isinstance(p, Shard) for dims, p in dims_and_placements):
        why = f"the sizes of {factor!r} are not provably equal along one sequence"
        return replicate_operands(call.node, have, "align", why, len(results))
    for i in rule.lenders:
        wants[i] = have[i]
    # A result without the factor is a sum over it, so each rank has a part.
    reduced = REPLICATE if rule.kind(factor) == "attend" else Partial()
    if rule.kind(factor) in ("mean", "total"):
        demands += tuple(
            Demand(call.node, i, rule.kind(factor), w, why="a total over the full sequence")
            for i, w in enumerate(wants)
            if isinstance(w, Shard) and isinstance(have[i], Shard)
        )
    return NodeStep(tuple(wants), tuple(result or reduced for result in results), demands)


def mask_values(gm: GraphModule) -> set[Node]:
    """Return values that only masks use: they are needed replicated, so they are not sharded."""
    masks: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and node.users and all(_is_mask_use(node, u) or u in masks for u in node.users):
            masks.add(node)
    return masks


def _is_mask_use(node: Node, user: Node) -> bool:
    """Return True if the user reads the node only as operands that are masks by its rule."""
    call, rule = lookup_rule(user) or (None, None)
    if call is None or rule is None:
        return False
    indices = [i for i, operand in enumerate(call.operands) if operand is node]
    return bool(indices) and all(i in rule.masks for i in indices)


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
        axes: The axes of the graph.
        n: The number of ranks.
        inputs: The placements of placeholders and attributes that are not replicated.
        outputs: The outputs that stay sharded, see `output_options`.
        starts_sequences: True if replicated values may be sharded; else only inputs and exchanges start shards.
        declines: Returns a reason for which a node should not run on shards, or None.
        window_starts: Nodes at which a sequence starts as a window of another one (`sharding/window_starts.py`).

    Returns:
        The plan, with the demands that are not discharged yet.
    """
    plan = PlacementPlan()
    replicated = mask_values(gm) if starts_sequences else frozenset(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            plan.placements[node] = (axes.in_chunks(node, 0, (inputs or {}).get(node, REPLICATE)),)
        elif node.op == "output":
            _visit_output(plan, node, outputs)
        elif node.op == "call_function":
            step = _visit(plan, axes, node, n, node in replicated, declines, (window_starts or {}).get(node))
            if step.wants is not None:
                plan.wants[node] = step.wants
            plan.placements[node] = tuple(axes.in_chunks(node, i, p) for i, p in enumerate(step.results))
            plan.demands.extend(step.demands)
    _shard_demanded(plan, gm, axes, n, starts_sequences)
    return plan


def _shard_demanded(plan: PlacementPlan, gm: GraphModule, axes: Axes, n: int, starts_sequences: bool) -> None:
    """Shard replicated values that are only demanded as one shard, if this saves memory.

    These are constants with one value, such as zeros, and values with a row and a column for every position, such as
    masks of attention, which are computed from replicated operands.
    """
    for node in reversed(gm.graph.nodes):
        if node.target in FACTORIES or (starts_sequences and n > 1 and _is_replicated_square(plan, axes, node)):
            demanded = {p for user in node.users for p in demanded_placements(node, user, plan) or [REPLICATE]}
            placement = next(iter(demanded), None)
            if len(demanded) == 1 and isinstance(placement, Shard):  # all reads demand the same shard
                step = NodeStep((), (placement,)) if node.target in FACTORIES else _shard_result(plan, node, placement, n)
                if step is not None and step.wants is not None:
                    plan.wants[node], plan.placements[node] = step.wants, step.results


def _is_replicated_square(plan: PlacementPlan, axes: Axes, node: Node) -> bool:
    """Return True if a node computes a value with several dims of a sequence, and every rank computes it equally."""
    if node.op != "call_function" or not is_tensor(node) or node in plan.wants or transfer_of(node.target) is not None:
        return False
    if is_written(node) or is_random(node) or plan.of(node) != REPLICATE:
        return False
    return not node_info(node).replicated and len(axes.sequence_dims(node)) > 1


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
    return _shard_factor(call, rule, [REPLICATE] * len(call.operands), factor, base, n, ())


def demanded_placements(node: Node, user: Node, plan: PlacementPlan) -> list[Placement]:
    """Return the placements in which a user on shards reads a node, one for each read."""
    if user not in plan.wants or transfer_of(user.target) is not None:
        return []
    call, _ = lookup_rule(user) or (None, None)
    return [want for x, want in zip(call.operands, plan.wants[user]) if x is node] if call is not None else []


def _visit_output(plan: PlacementPlan, node: Node, outputs: str | Sequence[str]) -> None:
    """Add a demand to the plan for each output that may not stay sharded, partial or rank-local."""
    options = output_options(node, outputs)
    for i, source in enumerate(node.all_input_nodes):
        have = plan.of(source)
        if isinstance(have, Partial):
            plan.demands.append(Demand(node, i, "reduce", have, why="a result of the model"))
        elif have == SUMMAND_DEMAND:
            plan.demands.append(Demand(node, i, "invariant", have, why=INVARIANT))
        elif isinstance(have, Shard) and (why := gather_reason(source.meta["val"], options[source])):
            plan.demands.append(Demand(node, i, "whole", have, why=why))


def _visit(
    plan: PlacementPlan,
    axes: Axes,
    node: Node,
    n: int,
    keep_replicated: bool,
    declines: DeclineRule | None,
    window: Frame | None,
) -> NodeStep:
    """Return the step of a node of an op, from the placements of its operands in the plan.

    Args:
        plan: The plan so far.
        axes: The axes of the graph.
        node: A node that is no input or output.
        n: The number of ranks.
        keep_replicated: If True, no sequence starts at the node.
        declines: As in `propagate`.
        window: The window of another sequence as which a sequence starts at the node, if any.
    """
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return NodeStep(None, (_item_placement(plan, node, node.args[0]),))
    call, rule = lookup_rule(node) or (None, None)
    if is_written(node):
        rule = None
    have = [plan.of(a) for a in (call.operands if call else filter(is_tensor, node.all_input_nodes))]
    # An exchange determines the placement of its result.
    transfer = transfer_of(node.target)
    if transfer is not None and call is not None:
        why = "the exchange was written for another placement of its operand"
        stale = [
            Demand(node, i, "stale", p, why=why) for i, p in enumerate(have) if not has_expected_placement(call, p)
        ]
        return NodeStep(tuple(have), transfer(call), tuple(stale))
    if node_info(node).combines and call is not None and is_partial_sum(call, have):
        return NodeStep(tuple(p if isinstance(p, Partial) else SUMMAND_DEMAND for p in have), (Partial(),))
    # Other ops run on reduced sums; their rule determines the step.
    reduce = [Demand(node, i, "reduce", p) for i, p in enumerate(have) if isinstance(p, Partial)]
    have = [REPLICATE if isinstance(p, Partial) else p for p in have]
    step = _node_step(axes, node, call, rule, have, n, keep_replicated, window)
    declined = declines(call, rule, have) if declines and call and step.wants else None
    if declined is not None:
        step = replicate_operands(node, have, "whole", declined, len(step.results))
    # Results of varying operands vary, unless the op is written for them; passes also set results directly.
    expected = (rule.operand_placements if rule is not None else None) or (REPLICATE,) * len(have)
    if any(p == VARYING and want != VARYING for want, p in zip(expected, have)):
        step = varying_result(node, have, VARYING, len(step.results))
    forced_result = node_info(node).result
    if forced_result is not None:
        step = varying_result(node, have, forced_result, len(step.results))
    if step.wants is None and VARYING not in step.results:
        reduce += [Demand(node, i, "invariant", p, why=INVARIANT) for i, p in enumerate(have) if p == SUMMAND_DEMAND]
    demands = [*reduce, *step.demands]
    if step.wants is None and n > 1 and is_random(node) and not _is_broadcast_draw(node):
        why = "a random draw that must be equal on every rank"
        demands.append(Demand(node, 0, "draw", REPLICATE, why=why))
    return NodeStep(step.wants, step.results, tuple(demands))


def _item_placement(plan: PlacementPlan, node: Node, source: Node) -> Placement:
    """Return the placement of a getitem of `source`."""
    placements = plan.placements.get(source, ())
    bucketed = bucket_source(node) if VARYING in placements else None  # the node that a bucket of collectives contains
    if bucketed is None and len(placements) > 1 and isinstance(node.args[1], int):
        return placements[result_number(node)]
    return plan.of(bucketed or source)


def random_results(node: Node) -> list[Node]:
    """Return the results of a random op: its node, or the nodes that select them from a tuple."""
    return [node] if is_tensor(node) else [u for u in node.users if u.target is operator.getitem and is_tensor(u)]


def _is_broadcast_draw(node: Node) -> bool:
    """Return True if every result of a random op is already broadcast from one rank."""
    return all(u.target is torch.ops.sp.broadcast.default for r in random_results(node) for u in r.users)


def _node_step(
    axes: Axes, node: Node, call: OpCall | None, rule: BoundRule | None, have: Sequence[Placement], n: int,
    keep_replicated: bool, window: Frame | None,
) -> NodeStep:  # fmt: skip
    """Return the step of an op that is no exchange, by its rule; it runs replicated without a rule."""
    if call is None or rule is None or node_info(node).no_rule is not None:
        qualifier = " for such operands" if has_rule(node.target) else ""
        why = node_info(node).no_rule or f"{node.target} has no sharding rule{qualifier}"
        why = "its result is changed in place" if is_written(node) else why
        return replicate_operands(node, have, "no rule", why, max(1, len(call.results())) if call is not None else 1)
    if rule.operand_placements is not None:
        return place_as_written(call, rule, have)
    if any(isinstance(p, Shard) for p in have):
        return through_factors(call, rule, have, n)
    started = None if keep_replicated else start_sharding(axes, call, rule, n, window)
    return started or NodeStep(None, (REPLICATE,) * max(1, len(call.results())))
