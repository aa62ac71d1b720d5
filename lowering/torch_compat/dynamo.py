"""Query Dynamo's private state: sources of values, graph breaks, and fallbacks to eager.

A source describes where Dynamo reads the value of a placeholder: an argument, an attribute of the model, a global. A
frame is one call of a Python function; Dynamo compiles each frame of user code, or falls back to eager for it: Python
then runs the frame uncompiled. A graph break splits a frame at code that Dynamo cannot trace, into several graphs.
DDPOptimizer, Dynamo's mode for DistributedDataParallel, splits graphs too: one per bucket, a set of parameters whose
gradients are reduced together.
"""

import contextlib
import functools
import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._dynamo import eval_frame, external_utils
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.exc import (
    BackendCompilerFailed,
    RestartAnalysis,
    ShortenTraceback,
    TensorifyScalarRestartAnalysis,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.source import ConstantSource, LocalSource, TensorProperty, TensorPropertySource
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._guards import ChainedSource, CompileContext, TracingContext
from torch._subclasses.fake_tensor import fake_tensor_tls
from torch.fx import GraphModule, Node


def keep_source(new: Node, old: Node) -> None:
    """Copy Dynamo's source of a placeholder to its copy in another graph, for later guards and names."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def keep_state_sources(new: GraphModule, old: GraphModule) -> None:
    """Copy Dynamo's sources of parameters and buffers to a new graph, as AOTAutograd requires them.

    Buffers of the new graph itself, which are constants of the program, have constant sources.
    """
    if hasattr(old, "_param_name_to_source"):
        constants = {name: ConstantSource(name) for name, _ in new.named_buffers()}
        new._param_name_to_source = {**old._param_name_to_source, **constants}


def unmark_static(placeholder: Node) -> None:
    """Remove Dynamo's mark of a static input, a parameter or buffer, from a placeholder that the program writes to.

    A partitioner may recompute values from a static input in the backward, when the program has already overwritten it.
    """
    attributes = placeholder.meta.get("tensor_dict")
    if attributes:
        placeholder.meta["tensor_dict"] = {k: v for k, v in attributes.items() if k != "_dynamo_static_input_type"}


def is_module_state(node: Node) -> bool:
    """Return True if the placeholder is a parameter or buffer, not an argument of a forward."""
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()


def is_argument(node: Node) -> bool:
    """Return True if the placeholder is an argument, not module state, a global or a closed-over value."""
    source = getattr(node, "_dynamo_source", None)
    while isinstance(source, ChainedSource):
        source = source.base
    if source is not None and (not isinstance(source, LocalSource) or source.is_derefed_cell_contents):
        return False  # a global or a closed-over value
    return not is_module_state(node)


def is_memory_layout(node: Node) -> bool:
    """Return True if a Dynamo placeholder is a symbolic stride or storage offset of an argument."""
    source = getattr(node, "_dynamo_source", None)
    return isinstance(source, TensorPropertySource) and source.prop is not TensorProperty.SIZE


def is_fallback_error(error: BaseException) -> bool:
    """Return True if Dynamo falls back to eager when a backend raises this error."""
    return isinstance(error, exceptions_allowed_to_be_fallback)


def is_compiling() -> bool:
    """Return True if Dynamo traces or a backend compiles in this thread."""
    return CompileContext.try_get() is not None


def hide_views(cls: Any) -> None:
    """Make Dynamo treat views of this wrapper subclass as tensors without a base.

    It would otherwise repeat the view on a fake base, with symbols for the integers of its ops. torch 2.13 can neither
    write guards on these symbols nor create inputs for them.
    """
    is_view = torch.Tensor._is_view
    cls._is_view = torch.compiler.disable(lambda x: not is_compiling() and is_view(x))


def is_fragment(gm: GraphModule) -> bool:
    """Return True if a Dynamo graph is only a part of a model, so that others have the remaining layers.

    A fragment is next to a graph break, is a DDP bucket, or is called by user code that is not compiled.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)  # set by Dynamo; absent from the graphs of DDP's buckets
    if reason is not None and reason.graph_break:
        return True
    return _is_called_by_user_code() or (is_under_ddp() and reason is None)


