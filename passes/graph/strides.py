"""Restore the memory layout of values: copy a tensor to the stride order of another.

y: [S, B, D] in memory, read as [B, S, D]   ->   y.contiguous(): [B, S, D] in memory
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .node_info import set_node_info
from .sizes import Size, as_sizes, assume_large, is_same_size

aten = torch.ops.aten


def restore_strides(graph: Graph, node: Node, value: Tensor) -> Node:
    """Insert `match_strides` between the node and its users, and return the new node."""
    users = list(node.users)
    last = match_strides(graph, node, value)
    for user in users:
        user.replace_input_with(node, last)
    return last


def match_strides(graph: Graph, node: Node, value: Tensor) -> Node:
    """Append a copy of the node's value that is contiguous in the stride order of `value`."""
    order = order_of_strides(as_sizes(value.stride()))
    back = inverse_permutation(order)
    dense = {"memory_format": torch.contiguous_format}
    last, value = node, node.meta["val"]
    for target, args, kwargs in (
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), dense),
        (aten.permute.default, (back,), {}),
    ):
        if args and is_identity(order):
            continue
        with graph.inserting_after(last):
            last = graph.call_function(target, (last, *args), kwargs)
        value = target(value, *args, **kwargs)
        last.meta.update(node.meta, val=value)
        set_node_info(last, origin=None)
    return last


def has_other_strides(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors of the same shape differ in strides; dims of size 1 are ignored."""
    pairs = zip(as_sizes(x.shape), as_sizes(x.stride()), as_sizes(y.stride()))
    return any(not is_same_size(a, b) for extent, a, b in pairs if not is_same_size(extent, 1))


def is_identity(order: Sequence[int]) -> bool:
    """Return True if the permutation is the identity."""
    return all(d == i for i, d in enumerate(order))


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """Return the inverse permutation."""
    return [order.index(d) for d in range(len(order))]


def order_of_strides(strides: Sequence[Size]) -> list[int]:
    """Return the dims sorted by descending stride, or in their order if a dim is broadcast."""
    values = [assume_large(s) for s in strides]
    return sorted(range(len(values)), key=lambda d: -values[d]) if all(values) else list(range(len(values)))
