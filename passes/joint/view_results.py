"""Separate the storage of outputs.

    wait_tensor(all_gather(x)), wait_tensor(all_gather(x))      two outputs

A wait returns the storage of its operand, which its fake value does not show. The partitioner's elimination of common
subexpressions skips nodes that share storage with an output. Without this pass it would merge the two exchanges, and a
write to one output would change the other.

    permute(wait)  ->  _unsafe_view(permute(wait))              an output

Autograd rejects in-place writes to a view that an `autograd.Function` creates, and AOTAutograd's program is one. It
tracks views that the program's own ops create, but not those that an exchange of this package creates.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import WAIT_OP, is_tensor, node_shape


class SeparateResultStorage(Pass):
    """Pass that shows in fake values that a returned wait has its operand's storage, and returns no views.

    The module docstring explains both. The storage is that of the fake tensor in meta["val"].
    """

    provides = frozenset({"separate storage"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Change the graph in place, and return the number of changed waits and outputs.

        A wait_tensor returns the storage of its operand. If it shares its storage with an output, its operand gets the
        same fake value, so that the partitioner does not merge it with an equal node. Autograd rejects in-place writes
        to views that a compiled graph returns: such an output becomes an _unsafe_view, which is no view for autograd.
        """
        output = gm.graph.output_node()
        results = [node for node in output.all_input_nodes if _is_strided(node)]
        result_storages = {storage_of(node.meta["val"]) for node in results}
        waits = gm.graph.find_nodes(op="call_function", target=WAIT_OP)
        waits = [wait for wait in waits if storage_of(wait.meta["val"]) in result_storages]
        for wait in waits:
            wait.args[0].meta["val"] = wait.meta["val"]
        views = [node for node in results if node.op == "call_function" and _has_input_storage(node)]
        for view in views:
            with gm.graph.inserting_after(view):
                args = (view, self.sizes.list(node_shape(view)))
                unsafe_view = gm.graph.call_function(torch.ops.aten._unsafe_view.default, args)
            unsafe_view.meta.update(view.meta)
            output.replace_input_with(view, unsafe_view)
        return len(waits) + len(views)


def _is_strided(node: Node) -> bool:
    """Return True if the value of a node is a strided tensor, which has a storage to compare."""
    return is_tensor(node) and node.meta["val"].layout == torch.strided


def _has_input_storage(node: Node) -> bool:
    """Return True if the value of a node has the storage of an operand, as that of a view has."""
    inputs = filter(_is_strided, node.all_input_nodes)
    return any(storage_of(x.meta["val"]) == storage_of(node.meta["val"]) for x in inputs)
