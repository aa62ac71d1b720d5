"""Facts about the inputs of a graph across the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from .group_names import GroupGrid


@dataclass(frozen=True)
class InputFacts:
    """What is known of a graph's inputs, by name.

    differ: inputs whose values are not the same on every rank. equal: those whose values are; None if nobody looked.
    blank: those of the equal ones that hold one number throughout: initial values, perhaps of parts.
    grid: how the program's other groups lie to this.
    tangents: an input that is the gradient of a result -> the results that it may belong to, in a joint graph.
    gradients: the name of an input -> the node of the result that is its gradient, in a joint graph.
    """

    differing: frozenset[str] = frozenset()
    equal: frozenset[str] | None = None
    constants: frozenset[str] = frozenset()
    grid: GroupGrid | None = None
    tangents: Mapping[str, Sequence[Node]] = field(default_factory=dict)
    gradients: Mapping[str, Node] = field(default_factory=dict)

    def for_graph(self, gone: Mapping[Node, Node]) -> InputFacts:
        """The same of a graph in which other nodes, that are there, stand for those that are gone."""
        gradients = {name: gone.get(node, node) for name, node in self.gradients.items()}
        tangents = {name: [gone.get(node, node) for node in nodes] for name, nodes in self.tangents.items()}
        return replace(self, gradients=gradients, tangents=tangents)
