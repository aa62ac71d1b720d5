"""Functionalize a graph before autograd (pre-dispatch ATen), so that no value is mutated.

The algorithm renames values, as in SSA. Aliases are derived from the fake values (same storage), each with its view op.
An in-place op on a view becomes the functional op; the new value of the base is computed by inverting the view ops, and
other views are recomputed from the new base at their next use. A mutated placeholder or buffer is written back by one
aten.copy_ at the end. Two kinds of mutation remain: these copies, and ops without functional form (custom ops, out=
variants, norms with running statistics), which mutate a private clone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.base.errors import SpError, WriteError, node_line
from sp_compile.lowering.torch_compat import (
    OpOverload,
    enter_autocast,
    exit_autocast,
    has_autocast_kernel,
    set_grad_enabled,
    unmark_static,
)
from sp_compile.passes.graph.edit import GraphEditor, erase_dead
from sp_compile.passes.graph.mutation import (
    Mutation,
    find_mutation,
    functional_form,
    is_mutation,
    is_view_change,
    to_positional,
)
from sp_compile.passes.graph.node_info import node_info

from . import view_inverses
from .aliases import Aliases

aten = torch.ops.aten
RENORM_BEFORE = "Omit max_norm, and call torch.embedding_renorm_ under no_grad before the compiled model."
COMPLEX_ERROR = {aten.silu_.default: "x * x.sigmoid()"}


def functionalize(gm: GraphModule) -> GraphModule:
    """Functionalize `gm` and the bodies of its region ops in place.

    Args:
        gm: Graph whose nodes have meta["val"]; the metadata of inputs may have requires_grad. Mutated placeholders are
            unmarked as static inputs.

    Returns:
        The same graph.

    Raises:
        SpError: If a mutation has no functional form, or mutates a differentiable value outside autograd (no_grad,
            detach, .data), whose gradient renaming would lose.
    """
    for _, child in gm.named_children():
        if isinstance(child, GraphModule):
            functionalize(child)
    if any(is_mutation(n) for n in gm.graph.nodes):
        _Functionalizer(gm).run()
    return gm


class _Functionalizer:
    """Single pass over a graph; a view is current if it was computed at the version of its root.

    The version of a root is the number of its mutations.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        self.editor = GraphEditor().edit(gm.graph)
        self.aliases = Aliases(gm.graph)
        self.version: dict[Node, int] = {}
        self.current: dict[Node, Node] = {}  # mutated root -> its value
        self.values: dict[Node, tuple[Node, int, bool]] = {}  # node -> (value, version, True if it may have a gradient)
        self.dead: list[Node] = []
        self.autocast = int(torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))

    def run(self) -> None:
        """Rewrite all nodes in order and erase the in-place ones."""
        for node in list(self.graph.nodes):
            self.aliases.calls[node] = map_arg((node.args, node.kwargs), self.aliases.name)
            with self.graph.inserting_before(node):
                self.visit(node)
        for node in reversed(self.dead):
            assert not node.users, f"{node} is still read by {list(node.users)}"
            self.graph.erase_node(node)
        erase_dead(self.graph)
        self.graph.lint()
        self.gm.recompile()

    def visit(self, node: Node) -> None:
        """Rewrite one node to read the current values of its operands."""
        if node.op in ("placeholder", "get_attr"):
            self.aliases.adopt(node)
        elif is_view_change(node):
            self.change_view(node)
        elif is_mutation(node):
            self.change(node)
        else:
            node.args, node.kwargs = self.current_in(node)
            if node.op == "output":
                self.write_back()
            else:
                self.track_state(node)
                self.adopt(node)

    def track_state(self, node: Node) -> None:
        """Track whether gradients are recorded and autocast is on."""
        if node.target is set_grad_enabled:
            self.aliases.grad = bool(node.args[0])
        elif node.target is enter_autocast:
            self.autocast += 1
        elif node.target is exit_autocast:
            self.autocast -= 1

    def adopt(self, node: Node) -> None:
        """Record the memory and the version of a node's result."""
        if self.aliases.adopt(node):
            self.values[node] = (node, self.version.get(self.aliases.root(node), 0), self.aliases.grad)

    # ---- value of a node at this point of the program

    def current_in(self, node: Node) -> tuple[Any, Any]:
        """Return the arguments of a node with the current value of each operand."""
        return map_arg(self.aliases.calls[node], self.current_value)

    def current_value(self, node: Node) -> Node:
        """Return the current value of `node`, which is a name from `Aliases.name`."""
        root = self.aliases.root(node)
        version = self.version.get(root, 0)
        value, taken_at, with_grad = self.values.get(node, (node, 0, True))
        if taken_at == version and (with_grad or not self.aliases.grad or self.aliases.detach_view(node)):
            return value
        value = self.current[root] if node is root else self.take_view(node)
        self.values[node] = (value, version, self.aliases.grad or node is root)
        return value

    def take_view(self, node: Node) -> Node:
        """Emit a view of the current value of its base."""
        if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            raise WriteError(
                "SP222", f"{node.name}: {node_line(node)} is read after memory that it shares was changed."
            )
        args, kwargs = self.current_in(node)
        value = self.graph.call_function(node.target, args, kwargs)
        value.meta = dict(node.meta)
        cut = self.aliases.grad and self.aliases.detach_view(node)
        if cut and self.aliases.differentiable(self.aliases.root(node)):
            return self.emitter(node)(aten.detach.default, value)
        return value

    def emitter(self, like: Node) -> view_inverses.Emit:
        """Return a function that appends a node with its fake value and the metadata of `like`."""
        return lambda target, *args, **kwargs: self.editor.compute(target, args, like, kwargs)

    # ---- mutations

    def change_view(self, node: Node) -> None:
        """Replace x by the view in `x.unsqueeze_(0)`."""
        target = self.aliases.calls[node][0][0]
        op = functional_form(node.target)
        if op is None or self.aliases.root(target).op in ("placeholder", "get_attr"):
            raise WriteError("SP223", f"{node.name}: {node.target} at {node_line(node)} changes the shape of an input.")
        node.target = op
        node.args, node.kwargs = self.current_in(node)
        self.adopt(node)
        self.aliases.rename(target, node)

    def change(self, node: Node) -> None:
        """Replace an in-place node by new values of its targets."""
        mutation = find_mutation(node, *self.aliases.calls[node])
        for target in mutation.targets:
            self.refuse_unsound(node, target)
        if mutation.value is not None:
            (target,) = mutation.targets
            self.assign(node, target, self.new_value(node, mutation))
            self.aliases.rename(node, target)
            self.dead.append(node)
            return
        emit = self.emitter(node)
        clones = {t: emit(aten.clone.default, self.current_value(t)) for t in mutation.targets}
        node.args, node.kwargs = map_arg(self.aliases.calls[node], lambda a: clones.get(a) or self.current_value(a))
        with self.graph.inserting_before(node.next):
            for target, clone in clones.items():
                self.assign(node, target, clone)
        if mutation.returns_target:
            self.aliases.rename(node, mutation.targets[0])
        else:
            self.adopt(node)

    def refuse_unsound(self, node: Node, target: Node) -> None:
        """Raise WriteError if new values cannot reproduce a change or its gradient."""
        root = self.aliases.root(target)
        other = self.aliases.sharer(root)
        if other is not None:
            raise WriteError(
                "SP221", f"{node.name}: {node_line(node)} changes {root.name}, which shares memory with {other.name}."
            )
        unrecorded = not self.aliases.grad or self.aliases.detach_view(target)
        if self.aliases.any_grad and unrecorded and self.aliases.differentiable(root):
            raise WriteError(
                "SP224",
                f"{node.name}: {node_line(node)} changes {root.name} under no_grad or through detach() or .data, and "
                f"its gradient is needed.",
                RENORM_BEFORE if node.target is aten.embedding_renorm_.default else None,
            )

        if node.target in COMPLEX_ERROR and target.meta["val"].is_complex() and self.aliases.any_differentiable(node):
            raise SpError(
                "SP227",
                f"{node.name}: {node.target} at {node_line(node)} works in place on complex numbers, of which torch "
                "computes a wrong gradient.",
                f"Write {COMPLEX_ERROR[node.target]} instead.",
            )

    def new_value(self, node: Node, mutation: Mutation) -> Node:
        """Emit the value that an in-place node writes, with the dtype and shape of its target."""
        assert mutation.value is not None
        emit = self.emitter(node)
        args, kwargs = self.current_in(node)
        expected = mutation.targets[0].meta["val"]
        with self.as_in_place(node, expected.device):
            value = mutation.value(args, kwargs, emit)
        if value.meta["val"].dtype != expected.dtype:
            value = emit(aten.to.dtype, value, expected.dtype)
        if value.meta["val"].shape != expected.shape:
            value = emit(aten.expand.default, value, view_inverses.shape_in_graph(args[0], emit))
        # A later view may need the strides of the mutated tensor.
        if expected.is_contiguous() and not value.meta["val"].is_contiguous():
            value = emit(aten.clone.default, value, memory_format=torch.contiguous_format)
        return value

    @contextmanager
    def as_in_place(self, node: Node, device: torch.device) -> Iterator[None]:
        """Disable autocast for ops whose in-place variants it does not change."""
        op = functional_form(node.target)
        if not self.autocast or op is None or not has_autocast_kernel(op, device.type):
            yield
            return
        token = self.graph.call_function(enter_autocast, (device.type, None, False, None))
        with torch.autocast(device.type, enabled=False):
            yield
        leave = self.graph.call_function(exit_autocast, (token,))
        token.meta["val"] = leave.meta["val"] = None

    def assign(self, node: Node, target: Node, value: Node) -> None:
        """Set the value of `target`, and update the root of which `target` is a view."""
        emit = self.emitter(node)
        if self.aliases.any_differentiable(node):
            if self.aliases.grad:
                self.aliases.receive_gradient(target)
            else:
                value = emit(aten.detach.default, value)
        root, full, view = self.aliases.root(target), value, target
        parent = self.aliases.parent
        while view in parent:
            full = self.base_after(node, view, full, emit)
            source = parent[view]
            view = parent[source] if view.target is operator.getitem else source
        version = self.version[root] = self.version.get(root, 0) + 1
        self.current[root] = full
        self.values[root] = (full, version, True)
        self.values[target] = (value, version, True)

    def base_after(self, node: Node, view: Node, new: Node, emit: view_inverses.Emit) -> Node:
        """Return the new value of the base of `view` if `view` is replaced by `new`."""
        if view.target is operator.getitem:
            split = self.aliases.calls[view][0][0]
            full = view_inverses.rejoin_split(self.application(split), view, new, emit)
        else:
            full = view_inverses.invert_view(self.application(view), new, emit)
        if full is None:
            raise WriteError(
                "SP225", f"{node.name}: {node_line(node)} changes a view created by {view.target} at {node_line(view)}."
            )
        return full

    def application(self, view: Node) -> view_inverses.ViewCall:
        """Return a view with the current value of its base."""
        base, *rest = to_positional(view.target, *self.current_in(view))
        return view_inverses.ViewCall(view, base, tuple(rest))

    def write_back(self) -> None:
        """Copy changed values to the inputs and buffers at the end of the graph."""
        for root, value in self.current.items():
            if root.op == "placeholder" or (root.op == "get_attr" and not node_info(root).constant):
                unmark_static(root)
                copy = self.graph.call_function(aten.copy_.default, (root, value))
                copy.meta["val"] = root.meta["val"]
