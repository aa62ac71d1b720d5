"""Insert detaches at the end of no-grad regions, so that gradient flow is explicit in the graph.

Dynamo records `with torch.no_grad():` as calls that switch the mode, so that the gradient of a node depends on its
position. A value computed without gradients and read with gradients is read through a detach instead. A hook on a value
without gradient is removed: the value was a view of a leaf, or was overwritten in place.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from sp_compile.lowering.torch_compat import register_hook_op
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.modes import no_grad_nodes
from sp_compile.passes.sharding.matchers import may_carry_gradient

aten = torch.ops.aten


def detach_no_grad_regions(graph: Graph) -> None:
    """Insert a detach after each value that leaves a no-grad region, and remove hooks that never run.

    A no-grad region is the nodes between `set_grad_enabled(False)` and the next `set_grad_enabled(True)`.
    """
    no_grad, editor = no_grad_nodes(graph), GraphEditor().edit(graph)
    for node in [n for n in graph.nodes if n in no_grad and n.op == "call_function" and is_tensor(n)]:
        users_with_grad = [user for user in node.users if user not in no_grad or user.op == "output"]
        if users_with_grad and may_carry_gradient(node):
            with graph.inserting_after(node):
                detached = editor.emit(aten.detach.default, (node,), node.meta["val"], node)
            for user in users_with_grad:
                user.replace_input_with(node, detached)
    hooks = graph.find_nodes(op="call_function", target=register_hook_op) if register_hook_op else ()
    for hook in hooks:  # the node hook(tensor, ...) returns its tensor
        if hook in no_grad or not may_carry_gradient(hook.args[0]):
            hook.replace_all_uses_with(hook.args[0])
            graph.erase_node(hook)