def is_cut_by_ddp(gm: GraphModule) -> bool:
    """Return True if DDPOptimizer has split this Dynamo graph off at the end of a bucket."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and "DDPOptimizer" in reason.reason


def keep_first_call_fake() -> None:
    """Make DDPOptimizer's first call of the current bucket compute on fake tensors.

    torch deletes its flag for this when the frame that compiled the last bucket is garbage-collected. If that happens
    during this compilation, torch treats the bucket as one without a backward and reads the memory of other gradients.
    Therefore collect the frame first.
    """
    gc.collect()
    context = TracingContext.try_get()
    if context is not None:
        context.fakify_first_call = True


def _is_called_by_user_code() -> bool:
    """Return True if Dynamo was entered from an uncompiled Python frame inside the compiled function.

    The stack then contains, from the outermost frame: eval_frame's wrapper, that frame, convert_frame, the backend.
    """
    dynamo = Path(torch._dynamo.__file__).parent
    compiler_file, wrapper_file = str(dynamo / "convert_frame.py"), str(dynamo / "eval_frame.py")
    frame: FrameType | None = sys._getframe()
    # Leave the backend's frames.
    while frame is not None and frame.f_code.co_filename != compiler_file:
        frame = frame.f_back
    # Any frame up to the wrapper that is neither torch's nor the wrapper of `on_eager` is the user's.
    while frame is not None and frame.f_code.co_filename != wrapper_file:
        file = frame.f_code.co_filename
        if file != __file__ and not Path(file).is_relative_to(dynamo.parent):
            return True
        frame = frame.f_back
    return False


def retrace_with_symbols(dims: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Raise Dynamo's restart exception, so that it traces the frame again with symbols for these dims.

    Does nothing if all of them were marked as dynamic before: then Dynamo has specialized them in spite of the mark.
    The exception is the only restart that Dynamo accepts from a backend.

    Args:
        dims: Pairs of an input and the dim of it that must be a symbol.
    """
    unmarked = [(x, dim) for x, dim in dims if dim not in getattr(x, "_dynamo_weak_dynamic_indices", ())]
    for x, dim in unmarked:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    if unmarked:
        raise TensorifyScalarRestartAnalysis(restart_reason="sp_compile: the length of a shard becomes a symbol")


def refuse_eager_fallback() -> None:
    """Make Dynamo raise at its recompile limit, because eager code is wrong for inputs that are shards."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True


class EagerReason(Enum):
    """Reasons why Dynamo falls back to eager for code that was passed to torch.compile."""

    RECOMPILE_LIMIT = auto()  # compiled too often
    TORCH_CODE = auto()  # defined in a file of torch, which Dynamo skips
    DISABLED = auto()  # torch.compiler.disable
    GRAPH_BREAK = auto()  # a graph break where Dynamo cannot continue, such as in a loop, and all other reasons


class EagerFallback(NamedTuple):
    """Fallback to eager of code that was passed to torch.compile."""

    target: Any  # the module, or the name of a function
    code: CodeType  # of the user's function, without its decorators
    reason: EagerReason  # kind of the cause
    text: str  # Dynamo's message


def on_eager(
    backend: Callable[..., Any],
    must_run_eagerly: Callable[[CodeType, Mapping[str, Any], FrameType | None], bool],
    warn: Callable[[EagerFallback], None],
    warn_of_piece: Callable[[torch.nn.Module], None],
) -> None:
    """Select calls of this backend that run eagerly, and report code for which Dynamo falls back to eager.

    Dynamo has no hook for this, so this replaces the function that it calls for new code by a wrapper.

    Args:
        backend: The backend.
        must_run_eagerly: Called with the code, the arguments and the caller of a call for which there is no compiled
            code. If it returns True, this call and the calls inside of it run uncompiled.
        warn: Called with the fallback. Only for the object that was passed to torch.compile, not for code after a graph
            break, and not for code without tensors.
        warn_of_piece: Called with a module whose forward has a graph break, after which Dynamo has compiled the next
            piece of its code. FSDP's hooks of submodules, for example, split a forward in this way.
    """
    convert = CatchErrorsWrapper.__call__

    @functools.wraps(convert)
    def wrapped(self: Any, frame: Any, *args: Any) -> Any:
        """Convert a frame, and report code of this backend that stays eager."""
        is_own = _backend_of(self) is backend
        # Run this call uncompiled, but not later calls of the same code.
        if is_own and must_run_eagerly(frame.f_code, frame.f_locals, sys._getframe(1)):
            return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)
        if not is_own:
            return convert(self, frame, *args)
        counts_before = dict(counters["unimplemented"])  # number of graph breaks by reason
        result = convert(self, frame, *args)
        was_compiled, caller = result.guarded_code is not None, sys._getframe(1)
        entered = _entered_model(frame.f_code, caller)  # module or name; None for code inside of it
        if entered is None and was_compiled:  # code after a graph break
            module = _compiled_module(caller)
            if module is not None:
                warn_of_piece(module)
        elif entered is not None and not was_compiled:  # eager
            new_reasons = [text for text, n in counters["unimplemented"].items() if n > counts_before.get(text, 0)]
            if new_reasons:
                text = _shorten_reason(new_reasons[-1])
            else:
                text = getattr(result, "skip_reason", None) or ""
            if "no tensor" not in text:  # code without tensors has nothing to compile
                warn(_classify_fallback(entered, frame.f_code, text))
        return result

    CatchErrorsWrapper.__call__ = wrapped


def _classify_fallback(target: Any, code: CodeType, text: str) -> EagerFallback:
    """Return the fallback, with its reason, for code that Dynamo runs eagerly.

    Args:
        target: The module, or the name of a function.
        code: The code, which for a module may be that of a decorator around its forward.
        text: Dynamo's message.
    """
    user_code = code
    if isinstance(target, torch.nn.Module):
        user_code = getattr(inspect.unwrap(target.forward), "__code__", code)
    if "recompile limit" in text:  # also for the code of a decorator
        reason = EagerReason.RECOMPILE_LIMIT
    elif user_code is not code:  # torch.compiler.disable is a decorator around the forward
        reason = EagerReason.DISABLED
    elif "skipfiles" in text:
        reason = EagerReason.TORCH_CODE
    else:
        reason = EagerReason.GRAPH_BREAK
    return EagerFallback(target, user_code, reason, text)


def _backend_of(callback: Any) -> Any:
    """Return the backend passed to torch.compile, which Dynamo's callback for new code wraps."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return getattr(callback, "compiler_fn", callback)


