"""Graph + rules -> Plan: the placement of every value, and the demands nobody has met yet. Changes nothing.

One forward sweep. A node with a sharded operand runs on shards if its rule lets the factor pass; otherwise it states a
demand. A node whose operands are all replicated stays replicated, unless it is the place where a sequence of floats
begins (an embedding, the first pointwise op on an input): there its operands are wanted sharded, which is a free slice.
Propagation never inserts a collective; the idea is Shardy's factor propagation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.boundary.outputs import options_of_results, why_whole
from sp_compile.passes.graph.buckets import packed_in
from sp_compile.passes.graph.call import Call, is_tensor, overloads, result_number, shape_of
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import Size, all_same, divides, product, same, typical
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.factors import Dims, Factors, flat, parts
from sp_compile.passes.sharding.placement import (
    REPLICATE,
    VARYING,
    Demand,
    Frame,
    Partial,
    Placement,
    Plan,
    Replicate,
    Shard,
)
from sp_compile.passes.sharding.rule import has_rule, lookup, transfer_of
from sp_compile.passes.sharding.rules.exchange_rules import lies_as_written
from sp_compile.passes.sharding.window_rules import place


def located(rule: Factors, base: Shard, dims: Dims, shape: Sequence[Size], factor: str, n: int) -> Shard | None:
    """Where a tensor of these dims lies if `factor` is sharded as in `base`; None without the factor."""
    for at, dim in enumerate(dims):
        if dim == factor:
            return _scaled(base, at, shape[at], n)
        if factor in parts(dim):
            own = _scaled(base, at, rule.extents[factor], n)
            return own and rule.outside(dim, factor, own)
    return None


def _scaled(base: Shard, dim: int, extent: Size, n: int) -> Shard | None:
    """The same factor in a dim of another extent (grouped heads): whole multiples only."""
    if same(extent, product((base.outer, base.frame.length, base.inner))):
        return base.on(dim)
    total = product((base.outer, base.frame.size, base.inner))
    plain = base.frame.order.in_order and base.frame.exact(n) and same(base.outer, 1)
    return Shard(dim, Frame.full(extent)) if plain and divides(n, total) and divides(n, extent) else None


SUMMAND = Replicate(partial_grad=True)  # how a replicated operand enters a node that runs on shards
SCANNED = "every position needs what all before it combine to"
NEIGHBOURS = "every position needs its neighbours"
NO_PLACE = "the sequence has no single place in the result's shape"
DIFFERS = "another operand differs from rank to rank, so every rank needs all rows of this one"
Demands = tuple[Demand, ...]
FACTORIES = overloads("full ones zeros")


@dataclass(frozen=True)
class Step:
    """What one node does: how its operands must arrive, where its results lie, what it cannot do alone."""

    wants: tuple[Placement, ...] | None
    results: tuple[Placement, ...]
    demands: Demands = ()


def as_written(call: Call, rule: Factors, have: Sequence[Placement]) -> Step:
    """The call says where its operands lie; a shard that lies elsewhere is gathered first, and cut anew."""
    assert rule.wants is not None
    assert rule.gives is not None
    demands = tuple(
        Demand(call.node, i, "align", p, why="the op was written for another placement of it")
        for i, (p, want) in enumerate(zip(have, rule.wants))
        if isinstance(p, Shard) and not (isinstance(want, Shard) and p.dim == want.dim and p.matches(want))
    )
    return Step(tuple(rule.wants), (rule.gives,) * len(rule.results), demands)


def each_its_own(node: Node, have: Sequence[Placement], result: Placement, results: int) -> Step:
    """Ranks that combine values of their own with a common one, or exchange it as they wish, need all of it."""
    return Step(None, (result,) * results, _demands(node, have, "varying", DIFFERS, keeps_sharding=True))


def all_whole(node: Node, have: Sequence[Placement], kind: str, why: str, results: int) -> Step:
    return Step(None, (REPLICATE,) * results, _demands(node, have, kind, why))


def _demands(node: Node, have: Sequence[Placement], kind: str, why: str, keeps_sharding: bool = False) -> Demands:
    shards = [(i, p) for i, p in enumerate(have) if isinstance(p, Shard)]
    return tuple(Demand(node, i, kind, p, keeps_sharding, why) for i, p in shards)


def start(axes: Axes, call: Call, rule: Factors, n: int, window: Frame | None = None) -> Step | None:
    """Does a sequence of floats begin here (or of draws, or of what outgrows its operands)? Then run on their shards.

    window: the window of another sequence as which it begins, if it is none of its own.
    """
    node, value = call.node, next(iter(call.results()), None)
    random = is_random(node)
    if value is None or (rule.lazy and not random and not record(node).begins):
        return None
    begins = value.is_floating_point() or value.is_complex() or random or rule.begins or _outgrows(call)
    shard = axes.shard(node) if begins else None
    if shard is None:
        return None
    if window is not None and same(window.length, shard.frame.length):
        shard = replace(shard, frame=window)
    if shard.frame.order.dealt and not same(shard.frame.size, axes.longest()):  # a table deals rows of one sequence
        return None
    factor, shard = rule.inside(rule.results[0], shard)
    if not factor or rule.kind(factor) in ("whole", "attend"):  # causal attention counts from its first query
        return None
    if rule.kind(factor) == "halo":
        operand = axes.shard(call.operands[0])
        step = _slide(call, rule, [REPLICATE] * len(call.operands), operand, n) if operand else None
        return step if step is not None and step.wants is not None and not record(node).whole else None
    demands: Demands = ()
    if rule.kind(factor) == "scan":
        if record(node).whole or not (same(shard.outer, 1) and same(shard.inner, 1)):
            return None
        alone = n == 1 and shard.frame.exact(1)
        demands = () if alone else (Demand(node, 0, "scan", REPLICATE, why=SCANNED),)
    return _run(call, rule, [REPLICATE] * len(call.operands), factor, shard, n, demands)


WIDER = 8  # times as many elements as operands have together: a few bytes a token become a row of a vocabulary


def _outgrows(call: Call) -> bool:
    """Do operands broadcast to far more than they are, as tokens do that are compared with all classes?"""
    made, given = (
        sum(typical(product(s)) for s in shapes) for shapes in (call.result_shapes(), map(shape_of, call.operands))
    )
    return bool(given) and made >= WIDER * given


def through_factors(call: Call, rule: Factors, have: Sequence[Placement], n: int) -> Step:
    node, demands = call.node, []
    shards = {i: p for i, p in enumerate(have) if isinstance(p, Shard) and i not in rule.lenders}
    cut = {i: rule.inside(rule.operands[i], p) for i, p in shards.items()}
    if 0 in cut and rule.kind(cut[0][0]) == "halo":
        return _slide(call, rule, have, shards[0], n)
    if 0 in cut and rule.kind(cut[0][0]) == "window":
        placed = rule.cut(shards[0])
        return Step(tuple(have), placed) if placed else all_whole(node, have, "whole", NO_PLACE, len(rule.results))
    kept = _kept(call, rule, {i: f for i, (f, _) in cut.items()})
    factor, base = cut[kept] if kept is not None else ("", None)
    for i, (f, own) in cut.items():
        stays = kept is not None and factor not in flat(rule.operands[i])
        if not f or rule.kind(f) == "whole":
            why = f"needs all of {f!r}" if f and not rule.reshapes else NO_PLACE
            demands.append(Demand(node, i, "whole", shards[i], stays, why))
        elif rule.kind(f) == "scan" and not (n == 1 and own.frame.exact(1)):
            demands.append(Demand(node, i, "scan", shards[i], stays, SCANNED))
        elif rule.kind(f) == "attend":
            demands.append(Demand(node, i, "attend", shards[i], stays, "attention mixes the sequence"))
        elif base is None or f != factor or not _same_place(call, rule, i, f, own, base, n):
            why = f"operand {kept} is sharded otherwise"
            demands.append(Demand(node, i, "align", shards[i], stays, why))
    if base is not None:
        return _run(call, rule, have, factor, base, n, tuple(demands))
    lent = not demands and any(isinstance(have[i], Shard) for i in rule.lenders)
    return Step(tuple(have) if lent else None, (REPLICATE,) * len(rule.results), tuple(demands))


def _same_place(call: Call, rule: Factors, i: int, factor: str, have: Shard, base: Shard, n: int) -> bool:
    """Do an operand's shards of the factor hold the positions that those in `base` do?"""
    extent = call.shape(i)[have.dim] if factor in rule.operands[i] else rule.extents[factor]
    return have.matches(base) or have.matches(_scaled(base, have.dim, extent, n) or base)


