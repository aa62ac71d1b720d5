"""Compute the step of one node: its placements and demands, from those of its operands.

Names: `have` are the placements of a node's operands, `wants` those with which it runs on shards; n is the number of
ranks. A factor is a named index of a rule ("b s d, d e -> b s e"), of kind "pass" if the op runs row by row along it;
`passes/sharding/rule.py` lists the other kinds. A step is the `wants`, results and demands of one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import Size, assume_large, is_divisor, is_same_size, size_product
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.factors import BoundRule, Dims, dim_factors, flatten_dims
from sp_compile.passes.sharding.placement import REPLICATE, Demand, Frame, Partial, Placement, Replicate, Shard
from sp_compile.passes.sharding.window_rules import place_window

from .row_units import chunk_shard


def shard_of_factor(
    rule: BoundRule, base: Shard, dims: Dims, shape: Sequence[Size], factor: str, n: int
) -> Shard | None:
    """Return the placement of an operand or result if a factor that it shares with another tensor is sharded.

    For "b s d, d e -> b s e" and x sharded along s, the result is sharded along its s, and the weight, which has no s,
    has no such placement (None). The result is also None if the tensor has the factor in another, unsuitable length.

    Args:
        rule: The rule of the op.
        base: The placement of the other tensor: a shard of the factor.
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
            return rule.dim_shard(dim, factor, factor_shard) if factor_shard is not None else None
    return None


def _transfer_shard(base: Shard, dim: int, extent: Size, n: int) -> Shard | None:
    """Return `base`, the shard of another tensor, as a shard of `dim` with `extent` positions; None if impossible.

    For an equal number of positions it is the same shard. Another number (8 heads of keys, 32 of queries) is possible
    only if the rows of `base` are contiguous, and n divides both numbers, so that the blocks of ranks correspond.
    """
    if is_same_size(extent, size_product((base.outer, base.frame.length, base.inner))):
        return replace(base, dim=dim)
    base_extent = size_product((base.outer, base.frame.size, base.inner))
    is_contiguous = base.frame.order.is_in_order and base.frame.is_exact(n) and is_same_size(base.outer, 1)
    if is_contiguous and is_divisor(n, base_extent) and is_divisor(n, extent):
        return Shard(dim, Frame.full(extent))
    return None


# Placement of a replicated operand of a node on shards: the gradient that each rank computes is a summand.
SUMMAND_GRAD = Replicate(partial_grad=True)
SCANNED_DEMAND = "every position needs the reduction of all positions before it"
NEIGHBORS_DEMAND = "every position needs its neighbors"
NO_PLACEMENT = "the sequence is not a single dim of the result"
Demands = tuple[Demand, ...]


@dataclass(frozen=True)
class NodeStep:
    """Result of propagation at one node: the placements of its operands and results, and its demands."""

    wants: tuple[Placement, ...] | None  # placements of the operands; None if the node does not run on shards
    results: tuple[Placement, ...]  # placement of each result
    demands: Demands = ()  # demands that passes must discharge


def place_as_written(call: OpCall, rule: BoundRule, have: Sequence[Placement]) -> NodeStep:
    """Return the step of an op whose rule fixes the placements, such as sp::ring_attention with its frames.

    If a sharded operand has another placement than the rule requires, the step has a demand for it. A pass then gathers
    the operand and shards it again.

    Args:
        call: The call of the node.
        rule: The rule of the op.
        have: The placements of the operands.
    """
    assert rule.operand_placements is not None
    assert rule.result_placements is not None
    demands = []
    for i, (placement, want) in enumerate(zip(have, rule.operand_placements)):
        if not isinstance(placement, Shard):  # of a replicated operand, a rank has the rows that the rule states
            continue
        is_placed = isinstance(want, Shard) and placement.dim == want.dim and placement.has_same_positions(want)
        if not is_placed:
            why = "the op was written for another placement of it"
            demands.append(Demand(call.node, i, "align", placement, why=why))
    return NodeStep(tuple(rule.operand_placements), (rule.result_placements,) * len(rule.results), tuple(demands))


def replicate_operands(node: Node, have: Sequence[Placement], kind: str, why: str, num_results: int) -> NodeStep:
    """Return the step of a node that runs on replicated operands (`wants` is None), with a demand for each sharded one.

    Args:
        node: The node.
        have: The placements of the operands.
        kind: The kind of the demands.
        why: The reason of the demands, for the report.
        num_results: The number of its results.
    """
    return NodeStep(None, (REPLICATE,) * num_results, make_demands(node, have, kind, why))


def make_demands(node: Node, have: Sequence[Placement], kind: str, why: str, keeps_sharding: bool = False) -> Demands:
    """Return one demand of the kind for each sharded operand; for `keeps_sharding` see `Demand`."""
    shards = [(i, p) for i, p in enumerate(have) if isinstance(p, Shard)]
    return tuple(Demand(node, i, kind, p, keeps_sharding, why) for i, p in shards)


def start_sharding(axes: Axes, call: OpCall, rule: BoundRule, n: int, window: Frame | None = None) -> NodeStep | None:
    """Return a step on shards for a node with replicated operands, if a sequence starts there, else None.

    A sequence starts at a node whose result has a sequence dim: floats, as of an embedding, random draws, or results
    that are much larger than the operands. Each rank then computes its rows from a local slice of the operands. Ops
    that only move data are no reason to shard.

    Args:
        axes: The dims of the graph's values, and which of them are sequences.
        call: The call of the node.
        rule: The rule of the op.
        n: The number of ranks.
        window: The frame to use in place of that of `axes`, if it has the same number of positions: the node's rows are
            then placed as a window of another sequence.
    """
    node, value = call.node, next(iter(call.results()), None)
    is_draw = is_random(node)
    if value is None or (rule.lazy and not is_draw and not node_info(node).starts_sequence):  # `lazy`: only moves data
        return None
    is_float = has_gradient_dtype(value)
    starts = is_float or is_draw or rule.starts_sequence or _is_large_broadcast(call)
    shard = _starting_shard(axes, node) if starts else None
    chunks = chunk_shard(axes, call) if starts and shard is None else None
    shard = shard or chunks
    if shard is None:
        return None
    if window is not None and is_same_size(window.length, shard.frame.length):
        shard = replace(shard, frame=window)
    # The rows of a short part of a joint sequence, as 100 text tokens before 4000 of an image on 8 ranks, may all be
    # stored on one rank (shards have size / n rows), which would compute as much as without shards.
    is_short = n > 1 and assume_large(shard.frame.size) >= n * assume_large(shard.frame.length)
    # Only the longest sequence can be load-balanced.
    is_unbalanced = shard.frame.order.is_balanced and not is_same_size(shard.frame.size, axes.longest_sequence())
    if is_short or is_unbalanced:
        return None
    replicated = [REPLICATE] * len(call.operands)
    factor, shard = rule.local_part(rule.results[0], shard)
    # No op runs on shards of a "replicate" factor. Attention on a slice of its queries would count positions (a causal
    # mask) from the first query of the slice.
    if not factor or rule.kind(factor) in ("replicate", "attend") or (chunks and rule.kind(factor) != "pass"):
        return None
    if rule.kind(factor) == "halo":  # windows: the sequence starts with the rows of the operand
        operand_shard = _starting_shard(axes, call.operands[0])
        if operand_shard is None or node_info(node).replicated:  # no sequence starts at a gathered value
            return None
        if rule.operands[0][operand_shard.dim] not in rule.slides:  # a region along another dim, as the batch
            return None
        step = _window_step(call, rule, replicated, operand_shard, n)
        return step if step.wants is not None else None
    demands: Demands = ()
    if rule.kind(factor) == "scan":
        if node_info(node).replicated or not shard.is_only_factor:
            return None
        needs_ranks = not _has_all_positions(n, shard)
        demands = (Demand(node, 0, "scan", REPLICATE, why=SCANNED_DEMAND),) if needs_ranks else ()
    return shard_factor(call, rule, replicated, factor, shard, n, demands)


