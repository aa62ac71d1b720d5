"""Fold values of small integer inputs that a program reads on the host, with guards on the inputs.

Dynamo breaks the graph where a size, a split or a number depends on the data of a tensor. In models for images these
are computed from a few integers, such as the height and width of each image (`grid.tolist()`,
`repeat_interleave(a, counts)`), and the graphs between the breaks may lack the sequence. Here the value is computed
while Dynamo traces: the graph contains it as a constant, and Dynamo compiles again if an input from which it was
computed has other values.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo import config, utils
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.guards import GuardBuilder, GuardManagerType, get_verbose_code_parts, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._guards import Guard
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from .tensors import get_data, storage_of

MAX_INPUT = 1024  # elements of an input whose values may be folded; inputs of tokens and masks have more
MAX_LITERAL = 1 << 18  # elements of a folded value
MAX_VALUES = 4  # different values of the inputs of one function, of the 8 programs that Dynamo compiles for it
INTEGER_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)

_folded_inputs: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()  # values by code object


class _NotKnown(Exception):
    """A value is not computed from small integer inputs alone."""


class _RefuseImpure(TorchDispatchMode):
    """Raise `_NotKnown` for ops that draw random numbers or write to a tensor, collectives and ops of a user."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op that depends on the values of its arguments alone."""
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace not in ("aten", "prims") or func._schema.is_mutable or is_random:
            raise _NotKnown
        return func(*args, **(kwargs or {}))


class _KnownValues:
    """The values of nodes in a graph that Dynamo is tracing, computed from small integer inputs on demand."""

    def __init__(self, output: OutputGraph) -> None:
        self.output = output
        self.values: dict[Node, Any] = {}  # None: not known
        self.leaves: dict[Node, tuple[Guard, Tensor]] = {}  # inputs, with their values

    def find(self, node: Node) -> Any:
        """Return the value of a node, a tensor or a tuple of tensors; None if it is not known."""
        written = self._storages_written_as_data()
        for current in self._iterate_operands(node):
            example = current.meta.get("example_value")
            if isinstance(example, Tensor) and (example._version != 0 or (written and storage_of(example) in written)):
                return None  # the program has written to it
            if current not in self.values:
                try:
                    self.values[current] = self._compute(current)
                except _NotKnown:
                    self.values[current] = None
            if self.values[current] is None:
                return None
        return self.values[node]

    def _storages_written_as_data(self) -> set[int]:
        """Return the storages to which the program has written through `x.data`, which has a version of its own."""
        graphs = [tracer.graph for tracer in self.output.tracers]
        reads = [n for graph in graphs for n in graph.find_nodes(op="call_function", target=get_data)]
        examples = [n.meta["example_value"] for n in reads]
        return {storage_of(example) for example in examples if example._version != 0}

    def install_guards(self, node: Node) -> bool:
        """Guard the inputs from which a node was computed; return False if these have had too many values before."""
        leaves = [self.leaves[n] for n in self._iterate_operands(node) if n in self.leaves]
        code = self.output.root_tx.f_code
        if not _debug_get_cache_entry_list(code):  # nothing is compiled yet, or Dynamo was reset
            _folded_inputs.pop(code, None)
        known = _folded_inputs.setdefault(code, set())
        keys = {(guard.name, *value.shape, *value.flatten().tolist()) for guard, value in leaves}
        if any(sum(key[0] == old[0] for old in known) >= MAX_VALUES for key in keys - known):
            return False
        known |= keys
        for guard, _ in leaves:  # at each read, as Dynamo removes guards of code that it traces again
            install_guard(guard)
        return True

    def _iterate_operands(self, node: Node) -> Iterator[Node]:
        """Yield a node and all nodes that it is computed from, operands first; inputs of a region are those outside."""
        done, stack = set[Node](), [node]
        while stack:
            current = stack[-1]
            operands = [n for n in self._operands(current) if n not in done]
            if operands and current not in done:
                stack += operands
                continue
            stack.pop()
            if current not in done:
                done.add(current)
                yield current

    def _operands(self, node: Node) -> list[Node]:
        """Return the nodes that a node reads; for an input of a region, such as a checkpoint, the value outside."""
        if node.op != "placeholder" or "grapharg" in node.meta:
            return [] if isinstance(node.meta.get("example_value"), (int, torch.SymInt)) else node.all_input_nodes
        for tracer in self.output.tracers:
            for outer, inner in tracer.lifted_freevars.items():
                if getattr(inner, "node", None) is node:
                    return [outer.node]
        return []

    def _compute(self, node: Node) -> Any:
        """Compute a node from the values of its operands.

        Raises:
            _NotKnown: It is an input that is not small, or its op is not a pure function.
        """
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            example = example.node.maybe_as_int()
            if example is None:  # a dynamic size, which may not become a constant
                raise _NotKnown
        if isinstance(example, int):
            return example
        if node.op == "placeholder":
            return self._read_input(node)
        if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
            raise _NotKnown
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        with _disable_current_modes(), torch.no_grad(), _RefuseImpure():
            try:
                if node.op == "call_method":
                    value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    value = node.target(*args, **kwargs)  # type: ignore[operator]
            except _NotKnown:
                raise
            except Exception as error:  # the program raises it when it runs
                raise _NotKnown from error
        if isinstance(example, Tensor) and not _has_same_form(value, example):  # a mode around the call changes it
            raise _NotKnown
        return value

    def _read_input(self, node: Node) -> Any:
        """Return a copy of the input of a placeholder, or the value outside for an input of a region."""
        outside = self._operands(node)
        if outside:
            return self.values[outside[0]]
        given: Any = node.meta.get("grapharg")
        value: Any = None if given is None or given.pass_arg_as_tensor else given.example
        if type(value) is not Tensor or given.source is None or not given.source.subguards_allowed():
            raise _NotKnown
        # An argument that is a number, such as a count of steps, often changes; a number of a module does not.
        least = 1 if given.source.guard_source.is_unspecialized_nn_module() else 2
        is_small = least <= value.numel() <= MAX_INPUT
        if not is_small or value.is_meta or value.dtype.is_floating_point or value.dtype.is_complex:
            raise _NotKnown
        with _disable_current_modes(), torch.no_grad():
            copied = value.clone()
        self.leaves[node] = (given.source.make_guard(_match_values(copied)), copied)
        return copied


