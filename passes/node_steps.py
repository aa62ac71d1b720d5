"""What one node does, given where its operands lie: on shards, as its rule lets it, or on whole values, by demands.

Each function answers for one kind of rule, or says that none applies; `passes/propagate.py` asks them node by node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..axes import Axes
from ..call import Call
from ..layout import REPLICATE, Demand, Partial, Placement, Replicate, Shard
from ..movement import Reshape, Window, move
from ..randomness import is_random
from ..rule import Factors
from ..shapes import product, same, typical
from ..sliding import place
from .placing import located, same_place

SUMMAND = Replicate(partial_grad=True)  # how a replicated operand enters a node that runs on shards
SCANNED = "every position needs what all before it combine to"
NEIGHBOURS = "every position needs its neighbours"
DIFFERS = "another operand differs from rank to rank, so every rank needs all rows of this one"


@dataclass(frozen=True)
class Step:
    """What one node does: how its operands must arrive, where its results lie, what it cannot do alone."""

    wants: tuple[Placement, ...] | None
    results: tuple[Placement, ...]
    demands: tuple[Demand, ...] = ()


def as_spelt(call: Call, rule: Factors, have: Sequence[Placement]) -> Step:
    """The call says where its operands lie; a shard that lies elsewhere is gathered first, and cut anew."""
    assert rule.wants is not None
    assert rule.gives is not None
    demands = tuple(
        Demand(call.node, i, "", "align", p, why="the op was written for another placement of it")
        for i, (p, want) in enumerate(zip(have, rule.wants))
        if isinstance(p, Shard) and not _lies(p, want)
    )
    return Step(tuple(rule.wants), (rule.gives,) * len(rule.results), demands)


def _lies(have: Shard, want: Placement) -> bool:
    return isinstance(want, Shard) and have.dim == want.dim and have.matches(want)


def each_its_own(node: Node, have: Sequence[Placement], result: Placement, results: int) -> Step:
    """Ranks that combine values of their own with a common one, or exchange it as they wish, need all of it."""
    demands = tuple(
        Demand(node, i, "", "varying", p, True, DIFFERS) for i, p in enumerate(have) if isinstance(p, Shard)
    )
    return Step(None, (result,) * results, demands)


def all_whole(node: Node, have: Sequence[Placement], kind: str, why: str, results: int) -> Step:
    demands = tuple(Demand(node, i, "", kind, p, why=why) for i, p in enumerate(have) if isinstance(p, Shard))
    return Step(None, (REPLICATE,) * results, demands)


def through_movement(call: Call, rule: Reshape | Window, have: Sequence[Placement]) -> Step:
    moved = move(rule, have[0]) if isinstance(have[0], Shard) else None
    results = len(call.results())
    if moved is None and isinstance(have[0], Shard):
        why = "the sequence has no single place in the result's shape"
        return all_whole(call.node, have[:1], "whole", why, results)
    if moved is None:  # only a shape donor (view_as) is sharded
        return Step(tuple(have), (REPLICATE,) * results)
    return Step(tuple(have), moved)


def start(axes: Axes, call: Call, rule: Factors, n: int) -> Step | None:
    """Does a sequence of floats (or of random draws) begin here? Then run on shards of replicated operands."""
    node, value = call.node, next(iter(call.results()), None)
    random = is_random(node)
    if value is None or (rule.lazy and not random):
        return None
    shard = axes.shard(node) if value.is_floating_point() or value.is_complex() or random else None
    if shard is None:
        return None
    factor = rule.results[0][shard.dim]
    if not factor or rule.kind(factor) in ("whole", "attend"):  # causal attention counts from its first query
        return None
    if rule.kind(factor) == "halo":
        operand = axes.shard(call.operands[0])
        step = _slide(call, rule, [REPLICATE] * len(call.operands), operand, n) if operand else None
        return step if step is not None and step.wants is not None and "sp_whole" not in node.meta else None
    demands: tuple[Demand, ...] = ()
    if rule.kind(factor) == "scan":
        if "sp_whole" in node.meta or not (same(shard.outer, 1) and same(shard.inner, 1)):
            return None
        demands = (Demand(node, 0, factor, "scan", REPLICATE, why=SCANNED),) if n > 1 else ()
    return _run(call, rule, [REPLICATE] * len(call.operands), factor, shard, n, demands)


def through_factors(call: Call, rule: Factors, have: Sequence[Placement], n: int) -> Step:
    node, demands = call.node, []
    shards = {i: p for i, p in enumerate(have) if isinstance(p, Shard)}
    sharded = {i: rule.operands[i][p.dim] for i, p in shards.items()}
    if rule.kind(sharded.get(0, "")) == "halo":
        return _slide(call, rule, have, shards[0], n)
    kept = _kept(call, rule, sharded)
    for i, f in sharded.items():
        stays = kept is not None and sharded[kept] not in rule.operands[i]
        if rule.kind(f) == "whole":
            demands.append(Demand(node, i, f, "whole", shards[i], stays, f"needs all of {f!r}"))
        elif rule.kind(f) == "scan" and not (n == 1 and shards[i].frame.exact(1)):
            demands.append(Demand(node, i, f, "scan", shards[i], stays, SCANNED))
        elif rule.kind(f) == "attend":
            demands.append(Demand(node, i, f, "attend", shards[i], stays, "attention mixes the sequence"))
        elif kept is None or f != sharded[kept] or not same_place(call, i, shards[i], shards[kept], n):
            why = f"operand {kept} is sharded otherwise"
            demands.append(Demand(node, i, f, "align", shards[i], stays, why))
    if kept is None:
        return Step(None, (REPLICATE,) * len(rule.results), tuple(demands))
    return _run(call, rule, have, sharded[kept], shards[kept], n, tuple(demands))


def _slide(call: Call, rule: Factors, have: Sequence[Placement], base: Shard, n: int) -> Step:
    """Windows over the first operand's rows, which lie as in `base`; all other operands are read whole."""
    node, factor = call.node, rule.operands[0][base.dim]
    placed = place(rule.slides[factor], base, n)
    others = tuple(
        Demand(node, i, "", "whole", p, not isinstance(placed, str), "every window reads all of it")
        for i, p in enumerate(have)
        if i and isinstance(p, Shard)
    )
    if isinstance(placed, str):
        why = f"every position needs its neighbours, and {placed}"
        demand = Demand(node, 0, factor, "halo", have[0], why=why)
        return Step(None, (REPLICATE,) * len(rule.results), (demand, *others))
    alone = n == 1 and base.frame.exact(1) and placed.frame.exact(1)
    demands = () if alone else (Demand(node, 0, factor, "halo", have[0], why=NEIGHBOURS),)
    return Step((base, *[SUMMAND] * (len(have) - 1)), (placed,), (*demands, *others))


