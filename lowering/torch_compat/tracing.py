"""Access torch's private state of running tracers (make_fx, Dynamo) and of the recorded graphs.

A tracer records ops as nodes; the proxy of a tensor is its node in the graph that is being recorded. Dispatch modes are
the objects through which a tracer intercepts ops; a pre-dispatch mode does so before autograd. A structured trace is
torch's log of a compilation, which the tool tlparse shows.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext, TracingContext

# Context manager that restores the tracing context of a finished compilation.
from torch._guards import tracing as resume_trace
from torch._logging import trace_structured
from torch._logging._internal import log_state, trace_log
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module as graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_metadata_torch_function_mode,
    _temp_remove_pre_dispatch_torch_function_mode,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils._python_dispatch import _disable_current_modes

# Context manager in which the innermost dispatch mode is not active.
from torch.utils._python_dispatch import _pop_mode_temporarily as pop_dispatch_mode

from .tensors import is_in_transform


def is_tracing_enabled() -> bool:
    """Return True if structured traces are collected, so that the text of graphs must be created."""
    # torch's own handler has the root_dir None unless TORCH_TRACE names a folder. Other handlers have no root_dir.
    return any(getattr(handler, "root_dir", "") is not None for handler in trace_log.handlers)


def log_graph_text(name: str, text: str) -> None:
    """Log a graph's text under this name in the structured trace, for tlparse."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def active_tracer() -> Any:
    """Return the tracer of the running make_fx, to record nodes that are not ops."""
    return get_proxy_mode().tracer


def proxy_of(x: torch.Tensor) -> Any:
    """Return the proxy of a tensor in the graph that is traced, or None if the trace has not recorded the tensor."""
    return active_tracer().tensor_tracker.get(x)


def set_proxy(x: torch.Tensor, proxy: Any) -> None:
    """Set the proxy of a tensor to a value that `proxy_of` returned, so that later ops read that node."""
    active_tracer().tensor_tracker[x] = proxy


@contextmanager
def skip_graph_printing() -> Iterator[None]:
    """Skip code generation and printing of graphs inside the block, unless they are logged.

    Most graphs are created and changed but not run. Inside the block graph modules generate their code when they run.
    """
    with _use_lazy_graph_module(True):
        if is_tracing_enabled() or log_state.artifact_names:
            yield
            return
        with mock.patch.object(GraphModule, "print_readable", return_value=""):
            yield


@contextmanager
def suspend_trace(fake_mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Disable the running trace inside the block, so that ops there compute in `fake_mode` only.

    Removes all dispatch, pre-dispatch and torch-function modes, then enters `fake_mode`.
    """
    with (
        _temp_remove_pre_dispatch_torch_function_mode(),
        _temp_remove_metadata_torch_function_mode(),
        _disable_current_modes(),
        fake_mode,
    ):
        yield


@contextmanager
def use_real_tensors() -> Iterator[None]:
    """Compute on real tensors inside the block, also during a compilation or a torch.func transform.

    The package exchanges its own messages between ranks in such blocks. The Python dispatcher is off, too: with it c10d
    takes the GIL inside a collective, and then waits for a thread of Gloo that waits for the GIL.
    """
    has_modes = (  # all of these queries exist in torch 2.11 to 2.15
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
        or is_in_transform()
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
    )
    if not has_modes:  # the usual case, as in every call of a compiled program
        yield
        return
    with torch._C._DisablePythonDispatcher(), temporarily_clear_interpreter_stack(), suspend_trace(nullcontext()):
        yield


def keep_calling_convention(new: Graph, old: Graph) -> None:
    """Make a copy of a graph accept inputs and return outputs in the containers of the old one.

    An exported program has nested containers, which its code generator flattens.
    """
    new.set_codegen(old._codegen)


def rename_node(node: Node, name: str) -> None:
    """Rename a node to this name, or to the next free similar one."""
    node._rename(name)


def compiled_frame_id() -> tuple[int, int | None]:
    """Return identifiers of the code that is compiled now, stable until Dynamo is reset.

    Returns:
        The number of resets of Dynamo that were detected plus 1, and the frame's id, or None outside of compilations.
    """
    from torch._dynamo.callback import callback_handler

    if _detect_reset not in callback_handler.start_callbacks:  # a reset removes callbacks, and restarts frame ids at 0
        callback_handler.register_start_callback(_detect_reset)
        _num_registrations[0] += 1
    compiled = CompileContext.current_compile_id()
    return _num_registrations[0], compiled.frame_id if compiled is not None else None


def _detect_reset(event: Any) -> None:
    """Return without an effect. Dynamo was reset if this function is not among its callbacks anymore."""


_num_registrations = [0]  # number of registrations of `_detect_reset`, in a list so that a function can change it
