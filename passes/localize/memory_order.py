"""Restore the global order of dims in memory for values of a local graph below autograd.

    g: [S, B, D] in memory, read as [B, S, D]; all_gather(g)   ->   a copy in that order directly after the all_gather

A kernel may read memory without the `contiguous` that autograd's formula did not need, and views that were valid have
to stay valid. The passes add no traffic between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.fakes import infer_value
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, is_same_size
from sp_compile.passes.graph.strides import has_other_strides, order_of_strides, restore_strides

sp = torch.ops.sp
GATHERING_OPS = (sp.unshard.default, sp.all_reduce.default, sp.broadcast.default, sp.reorder.default)
"""Ops whose result is replicated."""


class RestoreStrides(Pass):
    """Pass that copies gathered values into their single-device memory layout.

    User code after a graph break may `view` an output, and a replicated op may read strides; both were written for the
    single-device layout. A copy is added only where the layouts differ.
    """

    requires = frozenset({"validated", "balanced rows"})  # reordered values are replicated, too
    provides = frozenset({"restored strides"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        found = [(n, node_info(n).origin) for n in gm.graph.nodes if n.target in GATHERING_OPS]
        separate = [
            (n, o.meta["val"]) for n, o in found if o is not None and has_other_strides(o.meta["val"], n.meta["val"])
        ]
        for node, value in separate:
            restore_strides(gm.graph, node, value)
        return len(separate)


class KeepDimOrder(Pass):
    """Pass that restores the global order of dims in memory for all values below autograd.

    In such a graph `meta["val"]` is local and `node_info(node).origin` is global.
    """

    requires = frozenset({"validated"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        nodes, changed = list(gm.graph.nodes), set[Node]()
        for node in nodes:
            if node.op != "call_function":
                continue
            if not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = infer_value(node.target, node.args, node.kwargs)
                changed.add(node)
            source, here = node_info(node).origin, node.meta.get("val")
            there = None if source is None else source.meta["val"]
            if isinstance(here, Tensor) and isinstance(there, Tensor) and not _has_dim_order(here, there):
                changed.add(restore_strides(gm.graph, node, there))
        return len(gm.graph.nodes) - len(nodes)


def _has_dim_order(here: Tensor, there: Tensor) -> bool:
    """Return True if the dims have the order of `there` in memory, without gaps if that has none."""
    order = order_of_strides(as_sizes(there.stride()))
    if _make_dense(there, order):
        return _make_dense(here, order)
    wide = [d for d in order if not is_same_size(as_sizes(here.shape)[d], 1)]
    return wide == [d for d in order_of_strides(as_sizes(here.stride())) if d in wide]


def _make_dense(x: Tensor, order: Sequence[int]) -> bool:
    shape, strides = as_sizes(x.shape), as_sizes(x.stride())
    step: Size = 1
    for d in reversed(order):
        if not is_same_size(shape[d], 1):
            if not is_same_size(strides[d], step):
                return False
            step = step * shape[d]
    return True
