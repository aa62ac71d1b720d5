"""Capture the graphs of torch.compile and torch.export as the IR of the package.

The IR: pre-dispatch ATen (composite ops such as linear, scaled_dot_product_attention and cross_entropy_loss are single
nodes, autograd has not run), functional, with a fake value in every node's meta["val"] and the user's lines in
meta["stack_trace"].
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import CaptureError, SpError, WriteError, node_line
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TracingContext,
    depends_on_size,
    detect_fake_mode,
    evaluate_expr,
    is_functorch_tensor,
    is_wrapper,
    keep_source,
    keep_state_sources,
    single_value,
    storage_of,
)
from sp_compile.passes.graph.edit import copy_graph, erase_dead
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import as_size, as_sizes, is_same_shape

from .check_captured import require_ops
from .functionalize import functionalize
from .grad_modes import detach_no_grad_regions
from .regions import inline_regions
from .trace import trace
from .user_collectives import functionalize_collectives
from .view_writes import VIEW_OPS, find_shared_results

_PLACEHOLDER_META = ("tensor_dict", "stack_trace", "nn_module_stack", "grapharg")


def capture(gm: GraphModule, example_inputs: Sequence[Any], *, fakes: Sequence[Any] | None = None) -> GraphModule:
    """Convert the Dynamo graph of a running torch.compile to IR with the same calling convention.

    Placeholders correspond to Dynamo's, with the same order, names and sources, so the result can replace `gm` in
    compile_fx. An input that the program mutates is written back by one aten.copy_ at the end. The results are followed
    by hidden bases of results that are views, see `view_writes.py`. Inside `cache_captures` each graph is captured
    once.

    Args:
        gm: Dynamo graph.
        example_inputs: Inputs of the graph.
        fakes: Replacement for `fake_inputs(example_inputs)`, to capture for other sizes.

    Returns:
        The captured graph.

    Raises:
        SpError: If the program cannot be captured.
    """
    known = _capture_cache.get()
    if known is None or fakes is not None:
        return _capture(gm, example_inputs, fakes)
    if gm not in known:
        known[gm] = _capture(gm, example_inputs, fakes)
    if any(isinstance(child, GraphModule) for child in known[gm].children()):  # passes mutate these, too
        return known.pop(gm)
    found = copy_graph(known[gm])
    found.meta.update(known[gm].meta)
    _keep_sources(found, known[gm])
    return found


@contextmanager
def cache_captures(known: dict[GraphModule, GraphModule]) -> Iterator[None]:
    """Cache captures in this context, for repeated analyses of the same graphs with the same inputs.

    Args:
        known: Captured graph by Dynamo graph; updated.
    """
    before = _capture_cache.set(known)
    try:
        yield
    finally:
        _capture_cache.reset(before)


_capture_cache: ContextVar[dict[GraphModule, GraphModule] | None] = ContextVar("known", default=None)


def _capture(gm: GraphModule, example_inputs: Sequence[Any], fakes: Sequence[Any] | None) -> GraphModule:
    fake_mode, own = fake_inputs(example_inputs)
    captured = trace(gm, own if fakes is None else fakes, fake_mode)
    erase_dead(captured.graph, ("call_function", "get_attr"))
    _lift_constants(captured, fake_mode)
    _keep_dynamo_meta(captured, gm)
    for node, value in zip(captured.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        set_node_info(node, requires_grad=getattr(value, "requires_grad", None))
    captured.meta[VIEW_OPS] = find_shared_results(captured)
    functionalize(captured)
    _refuse_written_aliases(captured, example_inputs)
    return _finish_capture(captured)


def fake_inputs(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return the fake mode of the compilation, and the inputs as fake tensors with dynamic dims.

    A `Sharded` input is the full tensor. A dim that the guards restrict to one length has this length.
    """
    mode, fakes = _fake_inputs(example_inputs)
    return mode, _replace_single_values(fakes, mode)


