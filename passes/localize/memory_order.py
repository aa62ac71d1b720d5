"""Every value of a local graph below autograd keeps the order of dims in memory that the global one has.

    g: [S, B, D] in memory, read as [B, S, D]; all_gather(g)   ->   a copy in that order right behind the all_gather

A kernel there may read memory as it lies, without the `contiguous` that autograd's formula had no need to write, and
views that were possible have to stay so. Bytes moved between ranks: none.
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
"""Ops whose result every rank goes on to use alike."""


class RestoreStrides(Pass):
    """Gathered values get the memory layout that they have on one device.

    User code after a graph break may `view` a result, and an op that runs alike on every rank may read its strides;
    both were written for the layout of one device. A copy where the layouts differ.
    """

    requires = frozenset({"proved", "dealt"})  # what is reordered is whole, too
    provides = frozenset({"strides are restored"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        found = [(n, node_info(n).origin) for n in gm.graph.nodes if n.target in GATHERING_OPS]
        apart = [
            (n, o.meta["val"]) for n, o in found if o is not None and has_other_strides(o.meta["val"], n.meta["val"])
        ]
        for node, value in apart:
            restore_strides(gm.graph, node, value)
        return len(apart)


class KeepDimOrder(Pass):
    """Every value below autograd, in a graph whose `meta["val"]` is local.

    `node_info(node).origin` is global.
    """

    requires = frozenset({"proved"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
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
    """Do the dims lie in memory in the order of the other's? Where that one has no gaps, without gaps."""
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
