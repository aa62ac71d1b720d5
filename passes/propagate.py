"""Propagate placements through a graph: compute a PlacementPlan with open demands.

The graph is not changed. One forward sweep visits all nodes. A node with a sharded operand runs on shards if its rule
lets the factor pass; otherwise it states a demand. A node with replicated operands stays replicated, unless a sequence
of floats starts there (an embedding, the first pointwise op on an input): then its operands are demanded sharded, which
is a local slice. Propagation never inserts a collective. It follows Shardy's factor propagation.
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
from sp_compile.passes.graph.sizes import Size, assume_large, divides, is_same_shape, is_same_size, size_product
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.factors import BoundRule, Dims, dim_factors, flatten_dims
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
    """Return the placement of a tensor if `factor` is sharded as in `base`; None without the factor.

    Args:
        rule: The rule of the op.
        base: The placement of another tensor with the factor.
        dims: The tensor's dims in the rule.
        shape: The tensor's shape.
        factor: The name of the factor.
        n: The number of ranks.
    """
    for at, dim in enumerate(dims):
        if dim == factor:
            return _scale_shard(base, at, shape[at], n)
        if factor in dim_factors(dim):
            own = _scale_shard(base, at, rule.extents[factor], n)
            return own and rule.dim_shard(dim, factor, own)
    return None


def _scale_shard(base: Shard, dim: int, extent: Size, n: int) -> Shard | None:
    """Return the shard of the factor in a dim of another extent (grouped heads), if it is a multiple of n."""
    if is_same_size(extent, size_product((base.outer, base.frame.length, base.inner))):
        return base.on_dim(dim)
    total = size_product((base.outer, base.frame.size, base.inner))
    plain = base.frame.order.is_in_order and base.frame.is_exact(n) and is_same_size(base.outer, 1)
    return Shard(dim, Frame.full(extent)) if plain and divides(n, total) and divides(n, extent) else None


SUMMAND_DEMAND = Replicate(partial_grad=True)  # the placement of a replicated operand of a node on shards
SCANNED_DEMAND = "every position needs the reduction of all positions before it"
NEIGHBORS_DEMAND = "every position needs its neighbors"
NO_PLACEMENT = "the sequence is not a single dim of the result"
DIFFERENT_PLACEMENT = "another operand differs between ranks, so every rank needs all rows of this one"
Demands = tuple[Demand, ...]
FACTORIES = parse_overloads("full ones zeros")


@dataclass(frozen=True)
class NodeStep:
    """The placements of one node: its operands, its results, and its open demands."""

    wants: tuple[Placement, ...] | None  # placements of the operands; None if the node does not run on shards
    results: tuple[Placement, ...]
    demands: Demands = ()  # the demands that passes must discharge


def place_as_written(call: OpCall, rule: BoundRule, have: Sequence[Placement]) -> NodeStep:
    """Return the step of a call that determines the placement of its operands.

    An operand with another placement is gathered first and sharded again.
    """
    assert rule.operand_placements is not None
    assert rule.result_placements is not None
    demands = tuple(
        Demand(call.node, i, "align", p, why="the op was written for another placement of it")
        for i, (p, want) in enumerate(zip(have, rule.operand_placements))
        if isinstance(p, Shard) and not (isinstance(want, Shard) and p.dim == want.dim and p.has_same_positions(want))
    )
    return NodeStep(tuple(rule.operand_placements), (rule.result_placements,) * len(rule.results), demands)


def varying_result(node: Node, have: Sequence[Placement], result: Placement, results: int) -> NodeStep:
    """Return the step of a node with varying operands or results, which demands all rows of its shards."""
    return NodeStep(
        None, (result,) * results, _make_demands(node, have, "varying", DIFFERENT_PLACEMENT, keeps_sharding=True)
    )


def replicate_operands(node: Node, have: Sequence[Placement], kind: str, why: str, results: int) -> NodeStep:
    """Return the step of a node that runs on replicated operands, with a demand for each sharded one."""
    return NodeStep(None, (REPLICATE,) * results, _make_demands(node, have, kind, why))


def _make_demands(node: Node, have: Sequence[Placement], kind: str, why: str, keeps_sharding: bool = False) -> Demands:
    shards = [(i, p) for i, p in enumerate(have) if isinstance(p, Shard)]
    return tuple(Demand(node, i, kind, p, keeps_sharding, why) for i, p in shards)


def start_sharding(axes: Axes, call: OpCall, rule: BoundRule, n: int, window: Frame | None = None) -> NodeStep | None:
    """Return a step on shards if a sequence of floats starts at a replicated node, else None.

    A sequence also starts at draws, and at results that are much larger than the operands.

    Args:
        axes: The axes of the graph.
        call: The call of the node.
        rule: The rule of the op.
        n: The number of ranks.
        window: The window of another sequence as which it starts, if any.
    """
    node, value = call.node, next(iter(call.results()), None)
    random = is_random(node)
    if value is None or (rule.lazy and not random and not node_info(node).starts_sequence):
        return None
    begins = (
        value.is_floating_point() or value.is_complex() or random or rule.starts_sequence or _is_large_broadcast(call)
    )
    shard = axes.shard(node) if begins else None
    if shard is None:
        return None
    if window is not None and is_same_size(window.length, shard.frame.length):
        shard = replace(shard, frame=window)
    if shard.frame.order.is_balanced and not is_same_size(
        shard.frame.size, axes.longest_sequence()
    ):  # balanced rows are those of one sequence
        return None
    factor, shard = rule.local_part(rule.results[0], shard)
    if not factor or rule.kind(factor) in ("whole", "attend"):  # causal attention counts from its first query
        return None
    if rule.kind(factor) == "halo":
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


MIN_BROADCAST = 8  # minimum ratio of elements, results to operands: a few bytes per token become a row of a vocabulary


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
    shards = {i: p for i, p in enumerate(have) if isinstance(p, Shard) and i not in rule.lenders}
    cut = {i: rule.local_part(rule.operands[i], p) for i, p in shards.items()}
    if 0 in cut and rule.kind(cut[0][0]) == "halo":
        return _place_window(call, rule, have, shards[0], n)
    if 0 in cut and rule.kind(cut[0][0]) == "window":
        placed = rule.window_shard(shards[0])
        return (
            NodeStep(tuple(have), placed)
            if placed
            else replicate_operands(node, have, "whole", NO_PLACEMENT, len(rule.results))
        )
    leading = _leading_operand(call, rule, {i: f for i, (f, _) in cut.items()})
    factor, base = cut[leading] if leading is not None else ("", None)
    for i, (f, own) in cut.items():
        stays = leading is not None and factor not in flatten_dims(rule.operands[i])
        if not f or rule.kind(f) == "whole":
            why = f"needs all of {f!r}" if f and not rule.reshapes else NO_PLACEMENT
            demands.append(Demand(node, i, "whole", shards[i], stays, why))
        elif rule.kind(f) == "scan" and not (n == 1 and own.frame.is_exact(1)):
            demands.append(Demand(node, i, "scan", shards[i], stays, SCANNED_DEMAND))
        elif rule.kind(f) == "attend":
            demands.append(Demand(node, i, "attend", shards[i], stays, "attention mixes the sequence"))
        elif base is None or f != factor or not _has_same_positions(call, rule, i, f, own, base, n):
            why = f"operand {leading} is sharded differently"
            demands.append(Demand(node, i, "align", shards[i], stays, why))
    if base is not None:
        return _shard_factor(call, rule, have, factor, base, n, tuple(demands))
    lent = not demands and any(isinstance(have[i], Shard) for i in rule.lenders)
    return NodeStep(tuple(have) if lent else None, (REPLICATE,) * len(rule.results), tuple(demands))


def _has_same_positions(call: OpCall, rule: BoundRule, i: int, factor: str, have: Shard, base: Shard, n: int) -> bool:
    """Return True if an operand's shards of the factor have the same positions as those of `base`."""
    extent = call.shape(i)[have.dim] if factor in rule.operands[i] else rule.extents[factor]
    return have.has_same_positions(base) or have.has_same_positions(_scale_shard(base, have.dim, extent, n) or base)


