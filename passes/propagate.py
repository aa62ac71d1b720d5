"""Graph + rules -> Plan: the placement of every value, and the demands nobody has met yet. Changes nothing.

One forward sweep. A node with a sharded operand runs on shards if its rule lets the factor pass; otherwise it states a
demand. A node whose operands are all replicated stays replicated, unless it is the place where a sequence of floats
begins (an embedding, the first pointwise op on an input): there its operands are wanted sharded, which is a free slice.
Propagation never inserts a collective; see the design's section 4, and Shardy's factor propagation for the idea.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from ..axes import Axes
from ..call import Call, is_tensor, is_written, result_number
from ..layout import REPLICATE, VARYING, Demand, Partial, Placement, Plan, Shard
from ..randomness import is_random
from ..rule import Factors, Rule, lookup, transfer_of
from ..rules.redistribute import fits
from .mask_values import only_masks
from .node_steps import (
    SUMMAND,
    Step,
    all_whole,
    as_spelt,
    each_its_own,
    start,
    through_factors,
    through_movement,
)

INVARIANT = "it runs alike on every rank, so the gradient it sends back is whole on every rank"
Declines = Callable[[Call, Rule | None, Sequence[Placement]], str | None]


def propagate(
    gm: GraphModule,
    axes: Axes,
    n: int,
    inputs: Mapping[Node, Placement] | None = None,
    gather_outputs: bool = True,
    begin: bool = True,
    declines: Declines | None = None,
) -> Plan:
    """The Plan of a graph for `n` ranks.

    inputs: placements of placeholders and attributes that are not replicated. begin: may replicated values be cut
    where a sequence begins? If not, only inputs and exchanges shard anything. declines: why a node that could run on
    shards had better not.
    """
    plan = Plan()
    whole = only_masks(gm) if begin else frozenset(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            plan.placements[node] = ((inputs or {}).get(node, REPLICATE),)
        elif node.op == "output":
            _visit_output(plan, node, gather_outputs)
        elif node.op == "call_function":
            step = _visit(plan, axes, node, n, node in whole, declines)
            if step.wants is not None:
                plan.wants[node] = step.wants
            plan.placements[node] = step.results
            plan.demands.extend(step.demands)
    return plan


def _visit_output(plan: Plan, node: Node, gather: bool) -> None:
    for i, source in enumerate(node.all_input_nodes):
        have = plan.of(source)
        if isinstance(have, Partial):
            plan.demands.append(Demand(node, i, "", "reduce", have, why="a result of the model"))
        elif have == SUMMAND:
            plan.demands.append(Demand(node, i, "", "invariant", have, why=INVARIANT))
        elif isinstance(have, Shard) and gather:
            plan.demands.append(
                Demand(node, i, "", "whole", have, why="a result of the model (outputs='gather')")
            )


def _visit(
    plan: Plan, axes: Axes, node: Node, n: int, keep_whole: bool, declines: Declines | None = None
) -> Step:
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        source, index = plan.placements.get(node.args[0], ()), node.args[1]
        if len(source) > 1 and isinstance(index, int):
            return Step(None, (source[result_number(node)],))
        return Step(None, (plan.of(node.args[0]),))
    tensors = [a for a in node.all_input_nodes if is_tensor(a)]
    found = lookup(node)
    if found is not None and is_written(node):
        found = (found[0], None)
    operands = found[0].operands if found is not None else tensors
    have = [plan.of(a) for a in operands]
    transfer = transfer_of(node.target)
    if transfer is not None and found is not None:
        why = "the exchange was written for another placement of its operand"
        stale = [
            Demand(node, i, "", "stale", p, why=why) for i, p in enumerate(have) if not fits(found[0], p)
        ]
        return Step(tuple(have), transfer(found[0]), tuple(stale))
    reduce = [Demand(node, i, "", "reduce", p) for i, p in enumerate(have) if isinstance(p, Partial)]
    have = [REPLICATE if isinstance(p, Partial) else p for p in have]
    step = _step(axes, node, found, have, n, keep_whole)
    declined = declines(found[0], found[1], have) if declines and found and step.wants else None
    if declined is not None:
        step = all_whole(node, have, "whole", declined, len(step.results))
    if VARYING in have and not _takes_varying(found, have):
        step = each_its_own(node, have, VARYING, len(step.results))
    if "sp_result" in node.meta:
        step = each_its_own(node, have, node.meta["sp_result"], len(step.results))
    if step.wants is None and VARYING not in step.results:
        reduce += [
            Demand(node, i, "", "invariant", p, why=INVARIANT) for i, p in enumerate(have) if p == SUMMAND
        ]
    draws = []
    if step.wants is None and n > 1 and is_random(node) and not _agreed(node):
        why = "a random draw that must be the same on every rank"
        draws.append(Demand(node, 0, "", "draw", REPLICATE, why=why))
    return Step(step.wants, step.results, (*reduce, *step.demands, *draws))


def _agreed(node: Node) -> bool:
    """Is every result of a random op already taken from one rank?"""
    results = [node] if is_tensor(node) else [u for u in node.users if is_tensor(u)]
    return all(u.target is torch.ops.sp.broadcast.default for r in results for u in r.users)


def _step(
    axes: Axes,
    node: Node,
    found: tuple[Call, Rule | None] | None,
    have: Sequence[Placement],
    n: int,
    keep_whole: bool,
) -> Step:
    call, rule = found if found is not None else (None, None)
    results = max(1, len(call.results())) if call is not None else 1
    if call is not None and isinstance(rule, Factors) and rule.wants is not None:
        return as_spelt(call, rule, have)
    if not any(isinstance(p, Shard) for p in have):
        begun = None
        if call is not None and isinstance(rule, Factors) and not keep_whole:
            begun = start(axes, call, rule, n)
        return begun or Step(None, (REPLICATE,) * results)
    if call is None or rule is None:
        return all_whole(node, have, "no rule", _no_rule(node), results)
    if isinstance(rule, Factors):
        return through_factors(call, rule, have, n)
    return through_movement(call, rule, have)


def _no_rule(node: Node) -> str:
    why = str(node.meta.get("sp_no_rule", f"{node.target} has no sharding rule"))
    return "its result is changed in place" if is_written(node) else why


def _takes_varying(found: tuple[Call, Rule | None] | None, have: Sequence[Placement]) -> bool:
    wants = found[1].wants if found is not None and isinstance(found[1], Factors) else None
    return wants is not None and all(w == VARYING for w, p in zip(wants, have) if p == VARYING)
