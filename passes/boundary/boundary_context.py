"""Provide the context of passes over the outputs of a local program, and helpers that edit outputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.context import PassContext
from sp_compile.passes.sharding.output_rules import OUTPUT_RULES

from .graph_boundary import GraphBoundary


@dataclass
class BoundaryContext(PassContext):
    """The context of a pass over the boundary of a local program."""

    edges: GraphBoundary = field(default_factory=GraphBoundary)  # the sharded inputs and outputs; passes extend it
    trains: bool = True  # gradients are recorded
    # The program has no collectives of its own, whose passes identify gradients by their position among the outputs.
    is_split_only: bool = True

    def differentiable(self, gm: GraphModule) -> list[int]:
        """Return the numbers of the sharded outputs that may have a gradient."""
        return [i for i in self.edges.results if gm.meta[OUTPUT_RULES][i].value.dtype.is_floating_point]

    def update_outputs(self, **of_results: dict[int, Any]) -> None:
        """Set fields of sharded outputs: for each field, a value by output number."""
        results = dict(self.edges.results)
        for name, values in of_results.items():
            for i, value in values.items():
                results[i] = replace(results[i], **{name: value})
        self.edges = replace(self.edges, results=results)


def output_leaves(gm: GraphModule) -> list[Any]:
    """Return the program's outputs."""
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def set_outputs(gm: GraphModule, leaves: Sequence[Any]) -> None:
    """Replace the program's outputs."""
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(leaves),)


def insert_tap(node: Node) -> Node:
    """Insert a tap that adds an external gradient to the node's gradient, and return its token."""
    graph, output = node.graph, node.graph.output_node()
    with graph.inserting_after(node):
        both = graph.call_function(torch.ops.sp.tap.default, (node,))
    with graph.inserting_after(both):
        value, ticket = (graph.call_function(operator.getitem, (both, k)) for k in (0, 1))
    node.replace_all_uses_with(value, lambda user: user not in (both, output))
    return ticket


def insert_detach(node: Node) -> Node:
    """Return the node's detached value, for use as an output."""
    with node.graph.inserting_before(node.graph.output_node()):
        detached: Node = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    return detached
