"""How passes add nodes to a graph: with the value that the node has in the global view, and the source it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import graph_module, keep_calling_convention

from .call import node_shape
from .fakes import infer_value
from .mutation import is_pure
from .sizes import Size, SizeBuilder, is_same_shape

aten = torch.ops.aten
INHERITED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "recompute", "ac_graph_id", "custom")


class GraphEditor:
    """Appends nodes at a graph's insertion point."""

    graph: Graph
    sizes: SizeBuilder

    def edit(self, graph: Graph) -> Self:
        """Bind to a graph."""
        self.graph, self.sizes = graph, SizeBuilder(graph)
        return self

    def emit(self, target: Any, args: tuple[Any, ...], value: Any, like: Node, kwargs: Any = None) -> Node:
        """Append a node at the graph's insertion point; `value`: its result in the global view."""
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta.update({k: v for k, v in like.meta.items() if k in INHERITED_META})
        node.meta["val"] = value
        return node

    def compute(self, target: Any, args: tuple[Any, ...], like: Node, kwargs: Any = None) -> Node:
        """Append an ordinary op; its value is inferred from its operands'."""
        return self.emit(target, args, infer_value(target, args, kwargs, like), like, kwargs)

    def reshape(self, x: Node, shape: Sequence[Size], like: Node) -> Node:
        """x in this shape; x itself where it has it."""
        if is_same_shape(node_shape(x), shape):
            return x
        return self.compute(aten.reshape.default, (x, self.sizes.list(shape)), like)

    def cast(self, x: Node, dtype: torch.dtype, like: Node) -> Node:
        """x in this dtype; x itself where it has it."""
        return x if x.meta["val"].dtype == dtype else self.compute(aten.to.dtype, (x, dtype), like)

    def repeat_each(self, x: Node, dim: int, times: Size, like: Node) -> Node:
        """repeat_interleave(x, times, dim), spelt (.., h, ..) -> (.., h, 1, ..) -> (.., h, r, ..) -> (.., h*r, ..)."""
        shape = node_shape(x)
        before, after = shape[:dim], shape[dim:][1:]
        behind = dim + 1 if dim >= 0 else dim
        each = self.compute(aten.unsqueeze.default, (x, behind), like)
        each = self.compute(aten.expand.default, (each, self.sizes.list((*before, shape[dim], times, *after))), like)
        whole = self.sizes.list((*before, shape[dim] * times, *after))
        return self.compute(aten.reshape.default, (each, whole), like)

    def insert_after(self, source: Node) -> Any:
        """Insertion point right behind a node (behind the sizes, if it is an input)."""
        anchor = self.sizes.last if source.op == "placeholder" else source
        assert anchor is not None
        return self.graph.inserting_before(anchor.next)

    def insert_between(self, node: Node, fresh: Node) -> None:
        """All that reads the node behind the fresh one, which is made of it, reads that instead."""
        node.replace_all_uses_with(fresh, lambda user: fresh < user)

    def replace(self, node: Node, fresh: Any) -> None:
        """Every use of the node becomes a use of the fresh one; what only the node needed goes with it.

        fresh: for an op whose results are read one by one, what to read instead, by their numbers.
        """
        if isinstance(fresh, Node):
            node.replace_all_uses_with(fresh)
        for user in list(node.users):
            user.replace_all_uses_with(fresh[user.args[1]])
            self.graph.erase_node(user)
        self.erase([node])

    def replace_call(self, node: Node, target: Any, args: tuple[Any, ...], like: Node) -> Node:
        """One call in place of the node, and of all that only the node read; it has the value of `like`."""
        with self.graph.inserting_before(node):
            fresh = self.emit(target, args, like.meta["val"], like)
        self.replace(node, fresh)
        return fresh

    def inline(self, body: GraphModule, operands: Sequence[Any], like: Node) -> Any:
        """Append the calls of another graph, whose nodes know their values; returns its results."""
        placed = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
        for node in body.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), placed.__getitem__)
                placed[node] = self.emit(node.target, args, node.meta["val"], like, kwargs)
        return torch.fx.map_arg(body.graph.output_node().args[0], placed.__getitem__)

    def erase(self, nodes: Sequence[Node]) -> None:
        """Erase nodes that only each other use, in the graph's order, draws too; what only they needed goes as well."""
        inputs = [i for n in nodes for i in n.all_input_nodes if i not in nodes]
        for node in reversed(nodes):
            self.graph.erase_node(node)
        self.drop(*inputs)

    def drop(self, *nodes: Any) -> None:
        """Erase the nodes, and what only they needed, as far as nothing else uses them.

        Arithmetic on sizes stays for `SizeBuilder`, which gives it to whoever asks next; `erase_dead` takes it in
        the end.
        """
        waiting, gone = [n for n in nodes if isinstance(n, Node)], set()
        while waiting:
            node = waiting.pop()
            size = isinstance(node.meta.get("val"), torch.SymInt)
            if node not in gone and not node.users and is_pure(node) and not size:
                waiting.extend(node.all_input_nodes)
                self.graph.erase_node(node)
                gone.add(node)


def erase_dead(graph: Graph, ops: Sequence[str] = ("call_function",)) -> None:
    """Erase all nodes of these ops that nothing reads, arithmetic on sizes too; never an op with an effect."""
    for node in reversed(graph.nodes):
        pure = is_pure(node) or isinstance(node.meta.get("val"), torch.SymInt)
        if node.op in ops and not node.users and pure:
            graph.erase_node(node)


def copy_graph(gm: GraphModule) -> GraphModule:
    """The same graph over the same attributes, to be changed."""
    graph, output = Graph(), gm.graph.output_node()
    results = graph.graph_copy(gm.graph, {})
    graph.output(results, output.type).meta.update(output.meta)
    keep_calling_convention(graph, gm.graph)
    return graph_module(gm, graph)
