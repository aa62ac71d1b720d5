"""Align the frames of sequences that are windows of another one, such as the targets of several heads.

    cat([h[:, :-1], embedding(ids[:, 1:])], -1)      h has 13 rows; ids are replicated, so their embedding starts here

A sequence starts at a node that runs on shards of replicated operands; its start frame describes the shards there. A
frame is the padded axis of a sequence and the window of valid positions in it (`placement.py`). Unaligned, the
embedding would start as a sequence of 12 rows, whose shards differ from those of h's window, and one of the two would
be gathered. A replicated value can be sharded at any position, so it starts in the frame of the window. This analysis
changes no graph: it returns the frames for `propagate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import is_same_size

from .placement import Demand, Frame, PlacementPlan, Shard

MAX_ALIGN_ROUNDS = 8  # maximum number of rounds: each round may misalign windows of windows, which the next one aligns
WindowStarts = Mapping[Node, Frame]


def align_window_starts(propagate_from: Callable[[WindowStarts], PlacementPlan]) -> PlacementPlan:
    """Return the placement plan in which the fewest operands are misaligned.

    Two operands of an op are misaligned if they have the same number of rows in frames of different sizes, such as
    h[:, 1:] in the frame of h, and an embedding of equal length in its own frame. One of them would be gathered. If its
    sequence starts at a node with replicated operands, as an embedding, it can start in the frame of the other one.

    Args:
        propagate_from: Returns the plan of the graph in which sequences start at these nodes in these frames.
    """
    starts: dict[Node, Frame] = {}
    best = plan = propagate_from(starts)
    for _ in range(MAX_ALIGN_ROUNDS):
        candidates: dict[Node, Frame] = {}
        for demand in _misaligned_demands(plan):
            candidates |= _start_candidates(demand, plan)
        if candidates.items() <= starts.items():  # nothing new
            break
        starts = {**starts, **candidates}
        plan = propagate_from(starts)
        best = _choose_better(best, plan)
    return best


def _choose_better(best: PlacementPlan, plan: PlacementPlan) -> PlacementPlan:
    """Return `plan` if it has fewer misaligned operands than `best` and no more demands in total, else `best`."""
    has_fewer = len(_misaligned_demands(plan)) < len(_misaligned_demands(best))
    return plan if has_fewer and len(plan.demands) <= len(best.demands) else best


def _misaligned_demands(plan: PlacementPlan) -> list[Demand]:
    """Return the demands for operands with the required number of rows in a frame of another size."""
    return [demand for demand in plan.demands if demand.kind == "align" and _demand_frames(demand, plan) is not None]


def _demand_frames(demand: Demand, plan: PlacementPlan) -> tuple[Frame, Frame] | None:
    """Return (current frame, required frame) of a misaligned operand: equal numbers of rows in frames of two sizes.

    The result is None if the demand is of another kind.
    """
    wants, have = plan.wants.get(demand.node, ()), demand.have
    want = wants[demand.operand] if demand.operand < len(wants) else None
    if not isinstance(have, Shard) or not isinstance(want, Shard):
        return None
    has_same_length = is_same_size(have.frame.length, want.frame.length)
    if not has_same_length or is_same_size(have.frame.size, want.frame.size):
        return None
    return have.frame, want.frame


def _start_candidates(demand: Demand, plan: PlacementPlan) -> dict[Node, Frame]:
    """Return nodes at which a sequence could start in another frame, with the frame, so that a demand is met.

    The sequence of the misaligned operand may start in the frame of the other operands. Otherwise theirs may start in
    the frame of the misaligned one. The result is {} if both are placed by sharded inputs.
    """
    frames = _demand_frames(demand, plan)
    assert frames is not None
    have, want = frames
    operands = OpCall(demand.node).operands
    start_nodes = _start_nodes(operands[demand.operand], have, plan)
    if start_nodes:
        return dict.fromkeys(start_nodes, want)
    placed = zip(operands, plan.wants[demand.node])
    others = [x for x, placement in placed if isinstance(placement, Shard) and _has_result_in_frame(x, want, plan)]
    nodes_of_others = [_start_nodes(x, want, plan) for x in others]
    if not all(nodes_of_others):  # the sequence of one of them starts at no replicated value
        return {}
    return dict.fromkeys(chain.from_iterable(nodes_of_others), have)


def _has_result_in_frame(node: Node, frame: Frame, plan: PlacementPlan) -> bool:
    """Return True if a result of the node is sharded in this frame: equal size and equal valid positions."""
    return any(isinstance(p, Shard) and p.frame.is_same_window(frame) for p in plan.placements.get(node, ()))


def _start_nodes(x: Node, frame: Frame, plan: PlacementPlan) -> list[Node]:
    """Return the nodes at which the sequence of a value starts: those that shard replicated operands, as an embedding.

    The list is empty if x depends on a sharded input, or on a value that is sharded in another frame: their rows are
    placed already.

    Args:
        x: The value.
        frame: Its frame.
        plan: The placements.
    """

    def sharded_operands(node: Node) -> list[Node]:
        """Return the operands of a node that are sharded, except constants, which start in any frame."""
        operands = [x for x in node.all_input_nodes if plan.wants.get(x) != ()]  # (): a constant, without operands
        return [x for x in operands if any(isinstance(p, Shard) for p in plan.placements.get(x, ()))]

    nodes = list(iterate_reachable([x], sharded_operands))
    if not all(node.op == "call_function" and _has_result_in_frame(node, frame, plan) for node in nodes):
        return []
    return [node for node in nodes if not sharded_operands(node)]
