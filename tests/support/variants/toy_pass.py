"""A canonical pass that is registered from outside the package: x + x becomes 2 * x."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from sp_compile.passes import CanonicalPass, PassContext

aten = torch.ops.aten


class Doubled(CanonicalPass):
    """x + x -> x * 2."""

    name = "doubled"
    requires = frozenset({"normalized"})
    provides = frozenset({"canonical", "fused attention"})  # so it runs before passes that require fused attention

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        added = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        found = [node for node in added if node.args[0] is node.args[1] and not node.kwargs]
        for node in found:
            with gm.graph.inserting_before(node):
                fresh = self.compute(aten.mul.Tensor, (node.args[0], 2), node)
            self.note(fresh, "twice the same")
            self.replace(node, fresh)
        return len(found)
