"""Bring a graph's fake values up to date where a rewrite has changed strides, and keep those of its results.

y: [s, b, h, d] in memory, read as [b, s, h, d]; y.view(b, s, h * d)   ->   y.reshape(b, s, h * d)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sp_compile._compat import FakeTensor, OpOverload, pytree
from sp_compile.graph.edit import infer
from sp_compile.graph.mutation import is_mutation
from sp_compile.graph.sizes import same, sizes
from sp_compile.graph.strides import restored

from .arrangement import COPIES, is_move, name_of, operands

aten = torch.ops.aten


class Restride:
    """What the graph's nodes were before a rewrite; `apply` afterwards."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.before = {node: node.meta.get("val") for node in graph.nodes}
        self.results = [(node, node is not None and _is_input(node)) for node in _results(graph)]

    def apply(self) -> None:
        """Edit the graph in place."""
        changed = {node for node in self.graph.nodes if node not in self.before}
        for node in list(self.graph.nodes):
            if node in self.before and any(i in changed for i in node.all_input_nodes) and self._follow(node):
                changed.add(node)
        self._keep_results()

    def _follow(self, node: Node) -> bool:
        """Infer the node's value again; whether its strides are others now."""
        if node.op not in ("call_function", "call_method") or is_mutation(node):
            return False
        if name_of(node) == "as_strided":
            self._settle(node)
            return False
        if (
            not isinstance(node.target, OpOverload)
            and name_of(node) != "getitem"
            and node.op != "call_method"
        ):
            return False
        try:
            value = infer(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError):  # the memory does not allow this view any more
            if name_of(node) not in ("view", "_unsafe_view"):
                raise
            node.target = aten.reshape.default if node.op == "call_function" else "reshape"
            value = infer(node.target, node.args, node.kwargs)
        old = node.meta.get("val")
        node.meta["val"] = value
        return _differ(old, value)

    def _settle(self, node: Node) -> None:
        """An op that reads memory gets the memory it was written for."""
        source = node.args[0]
        old = self.before.get(source)
        if isinstance(old, Tensor) and _differ(old, source.meta["val"]):
            node.replace_input_with(source, restored(self.graph, source, old))

    def _keep_results(self) -> None:
        output = self.graph.output_node()
        for (was, was_input), node in zip(self.results, _results(self.graph)):
            old = self.before.get(was) if was is not None else None
            if node is None or not isinstance(old, Tensor):
                continue
            if _differ(old, node.meta["val"]):
                output.replace_input_with(node, restored(self.graph, node, old))
            elif _is_input(node) and not was_input:
                with self.graph.inserting_before(output):
                    own = self.graph.call_function(aten.clone.default, (node,))
                own.meta["val"] = old
                output.replace_input_with(node, own)


def _is_input(node: Node) -> bool:
    """Does it share memory with an input of the graph?"""
    while is_move(node) and name_of(node) not in COPIES:
        node = operands(node)[0]
    return node.op == "placeholder"


def _results(graph: Graph) -> list[Node | None]:
    """What the graph returns; None for numbers and the like."""
    flat = pytree.tree_leaves(graph.output_node().args[0])
    return [x if isinstance(x, Node) else None for x in flat]


def one_mode(graph: Graph) -> None:
    """make_fx in its default mode gives every node a value of a mode of its own: bring them into one."""
    held = [
        x for n in graph.nodes for x in pytree.tree_leaves(n.meta.get("val")) if isinstance(x, FakeTensor)
    ]
    if len({id(x.fake_mode) for x in held}) < 2 or not all(_is_static(x) for x in held):
        return
    with held[0].fake_mode:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(_like, node.meta["val"])


def _is_static(x: Tensor) -> bool:
    return x.layout == torch.strided and all(isinstance(i, int) for i in (*x.shape, *x.stride()))


def _like(x: Any) -> Any:
    """A new one in the mode that is on."""
    if not isinstance(x, FakeTensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _differ(old: Any, new: Any) -> bool:
    if isinstance(old, list | tuple):
        return any(_differ(a, b) for a, b in zip(old, new))
    if not isinstance(old, Tensor):
        return False
    pairs = zip(sizes(old.shape), sizes(old.stride()), sizes(new.stride()))
    return any(not same(a, b) for extent, a, b in pairs if not same(extent, 1))
