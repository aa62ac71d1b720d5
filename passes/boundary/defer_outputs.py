"""Results that only repeat, for the caller, what tiles do: whoever reads them makes them.

    (loss, logits)  ->  (loss, hidden, weight)      and a graph of (hidden, weight) that makes the logits

See `lowering/collectives/deferred.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.collectives.deferred import LateGraph
from sp_compile.lowering.torch_compat import enter_autocast, exit_autocast
from sp_compile.passes.base import Pass
from sp_compile.passes.graph.closure import closure
from sp_compile.passes.graph.edit import drop_dead
from sp_compile.passes.graph.modes import autocast_regions
from sp_compile.passes.graph.node_info import record

from .boundary_context import EdgesJob, detached, give_back, leaves_of, tapped


class MakeLate(Pass):
    """What such results are made of is returned in their place, and behind all results."""

    requires = frozenset({"tiled", "orders are returned"})
    provides = frozenset({"late results are taken out"})

    @classmethod
    def of(cls, job: EdgesJob) -> Pass | None:
        return cls() if job.splits_only else None

    def apply(self, gm: GraphModule, job: EdgesJob) -> int:
        leaves, found = leaves_of(gm), dict[int, LateGraph]()
        its: dict[Node, list[int]] = {}
        for i in job.smooth(gm):
            its.setdefault(leaves[i], []).append(i)
        for node, numbers in its.items():
            inside = _again(node)
            if inside is None:
                continue
            graph, operands = _apart(gm, inside, node)
            where, tickets = [], []
            for x in operands:
                tickets.append(len(leaves) if job.learns and _may_learn(x) else None)
                if tickets[-1] is not None:
                    leaves.append(tapped(x))
                argument = _argument(x)
                where.append((argument is not None, len(leaves) if argument is None else argument))
                if argument is None:
                    leaves.append(detached(x))
            late = LateGraph(graph, node.meta["val"], tuple(where), tuple(tickets))
            for i in numbers:  # something that every rank has rows of
                leaves[i] = leaves[next(number for is_argument, number in where if not is_argument)]
                found[i] = late
        if found:
            give_back(gm, leaves)
            drop_dead(gm.graph)
        job.add(late=found)
        if job.ranks.n == 1:  # what is made already is whole there
            job.edges = replace(job.edges, results={i: job.edges.results[i] for i in found})
        return len(found)


def _again(node: Node) -> list[Node] | None:
    """The nodes that make it for the caller alone, in order; None if others read one of them, or it is made anyway."""
    if not record(node).again or set(node.users) != {node.graph.output_node()}:
        return None
    inside = closure([node], lambda n: [x for x in n.all_input_nodes if record(x).again])
    if any(user not in inside for n in inside if n is not node for user in n.users):
        return None
    return [n for n in node.graph.nodes if n in inside]


def _apart(gm: GraphModule, inside: Sequence[Node], result: Node) -> tuple[GraphModule, list[Node]]:
    """These nodes as a graph of their own, each in the autocast where it is, and what it takes."""
    graph, made = Graph(), dict[Node, Node]()
    operands = [x for x in dict.fromkeys(x for n in inside for x in n.all_input_nodes) if x not in inside]
    for x in operands:
        made[x] = graph.placeholder(x.name)
    for regions, together in groupby(inside, autocast_regions):
        entered = [graph.call_function(enter_autocast, tuple(one)) for one in regions]
        for n in together:
            made[n] = graph.node_copy(n, made.__getitem__)
        for token in reversed(entered):
            graph.call_function(exit_autocast, (token,))
    graph.output(made[result])
    return GraphModule(gm, graph), operands


def _may_learn(x: Node) -> bool:
    return record(x).requires_grad is not False and x.meta["val"].is_floating_point() and x.op == "call_function"


def _argument(x: Node) -> int | None:
    """The number of the program's argument whose value it is; None of what is computed."""
    if x.target is operator.getitem and x.args[0].target is torch.ops.sp.reduce_grad.default:  # type: ignore[union-attr]
        x = x.args[0].args[0][x.args[1]]  # type: ignore[union-attr,index]
    return list(x.graph.find_nodes(op="placeholder")).index(x) if x.op == "placeholder" else None
