"""Compute the step of one node: its placements and demands, from those of its operands.

Names: `have` are the placements of a node's operands, `wants` those with which it runs on shards; n is the number of
ranks. A factor is a named index of a rule ("b s d, d e -> b s e"), of kind "pass" if the op runs row by row along it. A
step is the `wants`, results and demands of one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import Size, assume_large, divides, is_same_size, size_product
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.factors import BoundRule, Dims, dim_factors, flatten_dims
from sp_compile.passes.sharding.placement import REPLICATE, Demand, Frame, Partial, Placement, Replicate, Shard
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
            return _transfer_shard(base, i, shape[i], n)
        if factor in dim_factors(dim):  # one of several factors of the dim
            factor_shard = _transfer_shard(base, i, rule.extents[factor], n)
            return factor_shard and rule.dim_shard(dim, factor, factor_shard)
    return None


def _transfer_shard(base: Shard, dim: int, extent: Size, n: int) -> Shard | None:
    """Return `base`, the shard of another tensor, as a shard of `dim` with `extent` positions; None if impossible.

    For an equal number of positions it is the same shard. Another number (8 heads of keys, 32 of queries) is possible
    only if the rows of `base` are contiguous, and n divides both numbers, so that the blocks of ranks correspond.
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
    return shard_factor(call, rule, [REPLICATE] * len(call.operands), factor, shard, n, demands)


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
            is_pairs = _reads_pairs(call, rule, leading, i, main_factor, factor)
            why = (
                f"every row of operand {leading} reads it" if is_pairs else f"operand {leading} is sharded differently"
            )
            demands.append(Demand(node, i, "pairs" if is_pairs else "align", shards[i], keeps_sharding, why))
    if base is not None:
        return shard_factor(call, rule, have, main_factor, base, n, tuple(demands))
    # Operands of which the op reads any local rows, such as the shape (`lenders`), do not shard the result.
    only_lenders = not demands and any(isinstance(have[i], Shard) for i in rule.lenders)
    return NodeStep(tuple(have) if only_lenders else None, (REPLICATE,) * len(rule.results), tuple(demands))


def _reads_pairs(call: OpCall, rule: BoundRule, leading: int | None, i: int, main_factor: str, factor: str) -> bool:
    """Return True if an op reads an operand for pairs of rows, of which it has a larger value: q @ k.T, weights @ v.

    The value is the result or the leading operand, and has a dim for the rows of each.

    Args:
        call: The call of the op.
        rule: The rule of the op.
        leading: The index of the operand whose sharding is propagated, if any.
        i: The index of the other operand.
        main_factor: The sharded factor of the first operand.
        factor: That of the other one.
    """
    if leading is None or factor == main_factor or main_factor in flatten_dims(rule.operands[i]):
        return False
    values = [*zip(rule.results, call.result_shapes()), (rule.operands[leading], call.shape(leading))]
    pairs = [shape for dims, shape in values if {main_factor, factor} <= set(flatten_dims(dims))]
    least = assume_large(size_product(call.shape(i)))
    return any(assume_large(size_product(shape)) >= least for shape in pairs)


def _has_same_positions(call: OpCall, rule: BoundRule, i: int, factor: str, have: Shard, base: Shard, n: int) -> bool:
    """Return True if an operand's shards of the factor have the same positions as those of `base`."""
    extent = call.shape(i)[have.dim] if factor in rule.operands[i] else rule.extents[factor]
    return have.has_same_positions(base) or have.has_same_positions(_transfer_shard(base, have.dim, extent, n) or base)


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


def shard_factor(
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
