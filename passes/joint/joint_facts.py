"""Map facts about a function's arguments to the inputs and gradients of its joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.cost.input_facts import InputFacts
from sp_compile.passes.graph.call import graph_tangents, is_tensor
from sp_compile.passes.graph.sizes import as_sizes, is_same_shape


def map_facts(gm: GraphModule, facts: InputFacts, shapes: Sequence[tuple[Any, ...]]) -> InputFacts | None:
    """Return facts about a joint graph's inputs and their gradients.

    A joint graph has the primals, then the tangents; its outputs end with a gradient (or None) for each primal. A
    DTensor is represented by its local tensor and its mesh.

    Args:
        gm: The joint graph.
        facts: The facts about the function's arguments.
        shapes: The shapes of the function's tensor arguments, on this rank.

    Returns:
        The facts, or None if the inputs are not recognized.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    primals = inputs[: len(inputs) - len(graph_tangents(gm.graph))]
    tensors = [n for n in primals if is_tensor(n)]
    if len(tensors) != len(shapes) or not all(map(_matches_shape, tensors, shapes)):
        return None
    symbols = [n for n in primals if isinstance(n.meta.get("val"), torch.SymInt)]
    names = {
        **{f"input_{i}": node.name for i, node in enumerate(tensors)},
        **{f"size_{i}": node.name for i, node in enumerate(symbols)},
    }
    if not facts.differing <= names.keys():
        return None
    results = gm.graph.output_node().args[0]
    gradients: dict[str, Node] = {}
    tangents: dict[str, list[Node]] = {}
    if len(primals) < len(inputs) and isinstance(results, Sequence) and len(results) > len(primals):
        created, ends = results[: -len(primals)], results[-len(primals) :]
        gradients = {p.name: g for p, g in zip(primals, ends, strict=True) if isinstance(g, Node)}
        for tangent in inputs[len(primals) :]:
            tangents[tangent.name] = [r for r in created if is_tensor(r) and _can_be_gradient(r, tangent)]
    differ = frozenset(names[name] for name in facts.differing)
    blank = frozenset(names[name] for name in facts.constants)
    equal = None if facts.equal is None else frozenset(names[name] for name in facts.equal)
    return replace(facts, differing=differ, equal=equal, constants=blank, gradients=gradients, tangents=tangents)


def _can_be_gradient(result: Node, tangent: Node) -> bool:
    """Return True if the shapes match. AOTAutograd does not record the output of a tangent."""
    return is_tensor(tangent) and is_same_shape(*(as_sizes(node.meta["val"].shape) for node in (result, tangent)))


def _matches_shape(node: Node, shape: tuple[Any, ...]) -> bool:
    """Return True if the static sizes match; sizes that are symbols here were ints in the call."""
    found = node.meta["val"].shape
    pairs = [(a, b) for a, b in zip(found, shape) if isinstance(a, int)]
    return len(found) == len(shape) and all(a == b for a, b in pairs)
