"""Trace `x.requires_grad_()` of a value inside of a program, if it has no effect outside of it.

transformers' `enable_input_require_grads` makes the output of a frozen embedding require a gradient, for checkpoints
with use_reentrant=True; models of audio assign `x.requires_grad = True`. Dynamo breaks the graph at the assignment, and
at the call if a result of the program depends on `x`: AOTAutograd drops the call, so that results without another
operand that requires a gradient would not require one. Other results do not change. Here the assignment is traced as
the call, and the graph runs on fake tensors without the calls; they are removed if every result still requires a
gradient that did so with them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.output_graph import FakeRootModule, OutputGraph
from torch._dynamo.variables import TensorVariable, builtin
from torch.fx import Interpreter, Node

from .folded_reads import find_backend
from .thread_state import preserve_thread_state

CALL = "requires_grad_"

_with_input_grads: list[Callable[..., Any]] = []  # backends


def trace_input_grads(backend: Callable[..., Any]) -> None:
    """Make Dynamo remove calls of `requires_grad_` from programs of this backend where that changes no result.

    Dynamo has no hook for this, so the first call wraps the method that refuses such programs, and the function that
    sets an attribute.

    Args:
        backend: The backend, a function; for a method, the function of its class.
    """
    check: Callable[..., Any] | None = getattr(OutputGraph, "_check_requires_grad_intermediate_outputs", None)
    if check is not None and not _with_input_grads:  # torch 2.13
        OutputGraph._check_requires_grad_intermediate_outputs = _remove_calls_or(check)  # type: ignore[method-assign]
        setter: Any = getattr(builtin, "SetAttrBuiltinVariable", None)
        if hasattr(setter, "_call_setattr"):
            setter._call_setattr = _call_or(setter._call_setattr)
    _with_input_grads.append(backend)


def _has_input_grads(output: OutputGraph) -> bool:
    """Return True if the graph is traced for a backend that `trace_input_grads` was called with."""
    backend = find_backend(output)[0]
    return any(own is backend for own in _with_input_grads)


def _call_or(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dynamo's function that sets an attribute, which traces `x.requires_grad = True` as the call."""

    @functools.wraps(assign)
    def set_attribute(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        """Set an attribute, and return the value."""
        # In a region of its own, such as that of a checkpoint, Dynamo does not find leaves that its results depend on.
        can_call = isinstance(obj, TensorVariable) and len(tx.output.tracers) == 1 and not obj.source
        is_mark = can_call and all(x.is_python_constant() for x in (name, value))
        is_mark = is_mark and (name.as_python_constant(), value.as_python_constant()) == ("requires_grad", True)
        if is_mark and _can_have_gradient(obj.as_proxy().node) and _has_input_grads(tx.output):
            obj.call_method(tx, CALL, [value], {})
            return value
        return assign(self, tx, obj, name, value)

    return set_attribute


def _can_have_gradient(node: Node) -> bool:
    """Return True for a tensor with a dtype of gradients."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and (example.is_floating_point() or example.is_complex())


def _remove_calls_or(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dynamo's method `check`, which removes the calls, or refuses the program as torch does."""

    @functools.wraps(check)
    def remove_calls(self: Any, results: Sequence[Any], tx: Any) -> Any:
        """Remove the calls of `requires_grad_` of a graph whose results do not depend on them."""
        calls = [n for n in self.graph.nodes if n.op == "call_method" and n.target == CALL]
        is_own = bool(calls) and _has_input_grads(self)
        if not is_own or not _is_without_effect(self, calls, results):
            return check(self, results, tx)
        for call in calls:
            for node in (call.prev, call, call.next):  # the neighbors allow the call inside of functorch
                if node is call or node.target is torch._C._functorch.set_inplace_requires_grad_allowed:
                    self.graph.erase_node(node)

    return remove_calls


def _is_without_effect(output: Any, calls: list[Node], results: Sequence[Any]) -> bool:
    """Return True if the same results and inputs of a graph require a gradient without the calls.

    Args:
        output: Dynamo's OutputGraph.
        calls: The calls of `requires_grad_` in it.
        results: Dynamo's variables of the results.
    """
    marked = {call.args[0] for call in calls}
    # Other leaves, such as parameters that the program creates, and calls whose result is read are left to torch.
    leaves = {x.as_proxy().node for x in output.leaf_var_creation_order if not getattr(x, "source", None)}
    if not leaves <= marked or any(call.users for call in calls):
        return False
    try:
        values = _run_without(output, calls)
    except Exception:  # such as a hook of a tensor that does not require a gradient
        return False
    expected = [x.as_proxy().node for x in results if isinstance(x, TensorVariable) and x.requires_grad]
    inputs = [n for n in output.graph.find_nodes(op="placeholder") if _requires_grad(n.meta.get("example_value"))]
    return all(_requires_grad(values.get(node)) for node in (*expected, *inputs))


def _requires_grad(value: Any) -> bool:
    """Return True for a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _run_without(output: Any, calls: list[Node]) -> dict[Node, Any]:
    """Run a Dynamo graph without some of its nodes, on new fake tensors; return the value of each node."""
    interpreter = Interpreter(FakeRootModule(output.nn_modules), garbage_collect_values=False, graph=output.graph)
    interpreter.extra_traceback = False
    skipped = dict.fromkeys(calls)  # the values of these nodes, which have no users
    with (
        preserve_thread_state(), output.restore_global_state(), output.fake_mode,
        output.fake_mode.shape_env.ignore_fresh_unbacked_symbols(),
    ):  # fmt: skip
        for node in output.graph.nodes:
            if node.op == "placeholder":
                value = node.meta.get("example_value")  # one that a write made differentiable becomes a leaf: an error
                interpreter.env[node] = value.detach().requires_grad_() if _requires_grad(value) else value
            elif node in skipped:
                interpreter.env[node] = None
            else:
                interpreter.env[node] = interpreter.run_node(node)
    return interpreter.env
