"""Trace `x.requires_grad_()` of a value inside of a program, if it has no effect outside of it.

transformers' `enable_input_require_grads` makes the output of a frozen embedding require a gradient, for checkpoints
with use_reentrant=True. Dynamo breaks the graph at such a call if a result of the program depends on `x`: AOTAutograd
drops the call, so that results without another operand that requires a gradient would not require one. Other results
do not change. Here the graph runs on fake tensors without the calls; they are removed if every result still requires a
gradient that did so with them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.output_graph import FakeRootModule, OutputGraph
from torch._dynamo.variables import TensorVariable
from torch.fx import Interpreter, Node

from .folded_reads import find_backend
from .thread_state import preserve_thread_state

CALL = "requires_grad_"

_with_input_grads: set[Callable[..., Any]] = set()  # backends


def trace_input_grads(backend: Callable[..., Any]) -> None:
    """Make Dynamo remove calls of `requires_grad_` from programs of this backend where that changes no result.

    Dynamo has no hook for this, so the first call wraps the method that refuses such programs.

    Args:
        backend: The backend, a function; for a method, the function of its class.
    """
    check: Callable[..., Any] | None = getattr(OutputGraph, "_check_requires_grad_intermediate_outputs", None)
    if check is not None and not _with_input_grads:  # torch 2.13
        OutputGraph._check_requires_grad_intermediate_outputs = _remove_calls_or(check)  # type: ignore[method-assign]
    _with_input_grads.add(backend)


def _remove_calls_or(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return Dynamo's method `check`, which removes the calls, or refuses the program as torch does."""

    @functools.wraps(check)
    def remove_calls(self: Any, results: Sequence[Any], tx: Any) -> Any:
        """Remove the calls of `requires_grad_` of a graph whose results do not depend on them."""
        calls = [n for n in self.graph.nodes if n.op == "call_method" and n.target == CALL]
        is_own = bool(calls) and find_backend(self)[0] in _with_input_grads
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