def _slide(call: Call, rule: Factors, have: Sequence[Placement], base: Shard, n: int) -> Step:
    """Windows over the first operand's rows, which lie as in `base`; all other operands are read whole."""
    node, factor = call.node, rule.operands[0][base.dim]
    placed = place(rule.slides[factor], base, n)
    rest = (REPLICATE, *have[1:])
    others = _demands(node, rest, "whole", "every window reads all of it", keeps_sharding=not isinstance(placed, str))
    if isinstance(placed, str):
        why = f"every position needs its neighbours, and {placed}"
        demand = Demand(node, 0, "halo", have[0], why=why)
        return Step(None, (REPLICATE,) * len(rule.results), (demand, *others))
    alone = n == 1 and base.frame.exact(1) and placed.frame.exact(1)
    demands = () if alone else (Demand(node, 0, "halo", have[0], why=NEIGHBOURS),)
    return Step((base, *[SUMMAND] * (len(have) - 1)), (placed,), (*demands, *others))


def _kept(call: Call, rule: Factors, sharded: Mapping[int, str]) -> int | None:
    """The operand whose sharding the node goes on with: one that reaches the result, the largest."""

    def worth(i: int) -> tuple[int, int, int]:
        rank = {"pass": 3, "attend": 2}.get(rule.kind(sharded[i]), 1)
        in_result = any(sharded[i] in flat(dims) for dims in rule.results)
        return (int(in_result), rank, typical(product(call.shape(i))))

    candidates = [i for i, f in sharded.items() if f and rule.kind(f) != "whole"]
    candidates = [i for i in candidates if rule.kind(sharded[i]) != "attend" or worth(i)[0]]
    return max(candidates, key=lambda i: (*worth(i), -i), default=None)


