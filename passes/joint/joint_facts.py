"""What is known of a function's arguments, as facts about the inputs of its joint graph, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.graph.call import is_tensor, tangents_of
from sp_compile.passes.graph.sizes import all_same, sizes
from sp_compile.passes.sharding.input_facts import Facts


def joint_facts(gm: GraphModule, facts: Facts, shapes: Sequence[tuple[Any, ...]]) -> Facts | None:
    """Facts about the function's arguments as facts about a joint graph's inputs, with their gradients.

    A joint graph has the primals, then the tangents; its results end with a gradient (or None) for each primal. A
    DTensor is its local tensor there, and its mesh. None if the inputs are not recognised.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    primals = inputs[: len(inputs) - len(tangents_of(gm.graph))]
    tensors = [n for n in primals if is_tensor(n)]
    if len(tensors) != len(shapes) or not all(map(_fits, tensors, shapes)):
        return None
    symbols = [n for n in primals if isinstance(n.meta.get("val"), torch.SymInt)]
    names = {
        **{f"input_{i}": node.name for i, node in enumerate(tensors)},
        **{f"size_{i}": node.name for i, node in enumerate(symbols)},
    }
    if not facts.differ <= names.keys():
        return None
    results = gm.graph.output_node().args[0]
    gradients: dict[str, Node] = {}
    tangents: dict[str, list[Node]] = {}
    if len(primals) < len(inputs) and isinstance(results, Sequence) and len(results) > len(primals):
        made, ends = results[: -len(primals)], results[-len(primals) :]
        gradients = {p.name: g for p, g in zip(primals, ends, strict=True) if isinstance(g, Node)}
        for tangent in inputs[len(primals) :]:
            tangents[tangent.name] = [r for r in made if is_tensor(r) and _same_kind(r, tangent)]
    differ = frozenset(names[name] for name in facts.differ)
    blank = frozenset(names[name] for name in facts.blank)
    equal = None if facts.equal is None else frozenset(names[name] for name in facts.equal)
    return replace(facts, differ=differ, equal=equal, blank=blank, gradients=gradients, tangents=tangents)


def _same_kind(result: Node, tangent: Node) -> bool:
    """Could this be the gradient of that? AOTAutograd does not say of which result it is."""
    return is_tensor(tangent) and all_same(*(sizes(node.meta["val"].shape) for node in (result, tangent)))


def _fits(node: Node, shape: tuple[Any, ...]) -> bool:
    """Sizes that are symbols here were numbers when the program was called."""
    found = node.meta["val"].shape
    pairs = [(a, b) for a, b in zip(found, shape) if isinstance(a, int)]
    return len(found) == len(shape) and all(a == b for a, b in pairs)
