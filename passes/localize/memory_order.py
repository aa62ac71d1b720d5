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
from sp_compile.passes.context import Job
from sp_compile.passes.graph.fakes import infer
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.sizes import Size, same, sizes
from sp_compile.passes.graph.strides import order_of_strides, restore, strides_differ

sp = torch.ops.sp
GIVE_WHOLE = (sp.unshard.default, sp.all_reduce.default, sp.broadcast.default, sp.reorder.default)
"""Ops whose result every rank goes on to use alike."""


class RestoreStrides(Pass):
    """Gathered values get the memory layout that they have on one device.

    User code after a graph break may `view` a result, and an op that runs alike on every rank may read its strides;
    both were written for the layout of one device. A copy where the layouts differ.
    """

    requires = frozenset({"proved", "dealt"})  # what is reordered is whole, too
    provides = frozenset({"strides are restored"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        found = [(n, record(n).origin) for n in gm.graph.nodes if n.target in GIVE_WHOLE]
        apart = [(n, o.meta["val"]) for n, o in found if o is not None and strides_differ(o.meta["val"], n.meta["val"])]
        for node, value in apart:
            restore(gm.graph, node, value)
        return len(apart)


class KeepOrder(Pass):
    """Every value below autograd, in a graph whose `meta["val"]` is local and whose `record(node).origin` is global."""

    requires = frozenset({"proved"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        nodes, changed = list(gm.graph.nodes), set[Node]()
        for node in nodes:
            if node.op != "call_function":
                continue
            if not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = infer(node.target, node.args, node.kwargs)
                changed.add(node)
            source, here = record(node).origin, node.meta.get("val")
            there = None if source is None else source.meta["val"]
            if isinstance(here, Tensor) and isinstance(there, Tensor) and not _in_order(here, there):
                changed.add(restore(gm.graph, node, there))
        return len(gm.graph.nodes) - len(nodes)


def _in_order(here: Tensor, there: Tensor) -> bool:
    """Do the dims lie in memory in the order of the other's? Where that one has no gaps, without gaps."""
    order = order_of_strides(sizes(there.stride()))
    if _dense(there, order):
        return _dense(here, order)
    wide = [d for d in order if not same(sizes(here.shape)[d], 1)]
    return wide == [d for d in order_of_strides(sizes(here.stride())) if d in wide]


def _dense(x: Tensor, order: Sequence[int]) -> bool:
    shape, strides = sizes(x.shape), sizes(x.stride())
    step: Size = 1
    for d in reversed(order):
        if not same(shape[d], 1):
            if not same(strides[d], step):
                return False
            step = step * shape[d]
    return True
