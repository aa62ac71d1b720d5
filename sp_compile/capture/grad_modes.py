"""Regions without gradients end in detaches: whoever joins two nodes of a graph sees where a gradient stops.

Dynamo writes `with torch.no_grad():` as calls that switch the mode, so a node has a gradient or not by its place in the
graph. A value that was made without one and is read with one is read through a detach instead. A hook of such a value
goes: torch lets one be registered where the value is a view of a leaf, and never calls it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from sp_compile._compat import register_hook_op, set_grad_enabled
from sp_compile.graph.call import is_tensor
from sp_compile.graph.edit import Editor
from sp_compile.sharding.matchers import carries_gradient

aten = torch.ops.aten


def detach_regions(graph: Graph) -> None:
    """Put a detach behind every value that leaves a region without gradients."""
    if not graph.find_nodes(op="call_function", target=set_grad_enabled):
        return
    modes: dict[Node, bool] = {}
    grad = True
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            grad = bool(node.args[0])
        modes[node] = grad
    editor = Editor().edit(graph)
    for node, has_gradient in modes.items():
        outside = [user for user in node.users if modes[user] or user.op == "output"]
        if node.op != "call_function" or has_gradient or not outside or not is_tensor(node):
            continue
        if carries_gradient(node):
            with graph.inserting_after(node):
                detached = editor.emit(aten.detach.default, (node,), node.meta["val"], node)
            for user in outside:
                user.replace_input_with(node, detached)
    for hook in graph.find_nodes(op="call_function", target=register_hook_op) if register_hook_op else ():
        if not modes[hook] or not carries_gradient(hook.args[0]):
            hook.replace_all_uses_with(hook.args[0])
            graph.erase_node(hook)