def settle_inputs(example_inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs, with fakes for tensors that have a constant size where Dynamo has a symbol."""
    mode, fakes = _fake_inputs(example_inputs)
    rows = zip(example_inputs, fakes, _replace_single_values(fakes, mode))
    return [x if new is old or isinstance(x, Sharded) or is_wrapper(x) else new for x, old, new in rows]


def fix_lengths(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Specialize the sizes that the program depends on, so that unrolled code may show a sequence.

    Sizes that the user marked as dynamic stay symbols: Dynamo raises if one is specialized.

    Returns:
        Whether any size was specialized.
    """
    context, (_, fakes) = TracingContext.get(), _fake_inputs(example_inputs)
    marked = set[Any]()
    for x, fake in zip(example_inputs, fakes):
        symbolic = context.tensor_to_context.get(x) if isinstance(x, torch.Tensor) else None
        rows = zip(fake.shape, getattr(symbolic, "constraint_sizes", None) or ()) if symbolic is not None else ()
        marked |= {as_size(extent) for extent, one in rows if one is not None and not one.warn_only}
    found = [e for e in _symbol_sizes(fakes) if as_size(e) not in marked and depends_on_size(e)]
    for extent in found:
        int(extent)  # adds a guard: another length recompiles
    (_capture_cache.get() or {}).pop(gm, None)
    return bool(found)


def _symbol_sizes(fakes: Sequence[Any]) -> list[torch.SymInt]:
    """Return the symbolic ints among inputs and their sizes."""
    extents = [e for x in fakes for e in (x.shape if isinstance(x, torch.Tensor) else [x])]
    return [e for e in extents if isinstance(e, torch.SymInt)]


def _fake_inputs(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return the fake mode, and the inputs in it with all dynamic dims of Dynamo.

    The values in meta["example_value"] belong to Dynamo's finished trace and must not be mixed in.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise SpError("SP203", "capture is supported inside a backend of torch.compile only.")
    mode = context.fake_mode

    def fake(x: Any) -> Any:
        """Return the fake tensor of an input; other values unchanged."""
        if not isinstance(x, torch.Tensor):
            return x
        if isinstance(x, Sharded) or is_wrapper(x):  # the full tensor, for any storage
            parts = x if isinstance(x, Sharded) and isinstance(x.local, FakeTensor) else in_mode(x)
            return _new_fake(x, parts.shape, parts.stride(), mode)
        if isinstance(x, FakeTensor):
            return x if x.fake_mode is mode else mode.from_tensor(x)
        return in_mode(x)

    def in_mode(x: torch.Tensor) -> Any:
        """Convert a tensor to the mode, with the symbols that Dynamo chose."""
        symbolic = context.tensor_to_context.get(x)
        source = symbolic.tensor_source if symbolic else None
        static = None if symbolic else True
        return mode.from_tensor(x, symbolic_context=symbolic, source=source, static_shapes=static, trace=False)

    return mode, [fake(x) for x in example_inputs]


def _new_fake(x: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any], mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of another shape with the metadata of the input."""
    with mode, torch.enable_grad():
        fresh = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
        if x.is_leaf:
            return fresh
        dense = fresh.clone()  # non-leaf, to which a program may write
        if is_same_shape(as_sizes(dense.stride()), as_sizes(stride)):
            return dense
        memory = torch.empty(fresh.untyped_storage().nbytes() // fresh.element_size(), dtype=x.dtype, device=x.device)
        return memory.requires_grad_().clone().as_strided(shape, stride)


def _replace_single_values(fakes: list[Any], mode: FakeTensorMode) -> list[Any]:
    """Replace symbols in the fake inputs that can have one value only by that value."""
    symbols: dict[Any, Any] = {as_size(e): e for e in _symbol_sizes(fakes)}
    numbers = {symbol: n for symbol, e in symbols.items() if (n := single_value(e)) is not None}
    if not numbers:
        return fakes

    def is_settled(x: Any) -> bool:
        """Return True if a size contains a symbol with a single value."""
        return isinstance(x, torch.SymInt) and not sympy.sympify(as_size(x)).free_symbols.isdisjoint(numbers)

    def known(x: Any) -> Any:
        """Replace symbols with a single value in a size or in the sizes of a tensor."""
        if isinstance(x, torch.SymInt):
            return evaluate_expr(sympy.sympify(as_size(x)), symbols | numbers)
        if not isinstance(x, torch.Tensor) or not any(is_settled(e) for e in x.shape):
            return x
        return _new_fake(x, [known(e) for e in x.shape], [known(e) for e in x.stride()], mode)

    return [known(x) for x in fakes]


def capture_export(program: ExportedProgram | GraphModule) -> GraphModule:
    """Convert an exported program, its module, or a make_fx graph to IR with the same calling convention.

    Parameters and buffers are get_attr nodes, shared ones remain shared; no input guards run. The program is not
    modified; its parameters are not copied.

    Args:
        program: Exported program, or a graph module of ops.

    Returns:
        The captured graph.

    Raises:
        SpError: If the graph contains calls that are not ops.
    """
    source = program.module() if isinstance(program, ExportedProgram) else program
    gm = inline_regions(source)
    for node in gm.graph.find_nodes(op="call_module"):
        if node.target != "_guards_fn":
            raise SpError("SP204", f"capture_export: {node.name} is a call of the module {node.target}.")
        gm.graph.erase_node(node)
    gm.delete_submodule("_guards_fn")
    require_ops(gm, "capture_export")
    mode = _single_fake_mode(gm)
    _copy_bodies(gm)
    functionalize_collectives(gm)
    _lift_constants(gm, mode)
    functionalize(gm)
    return _finish_capture(gm)


def _single_fake_mode(gm: GraphModule) -> FakeTensorMode | None:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    if len({id(value.fake_mode) for value in values if isinstance(value, FakeTensor)}) > 1:
        raise SpError("SP205", "capture_export: expected values of one fake mode, got several.")
    return detect_fake_mode(values)


def _copy_bodies(gm: GraphModule) -> None:
    """Copy the bodies of region ops, so that they can be rewritten."""
    for name, child in list(gm.named_children()):
        if isinstance(child, GraphModule):
            setattr(gm, name, inline_regions(child))
            _copy_bodies(getattr(gm, name))


def _keep_dynamo_meta(captured: GraphModule, gm: GraphModule) -> None:
    new, old = (g.graph.find_nodes(op="placeholder") for g in (captured, gm))
    for n, o in zip(new, old, strict=True):
        n.meta.update({k: o.meta[k] for k in _PLACEHOLDER_META if k in o.meta})
    captured.meta.update(gm.meta)
    _keep_sources(captured, gm)


def _keep_sources(new: GraphModule, old: GraphModule) -> None:
    for n, o in zip(*(gm.graph.find_nodes(op="placeholder") for gm in (new, old)), strict=True):
        keep_source(n, o)
    keep_state_sources(new, old)


def _refuse_written_aliases(captured: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise if an input is written through one name and shares memory with another input.

    A graph over separate values cannot represent this.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    owners: dict[int, list[Node]] = {}
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            owners.setdefault(storage_of(value), []).append(node)
    written = {n.args[0] for n in captured.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    for names in owners.values():
        changed = next((n for n in names if n in written), None)
        if changed is not None and len(names) > 1:
            other = next(n for n in names if n is not changed)
            raise WriteError(
                "SP221", f"The input {changed.name} is changed in place and shares memory with the input {other.name}."
            )


def _lift_constants(gm: GraphModule, fake_mode: FakeTensorMode | None) -> None:
    """Register tensor attributes as parameters or buffers and set the fake values of their nodes.

    A fake or functorch tensor in an attribute escaped the trace, so that the graph would be wrong.
    """
    known = {*dict(gm.named_parameters(remove_duplicate=False)), *dict(gm.named_buffers(remove_duplicate=False))}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(gm)
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, FakeTensor) or is_functorch_tensor(value):
            readers = ", ".join(node_line(user) for user in node.users)
            raise CaptureError("SP215", f"{node.name}: a value of torch.func is read outside its region, at {readers}.")
        if node.target not in known:
            delattr(gm, node.target)
            gm.register_buffer(node.target, value, persistent=False)
            set_node_info(node, constant=True, requires_grad=value.requires_grad)
        else:
            requires_grad = value.requires_grad or (None if isinstance(value, torch.nn.Parameter) else False)
            set_node_info(node, requires_grad=requires_grad)  # None: the user may still unfreeze a parameter
        if "val" not in node.meta:
            node.meta["val"] = fake_mode.from_tensor(value, static_shapes=True) if fake_mode else value


def _finish_capture(gm: GraphModule) -> GraphModule:
    for node in gm.graph.nodes:
        node.meta.setdefault("val", None)
    detach_no_grad_regions(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm
