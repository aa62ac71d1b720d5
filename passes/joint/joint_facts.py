"""Map facts about a function's arguments to the inputs and gradients of its joint graph.

A fact states, for example, that argument `input_0` has equal values on all ranks. In the joint graph that argument is
the first tensor among the primals, such as `primals_3`. The primals are the inputs of the forward; the tangents are the
gradients of its results. Facts (`InputFacts`) name the inputs that are equal on all ranks, that differ between ranks,
or that have one value in all elements.
"""

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
    """Return facts about a joint graph's inputs and their gradients, by the names of its placeholders.

    `ScatterLayers` calls it for each group, to scatter only layers whose inputs are equal on the group's ranks.

    A joint graph has the primals, then the tangents; its outputs end with a gradient (or None) for each primal. A
    DTensor is represented by its local tensor and its mesh.

    Args:
        gm: The joint graph.
        facts: The facts about the function's arguments.
        shapes: The shapes of the function's tensor arguments, on this rank.

    Returns:
        The facts, or None if the tensors among the primals do not match `shapes` one by one, since AOTAutograd has
        regrouped them, or if an input that differs between ranks has no placeholder of its own.
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
        forward_results, primal_gradients = results[: -len(primals)], results[-len(primals) :]
        gradients = {p.name: g for p, g in zip(primals, primal_gradients, strict=True) if isinstance(g, Node)}
        for tangent in inputs[len(primals) :]:
            tangents[tangent.name] = [x for x in forward_results if is_tensor(x) and _can_be_gradient(tangent, x)]
    differing, constants = (frozenset(names[x] for x in fact) for fact in (facts.differing, facts.constants))
    equal = None if facts.equal is None else frozenset(names[x] for x in facts.equal)
    return replace(facts, differing=differing, equal=equal, constants=constants, gradients=gradients, tangents=tangents)


def _can_be_gradient(tangent: Node, result: Node) -> bool:
    """Return True if a tangent has the shape of a result, so that it may be its gradient.

    AOTAutograd does not record of which result a tangent is the gradient.
    """
    return is_tensor(tangent) and is_same_shape(*(as_sizes(node.meta["val"].shape) for node in (result, tangent)))


def _matches_shape(node: Node, shape: tuple[Any, ...]) -> bool:
    """Return True if an input has this number of dims and its static sizes, as the argument has.

    Symbolic sizes may have any value.
    """
    node_shape = node.meta["val"].shape
    is_same_size = [size == extent for size, extent in zip(node_shape, shape) if isinstance(size, int)]
    return len(node_shape) == len(shape) and all(is_same_size)
