"""Separate the storage of outputs.

    wait_tensor(all_gather(x)), wait_tensor(all_gather(x))      two outputs

A wait returns the storage of its operand, which its fake value does not show. The partitioner's elimination of common
subexpressions skips nodes that share storage with an output. Without this pass it would merge the two exchanges, and a
write to one output would change the other.

    permute(wait)  ->  _unsafe_view(permute(wait))                  an output

Autograd rejects in-place writes to a view that an `autograd.Function` creates, and AOTAutograd's program is one. It
knows of views by the program's own ops, but not of those inside an exchange of this package.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import WAIT_OPS, is_tensor, node_shape


class SeparateResultStorage(Pass):
    """Pass that lets the fake operand of a returned wait share its storage, and returns no views."""

    provides = frozenset({"separate storage"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        nodes = [n for n in gm.graph.output_node().all_input_nodes if is_tensor(n) and _is_strided(n)]
        returned = {storage_of(node.meta["val"]) for node in nodes}
        waits = gm.graph.find_nodes(op="call_function", target=WAIT_OPS)
        waits = [wait for wait in waits if storage_of(wait.meta["val"]) in returned]
        for wait in waits:
            wait.args[0].meta["val"] = wait.meta["val"]
        views = [node for node in nodes if _is_view(node)]
        for view in views:
            with gm.graph.inserting_after(view):
                own = gm.graph.call_function(
                    torch.ops.aten._unsafe_view.default, (view, self.sizes.list(node_shape(view)))
                )
            own.meta.update(view.meta)
            gm.graph.output_node().replace_input_with(view, own)
        return len(waits) + len(views)


def _is_strided(node: Node) -> bool:
    return bool(node.meta["val"].layout == torch.strided)


def _is_view(node: Node) -> bool:
    """Return True if an op returns the storage of an operand."""
    inputs = [n for n in node.all_input_nodes if is_tensor(n) and _is_strided(n)] if node.op == "call_function" else []
    return any(storage_of(x.meta["val"]) == storage_of(node.meta["val"]) for x in inputs)
