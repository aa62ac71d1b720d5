"""Define the orders of a program's sequence: contiguous, zigzag, or load-balanced at run time.

    layout="auto"    contiguous; zigzag where nothing else depends on the order; load-balanced where, moreover, masks
                     identify documents, and inputs are full tensors

Load-balanced rows give each rank the same work of attention. Inputs are balanced if an earlier graph returned them in
that order. Balancing takes the host some milliseconds per graph (`balancing_seconds`). Sharded results keep its order;
a graph that cannot process that order gathers them (`unpermute_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import describe_node, node_line
from sp_compile.lowering.base.frames import BALANCED, CONTIGUOUS, LAYOUTS, RowOrder, row_order
from sp_compile.passes.context import PassContext, Refusal, RefusalKind
from sp_compile.passes.cost.attention_cost import AttentionShape
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.sizes import as_size, current_bytes
from sp_compile.passes.localize.balance_layout import FIXED_END_POSITIONS, balanced_inputs
from sp_compile.passes.sharding.output_rules import gather_reason, output_options
from sp_compile.passes.sharding.placement import PlacementPlan, Replicate, Shard

# layouts with which a graph keeps the load-balanced order of an earlier one
KEEP_BALANCED_ORDER = ("auto", BALANCED.name)
ORDERED_ROWS = ("whole", "no rule", "align", "halo")  # demands of readers of neighbors, such as convolutions
# CPU seconds to balance a sequence, and per position: `benchmarks/plans.py`
BALANCE_SECONDS, BALANCE_SECONDS_PER_ROW = 3e-3, 5e-8


def candidate_orders(shapes: Iterable[AttentionShape], plan: PlacementPlan, job: PassContext) -> list[RowOrder]:
    """Return the orders to evaluate, in order of preference between equally fast ones.

    Args:
        shapes: The sizes of each attention.
        plan: The placements.
        job: The context.

    Returns:
        The orders.
    """
    requested = LAYOUTS.get(job.options.layout)
    if job.ranks.n == 1:
        return [CONTIGUOUS]
    if balanced_inputs(job):
        return [BALANCED]
    if requested is not None and requested.is_balanced and shapes:
        return [requested]
    for order in (requested, row_order(job.folds)):
        if order is not None and order.chunks > 1:
            return [order]
    if requested is not None:
        return [CONTIGUOUS]
    supported = {True: any(shape.documents for shape in shapes), False: _is_permutable(plan, job)}
    return [order for order in LAYOUTS.values() if order.is_in_order or supported[order.is_balanced]]


def _is_permutable(plan: PlacementPlan, job: PassContext) -> bool:
    """Return True if no op and no caller depends on the order of the sequence, so that zigzag is possible."""
    has_no_order = not job.inputs and not _has_local_outputs(job)
    return has_no_order and not any(d.kind in ORDERED_ROWS and d.node.op != "output" for d in plan.demands)


def _has_local_outputs(job: PassContext) -> bool:
    """Return True if a result is the contiguous rows of this rank (outputs='local')."""
    return "local" in ([job.outputs] if isinstance(job.outputs, str) else job.outputs)


def balancing_seconds(shapes: Iterable[AttentionShape]) -> float:
    """Return the host seconds that load balancing takes for one graph."""
    return BALANCE_SECONDS + BALANCE_SECONDS_PER_ROW * max(shape.q_len for shape in shapes)


def balanced_layout_refusal(nodes: Iterable[Node], plan: PlacementPlan, job: PassContext) -> Refusal | None:
    """Return the reason why the program cannot run in the load-balanced order, if any.

    Args:
        nodes: The attention that would run in it.
        plan: The placements.
        job: The context.

    Returns:
        The reason, or None if the order is possible.
    """
    has_balanced_inputs = bool(balanced_inputs(job))

    def refuse(code: str, text: str) -> Refusal:
        """Return the refusal of the layout."""
        return Refusal(RefusalKind.ROW_ORDER, code, f"layout={job.options.layout!r}", text)

    if has_balanced_inputs and job.options.layout not in KEEP_BALANCED_ORDER:
        return refuse("SP414", "an earlier graph returned the rows in another order")
    if job.inputs and not has_balanced_inputs:
        return refuse("SP412", "inputs are sharded in another order")
    if _has_local_outputs(job):
        return refuse("SP413", "outputs='local' is not supported")
    for vector in (v for node in nodes for name in ("rows", "cols") for v in OpCall(node).get(name) or []):
        if not all(_is_available(n, plan) for n in iterate_reachable([vector], lambda n: n.all_input_nodes)):
            return refuse("SP411", f"{describe_node(vector)}, which a mask indexes, is computed from shards")
    kinds = ORDERED_ROWS if job.options.layout == "auto" and not has_balanced_inputs else ("halo", "align")
    for demand in plan.demands:
        if demand.kind in ("scan", *kinds) and demand.node.op != "output":
            node = describe_node(demand.node)
            return refuse("SP411", f"{node} depends on the order of the sequence: {demand.why}")
    placed = [p for placements in plan.placements.values() for p in placements]
    frames = dict.fromkeys(p.frame for p in placed if isinstance(p, Shard))
    lengths = dict.fromkeys(frame.size for frame in frames)
    if len(lengths) > 1:
        several = " and of ".join(map(str, lengths))
        return refuse("SP411", f"the program has sequences of {several} positions")
    ends = {as_size(end) for frame in frames for end in (frame.start, frame.size - frame.start - frame.length)}
    if has_balanced_inputs and not all(isinstance(end, int) and end <= FIXED_END_POSITIONS for end in ends):
        return refuse("SP411", f"more than {FIXED_END_POSITIONS} positions at an end of the sequence are removed")
    return None


def _is_available(node: Node, plan: PlacementPlan) -> bool:
    """Return True if every rank has the value before values are sharded, to compute the order from it."""
    is_replicated = all(isinstance(p, Replicate) for p in plan.placements.get(node, ()))
    return is_replicated and (node.op in ("placeholder", "get_attr") or is_pure(node))


def unpermute_seconds(gm: GraphModule, plan: PlacementPlan, job: PassContext) -> tuple[float, str]:
    """Estimate the cost of gathering load-balanced results, if the next graph cannot run in their order.

    A result that the program itself reads, as logits with their loss, does not count as an input of another graph.

    Args:
        gm: The graph.
        plan: The placements.
        job: The context of the compilation.

    Returns:
        The seconds, and a text that names the results.
    """
    output, seconds, found = gm.graph.output_node(), 0.0, ""
    for node, words in output_options(output, job.outputs).items():
        value = node.meta["val"]
        stays = isinstance(plan.of(node), Shard) and not gather_reason(value, words)
        if stays and (job.fragment or set(node.users) == {output}):
            ways = 2 if value.is_floating_point() else 1
            part = -(-current_bytes(value) // job.ranks.n)
            seconds += ways * job.machine_of(node).seconds("all_gather", part, job.ranks.n)
            found = found or f"{node.name} at {node_line(node)}, a sharded result"
    return seconds, found
