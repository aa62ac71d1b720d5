"""Find the values of a graph that may have a gradient."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype

from .call import is_tensor
from .node_info import node_info


def differentiable_nodes(gm: GraphModule) -> set[Node]:
    """Return the nodes that may have a gradient: they depend on an input or parameter that requires one.

    The gradients of all others are never computed, so they need no reduction.
    """
    differentiable: set[Node] = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            has_grad = is_tensor(node) and node_info(node).requires_grad is not False  # None: not known
        else:
            has_grad = node.op == "call_function" and node.target is not torch.ops.aten.detach.default
            has_grad = has_grad and not differentiable.isdisjoint(node.all_input_nodes)
        # An op with several results is included for its getitems, which are tensors.
        if has_grad and (not is_tensor(node) or has_gradient_dtype(value)):
            differentiable.add(node)
    return differentiable
