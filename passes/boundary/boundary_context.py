"""Provide the context of passes over the outputs of a local program, and functions that edit outputs.

The local program is the graph of one rank. Its outputs are also called leaves; the number of an output is its index.
The boundary describes which inputs and outputs are sharded. A gradient token is an extra output, a one-element tensor
that carries the gradient of another output, see `insert_tap`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.context import PassContext
from sp_compile.passes.sharding.output_rules import OUTPUT_INFOS

from .graph_boundary import GraphBoundary


@dataclass
class BoundaryContext(PassContext):
    """Context of a pass that adds outputs to a local program: the pass updates `boundary` when it does."""

    boundary: GraphBoundary = field(default_factory=GraphBoundary)  # replaced by passes that add outputs
    trains: bool = True  # gradients are recorded
    # The program has no collectives of its own, whose passes identify gradients by their position among the outputs.
    is_split_only: bool = True

    def differentiable(self, gm: GraphModule) -> list[int]:
        """Return the numbers (indices) of the sharded outputs that may have a gradient: those of floating dtypes."""
        return [i for i in self.boundary.results if gm.meta[OUTPUT_INFOS][i].value.dtype.is_floating_point]

    def update_outputs(self, **values_of_field: dict[int, Any]) -> None:
        """Replace fields of some outputs in `boundary`, after a pass has changed these outputs.

        `update_outputs(grad_token={0: 2})` records that output 2 is the gradient token of output 0.

        Args:
            **values_of_field: The name of a field of `ShardedOutput` = {output number: new value}.
        """
        results = dict(self.boundary.results)
        for name, values in values_of_field.items():
            results |= {i: replace(results[i], **{name: value}) for i, value in values.items()}
        self.boundary = replace(self.boundary, results=results)


def output_leaves(gm: GraphModule) -> list[Any]:
    """Return the program's outputs, nodes and constants, as a list that a pass can edit, see `set_outputs`."""
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def set_outputs(gm: GraphModule, leaves: Sequence[Any]) -> None:
    """Replace the program's outputs in place; passes call it with the edited list of `output_leaves`."""
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(leaves),)


def insert_tap(node: Node) -> Node:
    """Insert ``value, token = sp::tap(node)`` and return the token, which a pass appends to the outputs.

    The value equals the node, and all users except the outputs read it in place of the node. The caller detaches the
    node in the outputs (`insert_detach`). The gradient of the node is then the gradient of the value, plus the gradient
    that the runtime stores for the token if the backward of the user's program computes one.
    """
    graph, output = node.graph, node.graph.output_node()
    with graph.inserting_after(node):
        tap = graph.call_function(torch.ops.sp.tap.default, (node,))
    with graph.inserting_after(tap):
        value, token = (graph.call_function(operator.getitem, (tap, i)) for i in (0, 1))
    node.replace_all_uses_with(value, lambda user: user not in (tap, output))
    return token


def insert_detach(node: Node) -> Node:
    """Insert and return the node's detached value, to be returned in place of a node whose gradient a token carries."""
    with node.graph.inserting_before(node.graph.output_node()):
        detached: Node = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    return detached
