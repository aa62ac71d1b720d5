"""Functionalize a graph before autograd (pre-dispatch ATen), so that no value is mutated.

    y = x[0]; y.add_(1); return x   ->   y = x[0]; y1 = y + 1; x1 = select_scatter(x, y1, 0, 0); return x1

Each mutation creates a new value (y1), as in static single assignment (SSA). Aliases are derived from the fake values
(same storage): y is a view of its base x, and the root of a chain of views is the node that owns the storage
(`aliases.py`). An in-place op on a view becomes the functional op; the new value of the base is computed by inverting
the view ops (`view_inverses.py`), and other views are recomputed from the new base at their next use. A mutated
placeholder or buffer is written back by one aten.copy_ at the end. Two kinds of mutation remain: these copies, and ops
without functional form (custom ops, out= variants, norms with running statistics), which mutate a private clone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import SpError, WriteError, node_line
from sp_compile.passes.graph.call import collect_nodes
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
from .aliases import Aliases, node_storages

aten = torch.ops.aten
DATA_FIX = "Assign before the compiled model, or write x.copy_(y). Replace a package's layer that assigns."
RENORM_BEFORE = "Omit max_norm, and call torch.embedding_renorm_ under no_grad before the compiled model."
COMPLEX_ERROR = {aten.silu_.default: "x * x.sigmoid()"}  # wrong gradient of complex inputs -> replacement


def functionalize(gm: GraphModule) -> None:
    """Functionalize `gm` in place, and the bodies of its region ops (sub-graphs such as that of a cond).

    Args:
        gm: Graph whose nodes have meta["val"]; the metadata of inputs may have requires_grad. Mutated placeholders are
            unmarked as static inputs.

    Raises:
        SpError: If a mutation cannot be expressed by new values, or mutates a differentiable value outside autograd
            (no_grad, detach, .data), because the new value would not have its gradient.
    """
    for _, child in gm.named_children():
        if isinstance(child, GraphModule):
            functionalize(child)
    if any(is_mutation(n) for n in gm.graph.nodes):
        _Functionalizer(gm).run()


class _ViewValue(NamedTuple):
    """Node that has the value of a view or of a mutated node, at some version of its root."""

    value: Node  # the node that readers of the view read
    version: int  # version of the root when the value was computed
    with_grad: bool  # True if it was computed with gradients enabled


class _Functionalizer:
    """Rewrite of one graph, in program order.

    The version of a root is the number of its mutations so far, also those through its views. The value of a view is
    outdated if it was computed at an earlier version of its root. The target of a mutation is the argument that an
    in-place op writes to. Operands are nodes of the original program; each has a current value, a node of the new one.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        self.editor = GraphEditor().edit(gm.graph)
        self.aliases = Aliases(gm.graph)
        self.version: dict[Node, int] = {}  # mutated root -> number of its mutations so far
        self.root_values: dict[Node, Node] = {}  # mutated root -> node with its current value
        self.values: dict[Node, _ViewValue] = {}  # last computed value by view or mutated node
        self.replaced: list[Node] = []  # in-place nodes, erased at the end
        self.copies: list[Node] = []  # copies of the sources of copy_ and fill_, in program order
        # Number of entered autocast regions.
        self.autocast_depth = int(torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))

    def run(self) -> None:
        """Rewrite all nodes in order and erase the in-place ones."""
        for node in list(self.graph.nodes):
            self.aliases.calls[node] = map_arg((node.args, node.kwargs), self.aliases.resolve)  # original operands
            with self.graph.inserting_before(node):
                self.visit(node)
        for node in reversed(self.replaced):
            assert not node.users, f"{node} is still read by {list(node.users)}"
            self.graph.erase_node(node)
        self.remove_copies()
        erase_dead(self.graph)
        self.graph.lint()
        self.gm.recompile()

    def visit(self, node: Node) -> None:
        """Rewrite one node to read the current values of its operands, and to mutate none of them."""
        if node.op in ("placeholder", "get_attr"):
            self.aliases.record(node)
        elif is_view_change(node):  # x.unsqueeze_(0) changes the shape of x and writes no memory
            self.replace_view_change(node)
        elif is_mutation(node):
            self.replace_mutation(node)
        else:
            node.args, node.kwargs = self.current_arguments(node)
            if node.op == "output":
                self.write_back()
            else:
                self.track_modes(node)
                self.record(node)

    def track_modes(self, node: Node) -> None:
        """Update the grad mode and the autocast depth if the node changes one."""
        if node.target is torch_compat.set_grad_enabled:
            self.aliases.grad_enabled = bool(node.args[0])
        elif node.target is torch_compat.enter_autocast:
            self.autocast_depth += 1
        elif node.target is torch_compat.exit_autocast:
            self.autocast_depth -= 1

    def record(self, node: Node) -> None:
        """Record the aliases of a node that stays in the graph.

        For a view, also record the version of its root (the number of mutations so far), to detect later mutations.
        """
        is_view = self.aliases.record(node)
        if is_view:
            version = self.version.get(self.aliases.root(node), 0)
            self.values[node] = _ViewValue(node, version, self.aliases.grad_enabled)

    # ---- value of a node at this point of the program

    def current_arguments(self, node: Node) -> tuple[Any, Any]:
        """Return the arguments of a node, with each operand replaced by its current value."""
        return map_arg(self.aliases.calls[node], self.current_value)

    def current_value(self, node: Node) -> Node:
        """Return the node to read for `node` at this point of the program.

        The value of a view is outdated if its root (the tensor that owns the memory) was mutated after it was computed.
        Then its op is emitted again.

        Args:
            node: Node of the original program, a result of `Aliases.resolve`.
        """
        aliases, root = self.aliases, self.aliases.root(node)
        version = self.version.get(root, 0)
        # Before any mutation, the value is the node itself.
        last = self.values.get(node, _ViewValue(node, version=0, with_grad=True))
        # A view that was computed without gradients is computed again for a reader with gradients.
        lacks_grad = aliases.grad_enabled and not last.with_grad and not aliases.is_detached_view(node)
        if last.version == version and not lacks_grad:
            return last.value
        value = self.root_values[root] if node is root else self.emit_view(node)
        # The value of a root has its gradient in any mode, so that it is never computed again for a reader.
        self.values[node] = _ViewValue(value, version, aliases.grad_enabled or node is root)
        return value

    def emit_view(self, node: Node) -> Node:
        """Emit the op of an outdated view again, on the current value of its base, and return the new view."""
        # Other nodes cannot be emitted again, such as an autograd.Function that has returned a view.
        if not isinstance(node.target, torch_compat.OpOverload) and node.target is not operator.getitem:
            raise WriteError(
                "SP222",
                f"{node.name}: the view created at {node_line(node)} is read after its memory was changed in place, "
                "and cannot be computed again from the new values.",
            )
        args, kwargs = self.current_arguments(node)
        value = self.graph.call_function(node.target, args, kwargs)
        value.meta = dict(node.meta)
        # A view without gradients (of detach or no_grad) has none if it is emitted again where gradients are enabled.
        needs_detach = self.aliases.grad_enabled and self.aliases.is_detached_view(node)
        if needs_detach and self.aliases.is_differentiable(self.aliases.root(node)):
            return self.emitter(node)(aten.detach.default, value)
        return value

    def emitter(self, like: Node) -> view_inverses.Emit:
        """Return a function emit(target, *args, **kwargs) that appends a node with the metadata of `like`."""
        return lambda target, *args, **kwargs: self.editor.compute(target, args, like, kwargs)

    # ---- mutations

    def replace_view_change(self, node: Node) -> None:
        """Convert `x.unsqueeze_(0)`, which writes no memory, to `x.unsqueeze(0)`, which later nodes read as x.

        Raise WriteError for resize_ and set_, which have no functional form, and for an input: the caller would see its
        new shape, which no copy_ at the end can write back.
        """
        (target, *_), _ = self.aliases.calls[node]  # args and kwargs
        if node.target is aten.set_.source_Tensor:
            raise WriteError("SP223", f"{node.name}: `x.data = y` at {node_line(node)} replaces memory.", DATA_FIX)
        op = functional_form(node.target)
        if op is None or target.op in ("placeholder", "get_attr"):
            changed = "the storage of a tensor" if op is None else "the shape of an input"
            raise WriteError("SP223", f"{node.name}: {node.target} at {node_line(node)} changes {changed}.")
        node.target = op
        node.args, node.kwargs = self.current_arguments(node)
        self.record(node)
        self.aliases.replace(target, node)

    def replace_mutation(self, node: Node) -> None:
        """Replace an in-place op by its functional form; without one, let it mutate clones of its targets.

        A target is an argument that the op writes to.
        """
        mutation = find_mutation(node, *self.aliases.calls[node])  # (args, kwargs) of the original program
        for target in mutation.targets:
            self.check_mutation(node, target)
        if mutation.value is not None:  # a functional form of the op computes it
            # `assign` records the new value of the target; later readers of the op's result read the target.
            (target,) = mutation.targets
            self.assign(node, target, self.new_value(node, mutation))
            self.aliases.replace(node, target)
            self.replaced.append(node)
            return
        # Without a functional form: run the op in place on a clone of the current value of each target.
        emit = self.emitter(node)
        clones = {t: emit(aten.clone.default, self.current_value(t)) for t in mutation.targets}
        node.args, node.kwargs = map_arg(self.aliases.calls[node], lambda x: clones.get(x) or self.current_value(x))
        with self.graph.inserting_before(node.next):  # the new values of bases are computed from the mutated clones
            for target, clone in clones.items():
                self.assign(node, target, clone)
        if mutation.returns_target:
            self.aliases.replace(node, mutation.targets[0])
        else:
            self.record(node)

    def check_mutation(self, node: Node, target: Node) -> None:
        """Raise if functionalization would lose the mutation of `target` by `node`, or its gradient."""
        root = self.aliases.root(target)  # owner of the memory of `target`
        other_owner = self.aliases.other_owner(root)
        if other_owner is not None:
            raise WriteError(
                "SP221",
                f"{node.name}: {node_line(node)} changes {root.name}, which shares memory with {other_owner.name}.",
            )
        is_unrecorded = not self.aliases.grad_enabled or self.aliases.is_detached_view(target)
        if self.aliases.any_grad and is_unrecorded and self.aliases.is_differentiable(root):
            raise WriteError(
                "SP224",
                f"{node.name}: {node_line(node)} changes {root.name} under no_grad or through detach() or .data, and "
                "its gradient is needed.",
                RENORM_BEFORE if node.target is aten.embedding_renorm_.default else None,
            )
        is_wrong_for_complex = node.target in COMPLEX_ERROR and target.meta["val"].is_complex()
        if is_wrong_for_complex and self.aliases.has_differentiable_input(node):
            raise SpError(
                "SP227",
                f"{node.name}: {node.target} at {node_line(node)} works in place on complex numbers, for which torch "
                "computes a wrong gradient.",
                f"Write {COMPLEX_ERROR[node.target]} instead.",
            )

    def new_value(self, node: Node, mutation: Mutation) -> Node:
        """Emit the value that an in-place op writes, converted to the dtype and shape of its target, and return it.

        It has the strides of the target if these are dense, and does not share memory with another argument.
        """
        assert mutation.value is not None
        emit = self.emitter(node)
        args, kwargs = self.current_arguments(node)
        expected = mutation.targets[0].meta["val"]
        with self.disable_autocast_of_in_place(node, expected.device):
            value = mutation.value(args, kwargs, emit)
        if value.meta["val"].dtype != expected.dtype:
            value = emit(aten.to.dtype, value, expected.dtype)
        if value.meta["val"].shape != expected.shape:  # the op broadcasts to its target, the first argument
            value = emit(aten.expand.default, value, view_inverses.shape_in_graph(args[0], emit))
        # A later view may need the strides of the mutated tensor.
        value = view_inverses.match_strides(value, expected, emit)
        if any(node_storages(value) & node_storages(x) for x in collect_nodes((args[1:], kwargs))):
            value = emit(aten.clone.default, value)
            self.copies.append(value)
        return value

    def remove_copies(self) -> None:
        """Remove the copies of the sources of copy_ and fill_, unless a copy and its source must differ in memory.

        They must if the copy, or a view of it, is a result, and the source is an input or another result: the caller
        may write to one of them. They must also if the copy is written to an input, and the source is another input
        that the program writes to, as in a swap.
        """
        owners: dict[int, int] = {}  # storage of a removed copy -> storage of its source

        def storages(nodes: Iterable[Node]) -> set[int]:
            """Return the storages of nodes, without those of removed copies."""
            return {owners.get(storage, storage) for node in nodes for storage in node_storages(node)}

        inputs = [node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")]
        written = {root: value for root, value in self.root_values.items() if root in inputs}
        for copy in self.copies:
            (storage,), (source,) = node_storages(copy), storages(copy.all_input_nodes)
            results = storages(self.graph.output_node().all_input_nodes)
            if storage in results and source in results | storages(inputs):
                continue
            if storage in storages(written.values()) and source in storages(written):
                continue
            owners[storage] = source
            copy.replace_all_uses_with(copy.all_input_nodes[0])
            self.graph.erase_node(copy)

    @contextmanager
    def disable_autocast_of_in_place(self, node: Node, device: torch.device) -> Iterator[None]:
        """Emit the nodes of the block in a region without autocast, if autocast would change their dtypes.

        Autocast does not apply to an in-place op, which computes in the dtype of its target, but may apply to its
        functional form, which replaces it.
        """
        op = functional_form(node.target)
        if not self.autocast_depth or op is None or not torch_compat.has_autocast_kernel(op, device.type):
            yield
            return
        arguments = (device.type, None, False, None)  # device, dtype, enabled, cache_enabled
        token = self.graph.call_function(torch_compat.enter_autocast, arguments)
        with torch.autocast(device.type, enabled=False):
            yield
        exit_node = self.graph.call_function(torch_compat.exit_autocast, (token,))
        token.meta["val"] = exit_node.meta["val"] = None

    def assign(self, node: Node, target: Node, value: Node) -> None:
        """Set `value` as the current value of `target` after the mutation `node`.

        If `target` is a view, the new values of its bases up to the root are emitted. The version of the root is
        incremented, so that other views of it are outdated.
        """
        emit = self.emitter(node)
        if self.aliases.has_differentiable_input(node):
            if self.aliases.grad_enabled:
                self.aliases.mark_differentiable(target)
            else:  # what an op writes under no_grad has no gradient
                value = emit(aten.detach.default, value)
        # Compute the new value of each base, from the target to the root.
        root, view, view_value = self.aliases.root(target), target, value
        parent = self.aliases.parent
        while view in parent:
            view_value = self.emit_new_base(node, view, view_value, emit)
            base = parent[view]
            # For an element of a split, `emit_new_base` has returned the new operand of the split.
            view = parent[base] if view.target is operator.getitem else base
        version = self.version[root] = self.version.get(root, 0) + 1
        self.root_values[root] = view_value
        # with_grad=True, also under no_grad: the detach above has decided that these values have no gradient, so a
        # later reader with gradients must not compute them again.
        self.values[root] = _ViewValue(view_value, version, with_grad=True)
        self.values[target] = _ViewValue(value, version, with_grad=True)

    def emit_new_base(self, node: Node, view: Node, new: Node, emit: view_inverses.Emit) -> Node:
        """Emit the new value of the base of `view`, and return it.

        For an element of a split, this is the new value of the operand of the split.

        Args:
            node: The mutation.
            view: The view that it has changed, directly or through a view of it.
            new: The new value of the view.
            emit: Emits a node, see `emitter`.
        """
        if view.target is operator.getitem:
            (split, _), _ = self.aliases.calls[view]  # getitem(split, index)
            base = self.aliases.parent[split]
            new_base = view_inverses.rejoin_split(self.current_view_call(split), view, new, emit)
        else:
            base = self.aliases.parent[view]
            new_base = view_inverses.invert_view(self.current_view_call(view), new, emit)
        if new_base is None:
            raise WriteError(
                "SP225",
                f"{node.name}: {node_line(node)} changes in place a view that {view.target} created at "
                f"{node_line(view)}. This op has no known inverse, so that the viewed tensor cannot be updated.",
            )
        return view_inverses.match_strides(new_base, base.meta["val"], emit)

    def current_view_call(self, view: Node) -> view_inverses.ViewCall:
        """Return the call of a view op on the current value of its base, as `view_inverses` inverts it."""
        base, *args = to_positional(view.target, *self.current_arguments(view))
        return view_inverses.ViewCall(view, base, tuple(args))

    def write_back(self) -> None:
        """Emit a copy_ of the current value to each mutated input and buffer, before the graph's output."""
        for root, value in self.root_values.items():
            is_buffer = root.op == "get_attr" and not node_info(root).constant
            if root.op == "placeholder" or is_buffer:
                torch_compat.unmark_static(root)  # a backward must not recompute values from it after the copy_
                copy = self.graph.call_function(aten.copy_.default, (root, value))
                copy.meta["val"] = root.meta["val"]