def _starting_shard(axes: Axes, node: Node) -> Shard | None:
    """Return the shard of a value that starts a sequence or, if no sequence reaches it, a side region, or None."""
    side: Shard | None = node_info(node).side
    return axes.shard(node) or side


def _has_all_positions(n: int, *shards: Shard) -> bool:
    """Return True if the only rank has all positions, without padding, so that an op along the dim needs no demand."""
    return n == 1 and all(shard.frame.is_exact(1) for shard in shards)


MIN_BROADCAST = 8  # minimum ratio of elements, results to operands: an index per token becomes a row of a vocabulary


def _is_large_broadcast(call: OpCall) -> bool:
    """Return True if operands broadcast to far more elements, such as tokens compared with all classes."""
    result_elements = sum(assume_large(size_product(shape)) for shape in call.result_shapes())
    operand_elements = sum(assume_large(size_product(node_shape(x))) for x in call.operands)
    return operand_elements > 0 and result_elements >= MIN_BROADCAST * operand_elements


def propagate_factors(call: OpCall, rule: BoundRule, have: Sequence[Placement], n: int) -> NodeStep:
    """Return the step of a node with sharded operands.

    The sharding of one operand, the leading one, is propagated to the result if its factor passes: for x sharded along
    s, linear with the rule "... s i, o i -> ... s o" has a result sharded along s. Operands that are sharded in another
    way have demands.

    Args:
        call: The call of the node.
        rule: The rule of the op.
        have: The placements of the operands.
        n: The number of ranks.
    """
    node, demands = call.node, []
    # The sharded operands, without the `lenders`, of which the op reads the shape only.
    shards = {i: p for i, p in enumerate(have) if isinstance(p, Shard) and i not in rule.lenders}
    # The sharded factor of each sharded operand, or "" if no factor describes the sharded dim, and its shard.
    factors = {i: rule.local_part(rule.operands[i], p) for i, p in shards.items()}
    # Windows over the rows of the first operand: convolutions (kind "halo") and slices (kind "window").
    first_factor, _ = factors.get(0, ("", None))
    first_kind = rule.kind(first_factor) if 0 in factors else ""
    if first_kind == "halo":
        return _window_step(call, rule, have, shards[0], n)
    if first_kind == "window":
        placed = rule.window_shard(shards[0])
        if placed:
            return NodeStep(tuple(have), placed)
        return replicate_operands(node, have, "gathered", NO_PLACEMENT, len(rule.results))
    leading = _leading_operand(call, rule, {i: factor for i, (factor, _) in factors.items()})
    # The factor along which the node runs sharded, and its shard in the leading operand.
    main_factor, base = factors[leading] if leading is not None else ("", None)
    # Demands, by the factor of each operand: one that the op needs in full ("gathered"); one that a scan or attention
    # exchanges; one that is not sharded as the leading operand ("align"), or that all its rows read ("pairs").
    for i, (factor, shard) in factors.items():
        # Whether the node remains sharded if this operand is gathered.
        keeps_sharding = leading is not None and main_factor not in flatten_dims(rule.operands[i])
        if not factor or rule.kind(factor) == "replicate":
            why = f"needs all of {factor!r}" if factor and not rule.reshapes else NO_PLACEMENT
            demands.append(Demand(node, i, "gathered", shards[i], keeps_sharding, why))
        elif rule.kind(factor) == "scan" and not _has_all_positions(n, shard):
            demands.append(Demand(node, i, "scan", shards[i], keeps_sharding, SCANNED_DEMAND))
        elif rule.kind(factor) == "attend":
            demands.append(Demand(node, i, "attend", shards[i], keeps_sharding, "attention mixes the sequence"))
        elif base is None or factor != main_factor or not _has_same_positions(call, rule, i, factor, shard, base, n):
            kind, why = "align", f"operand {leading} is sharded differently"
            if _is_pairwise(call, rule, leading, i, main_factor, factor):
                kind, why = "pairs", f"every row of operand {leading} reads it"
            demands.append(Demand(node, i, kind, shards[i], keeps_sharding, why))
    if base is not None:
        return shard_factor(call, rule, have, main_factor, base, n, tuple(demands))
    # If only lenders are sharded, the op runs on shards and reads the local shape. None: it runs on full operands.
    only_lenders = not demands and any(isinstance(have[i], Shard) for i in rule.lenders)
    return NodeStep(tuple(have) if only_lenders else None, (REPLICATE,) * len(rule.results), tuple(demands))


