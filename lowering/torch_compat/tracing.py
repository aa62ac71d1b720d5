"""What torch keeps to itself about running tracers, and about the graphs that they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext, TracingContext, tracing
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

from .tensors import is_in_transform


def is_tracing_enabled() -> bool:
    """Does anybody collect structured traces (tlparse)? Graphs are printed for them alone."""
    return any(getattr(handler, "root_dir", "") is not None for handler in trace_log.handlers)


def trace_graph(name: str, text: str) -> None:
    """Hand a graph's text to tlparse."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def active_tracer() -> Any:
    """The tracer of the make_fx that is running."""
    return get_proxy_mode().tracer


def proxy_of(x: torch.Tensor) -> Any:
    """What stands for a tensor in the graph that is being made; None if nothing does."""
    return active_tracer().tensor_tracker.get(x)


def set_proxy(x: torch.Tensor, name: Any) -> None:
    """Have what `proxy_of` gave stand for the tensor, whatever does now."""
    active_tracer().tensor_tracker[x] = name


@contextmanager
def skip_graph_printing() -> Iterator[None]:
    """Graphs are made and changed, and few are run: spare their code, and AOTAutograd's text of each, if nobody logs.

    What `graph_module` and torch itself make gets its code when it is run.
    """
    with _use_lazy_graph_module(True):
        if is_tracing_enabled() or log_state.artifact_names:
            yield
            return
        with mock.patch.object(GraphModule, "print_readable", return_value=""):
            yield


def resume_trace(context: TracingContext) -> AbstractContextManager[Any]:
    """Inside the compilation of which this was the context, when it is over."""
    return tracing(context)


@contextmanager
def suspend_trace(fake_mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Run without recording (no dispatch, pre-dispatch or torch-function modes), still on fake tensors."""
    with (
        _temp_remove_pre_dispatch_torch_function_mode(),
        _temp_remove_metadata_torch_function_mode(),
        _disable_current_modes(),
        fake_mode,
    ):
        yield


@contextmanager
def use_real_tensors() -> Iterator[None]:
    """Compute for real inside a compilation or one of torch.func's transforms: no tracing, no fake tensors.

    Nor the Python dispatcher: under it c10d takes the GIL inside a collective, and then waits for a thread of Gloo that
    waits for the GIL.
    """
    if _has_no_modes():  # as on every call of a compiled program
        yield
        return
    with torch._C._DisablePythonDispatcher(), temporarily_clear_interpreter_stack(), suspend_trace(nullcontext()):
        yield


def _has_no_modes() -> bool:
    """Is no mode, no transform of torch.func and no Python dispatcher at work? Torch 2.11 to 2.15 have all of these."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
        or is_in_transform()
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
    )


def keep_calling_convention(new: Graph, old: Graph) -> None:
    """Make a new graph take its inputs and return its results in the containers that the old one does."""
    new.set_codegen(old._codegen)


def rename_node(node: Node, name: str) -> None:
    """Give a node this name, or the next free one like it."""
    node._rename(name)


def compiled_frame_id() -> tuple[int, int | None]:
    """Numbers of the code that is compiled now, the same each time until Dynamo is reset; the second None outside."""
    from torch._dynamo.callback import callback_handler

    if _ResetSentinel not in callback_handler.start_callbacks:  # a reset forgets them, and counts code from 0 again
        callback_handler.register_start_callback(_ResetSentinel)
        _reset_sentinels[0] += 1
    compiled = CompileContext.current_compile_id()
    return _reset_sentinels[0], compiled.frame_id if compiled is not None else None


def _ResetSentinel(told: Any) -> None:
    """Is there as long as Dynamo is not reset."""


_reset_sentinels = [0]