def _run(
    call: Call, rule: Factors, have: Sequence[Placement], factor: str, base: Shard, n: int, demands: Demands
) -> Step:
    """Run the node on shards of `factor`: place the operands and the results."""
    wants: list[Placement] = [
        located(rule, base, d, call.shape(i), factor, n) or SUMMAND for i, d in enumerate(rule.operands)
    ]
    results = [located(rule, base, d, s, factor, n) for d, s in zip(rule.results, call.result_shapes())]
    named = zip((*rule.operands, *rule.results), (*wants, *results))
    if any(factor in flat(dims) and not isinstance(placed, Shard) for dims, placed in named):
        why = f"the sizes of {factor!r} are not provably those of one sequence"
        return all_whole(call.node, have, "align", why, len(results))
    for i in rule.lenders:
        wants[i] = have[i]
    lost = REPLICATE if rule.kind(factor) == "attend" else Partial()
    if rule.kind(factor) in ("mean", "total"):
        demands += tuple(
            Demand(call.node, i, rule.kind(factor), w, why="a total over the whole sequence")
            for i, w in enumerate(wants)
            if isinstance(w, Shard) and isinstance(have[i], Shard)
        )
    return Step(tuple(wants), tuple(r or lost for r in results), demands)


def only_masks(gm: GraphModule) -> set[Node]:
    """Values that reach nothing but masks: every rank needs them whole, so they are not worth sharding."""
    whole: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and node.users and all(_as_mask(node, u) or u in whole for u in node.users):
            whole.add(node)
    return whole


def _as_mask(node: Node, user: Node) -> bool:
    call, rule = lookup(user) or (None, None)
    if call is None or rule is None:
        return False
    at = [i for i, operand in enumerate(call.operands) if operand is node]
    return bool(at) and all(i in rule.masks for i in at)


