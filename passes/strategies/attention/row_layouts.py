"""Define the orders of a program's sequence: contiguous, zigzag, or load-balanced at run time.

    layout="auto"    contiguous; zigzag where nothing else depends on the order; load-balanced where, moreover, masks
                     identify documents, and inputs are full tensors

Load-balanced rows give each rank the same work of attention. Inputs are balanced if an earlier graph returned them in
that order. Balancing takes the host some milliseconds per graph (`balancing_seconds`). Sharded results keep its order;
a graph that cannot process that order gathers them (`unpermute_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
ORDERED_ROWS = ("gathered", "no rule", "align", "halo")  # demands of readers of neighbors, such as convolutions
# CPU seconds to balance a sequence, and per position: `benchmarks/plans.py`
BALANCE_SECONDS, BALANCE_SECONDS_PER_ROW = 3e-3, 5e-8


def candidate_orders(shapes: Sequence[AttentionShape], plan: PlacementPlan, context: PassContext) -> list[RowOrder]:
    """Return the orders of rows, such as zigzag, in which the attention of a program may run; the cost model chooses.

    Args:
        shapes: The sizes of each attention.
        plan: The placements.
        context: The context.

    Returns:
        The orders; of equally fast ones, the first is preferred.
    """
    requested = LAYOUTS.get(context.options.layout)  # None for layout="auto"
    if context.ranks.n == 1:
        return [CONTIGUOUS]
    if balanced_inputs(context):  # an earlier graph returned inputs in this order
        return [BALANCED]
    if requested is not None and requested.is_balanced and shapes:  # without attention, nothing is to be balanced
        return [requested]
    order_of_inputs = row_order(context.folds)
    for order in (requested, order_of_inputs):
        if order is not None and order.chunks > 1:  # zigzag
            return [order]
    if requested is not None:
        return [CONTIGUOUS]
    # layout="auto": the contiguous order, and each other one that is possible.
    can_balance, can_fold = any(shape.documents for shape in shapes), _is_permutable(plan, context)
    possible = {order: can_balance if order.is_balanced else can_fold for order in LAYOUTS.values()}
    return [order for order in LAYOUTS.values() if order.is_in_order or possible[order]]


def _is_permutable(plan: PlacementPlan, context: PassContext) -> bool:
    """Return True if no op and no caller depends on the order of the sequence, so that zigzag is possible."""
    if context.inputs or _has_local_outputs(context):  # sharded inputs and outputs='local' have contiguous rows
        return False
    return not any(d.kind in ORDERED_ROWS and d.node.op != "output" for d in plan.demands)


def _has_local_outputs(context: PassContext) -> bool:
    """Return True if the program returns the contiguous rows of this rank (outputs='local'), for any output."""
    outputs = [context.outputs] if isinstance(context.outputs, str) else context.outputs
    return "local" in outputs


def balancing_seconds(shapes: Iterable[AttentionShape]) -> float:
    """Return the seconds in which the host computes the load-balanced order of rows for one graph."""
    return BALANCE_SECONDS + BALANCE_SECONDS_PER_ROW * max(shape.q_len for shape in shapes)


def balanced_layout_refusal(nodes: Iterable[Node], plan: PlacementPlan, context: PassContext) -> Refusal | None:
    """Return the reason why the program cannot run in the load-balanced order, or None if it can.

    Args:
        nodes: The attention that would run in it.
        plan: The placements.
        context: The context.

    Returns:
        The refusal, with an error code and a text, or None.
    """
    has_balanced_inputs = bool(balanced_inputs(context))  # an earlier graph returned them in this order

    def refuse(code: str, text: str) -> Refusal:
        """Return the refusal of the layout for a reason."""
        return Refusal(RefusalKind.ROW_ORDER, code, f"layout={context.options.layout!r}", text)

    if has_balanced_inputs and context.options.layout not in KEEP_BALANCED_ORDER:
        return refuse("SP414", "an earlier graph returned the rows in another order")
    if context.inputs and not has_balanced_inputs:
        return refuse("SP412", "inputs are sharded in another order")
    if _has_local_outputs(context):
        return refuse("SP413", "outputs='local' is not supported")
    # The order is computed from vectors that masks index, such as document ids, before values are sharded.
    for vector in (v for node in nodes for name in ("rows", "cols") for v in OpCall(node).get(name) or []):
        if not all(_is_available(n, plan) for n in iterate_reachable([vector], lambda n: n.all_input_nodes)):
            return refuse("SP411", f"{describe_node(vector)}, which a mask indexes, is computed from shards")
    # A scan, or an op that reads neighbors of rows, refuses the order in any case; an op that needs gathered rows only
    # if the order is merely preferred, neither requested nor that of the inputs.
    kinds = ORDERED_ROWS if context.options.layout == "auto" and not has_balanced_inputs else ("halo", "align")
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
    # The positions at both ends of the sequence that values such as x[:, 1:] lack. They must not be moved. A graph that
    # computes the order fixes those that it needs, but an order that an earlier graph has computed fixes only
    # `FIXED_END_POSITIONS` at either end.
    ends = {as_size(end) for frame in frames for end in (frame.start, frame.size - frame.start - frame.length)}
    if has_balanced_inputs and not all(isinstance(end, int) and end <= FIXED_END_POSITIONS for end in ends):
        return refuse("SP411", f"more than {FIXED_END_POSITIONS} positions at an end of the sequence are removed")
    return None


def _is_available(node: Node, plan: PlacementPlan) -> bool:
    """Return True for a replicated input, or a pure op with replicated results: every rank can compute it at the start.

    The load-balanced order of rows is computed from such values before other values are sharded in it.
    """
    is_replicated = all(isinstance(p, Replicate) for p in plan.placements.get(node, ()))
    return is_replicated and (node.op in ("placeholder", "get_attr") or is_pure(node))


def unpermute_seconds(gm: GraphModule, plan: PlacementPlan, context: PassContext) -> tuple[float, str]:
    """Estimate the time to gather load-balanced results, if the next graph cannot run in their order.

    A result of a complete model that the model itself reads, as logits with their loss, is not counted: it is probably
    no input of another graph.

    Args:
        gm: The graph.
        plan: The placements.
        context: The context of the compilation.

    Returns:
        The seconds, and a text that names the first such result; "" if there is none.
    """
    output, seconds, first_result = gm.graph.output_node(), 0.0, ""
    for node, options in output_options(output, context.outputs).items():
        value = node.meta["val"]
        stays_sharded = isinstance(plan.of(node), Shard) and not gather_reason(value, options)
        if stays_sharded and (context.fragment or set(node.users) == {output}):
            num_gathers = 2 if value.is_floating_point() else 1  # also of the gradient
            rank_bytes = -(-current_bytes(value) // context.ranks.n)  # rounded up
            seconds += num_gathers * context.machine_of(node).seconds("all_gather", rank_bytes, context.ranks.n)
            first_result = first_result or f"{node.name} at {node_line(node)}, a sharded result"
    return seconds, first_result
