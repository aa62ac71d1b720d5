"""Choose the fastest strategy of each attention, from the candidates of the cost model.

    node_info(node).choice = Candidate(kind=<a strategy>, layout="zigzag", ...)    read by that strategy's pass

A candidate is one strategy with its parameters (Ulysses and ring ranks, layout) and its predicted times and memory. Its
`refusal` is None, or the reason why it cannot run. A layout is an order of the rows of the sequence.

Changes nothing else. Attention whose queries or keys are not sharded along their sequence is for the passes to refuse.
One layout applies to the program: zigzag if any attention was chosen to run on it and nothing else of the program
depends on the order of the sequence; load-balanced for masks with documents, for which contiguous and zigzag orders are
imbalanced (`row_layouts.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.attention.kernel_args import KernelKey
from sp_compile.lowering.attention.kernels import expected_kernel
from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.frames import BALANCED, LAYOUTS, RowOrder
from sp_compile.lowering.base.ranks import STRATEGIES
from sp_compile.lowering.masks.blocks import FULL_WINDOW, Kind, Window
from sp_compile.lowering.masks.predicate import evaluate_over, is_within_documents, predicate_symbols
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.base import Pass
from sp_compile.passes.context import Note, NoteKind, PassContext
from sp_compile.passes.cost.attention_cost import (
    AttentionShape,
    Candidate,
    attention_strategies,
    candidates_in_order,
    choose_attention,
)
from sp_compile.passes.cost.decision import Decision
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.differentiable import differentiable_nodes
from sp_compile.passes.graph.modes import autocast_dtype
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import is_divisor
from sp_compile.passes.localize.balance_layout import balanced_inputs
from sp_compile.passes.sharding.attention_axes import attention_nodes, mask_predicate
from sp_compile.passes.sharding.placement import PlacementPlan, Shard

from .base import has_broadcast_heads, has_fills, head_counts, mask_shard, sequence_shard
from .plan_memory import memory_needed
from .row_layouts import balanced_layout_refusal, balancing_seconds, candidate_orders, unpermute_seconds

MANY_ROWS = 1 << 20  # number of rows of a block for which kernels are predicted: no kernel requires more


class ChooseAttention(Pass):
    """Choice of a strategy per attention, and of the layout of the program."""

    requires = frozenset({"canonical", "sequences"})
    provides = frozenset({"chosen attention"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Choose a strategy for every sharded attention (`NodeInfo.choice`), and the row order of the program.

        For each order of rows that is possible, the best strategy of each attention is found; the order with the fewest
        predicted seconds is used. `context.folds` identifies it: 1 contiguous, 2 zigzag (chunks of a rank), 0 balanced.

        Args:
            gm: The graph.
            context: The context of the compilation.

        Returns:
            0, as no op is changed.

        Raises:
            SpError: The requested strategy supports none of the attention.
        """
        plan, trained = context.plan(gm), differentiable_nodes(gm)  # trained: nodes that receive a gradient
        nodes = [n for n in attention_nodes(gm) if _is_decided_by_cost(n, plan)]
        shapes = {n: _attention_shape(n, plan, context, trained) for n in nodes}
        machines = {n: context.machine_of(n) for n in nodes}
        # Estimate the memory for the choice here, and for `OffloadValues`, which reads the bytes of sharded weights.
        may_offload = context.options.offload == "auto" and context.options.state == "sharded"
        if nodes or may_offload:
            machine = context.machine_of_nodes(nodes or gm.graph.nodes)
            memory = memory_needed(gm, plan, context, trained, machine.memory)
            context.memory.append(memory)
            machines = {n: replace(machine, memory=memory.available) for n, machine in machines.items()}
        orders = candidate_orders(list(shapes.values()), plan, context)
        decisions = {order: _decide_all(shapes, machines, order, plan, context) for order in orders}
        seconds = {order: _order_seconds(order, of_order.values()) for order, of_order in decisions.items()}
        order = min(seconds, key=seconds.__getitem__)
        folds = order.folds
        has_ring = any(d.chosen.ring > 1 for d in decisions[order].values())
        if order.is_balanced and not balanced_inputs(context) and not has_ring:
            # Without a ring the chosen strategies have full sequences, so the program keeps its order, `context.folds`.
            why = "attention is not sharded along the sequence, so there is no work to balance"
            self._reject_balanced(why)
            folds = context.folds
        elif order.is_balanced:
            order = self._accept_balanced(order, decisions[order], seconds, gm, plan, context)
            folds = order.folds
        for node, decision in decisions[order].items():
            set_node_info(node, choice=decision.chosen)
        context.decisions += decisions[order].values()
        if folds != context.folds:
            context.folds = folds
            context.invalidate()  # the cached placements are of the old order
        return 0

    def _accept_balanced(
        self,
        balanced: RowOrder,
        found: Mapping[Node, Decision],
        seconds: Mapping[RowOrder, float],
        gm: GraphModule,
        plan: PlacementPlan,
        context: PassContext,
    ) -> RowOrder:
        """Return the load-balanced order; the best other one if the program does not allow it, or it saves too little.

        The order of the results has to be restored, unless the next graph uses it, which may take longer than is saved.

        Args:
            balanced: The load-balanced order, which is predicted to be the fastest.
            found: The decision for each attention in this order.
            seconds: The predicted seconds in each order.
            gm: The graph.
            plan: The placements.
            context: The context of the compilation.

        Raises:
            SpError: The program does not allow the order, which the option `layout` names. With sharded inputs,
                `context.refusal` is set instead.
        """
        has_balanced_inputs = bool(balanced_inputs(context))
        # Attention without a ring has full sequences in the program's own order between its exchanges.
        without_ring = {node for node, d in found.items() if d.chosen.ring == 1}
        refusal = balanced_layout_refusal([n for n in attention_nodes(gm) if n not in without_ring], plan, context)
        if has_balanced_inputs or context.options.layout != "auto":  # the order is required
            if refusal is not None and not context.inputs:
                raise refusal.error()
            context.refusal = refusal
            return balanced
        best_other = min((order for order in seconds if not order.is_balanced), key=lambda order: seconds[order])
        if refusal is not None:
            self._reject_balanced(refusal.text)
            return best_other
        # The seconds to restore the order of the results, and a text that names these.
        reorder_seconds, results = unpermute_seconds(gm, plan, context)
        saved_seconds = seconds[best_other] - seconds[balanced]
        if reorder_seconds <= saved_seconds:
            return balanced
        self._reject_balanced(
            f"{results}, would take {reorder_seconds * 1e3:.3f} ms to reorder where the next graph does not use "
            f"its order, and balancing saves {saved_seconds * 1e3:.3f} ms"
        )
        return best_other

    def _reject_balanced(self, why: str) -> None:
        """Add a line to the report that states why the load-balanced order is not used."""
        self.notes.append(Note(NoteKind.DECLINED, BALANCED.name, why))


