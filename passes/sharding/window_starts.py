"""Align the frames of sequences that are windows of another one, such as the targets of several heads.

    cat([h[:, :-1], embedding(ids[:, 1:])], -1)      h has 13 rows; ids are replicated, so their embedding starts here

Unaligned, it would start as a sequence of 12 rows, whose shards differ from those of h's window, and one of the two
would be gathered. A replicated value can be sharded at any position, so it starts in the frame of the window. This
analysis changes no graph: it returns the frames for `propagate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import is_same_size

from .placement import Demand, Frame, PlacementPlan, Shard

MAX_ALIGN_ROUNDS = 8
"""Maximum number of rounds: each round may misalign windows of windows, which the next one aligns."""
WindowStarts = Mapping[Node, Frame]


def align_window_starts(propagated: Callable[[WindowStarts], PlacementPlan]) -> PlacementPlan:
    """Return the plan with the fewest misaligned values.

    Args:
        propagated: Propagates placements with the given start frames.
    """
    begins: dict[Node, Frame] = {}
    best = plan = propagated(begins)
    for _ in range(MAX_ALIGN_ROUNDS):
        demands = _misaligned_demands(plan)
        best = _choose_better(best, plan)
        found = {node: frame for demand in demands for node, frame in _start_candidates(demand, plan).items()}
        if found.items() <= begins.items():
            break
        begins = {**begins, **found}
        plan = propagated(begins)
    return _choose_better(best, plan)


def _choose_better(known: PlacementPlan, other: PlacementPlan) -> PlacementPlan:
    """Return the other plan if it has fewer misaligned values and no more demands, else the known one."""
    fewer = len(_misaligned_demands(other)) < len(_misaligned_demands(known))
    return other if fewer and len(other.demands) <= len(known.demands) else known


def _misaligned_demands(plan: PlacementPlan) -> list[Demand]:
    """Return the demands of values that have the same number of rows as the other operands but another frame size."""
    return [demand for demand in plan.demands if demand.kind == "align" and _demand_frames(demand, plan) is not None]


def _demand_frames(demand: Demand, plan: PlacementPlan) -> tuple[Frame, Frame] | None:
    """Return the current and the required frame of the operand, or None if they are not misaligned."""
    wants, have = plan.wants.get(demand.node, ()), demand.have
    want = wants[demand.operand] if demand.operand < len(wants) else None
    if not isinstance(have, Shard) or not isinstance(want, Shard):
        return None
    other = is_same_size(have.frame.length, want.frame.length) and not is_same_size(have.frame.size, want.frame.size)
    return (have.frame, want.frame) if other else None


def _start_candidates(demand: Demand, plan: PlacementPlan) -> dict[Node, Frame]:
    """Return new start frames for the misaligned operand, or else for the operands that it is combined with."""
    frames = _demand_frames(demand, plan)
    assert frames is not None
    have, want = frames
    operands = OpCall(demand.node).operands
    found = _start_nodes(operands[demand.operand], have, plan)
    if found:
        return dict.fromkeys(found, want)
    others = [
        x for x, p in zip(operands, plan.wants[demand.node]) if isinstance(p, Shard) and _has_frame(x, want, plan)
    ]
    started = [_start_nodes(x, want, plan) for x in others]
    return dict.fromkeys((node for nodes in started for node in nodes), have) if all(started) else {}


def _has_frame(node: Node, frame: Frame, plan: PlacementPlan) -> bool:
    return any(isinstance(p, Shard) and p.frame.is_same_window(frame) for p in plan.placements.get(node, ()))


def _start_nodes(x: Node, frame: Frame, plan: PlacementPlan) -> list[Node]:
    """Return the nodes at which the computation of x starts on shards of the frame.

    The list is empty if an input is sharded in this frame, or a value is cut to it.
    """

    def sharded(node: Node) -> list[Node]:
        """Return the operands of a node that are sharded and not cut as required."""
        declared = [i for i in node.all_input_nodes if plan.wants.get(i) != ()]  # a constant is cut as required
        return [i for i in declared if any(isinstance(p, Shard) for p in plan.placements.get(i, ()))]

    nodes = list(iterate_reachable([x], sharded))
    if not all(node.op == "call_function" and _has_frame(node, frame, plan) for node in nodes):
        return []
    return [node for node in nodes if not sharded(node)]
