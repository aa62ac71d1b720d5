"""Regions without gradients end in detaches: whoever joins two nodes of a graph sees where a gradient stops.

Dynamo writes `with torch.no_grad():` as calls that switch the mode, so a node has a gradient or not by its place in the
graph. A value that was made without one and is read with one is read through a detach instead. A hook of a value that
has none goes, which torch would refuse, or never call: it was a view of a leaf, or was overwritten whole, in place.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from sp_compile.lowering.torch_compat import register_hook_op
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.modes import no_grad_nodes
from sp_compile.passes.sharding.matchers import carries_gradient

aten = torch.ops.aten


def detach_no_grad_regions(graph: Graph) -> None:
    """Put a detach behind every value that leaves a region without gradients."""
    off, editor = no_grad_nodes(graph), GraphEditor().edit(graph)
    for node in [n for n in graph.nodes if n in off and n.op == "call_function" and is_tensor(n)]:
        outside = [user for user in node.users if user not in off or user.op == "output"]
        if outside and carries_gradient(node):
            with graph.inserting_after(node):
                detached = editor.emit(aten.detach.default, (node,), node.meta["val"], node)
            for user in outside:
                user.replace_input_with(node, detached)
    for hook in graph.find_nodes(op="call_function", target=register_hook_op) if register_hook_op else ():
        if hook in off or not carries_gradient(hook.args[0]):
            hook.replace_all_uses_with(hook.args[0])
            graph.erase_node(hook)
