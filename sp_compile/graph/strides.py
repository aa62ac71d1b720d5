"""Gathered values get the memory layout that they have on one device.

    y: [S, B, D] in memory, read as [B, S, D]   ->   y.contiguous(): [B, S, D] in memory

User code after a graph break may `view` a result, and an op that runs alike on every rank may read its strides; both
were written for the layout of one device. Bytes moved between ranks: none; a copy where the layouts differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .sizes import Size, same, sizes

sp, aten = torch.ops.sp, torch.ops.aten
# Ops whose result every rank goes on to use alike.
WHOLE = (sp.unshard.default, sp.all_reduce.default, sp.broadcast.default)
LARGE = 1 << 20  # any symbolic size, where only the order of strides matters


def restore_strides(local: GraphModule) -> None:
    """Edits a validated local graph, in which `meta["val"]` is local and `meta["sp_global"]` is the global node."""
    for node in list(local.graph.nodes):
        source = node.meta.get("sp_global")
        if node.target in WHOLE and source is not None and _differ(node.meta["val"], source.meta["val"]):
            restore(local.graph, node, source.meta["val"])
    local.recompile()


def _differ(here: Tensor, there: Tensor) -> bool:
    pairs = zip(sizes(there.shape), sizes(here.stride()), sizes(there.stride()))
    return any(not same(a, b) for extent, a, b in pairs if extent != 1)


def restore(graph: Graph, node: Node, value: Tensor) -> Node:
    """Give the users of the node what `restored` makes of it, and return that."""
    users = list(node.users)
    last = restored(graph, node, value)
    for user in users:
        user.replace_input_with(node, last)
    return last


def restored(graph: Graph, node: Node, value: Tensor) -> Node:
    """Right behind the node: its values, contiguous in the order of the strides of `value`."""
    order = order_of(sizes(value.stride()))
    back = [order.index(d) for d in range(len(order))]
    dense = {"memory_format": torch.contiguous_format}
    last, value = node, node.meta["val"]
    for target, args, kwargs in (
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), dense),
        (aten.permute.default, (back,), {}),
    ):
        if args and order == sorted(order):
            continue
        with graph.inserting_after(last):
            last = graph.call_function(target, (last, *args), kwargs)
        value = target(value, *args, **kwargs)
        last.meta.update({k: v for k, v in node.meta.items() if k != "sp_global"}, val=value)
    return last


def order_of(strides: Sequence[Size]) -> list[int]:
    """The dims from the largest stride to the smallest; as they are where a dim is broadcast."""
    values = [s if isinstance(s, int) else s.subs({x: LARGE for x in s.free_symbols}) for s in strides]
    return sorted(range(len(values)), key=lambda d: -values[d]) if all(values) else list(range(len(values)))
