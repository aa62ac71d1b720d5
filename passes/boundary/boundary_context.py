"""What passes over the edges of a rank's program are told, and what they are written with."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.context import PassContext

from .graph_boundary import GraphBoundary
from .outputs import OUTPUT_RULES


@dataclass
class BoundaryContext(PassContext):
    """edges: what the program returns in shards; passes add what it returns for these beside them.

    learns: are gradients recorded? splits_only: the program has no exchanges of its own, whose passes know gradients
    by their place among the results.
    """

    edges: GraphBoundary = field(default_factory=GraphBoundary)
    trains: bool = True
    is_split_only: bool = True

    def differentiable(self, gm: GraphModule) -> list[int]:
        """The results in shards that may have a gradient, by number."""
        return [i for i in self.edges.results if gm.meta[OUTPUT_RULES][i].value.dtype.is_floating_point]

    def update_outputs(self, **of_results: dict[int, Any]) -> None:
        """Set a field of some results."""
        results = dict(self.edges.results)
        for name, values in of_results.items():
            for i, value in values.items():
                results[i] = replace(results[i], **{name: value})
        self.edges = replace(self.edges, results=results)


def output_leaves(gm: GraphModule) -> list[Any]:
    """What the program returns."""
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def set_outputs(gm: GraphModule, leaves: Sequence[Any]) -> None:
    """Let the program return these."""
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(leaves),)


def insert_tap(node: Node) -> Node:
    """Let the program go on with a value that has a gradient from elsewhere, too; the ticket for that."""
    graph, output = node.graph, node.graph.output_node()
    with graph.inserting_after(node):
        both = graph.call_function(torch.ops.sp.tap.default, (node,))
    with graph.inserting_after(both):
        value, ticket = (graph.call_function(operator.getitem, (both, k)) for k in (0, 1))
    node.replace_all_uses_with(value, lambda user: user not in (both, output))
    return ticket


def insert_detach(node: Node) -> Node:
    """The value, without a gradient, as a result."""
    with node.graph.inserting_before(node.graph.output_node()):
        made: Node = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    return made