def _place_window(call: OpCall, rule: BoundRule, have: Sequence[Placement], base: Shard, n: int) -> NodeStep:
    """Return the step of windows over the first operand's rows, placed as `base`; others are replicated."""
    node, factor = call.node, rule.operands[0][base.dim]
    placed = place_window(rule.slides[factor], base, n)
    rest = (REPLICATE, *have[1:])
    others = _make_demands(
        node, rest, "whole", "every window reads all of it", keeps_sharding=not isinstance(placed, str)
    )
    if isinstance(placed, str):
        why = f"every position needs its neighbors, and {placed}"
        demand = Demand(node, 0, "halo", have[0], why=why)
        return NodeStep(None, (REPLICATE,) * len(rule.results), (demand, *others))
    single_rank = n == 1 and base.frame.is_exact(1) and placed.frame.is_exact(1)
    demands = () if single_rank else (Demand(node, 0, "halo", have[0], why=NEIGHBORS_DEMAND),)
    return NodeStep((base, *[SUMMAND_DEMAND] * (len(have) - 1)), (placed,), (*demands, *others))


def _leading_operand(call: OpCall, rule: BoundRule, sharded: Mapping[int, str]) -> int | None:
    """Return the operand whose sharding is propagated: one that reaches the result, the largest."""

    def worth(i: int) -> tuple[int, int, int]:
        """Return a key: reaches the result, kind of the factor, elements."""
        rank = {"pass": 3, "attend": 2}.get(rule.kind(sharded[i]), 1)
        in_result = any(sharded[i] in flatten_dims(dims) for dims in rule.results)
        return (int(in_result), rank, assume_large(size_product(call.shape(i))))

    candidates = [i for i, f in sharded.items() if f and rule.kind(f) != "whole"]
    candidates = [i for i in candidates if rule.kind(sharded[i]) != "attend" or worth(i)[0]]
    return max(candidates, key=lambda i: (*worth(i), -i), default=None)