def _order_seconds(order: RowOrder, decisions: Collection[Decision]) -> float:
    """Return the predicted seconds of all attention in an order of rows, and to compute a load-balanced order."""
    seconds = sum(d.nodes * d.chosen.seconds for d in decisions)
    if order.is_balanced and decisions:
        seconds += balancing_seconds(d.shape for d in decisions)
    return seconds


def _decide_all(
    shapes: dict[Node, AttentionShape],
    machines: dict[Node, Machine],
    order: RowOrder,
    plan: PlacementPlan,
    context: PassContext,
) -> dict[Node, Decision]:
    """Return the best strategy of each attention that has one, if the program has its rows in this order.

    Args:
        shapes: The sizes of each attention.
        machines: The machine of each attention, with the memory that is available for it.
        order: The order of rows.
        plan: The placements.
        context: The context of the compilation.
    """
    decisions: dict[Node, Decision] = {}
    is_requested = _requested_strategy(context) != "auto"
    for node, shape in shapes.items():
        candidates = candidates_in_order(replace(shape, order=order), machines[node])
        chosen = _choose_candidate(candidates, node, plan, context)
        if chosen is not None:
            decisions[node] = Decision(shape, candidates, chosen, context.times(node), is_requested)
    return decisions


def _is_decided_by_cost(node: Node, plan: PlacementPlan) -> bool:
    """Return True if the strategy of an attention is chosen by cost.

    Its q, k and v are sharded along their sequence, and it has a demand ("attend"): otherwise it needs nothing of other
    ranks. For other attention, such as one without a dim of heads, the passes of the strategies decide, and report it.
    """
    call = OpCall(node)
    is_sharded = all(sequence_shard(plan, call, i) is not None for i in range(3))
    has_demand = any(d.node is node and d.kind == "attend" for d in plan.demands)
    has_heads = call.ndim(0) >= 3  # q is ([B,] H, S, D)
    return has_demand and is_sharded and has_heads and not has_broadcast_heads(call)


