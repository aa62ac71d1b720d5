"""Passes over what AOTAutograd makes of a program: forward and backward in one graph, the collectives in sight.

A pass of collectives alone belongs there: gradients' all_reduces exist, and those of DTensor, autograd is behind, and
what the partitioner keeps for the backward is decided on the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import _compat
from .call import is_tensor
from .explain import Report
from .mesh import Ranks
from .passes.lower_exchanges import lower_exchanges
from .passes.own_rows import exchange_over, mark_own_rows
from .passes.rewrite import Note
from .passes.sequence_parallel_linear import SequenceParallelLinear
from .passes.tensor_parallel import Facts

log = logging.getLogger(__name__)


@dataclass
class JointPasses:
    """What is done to the joint graph, and what came of it.

    groups: the tensor-parallel groups of the program, in the order of their appearance. facts: of each, by its name;
    inputs are called input_0, input_1, ..., the function's tensor arguments in order. shapes: theirs, on this rank.
    own_rows: the program may take slices at its rank's place.
    """

    groups: Sequence[Ranks] = ()
    facts: Mapping[str, Facts] = field(default_factory=dict)
    shapes: Sequence[tuple[Any, ...]] = ()
    own_rows: bool = False
    decompose: bool = False
    report: Report = field(default_factory=lambda: Report(1))

    def key(self) -> str | None:
        """The same for what does the same, for caches of compiled code; None where ranks ask each other meanwhile."""
        if self.own_rows:
            return None
        facts = {name: (sorted(f.differ), sorted(f.equal or ())) for name, f in self.facts.items()}
        return f"{[(r.n, r.group) for r in self.groups]} {facts}"

    def __call__(self, gm: GraphModule) -> None:
        """Change the graph in place. Raises SpError as the passes do."""
        for ranks in self.groups:
            if self.own_rows:
                mark_own_rows(gm, ranks, exchange_over(ranks))
            facts = joint_facts(gm, self.facts[ranks.group], self.shapes)
            if facts is None:
                why = "AOTAutograd has regrouped the inputs, so nothing says which of them are equal on all ranks"
                self.report.add([Note("not sequence_parallel_linear", "graph", f"group {ranks.group}", why)])
                continue
            one = SequenceParallelLinear(ranks, facts)
            local = one(gm).graph_module
            self.report.layers += one.layers
            self.report.add(one.notes)
            if local is not gm:
                adopt(gm, local)
            lower_exchanges(gm, _compat.inductor_decompositions() if self.decompose else None)


def joint_facts(gm: GraphModule, facts: Facts, shapes: Sequence[tuple[Any, ...]]) -> Facts | None:
    """Facts about the function's arguments as facts about a joint graph's inputs, with their gradients.

    A joint graph has the primals, then the tangents; its results end with a gradient (or None) for each primal. A
    DTensor is its local tensor there, and its mesh. None if the inputs are not recognised.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    primals = [n for n in inputs if not n.name.startswith("tangents")]
    tensors = [n for n in primals if is_tensor(n)]
    if len(tensors) != len(shapes) or not all(map(_alike, tensors, shapes)):
        return None
    names = {f"input_{i}": node.name for i, node in enumerate(tensors)}
    results = gm.graph.output_node().args[0]
    gradients: dict[str, Node] = {}
    if len(primals) < len(inputs) and isinstance(results, Sequence) and len(results) > len(primals):
        ends = results[-len(primals) :]
        gradients = {p.name: g for p, g in zip(primals, ends, strict=True) if isinstance(g, Node)}
    differ = frozenset(names[name] for name in facts.differ)
    equal = None if facts.equal is None else frozenset(names[name] for name in facts.equal)
    return replace(facts, differ=differ, equal=equal, gradients=gradients)


def _alike(node: Node, shape: tuple[Any, ...]) -> bool:
    """Sizes that are symbols here were numbers when the program was called."""
    found = node.meta["val"].shape
    pairs = [(a, b) for a, b in zip(found, shape) if isinstance(a, int)]
    return len(found) == len(shape) and all(a == b for a, b in pairs)


def adopt(gm: GraphModule, local: GraphModule) -> None:
    """Give `gm` the nodes of another graph over the same inputs; its own Graph object stays."""
    inputs = gm.graph.find_nodes(op="placeholder")
    theirs = local.graph.find_nodes(op="placeholder")
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "placeholder":
            gm.graph.erase_node(node)
    made: dict[Node, Node] = dict(zip(theirs, inputs, strict=True))
    for node in local.graph.nodes:
        if node.op != "placeholder":
            made[node] = gm.graph.node_copy(node, made.__getitem__)
        else:
            made[node].meta.update(node.meta)
    for node in gm.graph.nodes:
        for private in [key for key in node.meta if key.startswith("sp_")]:
            del node.meta[private]
    gm.graph.lint()
    gm.recompile()
