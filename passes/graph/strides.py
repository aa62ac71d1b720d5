"""Restore the memory layout of values: copy a tensor to the stride order of another.

y: [S, B, D] in memory, read as [B, S, D]   ->   y.contiguous(): [B, S, D] in memory

The stride order of a tensor is the order of its dims in memory, slowest first. A pass may change it, while users of the
value (a view, a kernel that reads strides) were written for the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .node_info import set_node_info
from .sizes import Size, as_sizes, assume_large, is_same_size

aten = torch.ops.aten


def restore_strides(node: Node, value: Tensor) -> Node:
    """Insert a copy in the stride order of `value` between the node and its users, and return the copy.

    The stride order is the order of the dims in memory, largest stride first.
    """
    users = list(node.users)
    restored = copy_strides(node, value)
    for user in users:
        user.replace_input_with(node, restored)
    return restored


def copy_strides(node: Node, value: Tensor) -> Node:
    """Append a copy of the node's value that is contiguous in the stride order of `value`, and return it.

    The stride order is the order of the dims in memory, largest stride first.

    Args:
        node: Node to copy; the new nodes follow it.
        value: Tensor with the same number of dims, only the strides of which are read.
    """
    last = node
    for target, args, kwargs in stride_copy_ops(value):
        result = target(last.meta["val"], *args, **kwargs)
        with node.graph.inserting_after(last):
            last = node.graph.call_function(target, (last, *args), kwargs)
        last.meta.update(node.meta, val=result)
        # The origin, of which `node` is the local value, was copied with the metadata; the copy is not that value.
        set_node_info(last, origin=None)
    return last


def stride_copy_ops(like: Tensor) -> list[tuple[Any, list[Any], dict[str, Any]]]:
    """Return the ops (target, further arguments, keyword arguments) that copy a value to the stride order of `like`."""
    order = order_of_strides(as_sizes(like.stride()))
    clone = (aten.clone.default, list[Any](), {"memory_format": torch.contiguous_format})
    if is_identity(order):
        return [clone]
    return [(aten.permute.default, [order], {}), clone, (aten.permute.default, [inverse_permutation(order)], {})]


def has_other_strides(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors of the same shape differ in strides; those of dims of size 1 are ignored."""
    dims = zip(as_sizes(x.shape), as_sizes(x.stride()), as_sizes(y.stride()))
    return any(not is_same_size(extent, 1) and not is_same_size(a, b) for extent, a, b in dims)


def is_identity(order: Sequence[int]) -> bool:
    """Return True if the permutation is the identity."""
    return list(order) == list(range(len(order)))


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """Return the permutation that reverts permute(order)."""
    return [order.index(d) for d in range(len(order))]


def order_of_strides(strides: Sequence[Size]) -> list[int]:
    """Return the dims sorted by descending stride, or in their own order if a dim has stride 0 (it is expanded)."""
    values = [assume_large(s) for s in strides]
    dims = range(len(values))
    return sorted(dims, key=lambda d: -values[d]) if all(values) else list(dims)
