"""aten.copy(x, y) -> y: what functionalisation makes of an in-place write, as dist.all_reduce(x) is one.

Nothing of x is left in the result but its layout, so x does not say who has which rows of it. Bytes: none.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def drop_overwrites(gm: GraphModule) -> dict[Node, Node]:
    """Rewrite the graph in place; what each node that is gone has become. A write that converts or broadcasts stays."""
    gone: dict[Node, Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=aten.copy.default):
        old, new = node.args[0].meta["val"], node.args[1].meta["val"]
        if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
            continue
        if old.stride() == new.stride():
            gone[node] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            gm.graph.erase_node(node)
        elif old.is_contiguous():
            node.target, node.args = aten.clone.default, (node.args[1],)
            node.kwargs = {"memory_format": torch.contiguous_format}
    return gone