def _describe_callee(fn: Any) -> tuple[Any, CodeType | None]:
    """Return what `on_eager` reports for a compiled function, the module or its name, and the code that it runs.

    Args:
        fn: The function, or a bound method of the module.

    Returns:
        The code is that of the module's forward or of the function; None if it has none.
    """
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner, getattr(owner.forward, "__code__", None)
    return getattr(fn, "__qualname__", ""), getattr(fn, "__code__", None)


def _compiled_module(frame: FrameType | None) -> torch.nn.Module | None:
    """Return the compiled module whose call contains this frame, or None if a function was compiled."""
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _COMPILED_CALL:
        frame = frame.f_back
    model, _ = _describe_callee(frame.f_locals.get("fn") if frame is not None else None)
    return model if isinstance(model, torch.nn.Module) else None


# File and name of Dynamo's wrapper of a compiled function, which it has in the local variable `fn`.
_COMPILED_CALL = eval_frame.__file__, "compile_wrapper"


def _entered_model(code: CodeType, caller: FrameType | None) -> Any:
    """Return what was passed to torch.compile, the module or the name of the function, if `code` is its code.

    None for other code, such as that after a graph break or of a submodule.

    Args:
        code: The code that Dynamo compiles.
        caller: Innermost frame around the one that runs the code.
    """
    module, module_file = None, torch.nn.modules.module.__file__
    # Skip the frames of Module.__call__ around a forward; their `self` is the module.
    while caller is not None and caller.f_code.co_filename == module_file:
        module, caller = caller.f_locals.get("self"), caller.f_back
    if caller is None or (caller.f_code.co_filename, caller.f_code.co_name) != _COMPILED_CALL:
        return None  # not called directly by Dynamo's wrapper
    if module is not None:
        return module if getattr(module.forward, "__code__", None) is code else None
    if code.co_filename in (module_file, external_utils.__file__):  # torch's own wrappers
        return None
    _, callee_code = _describe_callee(caller.f_locals.get("fn"))
    if callee_code is not None and callee_code is not code:  # a callback of the garbage collector, run at any time
        return None
    return code.co_qualname


def _shorten_reason(text: str) -> str:
    """Return the first line of each of Dynamo's messages on unsupported code, for a warning."""
    messages = text.split("*** While handling this graph break, another graph break occurred: ***")
    return ", and then: ".join(message.strip().partition("\n")[0] for message in messages)


def compile_in_place(
    model: torch.nn.Module, before: Callable[[], None], config: Mapping[str, Any], **kwargs: Any
) -> None:
    """Run `model.compile(**kwargs)` such that calls of the model run with settings of `torch._dynamo.config`.

    torch reads these settings when a model is called, and has no other switch.

    Args:
        model: The model.
        before: Check that is called before each call of the model, and may raise.
        config: The settings, such as `optimize_ddp`, with which DistributedDataParallel splits graphs.
        **kwargs: Arguments of torch.compile.
    """
    model.compile(**kwargs)
    compiled_call = model._compiled_call_impl

    @functools.wraps(compiled_call)
    def call_with_config(*args: Any, **kwargs: Any) -> Any:
        """Run the model compiled, with the settings."""
        before()
        with torch._dynamo.config.patch(config):
            return compiled_call(*args, **kwargs)

    model._compiled_call_impl = call_with_config


def is_under_ddp() -> bool:
    """Return True while the forward of a DistributedDataParallel runs."""
    return _running_ddp() is not None


