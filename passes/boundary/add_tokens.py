"""All that a rank's program returns beside its results, in order: orders, what late results are made of, tickets."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace

import torch
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.base import CAPTURED, Pass, Passes, check_order, passes_in
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import sizes

from .boundary_context import EdgesJob, detached, give_back, leaves_of, tapped
from .defer_outputs import MakeLate
from .outputs import RESULTS


class ReturnOrders(Pass):
    """Results whose rows are dealt need the order of each call: that, its inverse and its runs are returned, too.

    Not where the graph was given rows in that order.
    """

    requires = frozenset({"proved"})
    provides = frozenset({"orders are returned"})

    def apply(self, gm: GraphModule, job: EdgesJob) -> int:
        if job.edges.given is not None or not any(one.layout.is_dealt for one in job.edges.results.values()):
            return 0
        (dealt,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sp.deal.default)
        with gm.graph.inserting_before(gm.graph.output_node()):
            orders = [self.emit(operator.getitem, (dealt, i), dealt.meta["val"][i], dealt) for i in range(3)]
        leaves = leaves_of(gm)
        job.edges = replace(job.edges, deal=tuple(range(len(leaves), len(leaves) + 3)))
        give_back(gm, [*leaves, *orders])
        return 1


class LeaveTickets(Pass):
    """Results have gradients only where somebody reads them: a ticket for that of each is returned, too.

    Of those with which the program itself goes on, as with logits of which it makes a loss, see
    `lowering/collectives/grad_tokens.py`.
    """

    requires = frozenset({"proved", "late results are taken out"})

    @classmethod
    def of(cls, job: EdgesJob) -> Pass | None:
        return cls() if job.splits_only and job.learns and job.ranks.n > 1 else None

    def apply(self, gm: GraphModule, job: EdgesJob) -> int:
        leaves, output, found = leaves_of(gm), gm.graph.output_node(), dict[int, int]()
        memory = Counter(storage_of(x.meta["val"]) for x in leaves if is_tensor(x))
        for i in job.smooth(gm):
            node = leaves[i]
            if job.edges.results[i].late is not None or node.op != "call_function":
                continue
            if memory[storage_of(node.meta["val"])] > 1:  # AOTAutograd takes results that share memory for one
                continue
            if any(user is not output for user in node.users):
                ticket = tapped(node)
                leaves[i] = detached(node)
                found[i] = len(leaves)
                leaves.append(ticket)
        give_back(gm, leaves)
        job.add(ticket=found)
        return len(found)


PROVED = CAPTURED | {"proved", "tiled"}
"""What the program of one rank is."""


class EdgePasses(Passes):
    """What the program of one rank returns for the results that it leaves in shards."""

    steps = (ReturnOrders, MakeLate, LeaveTickets)

    def __init__(self, job: EdgesJob) -> None:
        check_order(passes_in(EdgePasses), PROVED)
        super().__init__(job)

    def apply(self, gm: GraphModule, job: EdgesJob) -> int:
        shapes = {i: tuple(sizes(gm.meta[RESULTS][i].value.shape)) for i in job.edges.results}
        job.add(shape=shapes)
        own = len(leaves_of(gm))
        changes = super().apply(gm, job)
        own += len(job.edges.deal)
        behind = range(own, len(leaves_of(gm)))
        job.edges = replace(job.edges, own=own, rows=job.edges.rows.union(behind))
        return changes