def _kept(call: Call, rule: Factors, sharded: Mapping[int, str]) -> int | None:
    """The operand whose sharding the node goes on with: one that reaches the result, the largest."""

    def worth(i: int) -> tuple[int, int, int]:
        rank = {"pass": 3, "attend": 2}.get(rule.kind(sharded[i]), 1)
        in_result = any(sharded[i] in dims for dims in rule.results)
        return (int(in_result), rank, typical(product(call.shape(i))))

    candidates = [i for i, f in sharded.items() if f and rule.kind(f) != "whole"]
    candidates = [i for i in candidates if rule.kind(sharded[i]) != "attend" or worth(i)[0]]
    return max(candidates, key=lambda i: (*worth(i), -i), default=None)


def _run(
    call: Call,
    rule: Factors,
    have: Sequence[Placement],
    factor: str,
    base: Shard,
    n: int,
    demands: tuple[Demand, ...],
) -> Step:
    """Run the node on shards of `factor`: place the operands and the results."""
    wants = [located(base, d, call.shape(i), factor, n) or SUMMAND for i, d in enumerate(rule.operands)]
    results = [located(base, d, s, factor, n) for d, s in zip(rule.results, call.result_shapes())]
    named = zip((*rule.operands, *rule.results), (*wants, *results))
    if any(factor in dims and not isinstance(placed, Shard) for dims, placed in named):
        why = f"the sizes of {factor!r} are not provably those of one sequence"
        return all_whole(call.node, have, "align", why, len(results))
    lost = REPLICATE if rule.kind(factor) == "attend" else Partial()
    if rule.kind(factor) in ("mean", "total"):
        demands += tuple(
            Demand(call.node, i, factor, rule.kind(factor), w, why="a total over the whole sequence")
            for i, w in enumerate(wants)
            if isinstance(w, Shard) and isinstance(have[i], Shard)
        )
    return Step(tuple(wants), tuple(r or lost for r in results), demands)
