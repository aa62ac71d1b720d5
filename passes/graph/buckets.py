"""Match buckets of collectives: cat, elementwise collectives, split.

Each piece of the split has the values of the part at the same index of the cat.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .call import is_tensor, node_shape
from .node_info import node_info
from .sizes import as_sizes, is_same_shape

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SPLITS_WITH_SIZES = (aten.split_with_sizes.default, aten.split_with_sizes_copy.default)
PER_ELEMENT = (c10d.all_reduce.default, c10d.wait_tensor.default)


def bucket_source(node: Node) -> Node | None:
    """Return the part of a bucket that this piece is computed from, or None if the node is no such piece."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    split, index = node.args
    if split.target not in SPLITS_WITH_SIZES or len(split.args) > 2 or split.kwargs:
        return None
    source = split.args[0]
    while source.target in PER_ELEMENT and node_info(source).result is None:
        source = source.args[0]
    if source.target is not aten.cat.default or len(source.args) > 1 or source.kwargs:
        return None
    parts, lengths = source.args[0], split.args[1]
    if len(parts) != len(lengths) or not all(is_tensor(p) and p.meta["val"].ndim == 1 for p in parts):
        return None
    pairs = zip(parts, split.meta["val"])
    return parts[index] if all(is_same_shape(node_shape(p), as_sizes(v.shape)) for p, v in pairs) else None
