"""functionalize: GraphModule -> GraphModule in which no value ever changes (pre-dispatch ATen, before autograd).

Renaming, as in SSA. Aliases are read off the fake values (same storage), each with the view op that made it. An
in-place op on a view becomes the functional op; the new value of the view's base follows by inverting the view ops, and
the other views are taken anew from the new base when they are next read. A changed placeholder or buffer is written back
by one aten.copy_ at the end. Two kinds of mutation stay: those copies, and ops with no functional form (custom ops,
out= variants), which work on a private clone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from . import views
from ._compat import (
    detect_fake_mode,
    enter_autocast,
    exit_autocast,
    has_autocast_kernel,
    is_functorch_tensor,
    set_grad_enabled,
)
from .errors import SpError, at
from .inplace import (
    Mutation,
    functional_form,
    is_mutation,
    is_pure,
    is_view_change,
    mutation_of,
    positional,
)

aten = torch.ops.aten

_KEPT_META = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id", "custom")

# A result that shares its argument's storage in the trace, but is a new value each time the program runs.
_FRESH = {aten.lift_fresh.default}

# Float results through which no gradient passes.
_STOPS_GRADIENT = {
    aten.detach.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
}


def functionalize(gm: GraphModule) -> GraphModule:
    """Make `gm` and the bodies of its region ops functional, in place; returns `gm`.

    Every node needs meta["val"]; placeholders may say meta["requires_grad"]. A changed placeholder is un-marked as a
    static input. Raises SpError for a mutation that has no functional form, and for one made outside autograd
    (no_grad, detach, .data) of a value whose gradient is wanted: renaming would lose that gradient.
    """
    for _, child in gm.named_children():
        if isinstance(child, GraphModule):
            functionalize(child)
    if any(is_mutation(n) for n in gm.graph.nodes):
        _Renaming(gm).run()
    return gm


class _Renaming:
    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        self.fake_mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes]) or nullcontext()
        self.renamed: dict[Node, Node] = {}  # what later code means when it names the key
        self.calls: dict[Node, tuple[Any, Any]] = {}  # original arguments, renamed at the node's own time
        self.parent: dict[Node, Node] = {}  # view -> base
        self.version: dict[Node, int] = {}  # root -> number of changes so far
        self.current: dict[Node, Node] = {}  # root -> its value at that version
        self.values: dict[
            Node, tuple[Node, int, bool]
        ] = {}  # node -> value, its version, made with grad mode on
        self.roots: dict[int, Node] = {}  # storage -> the node that owns it
        self.changed: list[Node] = []
        self.dead: list[Node] = []
        self.wants_grad: set[Node] = set()
        self.outside: set[Node] = set()  # views that do not carry their base's gradient
        self.grad = torch.is_grad_enabled()
        self.any_grad = self.grad or any(n.target is set_grad_enabled and n.args[0] for n in self.graph.nodes)
        self.autocast = int(torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))

    def run(self) -> None:
        for node in list(self.graph.nodes):
            self.calls[node] = map_arg((node.args, node.kwargs), self.name)
            with self.graph.inserting_before(node):
                self.visit(node)
        for node in reversed(self.dead):
            assert not node.users, f"{node} is still read by {list(node.users)}"
            self.graph.erase_node(node)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and is_pure(node):
                self.graph.erase_node(node)
        self.graph.lint()
        self.gm.recompile()

    def visit(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.adopt(node)
        elif is_view_change(node):
            self.change_view(node)
        elif is_mutation(node):
            self.change(node)
        else:
            node.args, node.kwargs = map_arg(self.calls[node], self.now)
            if node.op == "output":
                self.write_back()
            else:
                self.track_state(node)
                self.adopt(node)

    def track_state(self, node: Node) -> None:
        if node.target is set_grad_enabled:
            self.grad = bool(node.args[0])
        elif node.target is enter_autocast:
            self.autocast += 1
        elif node.target is exit_autocast:
            self.autocast -= 1

    # ---- who aliases whom

    def name(self, node: Node) -> Node:
        while node in self.renamed:
            node = self.renamed[node]
        return node

    def root(self, node: Node) -> Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def adopt(self, node: Node) -> None:
        """Record whether `node` is a view, of what, and whether a gradient is wanted for it."""
        args, kwargs = self.calls[node]
        inputs = [a for a in _nodes((args, kwargs)) if a.op != "get_attr" or "val" in a.meta]
        if self.grad and node.target not in _STOPS_GRADIENT and any(self.differentiable(i) for i in inputs):
            if _any_float(node.meta.get("val")):
                self.wants_grad.add(node)
        elif node.meta.get("requires_grad"):
            self.wants_grad.add(node)
        storages = _storages(node)
        if len(storages) != 1:
            return
        (storage,) = storages
        base = next((i for i in inputs if _storages(i) == {storage}), None)
        piece_of_value = node.target is operator.getitem and base not in self.parent
        if base is None or node.target in _FRESH or piece_of_value:
            self.roots.setdefault(storage, node)
            return
        self.parent[node] = base
        if not self.grad or node.target is aten.detach.default or base in self.outside:
            self.outside.add(node)
        self.values[node] = (node, self.version.get(self.root(node), 0), self.grad)

    def differentiable(self, node: Node) -> bool:
        return node in self.wants_grad or (node not in self.outside and self.root(node) in self.wants_grad)

    # ---- values

    def now(self, node: Node) -> Node:
        """The value at this point of the program of `node`, a name as `self.name` gives it."""
        root = self.root(node)
        version = self.version.get(root, 0)
        value, made_at, with_grad = self.values.get(node, (node, 0, True))
        if made_at == version and (with_grad or not self.grad or node in self.outside):
            return value
        value = self.current[root] if node is root else self.take_view(node)
        self.values[node] = (value, version, self.grad or node is root)
        return value

    def take_view(self, node: Node) -> Node:
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            raise SpError(
                f"{node.name}: read after the tensor it shares memory with has changed ({at(node)}); clone it"
            )
        args, kwargs = map_arg(self.calls[node], self.now)
        value = self.graph.call_function(node.target, args, kwargs)
        value.meta = dict(node.meta)
        cut = self.grad and node in self.outside and self.differentiable(self.root(node))
        return self.emitter(node)(aten.detach.default, value) if cut else value

    def emitter(self, like: Node) -> views.Emit:
        """A function that adds a node with its fake value, described as `like` is."""

        def emit(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
            node = self.graph.call_function(target, args, kwargs)
            node.meta = {k: like.meta[k] for k in _KEPT_META if k in like.meta}
            fakes, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
            with self.fake_mode, torch.no_grad():
                node.meta["val"] = target(*fakes, **fake_kwargs)
            return node

        return emit

    # ---- changes

    def change_view(self, node: Node) -> None:
        """`x.unsqueeze_(0)`: from here on x means the view."""
        target = self.calls[node][0][0]
        op = functional_form(node.target)
        if op is None or self.root(target).op in ("placeholder", "get_attr"):
            raise SpError(
                f"{node.name}: {node.target} at {at(node)} changes the shape of a tensor that it does not own; "
                "use the variant without underscore"
            )
        node.target = op
        node.args, node.kwargs = map_arg(self.calls[node], self.now)
        self.adopt(node)
        self.renamed[target] = node

    def change(self, node: Node) -> None:
        emit = self.emitter(node)
        args, kwargs = map_arg(self.calls[node], self.now)
        mutation = mutation_of(node, *self.calls[node])
        for target in mutation.targets:
            self.check_owner(node, target)
        if mutation.inplace:
            (target,) = mutation.targets
            self.assign(node, target, self.new_value(node, mutation, args, kwargs, emit))
            self.renamed[node] = target
            self.dead.append(node)
            return
        clones = {t: emit(aten.clone.default, self.now(t)) for t in mutation.targets}
        node.args, node.kwargs = map_arg(self.calls[node], lambda a: clones.get(a) or self.now(a))
        following = node.next
        with self.graph.inserting_before(following):
            for target, clone in clones.items():
                self.assign(node, target, clone)
        if mutation.returns_target:
            self.renamed[node] = mutation.targets[0]
        else:
            self.adopt(node)

    def new_value(self, node: Node, m: Mutation, args: Any, kwargs: Any, emit: views.Emit) -> Node:
        expected = m.targets[0].meta["val"]
        with self.as_in_place(node, expected.device):
            value = m.value(args, kwargs, emit)
        if value.meta["val"].dtype != expected.dtype:
            value = emit(aten.to.dtype, value, expected.dtype)
        if value.meta["val"].shape != expected.shape:
            value = emit(aten.expand.default, value, views.sizes(args[0], emit))
        return value

    @contextmanager
    def as_in_place(self, node: Node, device: torch.device) -> Iterator[None]:
        """Autocast changes the dtype of some ops but not of their in-place variants: keep it off for these."""
        op = functional_form(node.target)
        if not self.autocast or op is None or not has_autocast_kernel(op, device.type):
            yield
            return
        token = self.graph.call_function(enter_autocast, (device.type, None, False, None))
        with torch.autocast(device.type, enabled=False):
            yield
        leave = self.graph.call_function(exit_autocast, (token,))
        token.meta["val"] = leave.meta["val"] = None

    def check_owner(self, node: Node, target: Node) -> None:
        root = self.root(target)
        others = {self.roots.get(s, root) for s in _storages(root)} - {root}
        if others:
            raise SpError(
                f"{node.name}: {at(node)} changes {root.name}, which shares memory with {others.pop().name}; "
                "pass a clone of one of them"
            )
        if self.any_grad and (not self.grad or target in self.outside) and self.differentiable(root):
            raise SpError(
                f"{node.name}: {at(node)} changes {root.name} under no_grad or through detach() or .data, while "
                "its gradient is wanted; make a new tensor instead, for example x = x.clone()"
            )

    def assign(self, node: Node, target: Node, value: Node) -> None:
        """Let `target` be `value` from here on, and with it the tensor of which `target` is a view."""
        emit = self.emitter(node)
        if any(self.differentiable(a) or self.differentiable(self.root(a)) for a in _nodes(self.calls[node])):
            if not self.grad:
                value = emit(aten.detach.default, value)
            else:
                self.wants_grad |= {target} if target in self.outside else {target, self.root(target)}
        root, whole, view = self.root(target), value, target
        while view in self.parent:
            whole = self.base_after(node, view, whole, emit)
            source = self.parent[view]
            view = self.parent[source] if view.target is operator.getitem else source
        version = self.version[root] = self.version.get(root, 0) + 1
        self.current[root] = whole
        self.values[root] = (whole, version, True)
        if target is not root:
            self.values[target] = (value, version, True)
        if root not in self.changed:
            self.changed.append(root)

    def base_after(self, node: Node, view: Node, new: Node, emit: views.Emit) -> Node:
        """The value of the tensor that `view` was taken from, once `view` is `new`."""
        base = self.parent[view]
        if view.target is operator.getitem:
            split, index = base, self.calls[view][0][1]
            whole = views.piece(self.application(split), index, new, emit)
        else:
            whole = views.invert(self.application(view), new, emit)
        if whole is None:
            raise SpError(
                f"{node.name}: {at(node)} changes a view made by {view.target} at {at(view)}; "
                "clone the view before changing it"
            )
        return whole

    def application(self, view: Node) -> views.View:
        args, kwargs = map_arg(self.calls[view], self.now)
        base, *rest = positional(view.target, args, kwargs)
        return views.View(view.target, base, tuple(rest))

    def write_back(self) -> None:
        for root in self.changed:
            if root.op == "placeholder" or (root.op == "get_attr" and not root.meta.get("constant")):
                unmark_static(root)
                copy = self.graph.call_function(aten.copy_.default, (root, self.current[root]))
                copy.meta["val"] = root.meta["val"]


def unmark_static(placeholder: Node) -> None:
    """Drop the promise that the input's memory is constant: the min-cut partitioner would recompute from changed data."""
    facts = placeholder.meta.get("tensor_dict")
    if facts:
        placeholder.meta["tensor_dict"] = {k: v for k, v in facts.items() if k != "_dynamo_static_input_type"}


def _nodes(args: Any) -> list[Node]:
    found: dict[Node, None] = {}
    map_arg(args, lambda n: found.setdefault(n))
    return list(found)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple | list) else []


def _any_float(value: Any) -> bool:
    return any(t.is_floating_point() or t.is_complex() for t in _tensors(value))


def _storages(node: Node) -> set[int]:
    tensors = _tensors(node.meta.get("val"))
    return {
        t.untyped_storage()._cdata
        for t in tensors
        if t.layout is torch.strided and not is_functorch_tensor(t)
    }
