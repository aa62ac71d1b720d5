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
from sp_compile.passes.graph.node_info import can_require_grad, node_info

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
        """Replace outputs that only repeat work of tiles by their operands, and return the number of these outputs.

        Such an output is deferred: it is computed from these operands when the caller reads it.

        `context.boundary` records the deferred graph of each, with the numbers of its operands and tokens.
        """
        leaves = output_leaves(gm)
        deferred: dict[int, DeferredGraph] = {}  # by output number
        numbers: dict[Node, list[int]] = {}  # node -> numbers of the outputs that return it
        for i in context.differentiable(gm):
            numbers.setdefault(leaves[i], []).append(i)
        for node, node_numbers in numbers.items():
            recomputed = _nodes_to_defer(node)
            if recomputed is None:
                continue
            graph, operands = _extract_graph(gm, recomputed, node)
            sources = tuple(_return_operand(x, leaves, context.trains) for x in operands)
            # In place of the output, the program returns an operand, such as hidden, which is sharded as the output
            # was: it is one that is an extra output, or the first one if all are arguments.
            returned = [leaves[source.position] for source in sources if not source.is_argument]
            replacement = returned[0] if returned else insert_detach(operands[0])
            deferred_graph = DeferredGraph(graph, node.meta["val"], sources)
            for i in node_numbers:
                leaves[i], deferred[i] = replacement, deferred_graph
        if deferred:
            set_outputs(gm, leaves)
            erase_dead(gm.graph)
        context.update_outputs(deferred=deferred)
        if context.ranks.n == 1:  # on one rank, the runtime wraps deferred outputs only; all others are full tensors
            context.boundary = replace(context.boundary, results={i: context.boundary.results[i] for i in deferred})
        return len(deferred)


def _return_operand(x: Node, leaves: list[Any], trains: bool) -> DeferredOperand:
    """Make the operand x of a deferred graph available after a call, and return where the runtime finds it.

    It is an argument of the program, or else it is appended to the outputs, `leaves`. If gradients reach it, its
    gradient token is appended, too.
    """
    grad_token = None
    if trains and can_require_grad(x):
        grad_token = len(leaves)
        leaves.append(insert_tap(x))  # the token of sp::tap, which adds the gradient that the deferred graph computes
    argument = _argument_number(x)
    if argument is not None:
        return DeferredOperand(is_argument=True, position=argument, grad_token=grad_token)
    leaves.append(insert_detach(x))
    return DeferredOperand(is_argument=False, position=len(leaves) - 1, grad_token=grad_token)


def _nodes_to_defer(node: Node) -> list[Node] | None:
    """Return the nodes that only compute this output, in order, or None if the output cannot be deferred.

    The nodes repeat work of tiles, as their mark `recomputed` states. The output can be deferred if it consists of such
    nodes and nothing else in the program reads one of them.
    """
    if not node_info(node).recomputed or set(node.users) != {node.graph.output_node()}:
        return None
    recomputed = reachable_set([node], lambda n: [x for x in n.all_input_nodes if node_info(x).recomputed])
    readers = {user for n in recomputed if n is not node for user in n.users}
    return [n for n in node.graph.nodes if n in recomputed] if readers <= recomputed else None


def _extract_graph(gm: GraphModule, nodes: Sequence[Node], result: Node) -> tuple[GraphModule, list[Node]]:
    """Copy nodes of the program to a separate graph that returns `result`.

    Each copy is in the autocast region of its node, because the runtime runs the graph without the caller's autocast.

    Returns:
        The graph, and its operands: the other nodes of the program that the nodes read, one for each placeholder.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}  # node of the program -> node of the graph
    read_nodes = dict.fromkeys(x for n in nodes for x in n.all_input_nodes)
    operands = [x for x in read_nodes if x not in nodes]
    for x in operands:
        copies[x] = graph.placeholder(x.name)
    for regions, nodes_in_regions in groupby(nodes, autocast_regions):
        entered = [graph.call_function(enter_autocast, tuple(region)) for region in regions]
        for n in nodes_in_regions:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        for region in reversed(entered):
            graph.call_function(exit_autocast, (region,))
    graph.output(copies[result])
    return GraphModule(gm, graph), operands


def _argument_number(x: Node) -> int | None:
    """Return the index of the program's argument that the value x is, or None for a computed value.

    A result of ``sp::reduce_grad`` is an argument, too: the op returns weights unchanged, and its backward adds the
    ranks' gradients.
    """
    source: Any = x.args[0] if x.target is operator.getitem else None
    if source is not None and source.target is torch.ops.sp.reduce_grad.default:
        weights, index = source.args[0], x.args[1]
        x = weights[index]
    return list(x.graph.find_nodes(op="placeholder")).index(x) if x.op == "placeholder" else None
