"""Equal results stay two tensors, each with its own memory.

    wait_tensor(all_gather(x)), wait_tensor(all_gather(x))      two results

A wait returns the memory of what it waits for, which its fake value does not show. The partitioner's elimination of
common subexpressions leaves whatever shares memory with a result, and would make one exchange of the two: a write to
one result would change the other.

    permute(wait)  ->  _unsafe_view(permute(wait))                  a result

Autograd refuses to write in place to a view that an `autograd.Function` has made, which is what AOTAutograd's program
is. It knows of views that the program's own ops make, and not of those inside an exchange of this package.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import WAIT_OPS, is_tensor, node_shape


class SeparateResultStorage(Pass):
    """The fake value of an exchange whose wait shares memory with a result shares it, too; no result is a view."""

    provides = frozenset({"results are apart"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
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
    """Does an op return memory of what it reads?"""
    given = [n for n in node.all_input_nodes if is_tensor(n) and _is_strided(n)] if node.op == "call_function" else []
    return any(storage_of(x.meta["val"]) == storage_of(node.meta["val"]) for x in given)
