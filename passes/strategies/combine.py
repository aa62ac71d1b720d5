"""Sums over the sequence that add up to one loss are added on each rank first: one all_reduce, and one number a tile.

    all_reduce(ce) / n + 0.01 * (all_reduce(z) / m)     ->     all_reduce(ce / n + 0.01 * (z / m))

As a cross-entropy and its z-loss, which then have one gradient, made in the forward's loop over tiles. Bytes sent: of
one sum instead of several. Leaves alone: sums that anything else reads, casts (a half type rounds each rank's sum),
and numbers that are added to a sum, which every rank would count.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from sp_compile.graph.call import Call
from sp_compile.graph.record import mark
from sp_compile.passes.job import Job
from sp_compile.passes.propagate import sums_of
from sp_compile.passes.rewrite import Rewrite
from sp_compile.sharding.placement import Partial, Plan, Replicate


class CombineSums(Rewrite):
    """Marks what adds sums up, and what scales them on the way there, so that propagation leaves them to each rank."""

    requires = Rewrite.requires | {"means are sums"}

    def apply(self, gm: GraphModule, job: Job) -> int:
        plan, changes = job.plan(gm), 0
        known = {node for node in gm.graph.nodes if isinstance(plan.of(node), Partial)}
        for node in gm.graph.nodes:
            if node in known or len(sums_of(node)) < 2:
                continue
            ways = [self._way(x, known, plan) for x in sums_of(node)]
            if all(way is not None for way in ways):
                for one in (node, *(step for way in ways if way for step in way)):
                    mark(one, combines=True)
                known.add(node)
                changes += 1
                self.note(node, "sums over the sequence are added up before the ranks add theirs")
        return changes

    def _way(self, x: Node, known: set[Node], plan: Plan) -> list[Node] | None:
        """What scales a sum that nothing else reads, from there to x; None where x is no such sum.

        By what every rank has whole: a rank's rows of a factor are no factor of its share of all rows.
        """
        steps: list[Node] = []
        while x not in known:
            terms = sums_of(x)
            if len(terms) != 1 or len(x.users) != 1:
                return None
            if not all(isinstance(plan.of(y), Partial | Replicate) for y in Call(x).operands):
                return None
            steps.append(x)
            (x,) = terms
        return steps if len(x.users) == 1 else None
