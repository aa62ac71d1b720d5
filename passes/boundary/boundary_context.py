"""Provide the context of passes over the outputs of a local program, and functions that edit outputs."""

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

    boundary: GraphBoundary = field(default_factory=GraphBoundary)  # replaced by passes that add outputs
    trains: bool = True  # gradients are recorded
    # The program has no collectives of its own, whose passes identify gradients by their position among the outputs.
    is_split_only: bool = True

    def differentiable(self, gm: GraphModule) -> list[int]:
        """Return the numbers of the sharded outputs that may have a gradient."""
        return [i for i in self.boundary.results if gm.meta[OUTPUT_RULES][i].value.dtype.is_floating_point]

    def update_outputs(self, **values_of_field: dict[int, Any]) -> None:
        """Replace fields of `ShardedOutput`s in `boundary`: for each field, new values by output number."""
        results = dict(self.boundary.results)
        for name, values in values_of_field.items():
            results |= {i: replace(results[i], **{name: value}) for i, value in values.items()}
        self.boundary = replace(self.boundary, results=results)


def output_leaves(gm: GraphModule) -> list[Any]:
    """Return the program's outputs as a list of nodes and constants."""
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def set_outputs(gm: GraphModule, leaves: Sequence[Any]) -> None:
    """Replace the program's outputs in place."""
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(leaves),)


def insert_tap(node: Node) -> Node:
    """Insert ``value, token = sp::tap(node)`` and return the token. Users except outputs get the value instead."""
    graph, output = node.graph, node.graph.output_node()
    with graph.inserting_after(node):
        tap = graph.call_function(torch.ops.sp.tap.default, (node,))
    with graph.inserting_after(tap):
        value, token = (graph.call_function(operator.getitem, (tap, i)) for i in (0, 1))
    node.replace_all_uses_with(value, lambda user: user not in (tap, output))
    return token


def insert_detach(node: Node) -> Node:
    """Return the node's detached value, for use as an output."""
    with node.graph.inserting_before(node.graph.output_node()):
        detached: Node = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    return detached
