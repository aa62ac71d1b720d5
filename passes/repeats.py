"""Elements that repeat in place become a dim of their own, which regroups: repeats of a shard are a shard of repeats.

    repeat_interleave(x, k, 1)     (B, S, E) -> (B, S * k, E)
        ->  reshape(expand(unsqueeze(x, 2), (B, S, k, E)), (B, S * k, E))

Part of canonicalize, after attention has found its repeated heads. Bytes moved: none. Leaves alone: numbers of repeats
that are tensors, and repeats of the flattened operand.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..call import Call
from ..shapes import size, sizes
from .edit import Editor

aten = torch.ops.aten


class Repeats(Editor):
    """Rewrites every repeat_interleave of one graph along a dim."""

    def __init__(self, gm: GraphModule) -> None:
        self.edit(gm.graph)

    def run(self) -> bool:
        """True if the graph changed."""
        nodes = self.graph.find_nodes(op="call_function", target=aten.repeat_interleave.self_int)
        found = [n for n in nodes if Call(n)["dim"] is not None and Call(n).ndim()]
        for node in found:
            self._rewrite(node)
        return bool(found)

    def _rewrite(self, node: Node) -> None:
        call = Call(node)
        dim, shape = call.dim(), list(call.shape())
        expanded = self.sizes.list([*shape[: dim + 1], size(call["repeats"]), *shape[dim + 1 :]])
        whole = self.sizes.list(sizes(node.meta["val"].shape))
        with self.graph.inserting_before(node):
            x = self.compute(aten.unsqueeze.default, (call.operands[0], dim + 1), node)
            x = self.compute(aten.expand.default, (x, expanded), node)
            x = self.compute(aten.reshape.default, (x, whole), node)
        self.replace(node, x)