def _choose_candidate(
    found: Collection[Candidate], node: Node, plan: PlacementPlan, context: PassContext
) -> Candidate | None:
    """Return the best candidate that options and sizes allow.

    If no candidate fits in memory, it is the smallest one. The result is None if there is none, and the pass of a
    strategy reports why.

    Args:
        found: The candidates of all strategies.
        node: The attention.
        plan: The placements.
        context: The context of the compilation.

    Raises:
        SpError: The requested strategy does not support the attention.
    """
    # A relayout exchanges the rows to zigzag order for this attention only. Each rank then has two equal chunks of rows
    # without padding.
    n, placed = context.ranks.n, [plan.of(x) for x in OpCall(node).operands[:2]]
    can_relayout = all(isinstance(p, Shard) and p.frame.is_exact(n) and is_divisor(2 * n, p.frame.size) for p in placed)
    allowed = [c for c in found if _is_allowed(c, context) and (can_relayout or not c.relayout)]
    requested = STRATEGIES.get(_requested_strategy(context))
    if has_fills(OpCall(node)):  # results over blocks of keys cannot be merged
        allowed = [c for c in allowed if not STRATEGIES[c.kind].rewrite.merges_blocks]
        if requested is not None and requested.rewrite.merges_blocks:
            return None
    supported = [c for c in allowed if c.refusal is None]
    if supported:
        return choose_attention(supported)
    too_large = [c for c in allowed if not c.fits]
    if too_large:
        return min(too_large, key=lambda c: (c.memory, c.seconds))
    if requested is None or requested.rewrite.is_explained:  # the strategy's pass reports why it is not possible
        return None
    is_possible_elsewhere = any(c.refusal is None and c.kind == requested.name for c in found)  # in another layout
    if context.inputs and is_possible_elsewhere:  # inputs that an earlier graph returned in its layout
        options, inputs = context.options, ", ".join(map(repr, context.inputs))
        raise SpError(
            "SP403",
            f"attention={options.attention!r} with layout={options.layout!r} does not support {describe_node(node)} in "
            f"the layout in which an earlier graph returned {inputs}.",
        )
    raise _unsupported_error(node, context, allowed, {c.kind for c in found if c.refusal is None})


