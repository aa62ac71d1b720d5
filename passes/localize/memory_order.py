"""Restore the global order of dims in memory for values of a local graph below autograd.

    g: [S, B, D] in memory, read as [B, S, D]; all_gather(g)   ->   a copy in that order directly after the all_gather

A kernel may read memory without the `contiguous` that autograd's formula did not need, and views that were valid have
to stay valid. The passes add no traffic between ranks. The origin of a local node is its node in the global graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.fakes import infer_value
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import as_sizes, is_same_size
from sp_compile.passes.graph.strides import has_other_strides, order_of_strides, restore_strides

sp = torch.ops.sp
# ops whose result is replicated
GATHERING_OPS = (sp.unshard.default, sp.all_reduce.default, sp.broadcast.default, sp.reorder.default)


class RestoreStrides(Pass):
    """Pass that copies gathered values into their single-device memory layout.

    User code after a graph break may `view` an output, and a replicated op may read strides; both were written for the
    single-device layout. A copy is added only where the layouts differ.
    """

    requires = frozenset({"validated", "balanced rows"})  # reordered values are replicated, too
    provides = frozenset({"restored strides"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Add a copy after each gathered value whose strides differ from its global ones; return their number."""
        copies = 0
        for node in list(gm.graph.nodes):
            origin = node_info(node).origin if node.target in GATHERING_OPS else None
            if origin is not None and has_other_strides(origin.meta["val"], node.meta["val"]):
                restore_strides(node, origin.meta["val"])
                copies += 1
        return copies


class KeepDimOrder(Pass):
    """Pass that restores the global order of dims in memory for all values below autograd.

    These are the values of a graph that autograd does not differentiate any more: a joint graph, or an exported program
    for inference. Their `meta["val"]` is local, and `node_info(node).origin` is a node of the global graph.
    """

    requires = frozenset({"validated"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Copy each local value whose order of dims differs from that of its global value.

        The values (`meta["val"]`) of nodes that depend on a copy are inferred again, as their strides may change.
        Returns the number of added nodes.
        """
        nodes, changed = list(gm.graph.nodes), set[Node]()
        for node in nodes:
            if node.op != "call_function":
                continue
            if not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = infer_value(node.target, node.args, node.kwargs)
                changed.add(node)
            origin, local_value = node_info(node).origin, node.meta.get("val")
            global_value = None if origin is None else origin.meta["val"]
            if not isinstance(local_value, Tensor) or not isinstance(global_value, Tensor):
                continue
            if not _has_dim_order(local_value, global_value):
                changed.add(restore_strides(node, global_value))
        return len(gm.graph.nodes) - len(nodes)


def _has_dim_order(x: Tensor, expected: Tensor) -> bool:
    """Return True if the dims of x have the order of `expected` in memory.

    If `expected` is contiguous in that order, without gaps between its elements, so must be x.
    """
    order = order_of_strides(as_sizes(expected.stride()))
    if _is_dense(expected, order):
        return _is_dense(x, order)
    long_dims = [d for d in order if not is_same_size(as_sizes(x.shape)[d], 1)]  # the strides of others do not matter
    return long_dims == [d for d in order_of_strides(as_sizes(x.stride())) if d in long_dims]


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    """Return True if the elements of x are contiguous in memory with the dims in this order, the slowest first."""
    shape, strides, fastest_first = as_sizes(x.shape), as_sizes(x.stride()), order[::-1]
    dense_strides = accumulate((shape[d] for d in fastest_first), mul, initial=1)
    dims_and_strides = zip(fastest_first, dense_strides)
    return all(is_same_size(shape[d], 1) or is_same_size(strides[d], stride) for d, stride in dims_and_strides)