def _is_pairwise(call: OpCall, rule: BoundRule, leading: int | None, i: int, main_factor: str, factor: str) -> bool:
    """Return True if an op combines each row of the leading operand with each row of another: q @ k.T, weights @ v.

    A value of all pairs of rows, scores or weights, remains sharded along the rows of the leading operand, and the
    other operand is gathered. This saves nothing if the value is smaller than that operand: then the result is False.

    Args:
        call: The call of the op.
        rule: The rule of the op.
        leading: The index of the operand whose sharding is propagated, if any.
        i: The index of the other operand.
        main_factor: The sharded factor of the leading operand.
        factor: The sharded factor of the other one.
    """
    if leading is None or factor == main_factor or main_factor in flatten_dims(rule.operands[i]):
        return False
    values = [*zip(rule.results, call.result_shapes()), (rule.operands[leading], call.shape(leading))]
    shapes_of_pairs = [shape for dims, shape in values if {main_factor, factor} <= set(flatten_dims(dims))]
    gathered_elements = assume_large(size_product(call.shape(i)))  # symbolic sizes count as large numbers
    return any(assume_large(size_product(shape)) >= gathered_elements for shape in shapes_of_pairs)


def _has_same_positions(call: OpCall, rule: BoundRule, i: int, factor: str, have: Shard, base: Shard, n: int) -> bool:
    """Return True if each rank has the same positions of a factor in an operand and in the leading operand.

    Args:
        call: The call of the op.
        rule: The rule of the op.
        i: The index of the operand.
        factor: The sharded factor of both operands.
        have: The operand's shard of the factor.
        base: The leading operand's shard of the factor.
        n: The number of ranks.
    """
    if have.has_same_positions(base):
        return True
    # The factor is the sharded dim itself, or one of several factors of it.
    extent = call.shape(i)[have.dim] if factor in rule.operands[i] else rule.extents[factor]
    transferred = _transfer_shard(base, have.dim, extent, n)  # for another extent, as of 8 key heads for 32 query heads
    return transferred is not None and have.has_same_positions(transferred)


def _window_step(call: OpCall, rule: BoundRule, have: Sequence[Placement], base: Shard, n: int) -> NodeStep:
    """Return the step of an op with sliding windows over a sharded dim of its first operand, such as a convolution.

    If its windows can be placed, it runs on shards, with a "halo" demand for the rows of neighbors that they read.
    Otherwise `wants` is None, and the "halo" demand is discharged by a gather. Other operands (weights) are replicated.

    Args:
        call: The call of the node.
        rule: The rule of the op.
        have: The placements of the operands.
        base: The placement with which the first operand is read.
        n: The number of ranks.
    """
    node, factor = call.node, rule.operands[0][base.dim]
    placed = place_window(rule.slides[factor], base, n)  # the placement of the result, or the reason for none
    # Demands of the weights only: the first operand counts as replicated.
    weight_demands = make_demands(
        node, (REPLICATE, *have[1:]), "gathered", "every window reads all of it",
        keeps_sharding=not isinstance(placed, str),
    )  # fmt: skip
    if isinstance(placed, str):
        demand = Demand(node, 0, "halo", have[0], why=f"every position needs its neighbors, and {placed}")
        return NodeStep(None, (REPLICATE,) * len(rule.results), (demand, *weight_demands))
    needs_ranks = not _has_all_positions(n, base, placed)
    demands = (Demand(node, 0, "halo", have[0], why=NEIGHBORS_DEMAND),) if needs_ranks else ()
    return NodeStep((base, *[SUMMAND_GRAD] * (len(have) - 1)), (placed,), (*demands, *weight_demands))


def _leading_operand(call: OpCall, rule: BoundRule, sharded: Mapping[int, str]) -> int | None:
    """Return the index of the operand whose sharding is propagated to the result; None if all must be gathered.

    Operands whose sharded factor is in a result have priority, then factors that pass, then larger operands.

    Args:
        call: The call of the node.
        rule: The rule of the op.
        sharded: The sharded factor of each sharded operand, by index; "" if no factor describes the sharded dim.
    """

    def is_in_result(i: int) -> bool:
        """Return True if a result has the sharded factor of operand i."""
        return any(sharded[i] in flatten_dims(dims) for dims in rule.results)

    def priority(i: int) -> tuple[bool, int, int, int]:
        """Return the key of an operand; the largest is selected."""
        kind_priority = {"pass": 3, "attend": 2}.get(rule.kind(sharded[i]), 1)
        return is_in_result(i), kind_priority, assume_large(size_product(call.shape(i))), -i

    def can_lead(i: int) -> bool:
        """Return True if the op may run on shards of the operand's factor."""
        kind = rule.kind(sharded[i])  # "attend": queries, in the result, may lead; keys, which are not in it, may not
        return sharded[i] != "" and kind != "replicate" and (kind != "attend" or is_in_result(i))

    return max(filter(can_lead, sharded), key=priority, default=None)


def shard_factor(
    call: OpCall, rule: BoundRule, have: Sequence[Placement], factor: str, base: Shard, n: int, demands: Demands
) -> NodeStep:
    """Return the step of a node that runs on shards of a factor.

    Operands and results with the factor are sharded along it, other operands are replicated, and other results are
    partial: they are sums over the factor. Attention over sharded keys is an exception: its "attend" demand exchanges
    the keys, so its result is replicated. SUMMAND_GRAD is the placement of replicated operands, whose gradient on each
    rank is a summand. If the factor has lengths in these tensors that do not match, the node runs replicated.

    Args:
        call: The call of the node.
        rule: The rule of the op.
        have: The placements of the operands.
        factor: The name of the factor.
        base: The shard of the factor.
        n: The number of ranks.
        demands: The demands of the node that are known so far.
    """
    wants: list[Placement] = [
        shard_of_factor(rule, base, dims, call.shape(i), factor, n) or SUMMAND_GRAD
        for i, dims in enumerate(rule.operands)
    ]
    results = [shard_of_factor(rule, base, d, s, factor, n) for d, s in zip(rule.results, call.result_shapes())]
    dims_and_placements = zip((*rule.operands, *rule.results), (*wants, *results))
    if any(factor in flatten_dims(dims) and not isinstance(p, Shard) for dims, p in dims_and_placements):
        why = f"the sizes of {factor!r} are not provably equal along one sequence"
        return replicate_operands(call.node, have, "align", why, len(results))
    for i in rule.lenders:  # only the shape is read
        wants[i] = have[i]
    kind = rule.kind(factor)
    without_factor = REPLICATE if kind == "attend" else Partial()
    # A pass replaces the op by a sum over the ranks. Its demands are of the sharded operands only: each rank reads a
    # slice of the replicated ones.
    if kind in ("mean", "total"):
        demands += tuple(
            Demand(call.node, i, kind, want, why="a total over the full sequence")
            for i, want in enumerate(wants)
            if isinstance(want, Shard) and isinstance(have[i], Shard)
        )
    return NodeStep(tuple(wants), tuple(result or without_factor for result in results), demands)
