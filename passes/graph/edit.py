"""Add nodes to a graph, with values in the global view and the source locations of replaced nodes.

The value of a node, `meta["val"]`, is a fake tensor. In the global view it has the shape of the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import graph_module, keep_calling_convention

from .call import node_shape
from .fakes import infer_value, trace_function
from .mutation import is_pure
from .sizes import Size, SizeBuilder, is_same_shape

aten = torch.ops.aten
# keys of `node.meta` that regions set, such as a checkpoint, whose values the compiler computes again in the backward
REGION_META = ("recompute", "ac_graph_id", "custom")
# keys of `node.meta` that a new node inherits from the node that it replaces
INHERITED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", *REGION_META)


class GraphEditor:
    """Editor that appends nodes at the insertion point of a graph, and the base of all passes.

    In all methods, `like` is the node whose source location and other metadata the new nodes inherit.
    """

    graph: Graph  # graph that is edited
    sizes: SizeBuilder  # emits nodes for symbolic sizes

    def edit(self, graph: Graph) -> Self:
        """Bind the editor to a graph, to which all other methods apply, and return the editor."""
        self.graph, self.sizes = graph, SizeBuilder(graph)
        return self

    def emit(self, target: Any, args: tuple[Any, ...], value: Any, like: Node, kwargs: Any = None) -> Node:
        """Append a call at the insertion point.

        Args:
            target: Op to call.
            args: Positional arguments.
            value: Result of the call in the global view.
            like: Node whose source location and other metadata the new node inherits.
            kwargs: Keyword arguments.

        Returns:
            The new node.
        """
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta.update({k: v for k, v in like.meta.items() if k in INHERITED_META})
        node.meta["val"] = value
        return node

    def compute(self, target: Any, args: tuple[Any, ...], like: Node, kwargs: Any = None) -> Node:
        """Append a call whose value is inferred from its operands; arguments as in `emit`."""
        return self.emit(target, args, infer_value(target, args, kwargs, like), like, kwargs)

    def reshape(self, x: Node, shape: Sequence[Size], like: Node) -> Node:
        """Return x reshaped to `shape`, or x itself if it has that shape."""
        if is_same_shape(node_shape(x), shape):
            return x
        return self.compute(aten.reshape.default, (x, self.sizes.list(shape)), like)

    def expand(self, x: Node, shape: Sequence[Size], like: Node) -> Node:
        """Return x expanded to `shape`, or x itself if it has that shape."""
        if is_same_shape(node_shape(x), shape):
            return x
        return self.compute(aten.expand.default, (x, self.sizes.list(shape)), like)

    def cast(self, x: Node, dtype: torch.dtype, like: Node) -> Node:
        """Return x cast to `dtype`, or x itself if it has that dtype."""
        return x if x.meta["val"].dtype == dtype else self.compute(aten.to.dtype, (x, dtype), like)

    def repeat_each(self, x: Node, dim: int, times: Size, like: Node) -> Node:
        """Append repeat_interleave(x, times, dim), as unsqueeze, expand and reshape: only the last one moves data.

        (.., h, ..) -> (.., h, 1, ..) -> (.., h, times, ..) -> (.., h * times, ..)
        """
        shape = node_shape(x)
        before, after = shape[:dim], shape[dim:][1:]  # shape[dim + 1 :] would be wrong for dim = -1
        next_dim = dim + 1 if dim >= 0 else dim  # of the new dim after `dim`
        column = self.compute(aten.unsqueeze.default, (x, next_dim), like)
        expanded_shape = self.sizes.list((*before, shape[dim], times, *after))
        expanded = self.compute(aten.expand.default, (column, expanded_shape), like)
        return self.compute(
            aten.reshape.default, (expanded, self.sizes.list((*before, shape[dim] * times, *after))), like
        )

    def insert_after(self, source: Node) -> Any:
        """Return an insertion point (a context) directly after a node.

        For an input this is after all inputs and the nodes that compute sizes from them.
        """
        anchor = self.sizes.last if source.op == "placeholder" else source
        assert anchor is not None
        return self.graph.inserting_before(anchor.next)

    def insert_between(self, node: Node, new: Node) -> None:
        """Make all users of `node` after `new`, which is computed from `node`, read `new` instead."""
        node.replace_all_uses_with(new, lambda user: new < user)  # nodes compare by their position in the graph

    def replace(self, node: Node, new: Any) -> None:
        """Replace all uses of the node and erase it with the operands that only it used.

        Args:
            node: Node to replace.
            new: Replacement. For an op with several results, a sequence or mapping from result index to replacement.
        """
        if isinstance(new, Node):
            node.replace_all_uses_with(new)
        else:
            for getitem in list(node.users):
                getitem.replace_all_uses_with(new[getitem.args[1]])
                self.graph.erase_node(getitem)
        self.erase([node])

    def replace_call(self, node: Node, target: Any, args: tuple[Any, ...], like: Node) -> Node:
        """Replace the node by a call with the value and metadata of `like`, and erase operands that only it used.

        Returns the new node.
        """
        with self.graph.inserting_before(node):
            new = self.emit(target, args, like.meta["val"], like)
        self.replace(node, new)
        return new

    def inline(self, body: GraphModule, operands: Sequence[Any], like: Node) -> Any:
        """Append copies of the calls of another graph, whose nodes have values, and return their results."""
        return interpret_graph(body, operands, lambda node, copies: self.copy_call(node, copies, like))

    def inline_function(self, run: Callable[..., Any], operands: Sequence[Any], like: Node, **options: Any) -> Any:
        """Append the calls of a function and return its results.

        Args:
            run: The function.
            operands: Its operands, nodes and constants.
            like: Node whose source location and other metadata the new nodes inherit.
            options: Options of `trace_function`.

        Returns:
            The results of the function as nodes.
        """
        values = torch.fx.map_arg(operands, lambda n: n.meta["val"])
        return self.inline(trace_function(run, values, **options), operands, like)

    def copy_call(self, node: Node, copies: Mapping[Node, Any], like: Node) -> Node:
        """Append a copy of a call of another graph; `copies` maps nodes of that graph to values of this one."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        return self.emit(node.target, args, node.meta["val"], like, kwargs)

    def erase(self, nodes: Sequence[Node]) -> None:
        """Erase nodes that have no users outside of `nodes`, then the inputs that only they used.

        Args:
            nodes: Nodes in graph order. Random draws are erased, too.
        """
        inputs = [i for n in nodes for i in n.all_input_nodes if i not in nodes]
        for node in reversed(nodes):
            self.graph.erase_node(node)
        self.drop(*inputs)

    def drop(self, *nodes: Any) -> None:
        """Erase the nodes, and the nodes that only they used, if they have no users and are pure.

        Arithmetic on sizes remains in the graph, because `SizeBuilder` reuses it; `erase_dead` removes it at the end.
        """
        waiting, dropped = [n for n in nodes if isinstance(n, Node)], set()
        while waiting:
            node = waiting.pop()
            is_size = isinstance(node.meta.get("val"), torch.SymInt)
            if node not in dropped and not node.users and is_pure(node) and not is_size:
                waiting.extend(node.all_input_nodes)
                self.graph.erase_node(node)
                dropped.add(node)


def interpret_graph(body: GraphModule, operands: Sequence[Any], run: Callable[[Node, Mapping[Node, Any]], Any]) -> Any:
    """Evaluate the nodes of a graph in order by `run`, for example to copy them, and return the graph's results.

    Args:
        body: Graph to evaluate.
        operands: Values of its inputs.
        run: run(node, values) returns the value of a call or an attribute from the values of the nodes before it.
    """
    values = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in body.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            values[node] = run(node, values)
    return torch.fx.map_arg(body.graph.output_node().args[0], values.__getitem__)


def erase_dead(graph: Graph, ops: Sequence[str] = ("call_function",)) -> None:
    """Erase all pure nodes without users, including arithmetic on sizes.

    Args:
        graph: Graph to change.
        ops: Node kinds to erase.
    """
    for node in reversed(graph.nodes):
        if node.op not in ops or node.users:
            continue
        if is_pure(node) or isinstance(node.meta.get("val"), torch.SymInt):
            graph.erase_node(node)


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a copy of the graph for a pass to edit; it shares the attributes of the original module."""
    graph, output = Graph(), gm.graph.output_node()
    results = graph.graph_copy(gm.graph, {})
    graph.output(results, output.type).meta.update(output.meta)
    keep_calling_convention(graph, gm.graph)
    return graph_module(gm, graph)
