"""Find kernel functions of packages, for which Dynamo traces those of `stand_ins`.

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule      ->  sp.linear_attention
    from causal_conv1d import causal_conv1d_fn                       ->  shifted products
    LigerFusedLinearCrossEntropyFunction.apply(...)                  ->  F.linear, F.cross_entropy

Dynamo does not trace such functions, so that a program with one would be cut into graphs. A function, a
`torch.autograd.Function`, or a module whose forward is replaced, is found by its kind, its name and the name of its
package, or of a build on a hub. transformers wraps these functions, together with one in plain torch for environments
without the package; a wrapper is found by the name of the function that it wraps. Modules are searched before each
compilation, once each. A function by which a user has replaced that of a package is not found.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.origin import has_code_of, has_own_method
from sp_compile.lowering.base.warn import warn_once
from sp_compile.lowering.scan.attention_kernels import KERNELS, register_kernel

from .stand_ins import loss_stand_ins, quantized_linears, state_space_stand_ins  # noqa: F401  (fill the table)
from .stand_ins.image_stand_ins import replace_methods
from .stand_ins.kernel_stand_ins import DOCUMENTS, has_stand_in, make_stand_in

log = logging.getLogger(__name__)

PACKAGES = """
    fla flash_linear_attention mamba_ssm causal_conv1d trl liger_kernel cut_cross_entropy torchao bitsandbytes