def _unsupported_error(
    node: Node, context: PassContext, allowed: Iterable[Candidate], alternatives: set[str]
) -> SpError:
    """Return the error of a requested strategy that does not support an attention, with reasons and a fix.

    Args:
        node: The attention.
        context: The context of the compilation.
        allowed: The candidates of the requested strategy, none of which can run.
        alternatives: The names of strategies that support the attention.
    """
    n, requested = context.ranks.n, context.options.attention
    heads, key_heads, _ = head_counts(OpCall(node))
    why = "; ".join(f"{c.kind} (ulysses {c.ulysses} x ring {c.ring}): {c.refusal}" for c in allowed)
    if not why:  # a hybrid without a possible number of Ulysses ranks has no candidates
        why = f"no number of Ulysses ranks u with 1 < u < {n} divides both {n} and the query heads"
    of_mesh = f", {context.ranks.ulysses} of them along the mesh's 'ulysses' axis" if context.ranks.ulysses else ""
    sizes = f"{heads} query heads and {key_heads} key heads on {n} ranks{of_mesh}"
    values = ", ".join(map(repr, ["auto", *sorted(alternatives)]))
    return SpError(
        "SP401",
        f"attention={requested!r} does not support {sizes}, in {describe_node(node)}: {why}.",
        f"Use attention={values}, or another mesh.",
    )


def _is_allowed(candidate: Candidate, context: PassContext) -> bool:
    """Return True if the options `attention`, `mesh` and `layout` allow a candidate.

    A candidate with a relayout moves the rows to another order for one attention only. With layout="contiguous", the
    candidate must run in contiguous order. If another order is requested, it is that of the whole program, so that no
    relayout is allowed.
    """
    if _requested_strategy(context) not in ("auto", candidate.kind):
        return False
    is_hybrid = 1 < candidate.ulysses < context.ranks.n
    if is_hybrid and context.ranks.ulysses not in (None, candidate.ulysses):  # the mesh has another "ulysses" axis
        return False
    requested = LAYOUTS.get(context.options.layout)
    if requested is None:  # "auto"
        return True
    if requested.is_in_order:  # the contiguous order
        return LAYOUTS[candidate.layout].is_in_order
    return not candidate.relayout


def _requested_strategy(context: PassContext) -> str:
    """Return the strategy that the user requested by name, or else by the shape of the mesh, or "auto".

    A mesh with a "ulysses" axis of some, but not all ranks, for example, requests "hybrid".
    """
    if context.options.attention != "auto":
        return context.options.attention
    of_mesh = [strategy.name for strategy in attention_strategies() if strategy.rewrite.is_used_on_mesh(context.ranks)]
    return of_mesh[0] if of_mesh else "auto"


def _attention_shape(
    node: Node, plan: PlacementPlan, context: PassContext, trained: Collection[Node]
) -> AttentionShape:
    """Return the sizes, mask and kernel of an attention for the cost model.

    Args:
        node: The attention.
        plan: The placements; the mask may be sharded.
        context: The context.
        trained: The nodes with gradients.
    """
    call = OpCall(node)
    is_mask_sharded = call.get("attn_mask") is not None and mask_shard(plan, call) is not None
    q, k, v = ([size_hint(size) for size in operand.meta["val"].shape] for operand in call.operands[:3])
    predicate = mask_predicate(call)  # None for a mask that is known as a tensor only
    causal, window = (False, None) if predicate is None else _causal_and_window(predicate, q[-2], k[-2])
    return AttentionShape(
        n=context.ranks.n,
        batch=math.prod(q[:-3]),
        q_len=q[-2],
        kv_len=k[-2],
        heads=q[-3],
        kv_heads=k[-3],
        head_dim=q[-1],
        v_head_dim=v[-1],
        element_size=_operand_dtype(call.operands[0], node).itemsize,
        causal=causal,
        window=window,
        mask=predicate is None,
        # Excludes strategies that need all rows of the mask. One requested by name gathers a sharded mask instead.
        mask_rows=is_mask_sharded and _requested_strategy(context) == "auto",
        documents=predicate is not None and is_within_documents(predicate),
        kernel=_kernel_rate_name(call, predicate, window, max(q[-1], v[-1]), trained),
        training=node in trained,
    )


def _planned_device(q: Node) -> torch.device:
    """Return the device for which times are predicted: that of the queries, or a GPU for the meta device."""
    return torch.device("cuda") if q.meta["val"].is_meta else q.meta["val"].device


