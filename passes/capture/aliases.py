"""Track storage sharing and gradient flow in a captured graph with in-place ops.

In `a = x[0]; a.add_(1)`, a is a view of x: both nodes have the same storage, so that the write changes x as well.
`functionalize.py` and `view_writes.py` visit a graph in order, and record each node here. A node is differentiable if
autograd records a gradient for its value. A view that is created by detach or under no_grad is detached: it shares
memory with its base, but gradients do not pass between them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.lowering.torch_compat import is_functorch_tensor, set_grad_enabled, storage_of
from sp_compile.passes.graph.call import collect_nodes, node_tensors, parse_overloads
from sp_compile.passes.graph.mutation import SILENT_WRITERS
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.sharding.matchers import LITERAL_OPS

aten = torch.ops.aten

# Float results through which no gradient passes.
_STOPS_GRADIENT = parse_overloads("""
    detach zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
""")


class Aliases:
    """Aliasing and gradient facts about the nodes visited so far, in program order.

    A view is a node whose value is in the storage of an argument, its base. The root of a view is the node that owns
    the storage: a chain of views starts there.
    """

    def __init__(self, graph: Graph) -> None:
        self.calls: dict[Node, tuple[Any, Any]] = {}  # (args, kwargs), resolved when the node was visited
        self.parent: dict[Node, Node] = {}  # base by view
        self.grad_enabled = torch.is_grad_enabled()  # at the visited node
        # True if gradients are enabled anywhere in the graph.
        self.any_grad = self.grad_enabled or any(n.target is set_grad_enabled and n.args[0] for n in graph.nodes)
        self._replacements: dict[Node, Node] = {}  # node -> node that later nodes read in its place
        self._owners: dict[int, Node] = {}  # first node by storage
        self._differentiable: set[Node] = set()
        self._detached_views: set[Node] = set()

    def resolve(self, node: Node) -> Node:
        """Return the node that later nodes read in place of `node`, after the replacements so far.

        The result of `x.add_(1)` is read as x, and after `x.unsqueeze_(0)` x is read as the result.
        """
        while node in self._replacements:
            node = self._replacements[node]
        return node

    def replace(self, node: Node, replacement: Node) -> None:
        """Make later nodes read `replacement` in place of `node`."""
        self._replacements[node] = replacement

    def root(self, node: Node) -> Node:
        """Return the node that owns the storage of the value of `node`."""
        while node in self.parent:
            node = self.parent[node]
        return node

    def record(self, node: Node) -> bool:
        """Record the storage, base and gradient of the visited node; return True if it is a view.

        The value of a view is in the storage of an argument, its base. A view is detached if it is created without
        gradients: then no gradient passes between it and its base.
        """
        inputs = collect_nodes(self.calls[node])  # its arguments
        if self._has_gradient_path(node, inputs):
            self._differentiable.add(node)
        storages = node_storages(node)
        if len(storages) != 1:  # no strided tensor, or several tensors, whose getitem nodes are recorded instead
            return False
        (storage,) = storages
        if node.target in LITERAL_OPS:  # torch.tensor(...): one constant in the trace, but a new tensor in each run
            self._owners[storage] = node
            return False
        base = next((x for x in inputs if node_storages(x) == storages), None)
        # A getitem of a split is a view, because the split is a view of its operand (in `parent`). Other ops with
        # several results return new tensors, which a getitem only selects.
        is_new_result = node.target is operator.getitem and base not in self.parent
        if base is None or is_new_result:
            self._owners.setdefault(storage, node)
            return False
        self.parent[node] = base
        if not self.grad_enabled or node.target is aten.detach.default or base in self._detached_views:
            self._detached_views.add(node)
        return True

    def _has_gradient_path(self, node: Node, inputs: list[Node]) -> bool:
        """Return True if autograd records the node: it has float results and a differentiable input.

        An input of the graph counts if it requires a gradient.
        """
        if node.op == "placeholder" or node.op == "get_attr":
            return bool(node_info(node).requires_grad)
        if not self.grad_enabled or node.target in _STOPS_GRADIENT:
            return False
        has_float_result = any(map(has_gradient_dtype, node_tensors(node)))
        return has_float_result and any(map(self.is_differentiable, inputs))

    def other_owner(self, root: Node) -> Node | None:
        """Return another node that owns the memory of a root, or None.

        In eager mode a mutation of the root changes its value, too; after functionalization it would not. An example is
        an input that overlaps with another one, or the result of an op that returns a view without declaring it.
        """
        # The first node seen with each storage of the root; usually the root itself.
        owners = {self._owners.get(storage, root) for storage in node_storages(root)}
        return next(iter(owners - {root}), None)

    def is_detached_view(self, node: Node) -> bool:
        """Return True if the node is a detached view, from which no gradient reaches its root."""
        return node in self._detached_views

    def is_differentiable(self, node: Node) -> bool:
        """Return True if autograd records a gradient for the node, by its op or as a view of a differentiable root."""
        is_view_of_differentiable = self.root(node) in self._differentiable and node not in self._detached_views
        return node in self._differentiable or is_view_of_differentiable

    def has_differentiable_input(self, node: Node) -> bool:
        """Return True if an argument of `node`, or the root of one, is differentiable.

        The value that an in-place op writes is then differentiable, too.
        """
        if node.target in SILENT_WRITERS:  # they write running statistics, which have no gradient
            return False
        inputs = collect_nodes(self.calls[node])
        return any(self.is_differentiable(x) or self.is_differentiable(self.root(x)) for x in inputs)

    def mark_differentiable(self, target: Node) -> None:
        """Record that a mutation made `target` differentiable, and its root unless `target` is a detached view."""
        self._differentiable.add(target)
        if target not in self._detached_views:
            self._differentiable.add(self.root(target))


def node_storages(node: Node) -> set[int]:
    """Return the identities of the storages of all tensors in the value of a node that have one.

    Tensors with a sparse layout and the wrappers of functorch have none.
    """
    return {storage_of(t) for t in node_tensors(node) if t.layout is torch.strided and not is_functorch_tensor(t)}
