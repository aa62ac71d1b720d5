"""Update fake values after a rewrite has changed strides, and preserve the strides of outputs.

y: [s, b, h, d] in memory, read as [b, s, h, d]; y.view(b, s, h * d)   ->   y.reshape(b, s, h * d)
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
from sp_compile.passes.graph.strides import has_other_strides, match_strides

aten = torch.ops.aten


class StrideRepair:
    """The values of a graph's nodes before a rewrite; call `apply` after it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.before = {node: node.meta.get("val") for node in graph.nodes}
        self.results = _graph_results(graph)

    def apply(self) -> None:
        """Infer the changed values again, in place."""
        changed = {node for node in self.graph.nodes if node not in self.before}
        for node in list(self.graph.nodes):
            if node in self.before and any(i in changed for i in node.all_input_nodes) and self._reinfer(node):
                changed.add(node)
        self._keep_results()

    def _reinfer(self, node: Node) -> bool:
        """Infer the node's value again, and return True if its strides have changed."""
        if node.target is aten.as_strided.default:
            self._restore_operands(node)
            return False
        known = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if not known or is_mutation(node):
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
        return _strides_changed(old, value)

    def _restore_operands(self, node: Node) -> None:
        """Restore the operand's strides for an op that reads storage directly."""
        source = node.args[0]
        old = self.before.get(source)
        if isinstance(old, Tensor) and _strides_changed(old, source.meta["val"]):
            node.replace_input_with(source, match_strides(self.graph, source, old))

    def _keep_results(self) -> None:
        for was, node in zip(self.results, _graph_results(self.graph)):
            old = self.before.get(was) if was is not None else None
            if node is not None and isinstance(old, Tensor) and _strides_changed(old, node.meta["val"]):
                self.graph.output_node().replace_input_with(node, match_strides(self.graph, node, old))


def _graph_results(graph: Graph) -> list[Node | None]:
    """Return the graph's outputs, with None for values that are not nodes."""
    flat = pytree.tree_leaves(graph.output_node().args[0])
    return [x if isinstance(x, Node) else None for x in flat]


def _strides_changed(old: Any, new: Any) -> bool:
    if isinstance(old, list | tuple):
        return any(_strides_changed(a, b) for a, b in zip(old, new))
    return isinstance(old, Tensor) and has_other_strides(old, new)