def _operand_dtype(x: Node, node: Node) -> torch.dtype:
    """Return the dtype in which an attention reads an operand x: that of autocast, if it is enabled at the node."""
    return autocast_dtype(node, x.meta["val"], _planned_device(OpCall(node).operands[0]).type)


def _kernel_rate_name(
    call: OpCall, predicate: str | None, window: int | None, head_dim: int, trained: Collection[Node]
) -> str:
    """Return the name in `Machine` of the throughput of the kernel that will run the attention.

    Args:
        call: The attention.
        predicate: Its mask as a condition on q and k; None for a mask tensor.
        window: The number of visible keys up to the query's own, or None for all.
        head_dim: The larger one of the head dims of keys and values.
        trained: The nodes with gradients.
    """
    q, mask = call.operands[0], call.get("attn_mask")
    if mask is not None:
        kind = Kind.MASKED
    elif predicate and is_within_documents(predicate):
        kind = Kind.PACKED
    else:
        kind = Kind.BAND if window else Kind.FULL
    bias_dtype = None if mask is None or mask.meta["val"].dtype == torch.bool else _operand_dtype(mask, call.node)
    has_dropout, has_score = call["dropout_p"] > 0, bool(call.get("score"))
    features = has_dropout, has_score, bias_dtype, mask in trained  # that the kernel must support
    visible = Window(left=window - 1, right=0) if window else FULL_WINDOW
    key = KernelKey(_planned_device(q), _operand_dtype(q, call.node), kind, head_dim, MANY_ROWS, *features, visible)
    return expected_kernel(key).rate


def _causal_and_window(predicate: str, queries: int, keys: int) -> tuple[bool, int | None]:
    """Return (True if the mask is causal: no query attends to later keys; the length of its sliding window, or None).

    The length is the number of keys to which a query attends, counted up to its own; None without a window. Both are
    found by evaluation of the mask at a few queries; they are used only to predict the work of the attention.

    Args:
        predicate: The mask as a condition on q and k.
        queries: The number of queries.
        keys: The number of keys.
    """
    unknown = {name: (-math.inf, math.inf) for name in predicate_symbols(predicate)}  # ranges of other symbols

    def is_fully_masked(query: int, first_key: int, last_key: int) -> bool:
        """Return True if a query attends to none of a range of keys."""
        return evaluate_over(predicate, {**unknown, "q": (query, query), "k": (first_key, last_key)}) is False

    last = min(queries, keys) - 1
    if last < 1:
        return False, None
    middle = last // 2
    # Evaluate the later keys of two queries, and the number of visible keys of three. The three are late queries, from
    # which a window usually does not reach back to the first key.
    causal = is_fully_masked(0, 1, last) and is_fully_masked(middle, middle + 1, last)
    windows = [_max_visible_keys(is_fully_masked, query) for query in (last, last * 7 // 8, last * 2 // 3)]
    known_windows = [window for window in windows if window is not None]
    return causal, max(known_windows) if len(known_windows) == len(windows) else None


def _max_visible_keys(is_fully_masked: Callable[[int, int, int], bool], query: int) -> int | None:
    """Return the number of keys to which a query attends, counted back from its own; None if the first key is one.

    It is the smallest distance d such that the query attends to none of the keys 0 to query - d: 4 in a window of 4
    keys.

    Args:
        is_fully_masked: Returns True for (query, first, last) if the query attends to none of the keys from `first` to
            `last`.
        query: The position of the query.
    """
    if not is_fully_masked(query, 0, 0):
        return None
    if query == 0:
        return 0  # it does not attend to the only key before or at its position
    # Once `is_fully_masked` is True for a distance, it is for all larger ones: bisect.
    distances = range(1, query + 1)
    return distances[bisect_left(distances, True, key=lambda distance: is_fully_masked(query, 0, query - distance))]
