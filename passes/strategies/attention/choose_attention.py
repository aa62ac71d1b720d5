"""Choose the fastest strategy of each attention, from the candidates of the cost model.

    node_info(node).choice = Candidate(kind=<a strategy>, layout="zigzag", ...)    read by that strategy's pass

A candidate is one strategy with its parameters (Ulysses and ring ranks, layout) and its predicted times and memory. Its
`legal` is None, or the reason why it cannot run. A layout is an order of the rows of the sequence.

Changes nothing else. Attention whose queries or keys are not sharded along their sequence is for the passes to refuse.
One layout applies to the program: zigzag if any attention was chosen to run on it and nothing else of the program
depends on the order of the sequence; load-balanced for masks with documents, for which contiguous and zigzag orders are
imbalanced (`row_layouts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

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
from sp_compile.passes.graph.modes import autocast_dtype
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import divides
from sp_compile.passes.localize.balance_layout import balanced_inputs
from sp_compile.passes.localize.reduce_gradients import differentiable_nodes
from sp_compile.passes.sharding.attention_axes import attention_nodes, mask_predicate
from sp_compile.passes.sharding.placement import PlacementPlan, Shard

from .base import has_broadcast_heads, has_fills, head_counts, mask_shard, sequence_shard
from .plan_memory import memory_needed
from .row_layouts import balanced_layout_refusal, balancing_seconds, candidate_orders, unpermute_seconds

MANY_NODES = 1 << 20  # number of rows that any condition on large blocks accepts, to predict the kernel


@dataclass(frozen=True, kw_only=True)
class AttentionDecision(Decision):
    """Decision for one attention."""

    node: Node  # the attention


class ChooseAttention(Pass):
    """Choice of a strategy per attention, and of the layout of the program."""

    requires = frozenset({"canonical", "sequences"})
    provides = frozenset({"chosen attention"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Set the choice of every sharded attention, and the row order of the program (`job.folds`).

        Args:
            gm: The graph.
            job: The context of the compilation.

        Returns:
            0, as no op is changed.

        Raises:
            SpError: The requested strategy supports none of the attention.
        """
        plan, trained = job.plan(gm), differentiable_nodes(gm)
        nodes = [n for n in attention_nodes(gm) if _is_shardable(n, plan)]
        shapes = {n: _attention_shape(n, plan, job, trained) for n in nodes}
        machines = {n: job.machine_of(n) for n in nodes}
        # Offloading uses the memory that remains after sharded weights.
        may_offload = job.options.offload == "auto" and job.options.state == "sharded"
        if nodes or may_offload:
            machine = job.machine_of_nodes(nodes or gm.graph.nodes)
            memory = memory_needed(gm, plan, job, trained, machine.memory)
            job.memory.append(memory)
            machines = {n: replace(machine, memory=memory.available) for n, machine in machines.items()}
        orders = candidate_orders(list(shapes.values()), plan, job)
        decisions = {order: _decide_all(shapes, machines, order, plan, job) for order in orders}
        seconds = {order: sum(d.nodes * d.chosen.seconds for d in found) for order, found in decisions.items()}
        for order, found in decisions.items():
            if order.is_balanced and found:
                seconds[order] += balancing_seconds(d.shape for d in found)
        order = min(decisions, key=lambda order: seconds[order])
        folds = order.folds
        if order.is_balanced and not balanced_inputs(job) and all(d.chosen.ring == 1 for d in decisions[order]):
            why = "attention is not sharded along the sequence, so there is no work to balance"
            self._reject_balanced(why)
            folds = job.folds
        elif order.is_balanced:
            order = self._accept_balanced(order, decisions[order], seconds, gm, plan, job)
            folds = order.folds
        for decision in decisions[order]:
            set_node_info(decision.node, choice=decision.chosen)
        job.decisions += decisions[order]
        if folds != job.folds:
            job.folds = folds
            job.invalidate()
        return 0

    def _accept_balanced(
        self,
        balanced: RowOrder,
        found: Iterable[AttentionDecision],
        seconds: Mapping[RowOrder, float],
        gm: GraphModule,
        plan: PlacementPlan,
        job: PassContext,
    ) -> RowOrder:
        """Return the load-balanced order, or the best other order if the program does not allow it.

        Args:
            balanced: The load-balanced order, which is predicted to be the fastest.
            found: The decisions in this order.
            seconds: The predicted seconds in each order.
            gm: The graph.
            plan: The placements.
            job: The context of the compilation.

        Raises:
            SpError: The option names the order. If inputs arrive in it, sets the job's refusal instead.
        """
        has_balanced_inputs = bool(balanced_inputs(job))
        without_ring = {d.node for d in found if d.chosen.ring == 1}  # in the program's order between its exchanges
        refusal = balanced_layout_refusal([n for n in attention_nodes(gm) if n not in without_ring], plan, job)
        if has_balanced_inputs or job.options.layout != "auto":
            if refusal is not None and not job.inputs:
                raise refusal.error()
            job.refusal = refusal
            return balanced
        why = refusal.text if refusal is not None else ""
        best = min((order for order in seconds if not order.is_balanced), key=lambda order: seconds[order])
        reorder_seconds, results = (0.0, "") if why else unpermute_seconds(gm, plan, job)
        saved_seconds = seconds[best] - seconds[balanced]
        if reorder_seconds > saved_seconds:
            why = (
                f"{results}, would take {reorder_seconds * 1e3:.3f} ms to reorder where the next graph does not use "
                f"its order, and balancing saves {saved_seconds * 1e3:.3f} ms"
            )
        if not why:
            return balanced
        self._reject_balanced(why)
        return best

    def _reject_balanced(self, why: str) -> None:
        """Add a line to the report that states why the load-balanced order is not used."""
        self.notes.append(Note(NoteKind.DECLINED, BALANCED.name, why))


