"""Values take the memory layout of another: what was in the order of one tensor's strides is copied into that order.

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
    """Give the users of the node what `match_strides` makes of it, and return that."""
    users = list(node.users)
    last = match_strides(graph, node, value)
    for user in users:
        user.replace_input_with(node, last)
    return last


def match_strides(graph: Graph, node: Node, value: Tensor) -> Node:
    """Right behind the node: its values, contiguous in the order of the strides of `value`."""
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
    """Do two tensors of a shape lie otherwise in memory? The strides of dims of size 1 say nothing."""
    pairs = zip(as_sizes(x.shape), as_sizes(x.stride()), as_sizes(y.stride()))
    return any(not is_same_size(a, b) for extent, a, b in pairs if not is_same_size(extent, 1))


def is_identity(order: Sequence[int]) -> bool:
    """Does a permutation leave every dim where it is?"""
    return all(d == i for i, d in enumerate(order))


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """The permutation that undoes one."""
    return [order.index(d) for d in range(len(order))]


def order_of_strides(strides: Sequence[Size]) -> list[int]:
    """The dims from the largest stride to the smallest; as they are where a dim is broadcast."""
    values = [assume_large(s) for s in strides]
    return sorted(range(len(values)), key=lambda d: -values[d]) if all(values) else list(range(len(values)))
