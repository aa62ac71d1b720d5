"""Sums over the sequence that add up to one loss are added on each rank first: one all_reduce, and one number a tile.

    all_reduce(ce) / n + 0.01 * (all_reduce(z) / m)     ->     all_reduce(ce / n + 0.01 * (z / m))

As a cross-entropy and its z-loss, which then have one gradient, made in the forward's loop over tiles. Bytes sent: of
one sum instead of several. Leaves alone: sums that anything else reads, casts (a half type rounds each rank's sum),
and numbers that are added to a sum, which every rank would count.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.propagate import LINEAR_OPS, scaled_operands, summed_operands
from sp_compile.passes.sharding.placement import Partial, PlacementPlan, Replicate

from .discharge import DemandPass


class MarkPartialSums(DemandPass):
    """Marks what adds sums up, and what scales them on the way there, so that propagation leaves them to each rank."""

    requires = DemandPass.requires | {"means are sums"}

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        plan, changes = job.plan(gm), 0
        ways: dict[Node, tuple[Node, ...]] = {}  # what scales a sum, from there on to the node
        for node in gm.graph.nodes:
            if isinstance(plan.of(node), Partial):
                ways[node] = ()
            elif node.target in LINEAR_OPS:
                terms, sums = (
                    summed_operands(node),
                    [x for x in OpCall(node).operands if x in ways and len(x.users) == 1],
                )
                if len(terms) == 2 and sums == terms:
                    for one in (node, *(step for x in sums for step in ways[x])):
                        set_node_info(one, combines=True)
                    ways[node] = ()
                    changes += 1
                    self.note(node, "sums over the sequence are added up before the ranks add theirs")
                elif len(sums) == 1 and _is_sum_scaling(node, sums[0], terms, plan):
                    ways[node] = (*ways[sums[0]], node)
        return changes


def _is_sum_scaling(node: Node, x: Node, terms: list[Node], plan: PlacementPlan) -> bool:
    """Does the node scale a sum, or add nothing to it?

    By what every rank has whole: a rank's rows of a factor are no factor of its share of all rows, nor is its share of
    another sum.
    """
    whole = all(isinstance(plan.of(y), Replicate) for y in OpCall(node).operands if y is not x)
    return whole and x in (terms if len(terms) == 1 else scaled_operands(node))
