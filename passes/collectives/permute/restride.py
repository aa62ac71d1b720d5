"""Update fake values after a rewrite has changed strides, and preserve the strides of outputs.

y: [s, b, h, d] in memory, read as [b, s, h, d]; y.view(b, s, h * d)   ->   y.reshape(b, s, h * d)

A rewrite may replace a node by one with other strides. The values of later nodes, and views that need certain strides,
then change; outputs of the graph must not.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compile.lowering.torch_compat import OpOverload, pytree
from sp_compile.passes.graph.fakes import infer_value
from sp_compile.passes.graph.mutation import is_mutation
from sp_compile.passes.graph.strides import copy_strides, has_other_strides

aten = torch.ops.aten


class StrideRepair:
    """The values of a graph's nodes before a rewrite; `apply` updates the graph after it.

    `FuseAllToAllPermutes` creates it before its passes and applies it after them.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.before = {node: node.meta.get("val") for node in graph.nodes}
        self.results = _graph_results(graph)

    def apply(self) -> None:
        """Infer the values of nodes after changed ones again, and restore the strides of the outputs, in place."""
        # Nodes that the rewrite has created, and those whose value has other strides than before.
        changed = {node for node in self.graph.nodes if node not in self.before}
        for node in list(self.graph.nodes):
            if node in self.before and any(x in changed for x in node.all_input_nodes) and self._reinfer(node):
                changed.add(node)
        for earlier, node in zip(self.results, _graph_results(self.graph)):  # None: an output that is no node
            if earlier is not None and node is not None:
                self._restore_strides(self.graph.output_node(), node, self.before.get(earlier))

    def _reinfer(self, node: Node) -> bool:
        """Infer the value of a node with a changed operand, and return True if its strides have changed.

        An as_strided, which reads the storage directly, receives an operand with the earlier strides instead. A view
        that the new strides do not allow becomes a reshape.
        """
        if node.target is aten.as_strided.default:
            source = node.args[0]
            self._restore_strides(node, source, self.before.get(source))
            return False
        is_inferable = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if not is_inferable or is_mutation(node):
            return False
        try:
            value = infer_value(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError):  # the new strides do not allow this view
            if node.target not in (aten.view.default, aten._unsafe_view.default):
                raise
            node.target = aten.reshape.default
            value = infer_value(node.target, node.args, node.kwargs)
        old = node.meta.get("val")
        node.meta["val"] = value
        return _has_changed_strides(old, value)

    def _restore_strides(self, user: Node, x: Node, old: Any) -> None:
        """Pass a copy of x with the strides of the value `old` to the user, if x has others now."""
        if isinstance(old, Tensor) and _has_changed_strides(old, x.meta["val"]):
            user.replace_input_with(x, copy_strides(x, old))


def _graph_results(graph: Graph) -> list[Node | None]:
    """Return the graph's outputs, with None for values that are not nodes."""
    flat = pytree.tree_leaves(graph.output_node().args[0])
    return [x if isinstance(x, Node) else None for x in flat]


def _has_changed_strides(old: Any, new: Any) -> bool:
    """Return True if a node's value, or one of its several results, has other strides than before."""
    if isinstance(old, list | tuple):
        return any(_has_changed_strides(a, b) for a, b in zip(old, new))
    return isinstance(old, Tensor) and has_other_strides(old, new)
