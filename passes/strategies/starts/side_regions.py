"""Shard regions that no sequence reaches along another of their dims.

    conv2d(image)   (B, C, H, W)  ->  reshape  (B, C, H * W)  ->  transpose  ->  attention along H * W

The sequence is H * W, which the convolution does not have: every rank would compute all of it. Its result can be
sharded along H, with the rows of neighbors that its windows read. Other examples are the backbone of a detector, a head
of convolutions, windows of an image that are no rows of it, and tokens of which the encoder selects some.

The pass marks the values of a class of dims (`NodeInfo.side`), at which propagation then starts shards. A class is
chosen by the FLOPs of a rank that it saves. The marks remain if the plan with them has clearly less work, and if the
exchanges where regions end take less time than that. No mark changes a value that has a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import current_bytes
from sp_compile.passes.sharding.axes import Atom, Axes, value_factors
from sp_compile.passes.sharding.find_sequences import complete_sequences
from sp_compile.passes.sharding.placement import PlacementPlan, Replicate, Shard
from sp_compile.passes.sharding.rule import lookup_rule
from sp_compile.passes.sharding.sharded_work import (
    LARGE_SHARE,
    ShardedWork,
    contraction_flops,
    count_work,
    largest_share,
)
from sp_compile.passes.strategies.gather_demands import demanded_operand
from sp_compile.passes.strategies.reduce_demands import DecomposeGroupNorms

MAX_REGIONS = 8  # maximum number of classes of dims
MAX_TRIALS = 3  # maximum number of classes of dims that are tried for one region
GRADIENT_WORK = 3.0  # FLOPs of forward and backward over those of the forward
PEAK_SHARE = 0.25  # of the FLOP/s of attention: the rate of convolutions and of products of few rows
GRADIENT_BYTES = 2.0  # bytes of the exchanges of forward and backward over those of the forward


class DecomposeChainedNorms(DecomposeGroupNorms):
    """Decomposition of all norms on shards, one after the other, so that a plan shows what they place on shards."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Decompose norms until none is on shards, and return their number."""
        changes = 0
        while changed := super().apply(gm, context):
            changes += changed
            context.invalidate()
        return changes


