"""Capture the graphs of torch.compile and torch.export as the IR of the package.

The IR: pre-dispatch ATen (composite ops such as linear, scaled_dot_product_attention and cross_entropy_loss are single
nodes, autograd has not run), functional, with a fake value in every node's meta["val"] and the user's lines in
meta["stack_trace"]. Fake tensors have shapes and no data; those of one program have one fake mode, and Dynamo's symbols
as sizes of dynamic dims. A guard restricts the sizes with which a compiled program runs. To specialize a size is to
replace its symbol by a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import CaptureError, SpError, WriteError, node_line
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.torch_compat import FakeTensor, FakeTensorMode, is_functorch_tensor
from sp_compile.passes.graph.edit import copy_graph, erase_dead
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import as_size, as_sizes, is_same_shape

from .check_captured import require_ops, require_whole_memory
from .functionalize import functionalize
from .regions import detach_no_grad_regions, inline_regions
from .tensor_subclasses import mark_subclass
from .trace import trace
from .user_collectives import functionalize_collectives
from .view_writes import VIEW_OPS, find_shared_results

# Keys of the metadata of Dynamo's placeholders that later compilers read.
_PLACEHOLDER_META = ("tensor_dict", "stack_trace", "nn_module_stack", "grapharg")

NESTED_CAUSE = "{}: expected tensors whose rows have one length, got a nested tensor."
NESTED_FIX = "Pass a padded tensor, such as x.to_padded_tensor(0.0), and a mask."


def capture(gm: GraphModule, example_inputs: Sequence[Any], *, fakes: Sequence[Any] | None = None) -> GraphModule:
    """Convert the Dynamo graph of a running torch.compile to IR with the same calling convention.

    Placeholders correspond to Dynamo's, with the same order, names and sources, so the result can replace `gm` in
    compile_fx. An input that the program mutates is written back by one aten.copy_ at the end. The results are followed
    by hidden results: tensors of which results are views and that the program does not return (`view_writes.py`).
    Inside `cache_captures` a graph without sub-graphs is captured once.

    Args:
        gm: Dynamo graph.
        example_inputs: Inputs of the graph.
        fakes: Replacement for `fake_inputs(example_inputs)`, to capture for other sizes.

    Returns:
        The captured graph.

    Raises:
        SpError: If the program cannot be captured.
    """
    cache = _capture_cache.get()
    if cache is None or fakes is not None:
        return _capture(gm, example_inputs, fakes)
    if gm not in cache:
        cache[gm] = _capture(gm, example_inputs, fakes)
    has_subgraphs = any(isinstance(child, GraphModule) for child in cache[gm].children())
    if has_subgraphs:  # a copy would share them with the cached graph, and passes modify them
        return cache.pop(gm)
    captured = copy_graph(cache[gm])
    captured.meta.update(cache[gm].meta)
    _copy_sources(captured, cache[gm])
    return captured


@contextmanager
def cache_captures(cache: dict[GraphModule, GraphModule]) -> Iterator[None]:
    """Capture each graph without sub-graphs once inside the block, for dry runs with other options.

    Args:
        cache: Captured graph by Dynamo graph; updated.

    Returns:
        The context manager of the block.
    """
    token = _capture_cache.set(cache)
    try:
        yield
    finally:
        _capture_cache.reset(token)


_capture_cache: ContextVar[dict[GraphModule, GraphModule] | None] = ContextVar("capture_cache", default=None)


def _capture(gm: GraphModule, example_inputs: Sequence[Any], fakes: Sequence[Any] | None) -> GraphModule:
    """Return the captured graph, as `capture` does without a cache; the arguments are those of `capture`."""
    captured = trace_ops(gm, example_inputs, fakes)
    require_whole_memory(captured)
    captured.meta[VIEW_OPS] = find_shared_results(captured)  # functionalization removes this information
    functionalize(captured)
    _check_written_inputs(captured, example_inputs)
    return _finish_capture(captured)


def trace_ops(gm: GraphModule, example_inputs: Sequence[Any], fakes: Sequence[Any] | None = None) -> GraphModule:
    """Return the ATen ops of a Dynamo graph with the writes of the program, as they are before functionalization.

    Args:
        gm: Dynamo graph.
        example_inputs: Inputs of the graph.
        fakes: As for `capture`.

    Returns:
        The graph; its placeholders record whether they require a gradient.
    """
    fake_mode, call_fakes = fake_inputs(example_inputs)
    traced = trace(gm, call_fakes if fakes is None else fakes, fake_mode)
    erase_dead(traced.graph, ("call_function", "get_attr"))
    _lift_constants(traced, fake_mode)
    _copy_dynamo_meta(traced, gm)
    for node, value in zip(traced.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        set_node_info(node, requires_grad=getattr(value, "requires_grad", None))
    return traced


def fake_inputs(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return the fake mode of the compilation, and the inputs as fake tensors, for the trace of the graph.

    The fake of a `Sharded` input is the full tensor. A dim that the guards restrict to one length has this length.
    Dims of two inputs whose rows the program combines have the same symbols.

    Args:
        example_inputs: The inputs of the graph.

    Returns:
        The mode, and the fake inputs.
    """
    mode, fakes = _fake_inputs_with_symbols(example_inputs)
    torch_compat.equate_factors(mode)
    return mode, _replace_single_values(fakes, mode)