def _has_same_form(value: Any, example: Tensor) -> bool:
    """Return True if a value has the dtype, the device and the number of dims of Dynamo's example."""
    if not isinstance(value, Tensor):
        return False
    return (value.dtype, value.device, value.ndim) == (example.dtype, example.device, example.ndim)


def _match_values(expected: Tensor) -> Callable[[GuardBuilder, Guard], None]:
    """Return a function that adds a guard: a tensor has these values."""

    def is_equal(value: Any) -> bool:
        """Return True if a tensor has the values with which the program was compiled."""
        return isinstance(value, Tensor) and value.shape == expected.shape and torch.equal(value, expected)

    def match_tensor_values(builder: GuardBuilder, guard: Guard) -> None:
        """Add the guard."""
        parts = get_verbose_code_parts(f"values of {guard.name} == {expected.tolist()}", guard)
        # Dynamo skips the guards of a tensor in a dict without changes, such as that of the buffers of a module, unless
        # the tensor has a child manager: a buffer may be changed in place.
        child = builder.get_guard_manager(guard).lambda_manager(
            lambda x: x, f"{guard.name}.values", expected, GuardManagerType.GUARD_MANAGER
        )
        child.add_lambda_guard(is_equal, parts, guard.user_stack)

    return match_tensor_values


def _known_values(output: OutputGraph) -> _KnownValues:
    """Return the known values of a graph, which are kept with it."""
    if "_sp_known_values" not in output.__dict__:
        output._sp_known_values = _KnownValues(output)
    return output._sp_known_values


def _read_value(tx: Any, node: Node) -> Any:
    """Return the value of a node, guarded, or None if it is not known."""
    known = _known_values(tx.output)
    value = known.find(node)
    leaves, _ = tree_flatten(value)
    if not all(isinstance(leaf, Tensor) and leaf.numel() <= MAX_LITERAL for leaf in leaves):
        return None
    return value if known.install_guards(node) else None


def literal_tensors(*parts: tuple[list[Any], list[int], torch.dtype, torch.device]) -> tuple[Tensor, ...]:
    """Return tensors of constant values; each part has the values in order, the shape, the dtype and the device."""
    return tuple(
        torch.tensor(values, dtype=dtype, device=device).reshape(shape) for values, shape, dtype, device in parts
    )


def _fold_call(tx: Any, node: Node) -> bool:
    """Replace a call by its value, or those of its operands that are known; return False if none is known."""
    value = _read_value(tx, node)
    if value is not None:
        _become_literal(node, value)
        return True
    if node.target is operator.getitem:
        return _fold_masks(tx, node)
    numbers = {x: _read_value(tx, x) for x in node.all_input_nodes if _is_integer_scalar(x)}
    known = {x: value.item() for x, value in numbers.items() if value is not None}
    node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda x: known.get(x, x))
    return bool(known)


def _fold_masks(tx: Any, node: Node) -> bool:
    """Replace the masks of x[mask] by the indices where they are True; return False if one is not known."""
    x, index = node.args
    entries: list[Any] = []
    for entry in index if isinstance(index, tuple) else (index,):
        example = entry.meta.get("example_value") if isinstance(entry, Node) else None
        if not isinstance(example, Tensor) or example.dtype != torch.bool:
            entries.append(entry)
            continue
        mask = _read_value(tx, entry)
        if mask is None or not mask.ndim:  # a mask without dims adds a dim
            return False
        with node.graph.inserting_before(node):
            for positions in mask.nonzero(as_tuple=True):
                literal = node.graph.call_function(torch.tensor)
                literal.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
                _become_literal(literal, positions)
                entries.append(literal)
    node.args = (x, tuple(entries))
    return True


def _is_integer_scalar(node: Node) -> bool:
    """Return True for a tensor that is one integer, as in `pad(x, (0, n))`."""
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.ndim == 0 and value.dtype in INTEGER_TYPES


def _become_literal(node: Node, value: Any) -> None:
    """Replace the call of a node by its value, a tensor or a tuple of tensors."""
    if not isinstance(value, Tensor):
        target: Any = literal_tensors
        args: tuple[Any, ...] = tuple((x.flatten().tolist(), list(x.shape), x.dtype, x.device) for x in value)
        kwargs = {}
    else:
        target, args, kwargs = torch.tensor, (value.tolist(),), {"dtype": value.dtype, "device": value.device}
        if not value.numel():
            target, args = torch.zeros, (list(value.shape),)
        elif _is_range(value):  # later passes know that its values follow each other
            target, args = torch.arange, (value.min().item(), value.max().item() + 1)
    node.op, node.target, node.args, node.kwargs = "call_function", target, args, kwargs
    if target is torch.arange and value.ndim > 1:
        with node.graph.inserting_before(node):
            numbers = node.graph.call_function(target, args, kwargs)
        numbers.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        node.target, node.args, node.kwargs = torch.reshape, (numbers, list(value.shape)), {}


def _is_range(value: Tensor) -> bool:
    """Return True for several integers of which each is the one before plus 1, in row-major order."""
    numbers = value.flatten()
    return value.dtype in INTEGER_TYPES and value.numel() > 1 and bool((numbers.diff() == 1).all())


_folding: dict[Callable[..., Any], Callable[[Any], bool]] = {}  # by backend, whether its options allow it


def fold_small_reads(backend: Callable[..., Any], may_fold: Callable[[Any], bool]) -> None:
    """Make Dynamo fold values that programs of this backend compute from small integer inputs and read on the host.

    Dynamo has no hook for this, so the first call wraps the functions by which it reads values.

    Args:
        backend: The backend, a function; for a method, the function of its class.
        may_fold: Called with the options that were passed to `torch.compile`, or None; False to trace as torch does.
    """
    if not _folding:
        if hasattr(utils, "_get_fake_value_impl"):  # of torch 2.13
            utils._get_fake_value_impl = _fold_results(utils._get_fake_value_impl)
        for name, convert in (("method_item", Tensor.item), ("method_tolist", Tensor.tolist)):
            if hasattr(TensorVariable, name):
                setattr(TensorVariable, name, _fold_method(getattr(TensorVariable, name), convert))
    _folding[backend] = may_fold


def find_backend(output: OutputGraph) -> tuple[Any, Any]:
    """Return the backend for which Dynamo traces a graph, for a method the function of its class, and its options."""
    backend: Any = output.compiler_fn
    options: Any = None
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if hasattr(backend, "compiler_fn"):  # torch.compile's wrapper
        backend, options = backend.compiler_fn, backend.kwargs.get("options")
    return getattr(backend, "__func__", backend), options


def _may_fold(tx: Any) -> bool:
    """Return True if values are folded in this compilation; not where the user selects dynamic shapes."""
    backend, options = find_backend(tx.output)
    may_fold = next((may for own, may in _folding.items() if own is backend), None)  # others need no hash
    return may_fold is not None and config.assume_static_by_default and may_fold(options)


def _fold_results(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dynamo's function `compute` of fake results, which folds results whose shape depends on known values."""

    @functools.wraps(compute)
    def get_fake_value(node: Node, tx: Any, allow_non_graph_fake: bool = False) -> Any:
        """Return the fake value of a node."""
        try:
            return compute(node, tx, allow_non_graph_fake)
        except Unsupported as error:
            depends_on_data = isinstance(error.__cause__, (DataDependentOutputException, DynamicOutputShapeException))
            call = node.target, node.args, node.kwargs
            if not (depends_on_data and _may_fold(tx) and _fold_call(tx, node)):
                raise
            try:
                value = compute(node, tx, allow_non_graph_fake)
            except (Unsupported, TorchRuntimeError):  # such as a method of an operand that is now a number
                node.target, node.args, node.kwargs = call
                raise error from error.__cause__
            error.remove_from_stats()
            return value

    return get_fake_value


def _fold_method(method: Callable[..., Any], convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Dynamo's tensors that returns the known value as Python numbers, or calls `method`."""

    @functools.wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the numbers, or what Dynamo returns."""
        tx = InstructionTranslator.current_tx()
        value = _read_value(tx, self.as_proxy().node) if _may_fold(tx) else None
        if not isinstance(value, Tensor):
            return method(self, *args, **kwargs)
        numbers = convert(value)
        if isinstance(numbers, list):
            return self.build(tx, numbers)
        return ConstantVariable.create(numbers)

    return read