class ShardSideRegions(Pass):
    """Marks on values that no sequence reaches, along one of whose dims they are sharded.

    There are none with fallback="error", as most regions end in a gather, and with the balanced layout, whose shards
    have no neighbors.
    """

    requires = frozenset({"canonical", "sequences"})
    provides = frozenset({"side regions"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Mark the values of some classes of dims, and return the number of classes."""
        is_excluded = context.options.fallback == "error" or context.is_balanced
        if context.ranks.n == 1 or context.refusal is not None or is_excluded or not context.axes(gm).sequences:
            return 0
        marked = 0
        while marked < MAX_REGIONS and self._mark_best(gm, context):
            marked += 1
        return marked

    def _mark_best(self, gm: GraphModule, context: PassContext) -> bool:
        """Mark the values of the class of dims that saves most time; return False if none saves a clear part."""
        axes, plan = context.axes(gm), context.plan(gm)
        work = _plan_work(gm, plan, context)
        is_large = work.flops - work.sharded_flops >= LARGE_SHARE * work.flops
        if not is_large or not work.sharded_flops:  # nothing is on shards with a sequence of one token
            return False
        idle = [node for node in gm.graph.nodes if _is_idle(node, plan)]
        unmarked = Trial({}, plan, work.rank_flops, _gathered_bytes(plan), 0.0, 0.0)
        best, best_class = unmarked, -1
        for classes in _rank_classes(idle, axes, context):
            for name in classes[:MAX_TRIALS] if not best.marks else ():
                trial = _try_marks(gm, unmarked, _find_marks(axes, name, idle, gm), context)
                is_clear = work.rank_flops - trial.rank_flops >= LARGE_SHARE / 2 * work.flops
                # Of about equal times, chunks remain.
                margin = LARGE_SHARE * best.saved_seconds if best_class in _classes_of_chunks(axes) else 0.0
                if is_clear and trial.seconds < best.seconds - margin:
                    best, best_class = trial, name
        if not best.marks:
            return False
        _set_marks(best.marks, context)
        first = next(iter(best.marks))
        started = next((node for node in best.marks if best.plan.of(node) != plan.of(node)), first)
        share = (work.rank_flops - best.rank_flops) / work.flops
        self.note(started, f"no sequence reaches it: another dim is sharded, and a rank has {share:.0%} less FLOPs")
        return True


class Trial(NamedTuple):
    """A plan with marks on values of one class of dims."""

    marks: dict[Node, Shard]  # the shard in which each value may start
    plan: PlacementPlan  # of the graph with the marks
    rank_flops: float  # FLOPs of a rank, of the forward
    gathered: float  # bytes of the operands that are gathered
    seconds: float  # of a step with the marks over one without them; negative if they save time
    saved_seconds: float  # of the FLOPs of a rank that the marks save, in a step


def _try_marks(gm: GraphModule, unmarked: Trial, marks: dict[Node, Shard], context: PassContext) -> Trial:
    """Return the plan with some marks, and remove them again.

    Its time is that of the FLOPs that a rank saves, and of the bytes that it sends in addition. Latencies are not
    counted: they depend on the sizes of the model less than on those of the machine.

    Args:
        gm: The graph.
        unmarked: The plan without the marks.
        marks: The shard of each value.
        context: The context.
    """
    _set_marks(marks, context)
    plan, n, machine = context.plan(gm), context.ranks.n, context.machine_of_nodes(gm.graph.nodes)
    _set_marks(dict.fromkeys(marks), context)
    flops, gathered = _plan_work(gm, plan, context).rank_flops, _gathered_bytes(plan)
    nbytes = (gathered - unmarked.gathered) * (n - 1) / n
    saved_seconds = GRADIENT_WORK * (unmarked.rank_flops - flops) / (PEAK_SHARE * machine.flops)
    seconds = GRADIENT_BYTES * nbytes / machine.all_gather_bandwidth - saved_seconds
    return Trial(marks, plan, flops, gathered, seconds, saved_seconds)


def _set_marks(marks: Mapping[Node, Shard | None], context: PassContext) -> None:
    """Set the shards in which values may start, and drop the analysis of the graph."""
    for node, shard in marks.items():
        set_node_info(node, side=shard)
    context.invalidate()


def _plan_work(gm: GraphModule, plan: PlacementPlan, context: PassContext) -> ShardedWork:
    """Return the FLOPs of a graph, and those of a rank."""
    return count_work(gm, plan, set(), context.times, context.ranks.n)


def _is_idle(node: Node, plan: PlacementPlan) -> bool:
    """Return True for an input, and for an op that every rank computes in full."""
    if node.op in ("placeholder", "get_attr"):
        return isinstance(plan.of(node), Replicate) and "val" in node.meta
    is_full = all(isinstance(p, Replicate) for p in plan.placements.get(node, ()))
    return node.op == "call_function" and node not in plan.wants and is_full and not is_random(node)


def _rank_classes(idle: Sequence[Node], axes: Axes, context: PassContext) -> tuple[list[int], list[int]]:
    """Return the classes of dims along which most of the work of every rank could be divided, the best first.

    A product divides the dims that its first operand and its result share: positions, batches and heads, but no
    features. It counts for the classes of which a rank has about the smallest share, which are returned first, and for
    others, such as the batch, which are considered if no rows of the former can stay on their ranks. Of about equal
    classes, those of chunks are first, as ops on each chunk exchange nothing.
    """
    saved: dict[tuple[bool, int], float] = {}  # FLOPs of a rank, by (True for about the smallest share, class)
    sizes: dict[int, int] = {}
    chunks = _classes_of_chunks(axes)
    for node in idle:
        flops = contraction_flops(node) * context.times(node) if node.op == "call_function" else 0.0
        atoms = _divided_atoms(node, axes) if flops else []
        shares = {atom: largest_share(atom.size, context.ranks.n) for atom in atoms}
        for atom, share in shares.items():
            key = share <= (1 + LARGE_SHARE) * min(shares.values()), atom.name
            preference = 1 + LARGE_SHARE if atom.name in chunks else 1.0
            saved[key] = saved.get(key, 0.0) + flops * (1 - share) * preference
            sizes[atom.name] = max(atom.size, sizes.get(atom.name, 0))
    ranked = sorted((key for key in saved if saved[key]), key=lambda key: (-saved[key], -sizes[key[1]], key[1]))
    best, others = ([name for is_best, name in ranked if is_best == wanted] for wanted in (True, False))
    return best, others


def _classes_of_chunks(axes: Axes) -> set[int]:
    """Return the classes of dims of chunks, into which other dims are split."""
    return {axes.find(split.factors[0].name) for split in axes.all_splits()}


def _divided_atoms(node: Node, axes: Axes) -> list[Atom]:
    """Return the dims that the first operand and the result of an op share, of known sizes, that are no sequence."""
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None:
        return []
    factors = value_factors(axes, call.operands[0], rule, rule.operands[0])
    read = {atom.name for dim, _ in factors for atom in axes.canonical(dim)} - axes.sequences
    atoms = (atom for dim in axes.dims[node, 0] for atom in axes.canonical(dim))
    return [atom for atom in atoms if atom.name in read and isinstance(atom.size, int)]


def _find_marks(axes: Axes, side_class: int, idle: Sequence[Node], gm: GraphModule) -> dict[Node, Shard]:
    """Return the shard of each value that has a dim of a class and no dim of a sequence.

    Args:
        axes: The axes of the graph.
        side_class: The class.
        idle: The values that every rank computes in full.
        gm: The graph.
    """
    fresh: dict[str, Any] = {name: {} for name in ("strides", "granules", "blocks", "chunk_blocks", "windowed")}
    side_axes = replace(axes, sequences={side_class}, folds=1, flat=set(), **fresh)
    complete_sequences(gm, side_axes, picks=False)
    marks = {}
    for node in idle:
        shard = side_axes.shard(node)
        if shard is not None and node_info(node).side is None and not axes.sequence_dims(node):
            marks[node] = shard
    return marks


def _gathered_bytes(plan: PlacementPlan) -> float:
    """Return the bytes of the operands that are gathered; several nodes share one gather of an operand."""
    kinds = {"gathered", "align", "no rule"}
    demands = [d for d in plan.demands if d.kind in kinds or (d.kind == "halo" and d.node not in plan.wants)]
    gathered = {demanded_operand(d.node, d.operand) for d in demands if isinstance(d.have, Shard)}
    return float(sum(current_bytes(x.meta["val"]) for x in gathered))