""".split()
IN_PACKAGE = re.compile(rf"(?:^|[._-])(?:{'|'.join(PACKAGES)})(?:$|[._-])")
MODELS = "transformers.models."
DISABLED_MODULES = ("FusedLinearCrossEntropyLoss",)  # modules that disable Dynamo for a forward that calls a kernel
WITHOUT_FALLBACK = ("mamba_split_conv1d_scan_combined",)  # the function in plain torch returns None: call others
_searched: set[str] = set()  # names of modules
_replaced: set[Any] = set()  # functions and classes


def replace_package_kernels() -> None:
    """Make Dynamo trace stand-ins for the kernel functions of all modules that were imported since the last call.

    Functions are searched in kernel packages, and in the models of transformers, which wrap or import them. Methods of
    these models are replaced, too (`image_stand_ins.py`).
    """
    for name in [name for name in sys.modules if name not in _searched]:
        _searched.add(name)
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and (name.startswith(MODELS) or _is_kernel_package(name)):
            for kernel, function, is_wrapper in _kernel_functions(module):
                _replace(kernel, function, is_wrapper)
            for value in list(vars(module).values()):
                if isinstance(value, type) and _is_kernel_package(str(value.__module__)):
                    _replace_class(value)
                elif isinstance(value, type) and value.__module__ == name:
                    replace_methods(value)


def _is_kernel_package(module: str) -> bool:
    """Return True for modules of kernel packages, such as "fla.ops.kda".

    The name of a package that is built on a hub has a prefix or a suffix, such as "causal_conv1d_3f2a".
    """
    return IN_PACKAGE.search(module) is not None


def _kernel_functions(module: ModuleType) -> Iterator[tuple[str, FunctionType, bool]]:
    """Yield the kernel functions of a module that have a stand-in.

    Yields:
        The name of the kernel, the function, and True if the function is a wrapper of transformers.
    """
    for function in list(vars(module).values()):
        if isinstance(function, FunctionType):
            wrapped = wrapped_kernel(function)
            if wrapped is None and not has_code_of(function, _is_kernel_package):
                continue
            name = wrapped or function.__name__
            if has_stand_in(name, FunctionType):
                yield name, function, wrapped is not None


def wrapped_kernel(function: FunctionType) -> str | None:
    """Return the name of the kernel that a function of transformers wraps, or None if it is no such wrapper.

    A wrapper is a closure over `func_name`, the name of the kernel, and `implementation`, the function that it calls.
    """
    if not (function.__module__ or "").startswith(MODELS) or "implementation" not in function.__code__.co_freevars:
        return None
    name = inspect.getclosurevars(function).nonlocals.get("func_name")
    return name if isinstance(name, str) else None


def _replace(kernel: str, function: FunctionType, is_wrapper: bool) -> None:
    """Make Dynamo trace the stand-in in place of a function; does nothing if it does so already.

    A function of a package is also registered as a kernel, which the operators of scans run on GPUs.

    Args:
        kernel: Name of the kernel.
        function: The function that models call.
        is_wrapper: True for a wrapper of transformers, which calls the package or a function in plain torch.
    """
    if function in _replaced:
        return
    _replaced.add(function)
    called: Callable[..., Any] = function  # the function whose signature callers use
    if is_wrapper:  # its closure has the function of the package, if that is installed
        called = inspect.getclosurevars(function).nonlocals.get("implementation") or function
    elif kernel in KERNELS:
        register_kernel(kernel, function, "cuda")
    traced = inspect.unwrap(function) if is_wrapper else None  # the function in plain torch, before it was wrapped
    if is_wrapper and kernel in WITHOUT_FALLBACK:
        if called is traced:  # the wrapper refuses documents, which the stand-ins of the other functions support
            torch_compat.trace_in_place_of(function, traced)
        return  # the function of the package has its own stand-in
    original, signature = _make_original_runner(kernel, function, traced), inspect.signature(called)
    # `drops_unknown`: a wrapper ignores arguments that the function it calls does not have.
    torch_compat.trace_in_place_of(function, make_stand_in(kernel, signature, original, drops_unknown=is_wrapper))


def _replace_class(cls: Any) -> None:
    """Make Dynamo trace stand-ins of a class of a package, if there are any; does nothing if it does so already."""
    if cls in _replaced or not issubclass(cls, (torch.autograd.Function, torch.nn.Module)):
        return
    if not has_own_method(cls, "forward", _is_kernel_package):
        return
    if issubclass(cls, torch.autograd.Function) and has_stand_in(cls.__name__, torch.autograd.Function):
        _replaced.add(cls)
        _replace_apply(cls)
    elif issubclass(cls, torch.nn.Module) and has_stand_in(cls.__name__, torch.nn.Module):
        _replaced.add(cls)
        _replace_forward(cls)
    elif issubclass(cls, torch.nn.Module) and cls.__name__ in DISABLED_MODULES:
        _replaced.add(cls)
        # Remove the wrapper that disables Dynamo. Substitutes, as for functions, do not exist for methods.
        cls.forward = inspect.unwrap(cls.forward)


def _replace_apply(cls: type[torch.autograd.Function]) -> None:
    """Make Dynamo trace the stand-in in place of `cls.apply`.

    Versions of a package return different numbers of results, of which the first ones are equal. The backward has a
    parameter for each result.
    """
    forward, backward = inspect.signature(cls.forward), inspect.signature(cls.backward)
    has_context = cls.setup_context is torch.autograd.Function.setup_context  # then ctx is the first parameter
    arguments = [*forward.parameters.values()][1 if has_context else 0 :]
    grads = [*backward.parameters.values()][1:]  # without ctx
    count = None if any(x.kind is x.VAR_POSITIONAL for x in grads) else len(grads)  # number of results, if known
    original = _make_original_runner(cls.__name__, cls.apply, traced=None)
    signature = forward.replace(parameters=arguments)
    stand_in = make_stand_in(cls.__name__, signature, original, drops_unknown=False, results=count)
    torch_compat.trace_in_place_of_apply(cls, stand_in)


def _replace_forward(cls: type[torch.nn.Module]) -> None:
    """Make Dynamo trace the stand-in in place of the forward of a class of modules.

    Substitutes do not exist for methods, so the method becomes one that calls the original forward as a function.
    """
    forward = cls.forward
    original = _make_original_runner(cls.__name__, forward, traced=None)
    stand_in = make_stand_in(cls.__name__, inspect.signature(forward), original, drops_unknown=False)
    torch_compat.trace_in_place_of(forward, stand_in)

    @functools.wraps(forward)
    def call_forward(*args: Any, **kwargs: Any) -> Any:
        """Call the original forward, or its stand-in where Dynamo traces."""
        return forward(*args, **kwargs)

    cls.forward = call_forward  # type: ignore[method-assign]


def _make_original_runner(
    kernel: str, function: Callable[..., Any], traced: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return run(reason, args, kwargs), which runs the original function for calls without an equivalent.

    Args:
        kernel: The name of the kernel.
        function: The original function.
        traced: For a wrapper of transformers, its function in plain torch, which Dynamo can trace, but which ignores
            arguments that separate documents (`DOCUMENTS`). None for the function of a package.
    """
    run_between_graphs = torch_compat.run_eagerly(function)

    def run(reason: str, args: Any, kwargs: Any) -> Any:
        """Trace the function in plain torch if it can compute the call, else run the original one between two graphs.

        `reason` is for a warning about the latter.
        """
        separates_documents = any(kwargs.get(name) is not None for name in DOCUMENTS)
        if traced is not None and not separates_documents:
            return traced(*args, **kwargs)
        _warn_unsplit_kernel(kernel, reason)
        return run_between_graphs(*args, **kwargs)

    return run


@torch.compiler.assume_constant_result  # called while Dynamo traces
def _warn_unsplit_kernel(kernel: str, reason: str) -> bool:
    """Warn on rank 0 that a kernel's original function runs, once for each kernel and reason.

    Returns True, because Dynamo requires a constant result.
    """
    warn_once(log, "%s runs between two graphs, unsplit on every rank: %s", kernel, reason)
    return True


torch_compat.call_at_compile_start(replace_package_kernels)