def is_under_no_sync() -> bool:
    """Return True while a DistributedDataParallel runs under no_sync, without gradient reductions."""
    ddp = _running_ddp()
    return ddp is not None and not ddp.require_backward_grad_sync


def _running_ddp() -> torch.nn.parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward runs now, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def is_compiled(model: torch.nn.Module) -> bool:
    """Return True if a model is a result of `torch.compile`, or `model.compile(...)` was called."""
    return isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None


def allow_meta_constants() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Dynamo traces `torch.tensor(...)` on the meta device, for dry runs.

    There it returns a plain meta tensor in place of a fake one, which fake modes reject by default.
    """
    return mock.patch.object(fake_tensor_tls, "allow_non_fake_inputs_override", True)


def replace_meta_constants(gm: GraphModule) -> None:
    """Replace each `torch.tensor(...)` on the meta device in a Dynamo graph by zeros of its shape, for dry runs.

    It has no values there. Later tracers of the graph obtain a fake tensor from torch.zeros, not from torch.tensor.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.tensor):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.is_meta:
            node.target, node.args = torch.zeros, (tuple(value.shape),)
            node.kwargs = {"dtype": value.dtype, "device": value.device}
    gm.recompile()


def trace_in_place_of(original: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Make Dynamo trace `traced` in calls of `original`, also if `original` is disabled for Dynamo.

    Calls that Dynamo does not trace, such as those of eager code, run the original.
    """
    torch.compiler.substitute_in_graph(original, skip_signature_check=True)(traced)


def trace_tensor_checks() -> None:
    """Make Dynamo trace `torch._check_tensor_all(cond)` as an assertion in the graph, as it does `assert cond`.

    Otherwise the check is a graph break, as it reads the value on the host. transformers checks the number of image
    tokens in this way. The substitution is that of the process: Dynamo has none for a backend.
    """

    def check_tensor_all(cond: torch.Tensor, message: Any = None) -> None:
        """Raise RuntimeError when the program runs if an element of `cond` is False, with a message that is a str."""
        if cond.dtype != torch.bool:
            raise TypeError(f"cond must be a bool tensor, but got dtype {cond.dtype}")
        text = message if isinstance(message, str) else "Expected all elements of a condition to be True."
        torch._assert_async(cond.all(), text)

    get_torch_obj_rule_map().pop(torch._check_tensor_all, None)  # Dynamo's own rule, which is the graph break
    trace_in_place_of(torch._check_tensor_all, check_tensor_all)


def trace_in_place_of_apply(function_class: type[torch.autograd.Function], traced: Callable[..., Any]) -> None:
    """Make Dynamo trace `traced` in calls of `function_class.apply`, without a backward of its own.

    Dynamo has no hook for this, so this wraps its method for such calls, once. Eager code runs the original. It also
    replaces a class with the decorator `allow_in_graph`.
    """
    call_method = AutogradFunctionVariable.call_method
    if not _TRACED_APPLY:

        @functools.wraps(call_method)
        def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            """Trace the function that replaces the class, or the method itself."""
            stand_in = _TRACED_APPLY.get(self.fn_cls) if name == "apply" else None
            if stand_in is None:
                return call_method(self, tx, name, args, kwargs)
            return VariableTracker.build(tx, stand_in).call_function(tx, args, kwargs)

        AutogradFunctionVariable.call_method = call  # type: ignore[method-assign]
    _TRACED_APPLY[function_class] = traced


_TRACED_APPLY: dict[type[torch.autograd.Function], Callable[..., Any]] = {}  # functions by the class that they replace


def untraced_function(target: Any) -> type[torch.autograd.Function] | None:
    """Return the autograd Function that a call in a Dynamo graph applies, or None for other calls.

    Dynamo does not trace Functions with the decorator `allow_in_graph`.
    """
    if getattr(target, "__name__", "") != "trampoline_autograd_apply" or not getattr(target, "__closure__", None):
        return None
    return target.__closure__[0].cell_contents  # the class, which this wrapper of Dynamo closes over


def run_eagerly(function: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    """Return a function with the same results that Dynamo does not trace: a call of it is a graph break.

    Args:
        function: The function.
        reason: The reason for messages about the graph break.
    """
    return torch.compiler.disable(lambda *args, **kwargs: function(*args, **kwargs), reason=reason)


def call_at_compile_start(callback: Callable[[], None]) -> None:
    """Call a function before every compilation of Dynamo, also after Dynamo was reset, which removes its callbacks."""
    from torch._dynamo.callback import callback_handler

    run_callbacks = callback_handler.run_start_callbacks

    @torch.compiler.disable  # Dynamo would trace it where eager code calls a backward
    def run(event: Any) -> None:
        """Run all callbacks."""
        callback()
        run_callbacks(event)

    callback_handler.run_start_callbacks = run  # type: ignore[method-assign]
