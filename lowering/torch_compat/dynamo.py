"""What Dynamo keeps to itself: where values come from, and which piece of a model a graph is."""

from __future__ import annotations

import functools
import gc
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dynamo import eval_frame, external_utils
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.exc import (
    RestartAnalysis,
    ShortenTraceback,
    TensorifyScalarRestartAnalysis,
    TorchRuntimeError,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.source import ConstantSource, LocalSource
from torch._dynamo.utils import counters
from torch._guards import ChainedSource, CompileContext, TracingContext
from torch.fx import GraphModule, Node


def keep_source(new: Node, old: Node) -> None:
    """Give a copied placeholder Dynamo's account of where its value comes from."""
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def keep_state_sources(new: GraphModule, old: GraphModule) -> None:
    """Give a new graph Dynamo's account of the old one's parameters and buffers, and one of its own buffers."""
    if hasattr(old, "_param_name_to_source"):
        constants = {name: ConstantSource(name) for name, _ in new.named_buffers()}
        new._param_name_to_source = {**old._param_name_to_source, **constants}


def unmark_static(placeholder: Node) -> None:
    """Drop the promise that the memory is constant: the min-cut partitioner would recompute from changed data."""
    if facts := placeholder.meta.get("tensor_dict"):
        kept = {name: fact for name, fact in facts.items() if name != "_dynamo_static_input_type"}
        placeholder.meta["tensor_dict"] = kept


def is_module_state(node: Node) -> bool:
    """Is the placeholder a parameter or buffer of the module, not an argument of its forward?"""
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()


def is_argument(node: Node) -> bool:
    """Is the placeholder an argument of what is compiled: no state of a module, no global and no closed-over value?"""
    source = getattr(node, "_dynamo_source", None)
    while isinstance(source, ChainedSource):
        source = source.base
    local = source is None or (isinstance(source, LocalSource) and not source.is_derefed_cell_contents)
    return local and not is_module_state(node)


def is_fallback_error(error: BaseException) -> bool:
    """Is it one on which Dynamo leaves a graph to eager code, where a backend raises it?"""
    return isinstance(error, exceptions_allowed_to_be_fallback)


def is_compiling() -> bool:
    """Does Dynamo compile something in this thread, backends included?"""
    return CompileContext.try_get() is not None


def hide_views(cls: Any) -> None:
    """Let Dynamo take views that are of this wrapper subclass for tensors of their own.

    It would repeat the view on a stand-in of its base, with symbols for the numbers of its ops: of these torch 2.13 can
    neither write guards nor make inputs.
    """
    is_view = torch.Tensor._is_view
    cls._is_view = torch.compiler.disable(lambda x: not is_compiling() and is_view(x))


def is_fragment(gm: GraphModule) -> bool:
    """Is this Dynamo graph only a piece of a model: before or after a graph break, or a bucket of DDPOptimizer?"""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return True
    return _called_by_user_code() or (is_under_ddp() and reason is None)


def is_cut_by_ddp(gm: GraphModule) -> bool:
    """Is this Dynamo graph a bucket of DDPOptimizer?"""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and "DDPOptimizer" in reason.reason


def keep_first_call_fake() -> None:
    """See to it that DDPOptimizer's first call of the bucket that is compiled now computes on fake tensors.

    Its sign for that is taken away when the frame in which the bucket before was compiled is collected. If that is only
    now, torch takes the bucket for one without a backward and reads other gradients' memory. Collect it first.
    """
    gc.collect()
    context = TracingContext.try_get()
    if context is not None:
        context.fakify_first_call = True


def _called_by_user_code() -> bool:
    """Was Dynamo entered from a Python frame that it could not compile, inside the function given to torch.compile?

    The stack then holds, inwards: eval_frame's wrapper, that frame, convert_frame, the backend.
    """
    dynamo = Path(torch._dynamo.__file__).parent
    entries, wrappers = str(dynamo / "convert_frame.py"), str(dynamo / "eval_frame.py")
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != entries:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != wrappers:
        ours = frame.f_code.co_filename == __file__  # see `on_eager`
        if not ours and not Path(frame.f_code.co_filename).is_relative_to(dynamo.parent):
            return True
        frame = frame.f_back
    return False


def retrace_with_symbols(dims: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Have Dynamo trace the frame anew with symbols for these dims of inputs; raises what makes it do so.

    Returns where it was asked before, and has found a reason for a constant. It is the one restart that Dynamo lets out
    of a backend.
    """
    new = [(x, dim) for x, dim in dims if dim not in getattr(x, "_dynamo_weak_dynamic_indices", ())]
    for x, dim in new:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    if new:
        raise TensorifyScalarRestartAnalysis(restart_reason="sp_compile: the length of a shard becomes a symbol")


def refuse_eager_fallback() -> None:
    """Past its recompile limit Dynamo runs the model uncompiled, which is another program where inputs are shards."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def on_eager(
    backend: Callable[..., Any],
    tell: Callable[[Any, CodeType, str], None],
    tell_of_piece: Callable[[torch.nn.Module], None],
) -> None:
    """Call `tell` when Dynamo leaves to Python what this backend was to compile, once for each piece of code.

    Dynamo has no hook for this, so the function that it calls when it first meets a piece of code is wrapped.

    Args:
        tell: Called with the module, or the name of a function; its code; and Dynamo's reason. Only for what was given
            to torch.compile itself, not for what a graph break leaves out.
        tell_of_piece: Called with the module during whose call code after a graph break is compiled.
    """
    convert = CatchErrorsWrapper.__call__

    @functools.wraps(convert)
    def wrapped(self: Any, frame: Any, *args: Any) -> Any:
        before = dict(counters["unimplemented"])
        result = convert(self, frame, *args)
        ours = _backend_of(self) is backend
        what = _entered_model(frame.f_code, sys._getframe(1)) if ours else None
        if ours and what is None and result.guarded_code is not None:
            whole = _compiled_module(sys._getframe(1))
            if whole is not None:
                tell_of_piece(whole)
        elif what is not None and result.guarded_code is None:
            said = [text for text, count in counters["unimplemented"].items() if count > before.get(text, 0)]
            reason = _shorten_reason(said[-1]) if said else getattr(result, "skip_reason", None) or ""
            tell(what, frame.f_code, reason)
        return result

    CatchErrorsWrapper.__call__ = wrapped


def _backend_of(callback: Any) -> Any:
    """What torch.compile was given as its backend, of what Dynamo calls for each piece of code."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return getattr(callback, "compiler_fn", callback)


def _describe_callee(fn: Any) -> tuple[Any, CodeType | None]:
    """The module, or the name of the function, that a call of `fn` runs, and its code."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner, getattr(owner.forward, "__code__", None)
    return getattr(fn, "__qualname__", ""), getattr(fn, "__code__", None)


def _compiled_module(frame: FrameType | None) -> torch.nn.Module | None:
    """The module that was given to torch.compile and whose call has come to this frame; None: a function."""
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _COMPILED_CALL:
        frame = frame.f_back
    what, _ = _describe_callee(frame.f_locals.get("fn")) if frame is not None else (None, None)
    return what if isinstance(what, torch.nn.Module) else None


_COMPILED_CALL = eval_frame.__file__, "compile_wrapper"


def _entered_model(code: CodeType, caller: FrameType | None) -> Any:
    """What was given to torch.compile, if this is its code and no code of a user is around it; None otherwise.

    caller: the innermost frame around the one that runs the code.
    """
    module = None
    while caller is not None and caller.f_code.co_filename == torch.nn.modules.module.__file__:
        module, caller = caller.f_locals.get("self"), caller.f_back
    if caller is None or (caller.f_code.co_filename, caller.f_code.co_name) != _COMPILED_CALL:
        return None
    if module is None:
        torchs = code.co_filename == torch.nn.modules.module.__file__ or code.co_filename == external_utils.__file__
        _, given = _describe_callee(caller.f_locals.get("fn"))
        collected = given not in (code, None)  # a callback of the garbage collection, which may come at any time
        return None if torchs or collected else code.co_qualname
    return module if getattr(module.forward, "__code__", None) is code else None


def _shorten_reason(words: str) -> str:
    """The headings of what Dynamo says of code that it cannot trace."""
    parts = words.split("*** While handling this graph break, another graph break occurred: ***")
    return ", and then: ".join(part.strip().partition("\n")[0] for part in parts)


def compile_in_place(model: torch.nn.Module, before: Callable[[], None], **kwargs: Any) -> None:
    """`model.compile(**kwargs)`, in whose calls Dynamo leaves graphs whole under DistributedDataParallel.

    torch asks its `optimize_ddp` when a model is called, and has no other way to be told. before: what comes before
    each call.
    """
    model.compile(**kwargs)
    call = model._compiled_call_impl

    @functools.wraps(call)
    def uncut(*args: Any, **kwargs: Any) -> Any:
        before()
        with torch._dynamo.config.patch(optimize_ddp=False):
            return call(*args, **kwargs)

    model._compiled_call_impl = uncut


def is_under_ddp() -> bool:
    """Is the forward of a DistributedDataParallel running?"""
    return _running_ddp() is not None


def is_under_no_sync() -> bool:
    """Is it running, and will its backward leave gradients as they are?"""
    ddp = _running_ddp()
    return ddp is not None and not ddp.require_backward_grad_sync


def _running_ddp() -> torch.nn.parallel.DistributedDataParallel | None:
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def is_compiled(model: torch.nn.Module) -> bool:
    """Is it what `torch.compile` made of a model, or has `model.compile(...)` been called?"""
    return isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None


def line_of_meta_constant(error: TorchRuntimeError) -> str | None:
    """Return the line "file:12" whose `torch.tensor` on the meta device the error is about; None of other errors."""
    text = str(error)
    if "convert all Tensors to FakeTensors" not in text or "device='meta'" not in text:
        return None
    lines = re.findall(r'File ".*?([^/\\"]+)", line (\d+)', text)
    return ":".join(lines[-1]) if lines else "an unknown file"
