"""Match buckets of collectives, such as DDP's reductions of many gradients by one all_reduce.

    split_with_sizes(wait_tensor(all_reduce(cat([a, b]), ..)), [len(a), len(b)])[1]      is b, reduced

A bucket is the cat of flat tensors (vectors), which one collective processes. Each piece of the split has the reduced
values of the vector at the same index of the cat.
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
ELEMENTWISE_COLLECTIVES = (c10d.all_reduce.default, c10d.wait_tensor.default)


def bucket_source(node: Node) -> Node | None:
    """Return the vector of which this piece of a bucket has the reduced values, or None if the node is no piece.

    A bucket is the cat of several vectors, which one collective reduces and a split separates again. Propagation gives
    the piece the placement that a collective on the vector alone would return.
    """
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    split, index = node.args
    if split.target not in SPLITS_WITH_SIZES or len(split.args) > 2 or split.kwargs:
        return None
    # Go back over the collectives to the cat. A collective with a recorded placement of its result (`NodeInfo.result`)
    # is not followed: that placement holds for the whole bucket, for vectors of any placement.
    cat = split.args[0]
    while cat.target in ELEMENTWISE_COLLECTIVES and node_info(cat).result is None:
        cat = cat.args[0]
    if cat.target is not aten.cat.default or len(cat.args) > 1 or cat.kwargs:
        return None
    vectors, lengths = cat.args[0], split.args[1]
    if len(vectors) != len(lengths) or not all(is_tensor(x) and x.meta["val"].ndim == 1 for x in vectors):
        return None
    pairs = zip(vectors, split.meta["val"])
    has_equal_pieces = all(is_same_shape(node_shape(x), as_sizes(piece.shape)) for x, piece in pairs)
    return vectors[index] if has_equal_pieces else None
