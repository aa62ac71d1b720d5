"""Run generation by the forward as it is written: `generate()` of transformers, and steps with a cache of keys.

A compiled program splits a sequence over ranks. A decoding step has one query row, and a cache that is longer in each
step, so that it would be compiled again and again, and nothing of it would be split. Ranks also generate independently
of each other, such as rank 0 alone. `must_run_eagerly` therefore decides for each call that Dynamo would compile, and
`generate()` is replaced by a function that disables torch.compile while it runs a model of this backend.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

GENERATION_MODULE = "transformers.generation.utils"  # imported by every model of transformers that generates
GENERATE_METHODS = "generate", "generate_batch"  # of GenerationMixin and of the class from which it inherits the second
# Names of the argument with one row for each query.
QUERY_ARGUMENTS = "decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds", "hidden_states"

# Modules whose forward was compiled with this backend, as keys. They are compared by identity, as some have no hash.
_models = WeakIdKeyDictionary()
# Code of the methods that `_wrap_generate` has replaced, by id: code that Dynamo has made may have no hash.
_generate_codes: dict[int, CodeType] = {}
_generating: list[bool] = []  # one element for each `generate()` around the current call
_compiles_prompt: list[bool] = []  # one element for each `compile_prompt` around the current call


def must_run_eagerly(code: CodeType, arguments: Mapping[str, Any], caller: FrameType | None) -> bool:
    """Return True if a call that is compiled with this backend is to run eagerly: in generation.

    Args:
        code: The code that is called.
        arguments: The arguments and other local variables of the call, by name.
        caller: The innermost frame around the call.

    Returns:
        True for a decoding step, and for all calls inside of `generate()`; False inside of `compile_prompt`.
    """
    module = arguments.get("self")
    if isinstance(module, torch.nn.Module):  # a model of this backend
        add_model(module)
    wrap_generation()
    if _compiles_prompt:
        return False
    # A caller may hold the method that `_wrap_generate` has replaced since: the original code is then on the stack.
    while caller is not None and _generate_codes:
        if id(caller.f_code) in _generate_codes:
            return True
        caller = caller.f_back
    return is_decoding_step(arguments)


@contextmanager
def compile_prompt() -> Iterator[None]:
    """Compile the calls of a model in the context, although `generate()` runs: for a prompt that ranks share.

    Returns:
        A context manager that yields None.
    """
    _compiles_prompt.append(True)
    try:
        with torch.compiler.set_stance("default"):
            yield
    finally:
        _compiles_prompt.pop()


def is_generating() -> bool:
    """Return True inside of `generate()` of a model of this backend.

    Returns:
        False in other calls, also in steps of a loop that generates tokens.
    """
    return bool(_generating)


def add_model(model: torch.nn.Module) -> None:
    """Add a model whose `generate()` runs eagerly from now on, before the first call of its forward.

    Args:
        model: The model.

    Returns:
        None.
    """
    _models[model] = True
    _wrap_own_generation(type(model))


def is_decoding_step(arguments: Mapping[str, Any]) -> bool:
    """Return True if a call has one query row and a cache that contains keys already.

    Args:
        arguments: The arguments of the call by name, with nested "args" and "kwargs".

    Returns:
        True if one argument is a cache as in transformers, with a method `get_seq_length`, that is not empty.
    """
    values = dict(_named_values(arguments))
    if not any(_cached_length(value) > 0 for value in values.values()):
        return False
    # Queries are an argument such as `input_ids`, or else the first positional tensor: those are named "0", "1", ...
    named = [values[name] for name in QUERY_ARGUMENTS if isinstance(values.get(name), torch.Tensor)]
    by_position = [value for name, value in values.items() if name.isdigit() and isinstance(value, torch.Tensor)]
    queries = [*named, *by_position][:1]
    return any(query.ndim >= 2 and query.shape[1] == 1 for query in queries)


def _named_values(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of arguments, with those in a tuple of positional and in a dict of named arguments."""
    for name, value in arguments.items():
        if isinstance(value, dict):
            yield from ((str(key), inner) for key, inner in value.items())
        elif isinstance(value, tuple):
            yield from ((str(i), inner) for i, inner in enumerate(value))
        else:
            yield name, value


def _cached_length(value: Any) -> int:
    """Return the number of positions in a cache of keys; 0 for other values."""
    get_length = getattr(type(value), "get_seq_length", None)
    try:
        return int(get_length(value)) if callable(get_length) else 0
    except Exception:  # another method of this name, or a cache whose construction has not finished
        return 0


def wrap_generation() -> None:
    """Replace the methods of transformers that generate, once and if it is imported, by ones that run eagerly.

    Returns:
        None.
    """
    module = sys.modules.get(GENERATION_MODULE)
    if module is not None:
        for name in GENERATE_METHODS:
            _wrap_generate(module.GenerationMixin, name)


def _wrap_own_generation(model_class: type[torch.nn.Module]) -> None:
    """Replace the `generate` methods that a model of transformers defines itself, as Whisper does, or inherits.

    They are replaced by ones that run eagerly (`_wrap_generate`).
    """
    module = sys.modules.get(GENERATION_MODULE)
    if module is not None and issubclass(model_class, module.GenerationMixin):
        for owner in model_class.__mro__:
            if "generate" in vars(owner):
                _wrap_generate(owner, "generate")


def _wrap_generate(owner: type, name: str) -> None:
    """Replace a method of a class, which it may inherit, such that it runs models of this backend eagerly."""
    generate: Callable[..., Any] | None = getattr(owner, name, None)
    if generate is None or hasattr(generate, "must_run_eagerly"):  # missing in this version, or replaced already
        return
    # `must_run_eagerly` finds this code on the stack if a caller holds the method from before its replacement.
    code = inspect.unwrap(generate).__code__
    _generate_codes[id(code)] = code

    @functools.wraps(generate)
    def generate_eagerly(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the method, without torch.compile if the model was compiled with this backend."""
        # `self` may be no module: the class of a model of another runtime may inherit the methods of transformers.
        modules = list(self.modules()) if isinstance(self, torch.nn.Module) else []
        if torch.compiler.is_compiling() or not any(module in _models for module in modules):
            return generate(self, *args, **kwargs)
        if name == "generate" and not kwargs.get("synced_gpus") and must_gather_weights(modules):
            # All ranks gather weights in each step, so none may stop before the others. This also replaces an explicit
            # False, which trainers of transformers pass.
            kwargs["synced_gpus"] = True
        _generating.append(True)
        try:
            with torch.compiler.set_stance("force_eager"):
                return generate(self, *args, **kwargs)
        finally:
            _generating.pop()

    generate_eagerly.must_run_eagerly = True  # type: ignore[attr-defined]
    setattr(owner, name, generate_eagerly)


def must_gather_weights(modules: Sequence[torch.nn.Module]) -> bool:
    """Return True if a rank gathers weights from others when it calls one of the modules: with `fully_shard`.

    Args:
        modules: The modules of a model.

    Returns:
        False without other processes.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded = fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules)
    return is_sharded and dist.is_initialized() and dist.get_world_size() > 1
