"""Facts about the inputs of a graph across the ranks of a group.

They are determined at run time, where the inputs exist, and read by passes, where only their names do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from .group_names import GroupGrid


@dataclass(frozen=True)
class InputFacts:
    """Facts about a graph's inputs, by name; a joint graph is one of forward and backward."""

    differing: frozenset[str] = frozenset()  # inputs whose values differ between ranks
    equal: frozenset[str] | None = None  # inputs whose values are equal; None if not determined
    # equal inputs whose elements all have one value; then a part of a tensor is equal to another part
    constants: frozenset[str] = frozenset()
    grid: GroupGrid | None = None  # relation of the program's other groups to this one
    # joint graph: tangent input -> results that it may belong to
    tangents: Mapping[str, Sequence[Node]] = field(default_factory=dict)
    gradients: Mapping[str, Node] = field(default_factory=dict)  # joint graph: input -> node of its gradient

    def for_graph(self, replaced: Mapping[Node, Node]) -> InputFacts:
        """Return the facts with the nodes of a new graph; `replaced` maps nodes of the old graph to them."""
        gradients = {name: replaced.get(node, node) for name, node in self.gradients.items()}
        tangents = {name: [replaced.get(node, node) for node in nodes] for name, nodes in self.tangents.items()}
        return replace(self, gradients=gradients, tangents=tangents)