def _shard_factor(
    call: OpCall, rule: BoundRule, have: Sequence[Placement], factor: str, base: Shard, n: int, demands: Demands
) -> NodeStep:
    """Return the step that runs the node on shards of `factor`."""
    wants: list[Placement] = [
        shard_of_factor(rule, base, d, call.shape(i), factor, n) or SUMMAND_DEMAND for i, d in enumerate(rule.operands)
    ]
    results = [shard_of_factor(rule, base, d, s, factor, n) for d, s in zip(rule.results, call.result_shapes())]
    named = zip((*rule.operands, *rule.results), (*wants, *results))
    if any(factor in flatten_dims(dims) and not isinstance(placed, Shard) for dims, placed in named):
        why = f"the sizes of {factor!r} are not provably equal along one sequence"
        return replicate_operands(call.node, have, "align", why, len(results))
    for i in rule.lenders:
        wants[i] = have[i]
    lost = REPLICATE if rule.kind(factor) == "attend" else Partial()
    if rule.kind(factor) in ("mean", "total"):
        demands += tuple(
            Demand(call.node, i, rule.kind(factor), w, why="a total over the full sequence")
            for i, w in enumerate(wants)
            if isinstance(w, Shard) and isinstance(have[i], Shard)
        )
    return NodeStep(tuple(wants), tuple(r or lost for r in results), demands)


def mask_values(gm: GraphModule) -> set[Node]:
    """Return values that only masks use: they are needed replicated, so they are not sharded."""
    masks: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and node.users and all(_is_mask_use(node, u) or u in masks for u in node.users):
            masks.add(node)
    return masks


def _is_mask_use(node: Node, user: Node) -> bool:
    call, rule = lookup_rule(user) or (None, None)
    if call is None or rule is None:
        return False
    at = [i for i, operand in enumerate(call.operands) if operand is node]
    return bool(at) and all(i in rule.masks for i in at)


INVARIANT = "it is replicated, so the gradient that it returns is replicated, too"
DeclineRule = Callable[[OpCall, BoundRule | None, Sequence[Placement]], str | None]