def _decide_all(
    shapes: dict[Node, AttentionShape],
    machines: dict[Node, Machine],
    order: RowOrder,
    plan: PlacementPlan,
    job: PassContext,
) -> list[AttentionDecision]:
    """Return the decision for each attention if the program has its rows in this order.

    Args:
        shapes: The sizes of each attention.
        machines: The machine of each attention, with the memory that is available for it.
        order: The order of rows.
        plan: The placements.
        job: The context of the compilation.
    """
    decisions = []
    for node, shape in shapes.items():
        found = candidates_in_order(replace(shape, order=order), machines[node])
        choice = _choose_candidate(found, node, plan, job)
        if choice is not None:
            decisions.append(
                AttentionDecision(shape, found, choice, job.times(node), _requested_strategy(job) != "auto", node=node)
            )
    return decisions


def _is_shardable(node: Node, plan: PlacementPlan) -> bool:
    """Return True if the cost model covers an attention, whose q, k, v are sharded along their sequence."""
    call = OpCall(node)
    is_sharded = all(sequence_shard(plan, call, i) is not None for i in range(3))
    has_demand = any(d.node is node and d.kind == "attend" for d in plan.demands)
    return has_demand and is_sharded and call.ndim(0) >= 3 and not has_broadcast_heads(call)


def _choose_candidate(
    found: Iterable[Candidate], node: Node, plan: PlacementPlan, job: PassContext
) -> Candidate | None:
    """Return the best candidate that options and sizes allow; None if a pass explains why there is none.

    If no candidate fits in memory, the smallest one is chosen.

    Args:
        found: The candidates of all strategies.
        node: The attention.
        plan: The placements.
        job: The context of the compilation.

    Raises:
        SpError: The requested strategy does not support the attention.
    """
    even = all(_has_even_chunks(plan.of(o), job.ranks.n) for o in OpCall(node).operands[:2])
    allowed = [c for c in found if _is_allowed(c, job) and (even or not c.relayout)]
    requested = STRATEGIES.get(_requested_strategy(job))
    if has_fills(OpCall(node)):
        allowed = [c for c in allowed if not STRATEGIES[c.kind].rewrite.merges_blocks]
        if requested is not None and requested.rewrite.merges_blocks:
            return None
    supported = [c for c in allowed if c.legal is None]
    if supported:
        return choose_attention(supported)
    if large := [c for c in allowed if not c.fits]:
        return min(large, key=lambda c: (c.memory, c.seconds))
    if requested is None or requested.rewrite.is_explained:
        return None
    if job.inputs and any(c.legal is None and c.kind == requested.name for c in found):
        options = job.options
        raise SpError(
            "SP403",
            f"layout={options.layout!r}: attention={options.attention!r} uses the layout of an earlier graph, which is "
            f"different, in {describe_node(node)}.",
        )
    raise _unsupported_error(node, job, allowed, {c.kind for c in found if c.legal is None})


def _unsupported_error(node: Node, job: PassContext, allowed: Iterable[Candidate], alternatives: set[str]) -> SpError:
    """Return the error of a requested strategy that does not support an attention, with reasons and a fix.

    Args:
        node: The attention.
        job: The context of the compilation.
        allowed: The candidates of the requested strategy, none of which can run.
        alternatives: The names of strategies that support the attention.
    """
    n, (key_heads, heads), requested = job.ranks.n, head_counts(OpCall(node)), job.options.attention
    why = "; ".join(f"{c.kind} (ulysses {c.ulysses} x ring {c.ring}): {c.legal}" for c in allowed)
    cause = (
        f"attention={requested!r} does not support {heads} query heads and {key_heads} key heads on {n} ranks"
        + (f", {job.ranks.ulysses} of them along the mesh's 'ulysses' axis" if job.ranks.ulysses else "")
        + f", in {describe_node(node)}: "
        + (why or f"no number of Ulysses ranks u with 1 < u < {n} divides both {n} and the query heads")
    )
    return SpError(
        "SP401", f"{cause}.", f"Use attention={', '.join(map(repr, ['auto', *sorted(alternatives)]))}, or another mesh."
    )


