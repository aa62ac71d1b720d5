"""Defer outputs that would repeat the work of tiles: they are computed when the caller reads them.

    (loss, logits)  ->  (loss, hidden, weight)      and a graph of (hidden, weight) that computes the logits

See `lowering/collectives/deferred.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.collectives.deferred import DeferredGraph
from sp_compile.lowering.torch_compat import enter_autocast, exit_autocast
from sp_compile.passes.base import Pass
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.modes import autocast_regions
from sp_compile.passes.graph.node_info import node_info

from .boundary_context import BoundaryContext, insert_detach, insert_tap, output_leaves, set_outputs


class DeferOutputs(Pass):
    """Pass that returns the operands of deferred outputs in place of these, after all other outputs."""

    requires = frozenset({"tiled", "row orders"})
    provides = frozenset({"deferred outputs"})

    @classmethod
    def of(cls, job: BoundaryContext) -> Pass | None:
        """Create the pass for a job, or return None if it does not apply."""
        return cls() if job.is_split_only else None

    def apply(self, gm: GraphModule, job: BoundaryContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        leaves, found = output_leaves(gm), dict[int, DeferredGraph]()
        its: dict[Node, list[int]] = {}
        for i in job.differentiable(gm):
            its.setdefault(leaves[i], []).append(i)
        for node, numbers in its.items():
            inside = _recompute_nodes(node)
            if inside is None:
                continue
            graph, operands = _extract_graph(gm, inside, node)
            where, tickets = [], []
            for x in operands:
                tickets.append(len(leaves) if job.trains and _is_differentiable_input(x) else None)
                if tickets[-1] is not None:
                    leaves.append(insert_tap(x))
                argument = _argument_number(x)
                where.append((argument is not None, len(leaves) if argument is None else argument))
                if argument is None:
                    leaves.append(insert_detach(x))
            late = DeferredGraph(graph, node.meta["val"], tuple(where), tuple(tickets))
            for i in numbers:  # a value of which every rank has rows
                leaves[i] = leaves[next(number for is_argument, number in where if not is_argument)]
                found[i] = late
        if found:
            set_outputs(gm, leaves)
            erase_dead(gm.graph)
        job.update_outputs(late=found)
        if job.ranks.n == 1:  # on one rank, other outputs are full tensors
            job.edges = replace(job.edges, results={i: job.edges.results[i] for i in found})
        return len(found)


def _recompute_nodes(node: Node) -> list[Node] | None:
    """Return the nodes that compute an output for the caller only, in order; None if other nodes read it."""
    if not node_info(node).recomputed or set(node.users) != {node.graph.output_node()}:
        return None
    inside = reachable_set([node], lambda n: [x for x in n.all_input_nodes if node_info(x).recomputed])
    if any(user not in inside for n in inside if n is not node for user in n.users):
        return None
    return [n for n in node.graph.nodes if n in inside]


def _extract_graph(gm: GraphModule, nodes: Sequence[Node], result: Node) -> tuple[GraphModule, list[Node]]:
    """Return the nodes as a separate graph, each in its autocast region, and the operands of that graph."""
    graph, copies = Graph(), dict[Node, Node]()
    operands = [x for x in dict.fromkeys(x for n in nodes for x in n.all_input_nodes) if x not in nodes]
    for x in operands:
        copies[x] = graph.placeholder(x.name)
    for regions, together in groupby(nodes, autocast_regions):
        entered = [graph.call_function(enter_autocast, tuple(one)) for one in regions]
        for n in together:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        for token in reversed(entered):
            graph.call_function(exit_autocast, (token,))
    graph.output(copies[result])
    return GraphModule(gm, graph), operands


def _is_differentiable_input(x: Node) -> bool:
    return node_info(x).requires_grad is not False and x.meta["val"].is_floating_point() and x.op == "call_function"


def _argument_number(x: Node) -> int | None:
    """Return the number of the program's argument that the node is, or None for a computed value."""
    if x.target is operator.getitem and x.args[0].target is torch.ops.sp.reduce_grad.default:  # type: ignore[union-attr]
        x = x.args[0].args[0][x.args[1]]  # type: ignore[union-attr,index]
    return list(x.graph.find_nodes(op="placeholder")).index(x) if x.op == "placeholder" else None