INVARIANT = "it runs alike on every rank, so the gradient it sends back is whole on every rank"
Declines = Callable[[Call, Factors | None, Sequence[Placement]], str | None]


def propagate(
    gm: GraphModule,
    axes: Axes,
    n: int,
    inputs: Mapping[Node, Placement] | None = None,
    outputs: str | Sequence[str] = "gather",
    begin: bool = True,
    declines: Declines | None = None,
    begins: Mapping[Node, Frame] | None = None,
) -> Plan:
    """The Plan of a graph for `n` ranks.

    inputs: placements of placeholders and attributes that are not replicated. begin: may replicated values be cut
    where a sequence begins? If not, only inputs and exchanges shard anything. declines: why a node that could run on
    shards had better not. outputs: which results stay in shards, see `options_of_results`. begins: nodes at which a
    sequence begins as this window of another one (`window_starts.py`).
    """
    plan = Plan()
    whole = only_masks(gm) if begin else frozenset(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            plan.placements[node] = ((inputs or {}).get(node, REPLICATE),)
        elif node.op == "output":
            _visit_output(plan, node, outputs)
        elif node.op == "call_function":
            step = _visit(plan, axes, node, n, node in whole, declines, (begins or {}).get(node))
            if step.wants is not None:
                plan.wants[node] = step.wants
            plan.placements[node] = step.results
            plan.demands.extend(step.demands)
    _cut_constants(plan, gm)
    return plan


def _cut_constants(plan: Plan, gm: GraphModule) -> None:
    """What holds one number everywhere, and is wanted in shards only, is made so."""
    for node in gm.graph.nodes:
        if node.target in FACTORIES and node.users:
            found = {want for user in node.users for want in wanted(node, user, plan) or [REPLICATE]}
            if len(found) == 1 and isinstance(want := found.pop(), Shard):
                plan.wants[node], plan.placements[node] = (), (want,)


def wanted(node: Node, user: Node, plan: Plan) -> list[Placement]:
    """How a user that runs on shards wants this operand: once for each time that it reads it."""
    found = lookup(user) if user in plan.wants and transfer_of(user.target) is None else None
    return [w for o, w in zip(found[0].operands, plan.wants[user]) if o is node] if found is not None else []


def _visit_output(plan: Plan, node: Node, outputs: str | Sequence[str]) -> None:
    asked = options_of_results(node, outputs)
    for i, source in enumerate(node.all_input_nodes):
        have = plan.of(source)
        if isinstance(have, Partial):
            plan.demands.append(Demand(node, i, "reduce", have, why="a result of the model"))
        elif have == SUMMAND:
            plan.demands.append(Demand(node, i, "invariant", have, why=INVARIANT))
        elif isinstance(have, Shard) and (why := why_whole(source.meta["val"], asked[source])):
            plan.demands.append(Demand(node, i, "whole", have, why=why))


def _visit(
    plan: Plan, axes: Axes, node: Node, n: int, keep_whole: bool, declines: Declines | None, window: Frame | None
) -> Step:
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        source, index = plan.placements.get(node.args[0], ()), node.args[1]
        part = packed_in(node) if VARYING in source else None
        if part is None and len(source) > 1 and isinstance(index, int):
            return Step(None, (source[result_number(node)],))
        return Step(None, (plan.of(part or node.args[0]),))
    call, rule = lookup(node) or (None, None)
    if is_written(node):
        rule = None
    have = [plan.of(a) for a in (call.operands if call else filter(is_tensor, node.all_input_nodes))]
    transfer = transfer_of(node.target)
    if transfer is not None and call is not None:
        why = "the exchange was written for another placement of its operand"
        stale = [Demand(node, i, "stale", p, why=why) for i, p in enumerate(have) if not lies_as_written(call, p)]
        return Step(tuple(have), transfer(call), tuple(stale))
    if record(node).combines and call is not None and _adds_up(call, have):
        return Step(tuple(p if isinstance(p, Partial) else SUMMAND for p in have), (Partial(),))
    reduce = [Demand(node, i, "reduce", p) for i, p in enumerate(have) if isinstance(p, Partial)]
    have = [REPLICATE if isinstance(p, Partial) else p for p in have]
    step = _step(axes, node, call, rule, have, n, keep_whole, window)
    declined = declines(call, rule, have) if declines and call and step.wants else None
    if declined is not None:
        step = all_whole(node, have, "whole", declined, len(step.results))
    wants = rule.wants if rule is not None else None
    if VARYING in have and not (wants is not None and all(w == VARYING for w, p in zip(wants, have) if p == VARYING)):
        step = each_its_own(node, have, VARYING, len(step.results))
    left = record(node).result
    if left is not None:
        step = each_its_own(node, have, left, len(step.results))
    if step.wants is None and VARYING not in step.results:
        reduce += [Demand(node, i, "invariant", p, why=INVARIANT) for i, p in enumerate(have) if p == SUMMAND]
    demands = [*reduce, *step.demands]
    if step.wants is None and n > 1 and is_random(node) and not _agreed(node):
        why = "a random draw that must be the same on every rank"
        demands.append(Demand(node, 0, "draw", REPLICATE, why=why))
    return Step(step.wants, step.results, tuple(demands))


PRODUCTS = (torch.ops.aten.mul.Tensor,)
SCALES = (*PRODUCTS, *overloads("div.Scalar div.Tensor mul.Scalar neg"))
ADDS = overloads("add.Tensor sub.Tensor")
LINEAR = (*ADDS, *SCALES)


def summands(node: Node) -> list[Node]:
    """The operands that the node adds up; none if it does anything else."""
    terms = _alike(node) if node.target in ADDS else []
    other = Call(node)["other"] if len(terms) == 1 else None
    return terms if len(terms) == 2 or (len(terms) == 1 and not isinstance(other, Node) and other == 0) else []


def scaled_by(node: Node) -> list[Node]:
    """The operands each of which the node scales by what else it reads; none if it does anything else."""
    factors = _alike(node) if node.target in SCALES else []
    factors = factors if node.target in PRODUCTS else [x for x in factors if x is Call(node)["self"]]
    return [x for x in factors if Call(node).operands.count(x) == 1]  # not a square


def _alike(node: Node) -> list[Node]:
    """The operands of floats in the shape and the dtype of the result."""
    value, operands = node.meta["val"], Call(node).operands
    alike = [x for x in operands if all_same(shape_of(x), shape_of(node)) and x.meta["val"].dtype == value.dtype]
    return alike if value.is_floating_point() else []


def _adds_up(call: Call, have: Sequence[Placement]) -> bool:
    """Are its terms sums, each rank's of its rows, and has every rank the whole of all else that it reads?"""
    sums = [x for x, p in zip(call.operands, have) if isinstance(p, Partial)]
    linear = sums == summands(call.node) or (len(sums) == 1 and sums[0] in scaled_by(call.node))
    return bool(sums) and linear and all(isinstance(p, Partial | Replicate) for p in have)


def drawn(node: Node) -> list[Node]:
    """The results of a random op."""
    return [node] if is_tensor(node) else [u for u in node.users if u.target is operator.getitem and is_tensor(u)]


def _agreed(node: Node) -> bool:
    """Is every result of a random op already taken from one rank?"""
    return all(u.target is torch.ops.sp.broadcast.default for r in drawn(node) for u in r.users)


def _step(
    axes: Axes, node: Node, call: Call | None, rule: Factors | None, have: Sequence[Placement], n: int,
    keep_whole: bool, window: Frame | None,
) -> Step:  # fmt: skip
    if call is None or rule is None or record(node).no_rule is not None:
        fits = " for such operands" if has_rule(node.target) else ""
        why = record(node).no_rule or f"{node.target} has no sharding rule{fits}"
        why = "its result is changed in place" if is_written(node) else why
        return all_whole(node, have, "no rule", why, max(1, len(call.results())) if call is not None else 1)
    if rule.wants is not None:
        return as_written(call, rule, have)
    if any(isinstance(p, Shard) for p in have):
        return through_factors(call, rule, have, n)
    begun = None if keep_whole else start(axes, call, rule, n, window)
    return begun or Step(None, (REPLICATE,) * max(1, len(call.results())))
