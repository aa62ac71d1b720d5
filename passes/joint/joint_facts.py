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
from sp_compile.passes.graph.call import graph_tangents, is_tensor, node_shape
from sp_compile.passes.graph.sizes import is_same_shape


def map_facts(gm: GraphModule, facts: InputFacts, shapes: Sequence[tuple[Any, ...]]) -> InputFacts | None:
    """Return facts about a joint graph's inputs and their gradients, by the names of its placeholders.

    `ScatterLayers` calls it for each group, to scatter only layers whose inputs are equal on the group's ranks. A fact
    about argument "input_0" becomes one about the placeholder of the first tensor argument, such as "primals_3".

    The inputs of a joint graph are the primals (inputs of the forward), then the tangents (gradients of its results).
    Its outputs are the results, then a gradient or None for each primal.

    Args:
        gm: The joint graph.
        facts: The facts about the function's arguments, which are named "input_i" (tensors) and "size_i" (sizes).
        shapes: The shapes of the function's tensor arguments, on this rank.

    Returns:
        The facts, with the gradient of each primal and the results whose gradient each tangent may be. None if the
        tensors among the primals do not match `shapes` one by one, since AOTAutograd has regrouped them, or if an
        argument that differs between ranks has no placeholder.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    primals = inputs[: len(inputs) - len(graph_tangents(gm.graph))]
    tensors = [n for n in primals if is_tensor(n)]
    if len(tensors) != len(shapes) or not all(map(_can_have_shape, tensors, shapes)):
        return None
    symbols = [n for n in primals if isinstance(n.meta.get("val"), torch.SymInt)]
    names = {  # name of the argument -> name of its placeholder
        **{f"input_{i}": node.name for i, node in enumerate(tensors)},
        **{f"size_{i}": node.name for i, node in enumerate(symbols)},
    }
    if not facts.differing <= names.keys():
        return None
    outputs = gm.graph.output_node().args[0]
    gradients: dict[str, Node] = {}
    tangents: dict[str, list[Node]] = {}
    has_tangents = len(primals) < len(inputs)
    if has_tangents and isinstance(outputs, Sequence) and len(outputs) > len(primals):
        forward_results, primal_gradients = outputs[: -len(primals)], outputs[-len(primals) :]
        gradients = {p.name: g for p, g in zip(primals, primal_gradients, strict=True) if isinstance(g, Node)}
        for tangent in inputs[len(primals) :]:
            tangents[tangent.name] = [x for x in forward_results if is_tensor(x) and _can_be_gradient(tangent, x)]
    differing = frozenset(names[x] for x in facts.differing)
    constants = frozenset(names[x] for x in facts.constants)
    # `facts.equal` is None if the ranks have not compared the values of the inputs.
    equal = None if facts.equal is None else frozenset(names[x] for x in facts.equal)
    return replace(facts, differing=differing, equal=equal, constants=constants, gradients=gradients, tangents=tangents)


def _can_be_gradient(tangent: Node, result: Node) -> bool:
    """Return True if a tangent may be the gradient of a result: it has the same shape.

    AOTAutograd does not record to which result a tangent belongs.
    """
    return is_tensor(tangent) and is_same_shape(node_shape(result), node_shape(tangent))


def _can_have_shape(node: Node, shape: tuple[Any, ...]) -> bool:
    """Return True if an input of the joint graph can be the argument with this shape.

    Its number of dims and its static sizes are then equal; a symbolic size may have any value.
    """
    sizes = node.meta["val"].shape
    return len(sizes) == len(shape) and all(a == b for a, b in zip(sizes, shape) if isinstance(a, int))
