"""Add sums over the sequence that form one loss locally: one all_reduce, and one number per tile.

    all_reduce(ce) / n + 0.01 * (all_reduce(z) / m)     ->     all_reduce(ce / n + 0.01 * (z / m))

A cross-entropy and its z-loss then have one gradient, computed in the forward's loop over tiles. Bytes sent: those of
one sum instead of several. Unchanged: sums with other readers, casts (a half type rounds each rank's sum), sums in
float16 (one rank's may overflow), and numbers that are added to a sum, which every rank would count.

A partial value (`Partial`) is one summand of each rank; the all_reduce adds them. A scaling multiplies a partial value
by a replicated one, so that it may run before the all_reduce.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.propagation.linear_ops import LINEAR_OPS, scaled_operands, summed_operands
from sp_compile.passes.sharding.placement import Partial, PlacementPlan, Replicate

from .discharge import DemandPass


class MarkPartialSums(DemandPass):
    """Marking of additions and scalings of sums, so that propagation keeps them partial."""

    requires = DemandPass.requires | {"decomposed means"}

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Mark additions of two partial sums, and the ops that scale the sums first; return the number of additions.

        For all_reduce(a) / n + all_reduce(b), the division and the addition are marked, so that ranks compute a / n + b
        and reduce once. Scalings alone are not marked, because they would save no all_reduce.
        """
        plan, num_additions = context.plan(gm), 0
        # Values that could be partial -> the ops between a partial sum and the value, which scale the sum.
        scalings: dict[Node, tuple[Node, ...]] = {}
        for node in gm.graph.nodes:
            if isinstance(plan.of(node), Partial):
                if node.meta["val"].dtype == torch.float16:
                    continue
                scalings[node] = ()
            elif node.target in LINEAR_OPS:
                terms = summed_operands(node)
                sums = [x for x in OpCall(node).operands if x in scalings and len(x.users) == 1]
                if len(terms) == 2 and sums == terms:
                    for marked in (node, *(scaling for x in sums for scaling in scalings[x])):
                        set_node_info(marked, combines=True)
                    scalings[node] = ()
                    num_additions += 1
                    self.note(node, "adds local sums before the all-reduce")
                elif len(sums) == 1 and _is_sum_scaling(node, sums[0], terms, plan):
                    scalings[node] = (*scalings[sums[0]], node)
        return num_additions


def _is_sum_scaling(node: Node, x: Node, terms: list[Node], plan: PlacementPlan) -> bool:
    """Return True if a linear op scales a partial sum by a replicated value, or adds 0 to it.

    A factor that differs between ranks, sharded or partial, would scale each rank's summand by another number.

    Args:
        node: The op.
        x: The partial sum, an operand of the op.
        terms: The operands that the op adds (`summed_operands`): x and y for x + y; only x for x + 0; none for x + 1.
        plan: The placements.
    """
    others_replicated = all(isinstance(plan.of(y), Replicate) for y in OpCall(node).operands if y is not x)
    adds_zero = terms == [x]
    return others_replicated and (adds_zero or x in scaled_operands(node))