def propagate(
    gm: GraphModule,
    axes: Axes,
    n: int,
    inputs: Mapping[Node, Placement] | None = None,
    outputs: str | Sequence[str] = "gather",
    begin: bool = True,
    declines: DeclineRule | None = None,
    begins: Mapping[Node, Frame] | None = None,
) -> PlacementPlan:
    """Return the placement plan of a graph for `n` ranks.

    Args:
        gm: The graph, which is not changed.
        axes: The axes of the graph.
        n: The number of ranks.
        inputs: The placements of placeholders and attributes that are not replicated.
        outputs: The outputs that stay sharded, see `output_options`.
        begin: True if replicated values may be sharded where a sequence starts; else only inputs and exchanges shard.
        declines: Returns a reason for which a node should not run on shards, or None.
        begins: Nodes at which a sequence starts as a window of another one (`sharding/window_starts.py`).

    Returns:
        The plan, with the demands that are not discharged yet.
    """
    plan = PlacementPlan()
    replicated = mask_values(gm) if begin else frozenset(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            plan.placements[node] = ((inputs or {}).get(node, REPLICATE),)
        elif node.op == "output":
            _visit_output(plan, node, outputs)
        elif node.op == "call_function":
            step = _visit(plan, axes, node, n, node in replicated, declines, (begins or {}).get(node))
            if step.wants is not None:
                plan.wants[node] = step.wants
            plan.placements[node] = step.results
            plan.demands.extend(step.demands)
    _shard_constants(plan, gm)
    return plan


def _shard_constants(plan: PlacementPlan, gm: GraphModule) -> None:
    """Shard constants with one value that are only demanded sharded."""
    for node in gm.graph.nodes:
        if node.target in FACTORIES and node.users:
            found = {want for user in node.users for want in demanded_placements(node, user, plan) or [REPLICATE]}
            if len(found) == 1 and isinstance(want := found.pop(), Shard):
                plan.wants[node], plan.placements[node] = (), (want,)


def demanded_placements(node: Node, user: Node, plan: PlacementPlan) -> list[Placement]:
    """Return the placements that a user on shards demands of an operand, one for each read."""
    found = lookup_rule(user) if user in plan.wants and transfer_of(user.target) is None else None
    return [w for o, w in zip(found[0].operands, plan.wants[user]) if o is node] if found is not None else []


def _visit_output(plan: PlacementPlan, node: Node, outputs: str | Sequence[str]) -> None:
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
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        source, index = plan.placements.get(node.args[0], ()), node.args[1]
        part = bucket_source(node) if VARYING in source else None
        if part is None and len(source) > 1 and isinstance(index, int):
            return NodeStep(None, (source[result_number(node)],))
        return NodeStep(None, (plan.of(part or node.args[0]),))
    call, rule = lookup_rule(node) or (None, None)
    if is_written(node):
        rule = None
    have = [plan.of(a) for a in (call.operands if call else filter(is_tensor, node.all_input_nodes))]
    transfer = transfer_of(node.target)
    if transfer is not None and call is not None:
        why = "the exchange was written for another placement of its operand"
        stale = [
            Demand(node, i, "stale", p, why=why) for i, p in enumerate(have) if not has_expected_placement(call, p)
        ]
        return NodeStep(tuple(have), transfer(call), tuple(stale))
    if node_info(node).combines and call is not None and _is_partial_sum(call, have):
        return NodeStep(tuple(p if isinstance(p, Partial) else SUMMAND_DEMAND for p in have), (Partial(),))
    reduce = [Demand(node, i, "reduce", p) for i, p in enumerate(have) if isinstance(p, Partial)]
    have = [REPLICATE if isinstance(p, Partial) else p for p in have]
    step = _node_step(axes, node, call, rule, have, n, keep_replicated, window)
    declined = declines(call, rule, have) if declines and call and step.wants else None
    if declined is not None:
        step = replicate_operands(node, have, "whole", declined, len(step.results))
    wants = rule.operand_placements if rule is not None else None
    if VARYING in have and not (wants is not None and all(w == VARYING for w, p in zip(wants, have) if p == VARYING)):
        step = varying_result(node, have, VARYING, len(step.results))
    left = node_info(node).result
    if left is not None:
        step = varying_result(node, have, left, len(step.results))
    if step.wants is None and VARYING not in step.results:
        reduce += [Demand(node, i, "invariant", p, why=INVARIANT) for i, p in enumerate(have) if p == SUMMAND_DEMAND]
    demands = [*reduce, *step.demands]
    if step.wants is None and n > 1 and is_random(node) and not _is_broadcast_draw(node):
        why = "a random draw that must be equal on every rank"
        demands.append(Demand(node, 0, "draw", REPLICATE, why=why))
    return NodeStep(step.wants, step.results, tuple(demands))


PRODUCT_OPS = (torch.ops.aten.mul.Tensor,)
SCALE_OPS = (*PRODUCT_OPS, *parse_overloads("div.Scalar div.Tensor mul.Scalar neg"))
ADD_OPS = parse_overloads("add.Tensor sub.Tensor")
LINEAR_OPS = (*ADD_OPS, *SCALE_OPS)


def summed_operands(node: Node) -> list[Node]:
    """Return the operands that the node adds; none for any other node."""
    terms = _operands_like_result(node) if node.target in ADD_OPS else []
    other = OpCall(node)["other"] if len(terms) == 1 else None
    return terms if len(terms) == 2 or (len(terms) == 1 and not isinstance(other, Node) and other == 0) else []


def scaled_operands(node: Node) -> list[Node]:
    """Return the operands that the node scales by its other operand; none for any other node."""
    factors = _operands_like_result(node) if node.target in SCALE_OPS else []
    factors = factors if node.target in PRODUCT_OPS else [x for x in factors if x is OpCall(node)["self"]]
    return [x for x in factors if OpCall(node).operands.count(x) == 1]  # not a square


def _operands_like_result(node: Node) -> list[Node]:
    """Return the floating operands with the shape and the dtype of the result."""
    value, operands = node.meta["val"], OpCall(node).operands
    same_shape = [
        x for x in operands if is_same_shape(node_shape(x), node_shape(node)) and x.meta["val"].dtype == value.dtype
    ]
    return same_shape if value.is_floating_point() else []


def _is_partial_sum(call: OpCall, have: Sequence[Placement]) -> bool:
    """Return True if the terms are partial sums and all other operands are replicated."""
    sums = [x for x, p in zip(call.operands, have) if isinstance(p, Partial)]
    linear = sums == summed_operands(call.node) or (len(sums) == 1 and sums[0] in scaled_operands(call.node))
    return bool(sums) and linear and all(isinstance(p, Partial | Replicate) for p in have)


def random_results(node: Node) -> list[Node]:
    """Return the results of a random op."""
    return [node] if is_tensor(node) else [u for u in node.users if u.target is operator.getitem and is_tensor(u)]


def _is_broadcast_draw(node: Node) -> bool:
    """Return True if every result of a random op is already broadcast from one rank."""
    return all(u.target is torch.ops.sp.broadcast.default for r in random_results(node) for u in r.users)


def _node_step(
    axes: Axes, node: Node, call: OpCall | None, rule: BoundRule | None, have: Sequence[Placement], n: int,
    keep_replicated: bool, window: Frame | None,
) -> NodeStep:  # fmt: skip
    if call is None or rule is None or node_info(node).no_rule is not None:
        fits = " for such operands" if has_rule(node.target) else ""
        why = node_info(node).no_rule or f"{node.target} has no sharding rule{fits}"
        why = "its result is changed in place" if is_written(node) else why
        return replicate_operands(node, have, "no rule", why, max(1, len(call.results())) if call is not None else 1)
    if rule.operand_placements is not None:
        return place_as_written(call, rule, have)
    if any(isinstance(p, Shard) for p in have):
        return through_factors(call, rule, have, n)
    started = None if keep_replicated else start_sharding(axes, call, rule, n, window)
    return started or NodeStep(None, (REPLICATE,) * max(1, len(call.results())))
