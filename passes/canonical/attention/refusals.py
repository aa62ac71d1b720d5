"""Which softmax nearly was attention, and what in front of it is neither scale nor bias nor fill: for the report.

    softmax(tanh(q @ k.mT)) @ v         "tanh (aten.tanh.default) stands between the product and the softmax"

Reads the graph only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from sp_compile.graph.call import is_tensor
from sp_compile.sharding.products import product_of

from .scores import FILLS

aten = torch.ops.aten
STEPS = 12  # between a product and the softmax; attention has half as many
HANDLED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor, *FILLS)


def between_products(softmax: Node) -> bool:
    """Does the softmax read what a product makes, and a product what it makes?"""
    return _reaches(softmax, lambda n: n.all_input_nodes) and _reaches(softmax, lambda n: list(n.users))


def _reaches(start: Node, following: Callable[[Node], Sequence[Node]]) -> bool:
    todo, seen = list(following(start)), set[Node]()
    while todo and len(seen) < STEPS:
        node = todo.pop(0)
        if node in seen or not is_tensor(node) or node.op != "call_function":
            continue
        if product_of(node) is not None:
            return True
        seen.add(node)
        todo += following(node)
    return False


def why_no_scores(x: Node) -> str:
    """Of what a softmax reads behind a product, and `scores_of` did not take."""
    node = x
    while product_of(node) is None:
        if len(node.users) > 1:
            return f"something else reads the scores ({node.name})"
        inner = [i for i in node.all_input_nodes if is_tensor(i) and i.op == "call_function" and _scores(i)]
        if not inner or (node.target not in HANDLED and _changes(node)):
            break
        node = inner[0]
    if product_of(node) is not None:
        read = len(node.users) > 1
        return f"something else reads the scores ({node.name})" if read else "a scale, bias or fill that no op takes so"
    return f"{node.name} ({node.target}) stands between the product and the softmax"


def _scores(node: Node) -> bool:
    return product_of(node) is not None or _reaches(node, lambda n: n.all_input_nodes)


def _changes(node: Node) -> bool:
    """Is it an op on the elements that is no cast or copy?"""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and node.target not in (
        aten.clone.default,
        aten._to_copy.default,
    )