def specialize_inputs(example_inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs; those with a dynamic dim that the guards restrict to one length become fakes of this length.

    Tensor subclasses that wrap other tensors, such as `Sharded`, are not replaced.

    Args:
        example_inputs: The inputs of the graph.

    Returns:
        The inputs, or fakes in their place.
    """
    mode, fakes = _fake_inputs_with_symbols(example_inputs)
    results = list(example_inputs)
    for i, specialized in enumerate(_replace_single_values(fakes, mode)):
        if specialized is not fakes[i] and not torch_compat.is_wrapper(results[i]):
            results[i] = specialized
    return results


def fix_lengths(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Specialize the symbolic sizes that the program depends on, so that its passes can run again.

    The caller does so after a pass has refused the program: with constant sizes, passes recognize code that Dynamo has
    unrolled along the sequence. Sizes that the user marked as dynamic remain symbols, because Dynamo would raise.

    Args:
        gm: The graph of Dynamo.
        example_inputs: The inputs of the graph.

    Returns:
        True if any size was specialized.
    """
    context = torch_compat.TracingContext.get()
    _, fakes = _fake_inputs_with_symbols(example_inputs)
    marked_sizes = set[Any]()  # a constraint by the user is strict, one by Dynamo results in a warning only
    for x, fake in zip(example_inputs, fakes):
        symbolic_context = context.tensor_to_context.get(x) if isinstance(x, torch.Tensor) else None
        constraints = getattr(symbolic_context, "constraint_sizes", None)  # by dim; None for dims without one
        if not constraints:
            continue
        for constraint, size in zip(constraints, fake.shape):
            if constraint is not None and not constraint.warn_only:
                marked_sizes.add(as_size(size))
    sizes = [
        size
        for size in _input_symints(fakes)
        if as_size(size) not in marked_sizes and torch_compat.is_specialized(size)
    ]
    for size in sizes:
        int(size)  # adds a guard: another length recompiles
    cache = _capture_cache.get()
    if cache is not None:
        cache.pop(gm, None)  # this capture has the symbols
    return bool(sizes)


def _input_symints(fakes: Sequence[Any]) -> list[torch.SymInt]:
    """Return the symbolic sizes of fake inputs, and the inputs that are symbolic ints."""
    sizes = [size for x in fakes for size in (x.shape if isinstance(x, torch.Tensor) else [x])]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _fake_inputs_with_symbols(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Return the fake mode of the compilation, and the inputs in it with symbols for all dynamic dims.

    The values in Dynamo's meta["example_value"] belong to its finished trace and must not be mixed in.

    Raises:
        SpError: If no compilation is running.
    """
    context = torch_compat.TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise SpError("SP203", "capture: expected a call inside a backend of torch.compile, got one outside of it.")
    mode = context.fake_mode

    def make_fake(x: Any) -> Any:
        """Return the fake tensor of an input; return other values, such as SymInts, unchanged.

        Raises:
            CaptureError: If the input is nested.
        """
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_nested:  # its ragged size has no symbol in Dynamo
            raise CaptureError("SP212", NESTED_CAUSE.format("inputs"), NESTED_FIX)
        if torch_compat.is_wrapper(x):  # its fake is a plain tensor of its full shape
            # A Sharded with a fake shard has symbols as sizes already; the conversion gives them to other wrappers.
            has_fake_shard = isinstance(x, Sharded) and isinstance(x.local, FakeTensor)
            full = x if has_fake_shard else convert_to_mode(x)
            fake = _new_fake(x, full.shape, full.stride(), mode)
            # The trace refuses methods of other subclasses, such as quantized weights, by the mark.
            return fake if isinstance(x, Sharded | DTensor) else mark_subclass(fake, x)
        if isinstance(x, FakeTensor):
            return x if x.fake_mode is mode else mode.from_tensor(x)
        return convert_to_mode(x)

    def convert_to_mode(x: torch.Tensor) -> Any:
        """Return a tensor in the mode, with the symbols of Dynamo; with constant sizes if Dynamo has none."""
        symbolic = context.tensor_to_context.get(x)
        source = symbolic.tensor_source if symbolic else None
        static = None if symbolic else True
        return mode.from_tensor(x, symbolic_context=symbolic, source=source, static_shapes=static, trace=False)

    return mode, [make_fake(x) for x in example_inputs]


def _new_fake(x: torch.Tensor, shape: Sequence[Any], stride: Sequence[Any], mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of another shape, with the dtype, device and autograd state of x.

    The autograd state is requires_grad and is_leaf: a program may write in place only to tensors that are no leaves.
    """
    with mode, torch.enable_grad():
        leaf = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
        if x.is_leaf:
            return leaf
        non_leaf = leaf.clone()
        if is_same_shape(as_sizes(non_leaf.stride()), as_sizes(stride)):
            return non_leaf
        # clone does not preserve all strides, for example those of a slice: clone the complete memory, and view it.
        n_elements = leaf.untyped_storage().nbytes() // leaf.element_size()
        memory = torch.empty(n_elements, dtype=x.dtype, device=x.device)
        return memory.requires_grad_().clone().as_strided(shape, stride)


def _replace_single_values(fakes: list[Any], mode: FakeTensorMode) -> list[Any]:
    """Return the fake inputs, with constants for the symbols to which the guards permit one value only."""
    symbols: dict[Any, Any] = {as_size(size): size for size in _input_symints(fakes)}
    all_values = {symbol: torch_compat.single_value(size) for symbol, size in symbols.items()}
    values = {symbol: value for symbol, value in all_values.items() if value is not None}
    if not values:
        return fakes

    def has_single_value(x: Any) -> bool:
        """Return True if a size contains a symbol with a single value."""
        return isinstance(x, torch.SymInt) and bool(sympy.sympify(as_size(x)).free_symbols & values.keys())

    def specialize(x: Any) -> Any:
        """Return a size or a tensor in which symbols with a single value are replaced by it; others remain symbols."""
        if isinstance(x, torch.SymInt):
            return torch_compat.evaluate_expr(sympy.sympify(as_size(x)), symbols | values)
        if not isinstance(x, torch.Tensor) or not any(map(has_single_value, x.shape)):
            return x
        return _new_fake(x, [*map(specialize, x.shape)], [*map(specialize, x.stride())], mode)

    return [specialize(x) for x in fakes]


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
        if node.target != "_guards_fn":  # torch.export's check of the inputs
            raise SpError(
                "SP204",
                f"capture_export: expected a graph of ops, got a call of the module {node.target} ({node.name}).",
            )
        gm.graph.erase_node(node)
    gm.delete_submodule("_guards_fn")
    require_ops(gm, "capture_export")
    mode = _single_fake_mode(gm)
    _copy_bodies(gm)
    functionalize_collectives(gm)
    _lift_constants(gm, mode)
    require_whole_memory(gm)
    functionalize(gm)
    return _finish_capture(gm)


def _single_fake_mode(gm: GraphModule) -> FakeTensorMode | None:
    """Return the fake mode of all values of a graph, None without fake values.

    Raises:
        SpError: If the values have several modes.
    """
    values = [n.meta.get("val") for n in gm.graph.nodes]
    if len({id(value.fake_mode) for value in values if isinstance(value, FakeTensor)}) > 1:
        raise SpError("SP205", "capture_export: expected values of one FakeTensorMode, got several.")
    return torch_compat.detect_fake_mode(values)


def _copy_bodies(gm: GraphModule) -> None:
    """Replace the bodies of region ops, sub-graphs of the user's module, by copies that may be rewritten."""
    for name, child in list(gm.named_children()):
        if isinstance(child, GraphModule):
            setattr(gm, name, inline_regions(child))  # returns a copy
            _copy_bodies(getattr(gm, name))


def _copy_dynamo_meta(captured: GraphModule, gm: GraphModule) -> None:
    """Copy the metadata that later compilers read, from Dynamo's graph `gm` and its placeholders to the captured graph.

    The sources, expressions from which Dynamo reads the inputs, are copied, too.
    """
    new_inputs, old_inputs = (g.graph.find_nodes(op="placeholder") for g in (captured, gm))
    for new, old in zip(new_inputs, old_inputs, strict=True):
        new.meta.update({key: old.meta[key] for key in _PLACEHOLDER_META if key in old.meta})
    captured.meta.update(gm.meta)
    _copy_sources(captured, gm)


def _copy_sources(new_gm: GraphModule, old_gm: GraphModule) -> None:
    """Copy Dynamo's sources of inputs and module state to a graph with equal placeholders.

    A source is the expression, such as L['x'], from which Dynamo reads a value.
    """
    new_inputs, old_inputs = (gm.graph.find_nodes(op="placeholder") for gm in (new_gm, old_gm))
    for new, old in zip(new_inputs, old_inputs, strict=True):
        torch_compat.keep_source(new, old)
    torch_compat.keep_state_sources(new_gm, old_gm)


def _check_written_inputs(captured: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Check that the program writes to no input that shares memory with another input.

    The other one would not change in the captured graph, whose values are separate.

    Raises:
        WriteError: If there is such a write.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    owners: dict[int, list[Node]] = {}
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            owners.setdefault(torch_compat.storage_of(value), []).append(node)
    written = {n.args[0] for n in captured.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    for nodes in owners.values():
        changed = next((node for node in nodes if node in written), None)
        if changed is not None and len(nodes) > 1:
            sharing = next(node for node in nodes if node is not changed)
            raise WriteError(
                "SP221",
                f"The input {changed.name} is changed in place and shares memory with the input {sharing.name}.",
            )


def _lift_constants(gm: GraphModule, fake_mode: FakeTensorMode | None) -> None:
    """Register the tensor attributes of a graph as buffers, except the model's parameters and buffers.

    Such an attribute is a constant that the trace has recorded. Sets the fake value and `requires_grad` of all get_attr
    nodes.

    Raises:
        CaptureError: If one is a fake or functorch tensor: it has escaped the trace of a torch.func transform, so that
            the graph would be wrong.
    """
    state_names = {*dict(gm.named_parameters(remove_duplicate=False)), *dict(gm.named_buffers(remove_duplicate=False))}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(gm)
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, FakeTensor) or is_functorch_tensor(value):
            readers = ", ".join(node_line(user) for user in node.users)
            raise CaptureError(
                "SP215", f"{node.name}: a tensor of a torch.func transform is read outside of it, at {readers}."
            )
        if node.target not in state_names:
            delattr(gm, node.target)
            gm.register_buffer(node.target, value, persistent=False)
            set_node_info(node, constant=True, requires_grad=value.requires_grad)
        else:
            is_frozen_parameter = isinstance(value, torch.nn.Parameter) and not value.requires_grad
            # None (not determined), because the user may still unfreeze the parameter.
            set_node_info(node, requires_grad=None if is_frozen_parameter else value.requires_grad)
        if "val" not in node.meta:
            node.meta["val"] = fake_mode.from_tensor(value, static_shapes=True) if fake_mode else value


def _finish_capture(gm: GraphModule) -> GraphModule:
    """Return the IR, completed in place: with detaches at the ends of no-grad regions.

    Nodes without a value, such as the output, get None as meta["val"].
    """
    for node in gm.graph.nodes:
        node.meta.setdefault("val", None)
    detach_no_grad_regions(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm
