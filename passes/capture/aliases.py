"""Track storage sharing and gradient flow in a captured graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

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

    A view is a node whose value is in the storage of an argument; its root is the node that owns the storage.
    """

    def __init__(self, graph: Graph) -> None:
        self.calls: dict[Node, tuple[Any, Any]] = {}  # (args, kwargs), renamed at the time of the visit
        self.parent: dict[Node, Node] = {}  # view -> its base
        self.grad = torch.is_grad_enabled()
        self.any_grad = self.grad or any(n.target is set_grad_enabled and n.args[0] for n in graph.nodes)
        self._meaning: dict[Node, Node] = {}
        self._owner: dict[int, Node] = {}
        self._wants_grad: set[Node] = set()
        self._cut: set[Node] = set()

    def name(self, node: Node) -> Node:
        """Return the current name of `node`, after in-place ops that return or reshape it."""
        while node in self._meaning:
            node = self._meaning[node]
        return node

    def rename(self, node: Node, meaning: Node) -> None:
        """Replace `node` by `meaning` from here on."""
        self._meaning[node] = meaning

    def root(self, node: Node) -> Node:
        """Return the node that owns the storage of the value of `node`."""
        while node in self.parent:
            node = self.parent[node]
        return node

    def adopt(self, node: Node) -> bool:
        """Record the base and the gradient of a visited node, and return True if it is a view."""
        inputs = collect_nodes(self.calls[node])
        if node.op == "placeholder" or node.op == "get_attr":
            flows = bool(node_info(node).requires_grad)
        else:
            floats = any(t.is_floating_point() or t.is_complex() for t in node_tensors(node))
            flows = self.grad and floats and node.target not in _STOPS_GRADIENT
            flows = flows and any(map(self.differentiable, inputs))
        if flows:
            self._wants_grad.add(node)
        storages = node_storages(node)
        if len(storages) != 1:
            return False
        base = next((i for i in inputs if node_storages(i) == storages), None)
        element = node.target is operator.getitem and base not in self.parent
        (storage,) = storages
        if node.target in LITERAL_OPS:  # shares its storage in the trace, but is a new tensor in each run
            self._owner[storage] = node
            return False
        if base is None or element:
            self._owner.setdefault(storage, node)
            return False
        self.parent[node] = base
        if not self.grad or node.target is aten.detach.default or base in self._cut:
            self._cut.add(node)
        return True

    def sharer(self, root: Node) -> Node | None:
        """Return another owner of the same memory, such as an overlapping input or a result that hides a view."""
        owners = {self._owner.get(s, root) for s in node_storages(root)}
        return next(iter(owners - {root}), None)

    def detach_view(self, node: Node) -> bool:
        """Return True if the view was created by detach or under no_grad, so that no gradient reaches its root."""
        return node in self._cut

    def differentiable(self, node: Node) -> bool:
        """Return True if the value of `node` has a gradient."""
        return node in self._wants_grad or (node not in self._cut and self.root(node) in self._wants_grad)

    def any_differentiable(self, node: Node) -> bool:
        """Return True if an argument of `node`, or the storage of one, has a gradient."""
        read = [] if node.target in SILENT_WRITERS else collect_nodes(self.calls[node])
        return any(self.differentiable(a) or self.differentiable(self.root(a)) for a in read)

    def receive_gradient(self, target: Node) -> None:
        """Record that a differentiable value was written to `target`."""
        self._wants_grad |= {target} if target in self._cut else {target, self.root(target)}


def node_storages(node: Node) -> set[int]:
    """Return the storages of the tensors in the value of a node."""
    return {storage_of(t) for t in node_tensors(node) if t.layout is torch.strided and not is_functorch_tensor(t)}
