"""Defer outputs that would repeat the work of tiles: they are computed when the caller reads them.

    return (loss, logits)  ->  return (loss, hidden), and a graph that computes logits from hidden and the weight

A tile is a part of a rank's rows; the loss is computed tile by tile, without full logits. Logits as an output would
need the same work again, in nodes marked `recomputed`. These nodes move to a deferred graph, which the runtime runs if
the caller reads the output. Its operands (hidden, weight) are arguments of the program or extra outputs; each that
needs a gradient has a gradient token, an extra output that carries it. See `lowering/collectives/deferred.py`.

The outputs are also called leaves; the number of an output or argument is its index.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.collectives.deferred import DeferredGraph, DeferredOperand
from sp_compile.lowering.torch_compat import enter_autocast, exit_autocast
from sp_compile.passes.base import Pass
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.modes import autocast_regions
from sp_compile.passes.graph.node_info import node_info

from .boundary_context import BoundaryContext, insert_detach, insert_tap, output_leaves, set_outputs


class DeferOutputs(Pass):
    """Pass that returns the operands of deferred outputs in place of these, after all other outputs.

    An output is deferred if its nodes only repeat work of tiles, as logits do next to a loss that is computed in tiles.
    """

    requires = frozenset({"tiled", "row orders"})
    provides = frozenset({"deferred outputs"})

    @classmethod
    def of(cls, context: BoundaryContext) -> Pass | None:
        """Create the pass for a program without collectives of its own, else return None.

        Passes over such collectives identify gradients by the position of outputs, which this pass changes.
        """
        return cls() if context.is_split_only else None

    def apply(self, gm: GraphModule, context: BoundaryContext) -> int:
        """Replace outputs that only repeat work of tiles by their operands, and return their number.

        `context.boundary` records the deferred graph of each, and the numbers of its operands and tokens.
        """
        leaves, deferred = output_leaves(gm), dict[int, DeferredGraph]()
        numbers: dict[Node, list[int]] = {}  # of the outputs that return the node
        for i in context.differentiable(gm):
            numbers.setdefault(leaves[i], []).append(i)
        for node, node_numbers in numbers.items():
            recomputed = _recompute_nodes(node)
            if recomputed is None:
                continue
            graph, operands = _extract_graph(gm, recomputed, node)
            sources = tuple(_return_operand(x, leaves, context.trains) for x in operands)
            # The output itself becomes a computed operand, of which every rank has rows, too.
            computed = next(leaves[source.position] for source in sources if not source.is_argument)
            result = DeferredGraph(graph, node.meta["val"], sources)
            for i in node_numbers:
                leaves[i], deferred[i] = computed, result
        if deferred:
            set_outputs(gm, leaves)
            erase_dead(gm.graph)
        context.update_outputs(deferred=deferred)
        if context.ranks.n == 1:  # on one rank, other outputs are full tensors
            context.boundary = replace(context.boundary, results={i: context.boundary.results[i] for i in deferred})
        return len(deferred)


def _return_operand(x: Node, leaves: list[Any], trains: bool) -> DeferredOperand:
    """Return the source of a deferred graph's operand, from which the runtime reads it after a call.

    Appends the operand to `leaves`, unless it is an argument, and its gradient token, if it needs a gradient.
    """
    grad_token = None
    # AOTAutograd returns the gradients of arguments itself.
    if trains and x.op == "call_function" and _needs_gradient(x):
        grad_token = len(leaves)
        leaves.append(insert_tap(x))
    argument = _argument_number(x)
    if argument is not None:
        return DeferredOperand(True, argument, grad_token)
    leaves.append(insert_detach(x))
    return DeferredOperand(False, len(leaves) - 1, grad_token)


def _needs_gradient(x: Node) -> bool:
    """Return True if gradients may reach the node, so that it needs a gradient token."""
    return node_info(x).requires_grad is not False and x.meta["val"].is_floating_point()


def _recompute_nodes(node: Node) -> list[Node] | None:
    """Return the nodes that compute an output for the caller only, in order; None if it is not deferred.

    They are marked `recomputed`: they only repeat work of tiles. None if nodes other than these and the output read
    them.
    """
    if not node_info(node).recomputed or set(node.users) != {node.graph.output_node()}:
        return None
    recomputed = reachable_set([node], lambda n: [x for x in n.all_input_nodes if node_info(x).recomputed])
    users = {user for n in recomputed if n is not node for user in n.users}
    return [n for n in node.graph.nodes if n in recomputed] if users <= recomputed else None


def _extract_graph(gm: GraphModule, nodes: Sequence[Node], result: Node) -> tuple[GraphModule, list[Node]]:
    """Return the nodes as a separate graph, and its operands: the nodes of the program that they read.

    Each node is in its autocast region in the separate graph, because the runtime runs it without the caller's
    autocast.
    """
    graph, copies = Graph(), dict[Node, Node]()
    operands = [x for x in dict.fromkeys(x for n in nodes for x in n.all_input_nodes) if x not in nodes]
    for x in operands:
        copies[x] = graph.placeholder(x.name)
    for regions, members in groupby(nodes, autocast_regions):
        entered = [graph.call_function(enter_autocast, tuple(region)) for region in regions]
        for n in members:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        for region in reversed(entered):
            graph.call_function(exit_autocast, (region,))
    graph.output(copies[result])
    return GraphModule(gm, graph), operands


def _argument_number(x: Node) -> int | None:
    """Return the number of the program's argument that the node is, or None for a computed value.

    ``sp::reduce_grad``, which adds the ranks' gradients of weights, returns arguments unchanged.
    """
    if x.target is operator.getitem and x.args[0].target is torch.ops.sp.reduce_grad.default:  # type: ignore[union-attr]
        x = x.args[0].args[0][x.args[1]]  # type: ignore[union-attr,index]
    return list(x.graph.find_nodes(op="placeholder")).index(x) if x.op == "placeholder" else None