def _is_allowed(candidate: Candidate, job: PassContext) -> bool:
    """Return True if the options `attention`, `mesh` and `layout` allow a candidate.

    A relayout moves the rows to another order for one attention only. A requested order other than the contiguous one
    is that of the whole program, so that no relayout is allowed.
    """
    if _requested_strategy(job) not in ("auto", candidate.kind):
        return False
    # a hybrid of another size than that of the mesh's axis
    if 1 < candidate.ulysses < job.ranks.n and job.ranks.ulysses not in (None, candidate.ulysses):
        return False
    requested = LAYOUTS.get(job.options.layout)
    if requested is not None and not requested.is_in_order:
        return not candidate.relayout
    return requested is None or LAYOUTS[candidate.layout].is_in_order


def _requested_strategy(job: PassContext) -> str:
    """Return the strategy that the user requested by name or by the mesh, or "auto"."""
    on_mesh = [s.name for s in attention_strategies() if s.rewrite.on_mesh(job.ranks)]
    return on_mesh[0] if on_mesh and job.options.attention == "auto" else job.options.attention


def _has_even_chunks(have: object, n: int) -> bool:
    """Return True if each rank has two equal chunks of rows without padding, as zigzag order requires.

    Args:
        have: The placement of an operand of attention.
        n: The number of ranks.
    """
    return isinstance(have, Shard) and have.frame.is_exact(n) and divides(2 * n, have.frame.size)


def _attention_shape(node: Node, plan: PlacementPlan, job: PassContext, trained: Collection[Node]) -> AttentionShape:
    """Return the sizes, mask and kernel of an attention for the cost model.

    A strategy that is requested by name is used with a sharded mask, too, and gathers the mask if it needs all rows.
    """
    call = OpCall(node)
    mask_rows = call.get("attn_mask") is not None and mask_shard(plan, call) is not None
    q, k, v = ([size_hint(s) for s in operand.meta["val"].shape] for operand in call.operands[:3])
    predicate = mask_predicate(call)
    causal, window = (False, None) if predicate is None else _predicate_bounds(predicate, q[-2], k[-2])
    return AttentionShape(
        n=job.ranks.n,
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
        mask_rows=mask_rows and _requested_strategy(job) == "auto",
        documents=predicate is not None and is_within_documents(predicate),
        kernel=_kernel_rate(call, predicate, window, max(q[-1], v[-1]), trained),
        training=node in trained,
    )


def _planned_device(q: Node) -> torch.device:
    """Return the device for which times are predicted: that of a tensor, a GPU for the meta device."""
    return torch.device("cuda") if q.meta["val"].is_meta else q.meta["val"].device


def _operand_dtype(x: Node, node: Node) -> torch.dtype:
    """Return the dtype in which the attention reads an operand, that of autocast if it is enabled."""
    return autocast_dtype(node, x.meta["val"], _planned_device(OpCall(node).operands[0]).type)


def _kernel_rate(
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
    kind = Kind.PACKED if predicate and is_within_documents(predicate) else Kind.BAND if window else Kind.FULL
    kind = kind if mask is None else Kind.MASKED
    bias = None if mask is None or mask.meta["val"].dtype == torch.bool else _operand_dtype(mask, call.node)
    of_scores = call["dropout_p"] > 0, bool(call.get("score")), bias, mask in trained
    seen = Window(window - 1, 0) if window else FULL_WINDOW
    return expected_kernel(
        KernelKey(_planned_device(q), _operand_dtype(q, call.node), kind, head_dim, MANY_NODES, *of_scores, seen)
    ).rate


def _predicate_bounds(predicate: str, queries: int, keys: int) -> tuple[bool, int | None]:
    """Return (True if no query sees later keys, the number of visible keys up to its own or None for all).

    The bounds are found by evaluation of the predicate at a few queries, for the predicted work of the attention.

    Args:
        predicate: The mask as a condition on q and k.
        queries: The number of queries.
        keys: The number of keys.
    """
    box = {name: (-math.inf, math.inf) for name in predicate_symbols(predicate)}

    def none(q: tuple[int, int], k: tuple[int, int]) -> bool:
        """Return True if no query of a range attends to a key of a range."""
        return evaluate_over(predicate, {**box, "q": q, "k": k}) is False

    last = min(queries, keys) - 1
    causal = last > 0 and none((0, 0), (1, last)) and none((last // 2,) * 2, (last // 2 + 1, last))
    if last < 1:
        return causal, None
    reaches = [_max_visible_keys(none, query) for query in (last, last * 7 // 8, last * 2 // 3)]
    return causal, None if None in reaches else max(r for r in reaches if r is not None)


def _max_visible_keys(none: Callable[..., bool], query: int) -> int | None:
    """Return the maximum number of keys up to its own that a query sees, or None for all, by bisection.

    Args:
        none: Returns True if no query of a range (first, last) sees a key of a range (first, last).
        query: The position of the query.
    """
    if not none((query, query), (0, 0)):
        return None
    near, far = 0, query  # keys at distance `far` and beyond are not visible
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (near, middle) if none((query, query), (0, query - middle)) else (middle, far)
    return far
