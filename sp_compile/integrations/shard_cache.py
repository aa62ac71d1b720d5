"""Generate with a cache of keys and values whose positions are sharded over ranks.

    with sp_compile.shard_cache(model, mesh):
        ids = model.generate(**inputs, max_new_tokens=100)      # on every rank, with the same inputs

The prompt runs compiled with backend="sp", on shards. Each rank keeps the keys and values of its rows. In a decoding
step every rank computes the new token's query, attends to its rows, and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.runtime.agreement import require_agreement
from sp_compile.runtime.control.message import CALL_VERB, Message

__all__ = ["shard_cache"]

CACHE_NAMES = "cache", "past_key_values"  # of the argument and the output of a model, new and old
# Arguments of generate() that need another cache, or a second model whose cache would be complete on every rank.
UNSUPPORTED = "assistant_model", "prompt_lookup_num_tokens", "cache_implementation"

# Compiled forward of each model, by the options with which it was compiled.
_prompts: weakref.WeakKeyDictionary[nn.Module, dict[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()


@contextmanager
def shard_cache(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> Iterator[nn.Module]:
    """Shard the cache of keys and values in calls of a model's `generate()` in the context.

    Each rank stores `1 / n` of the positions of every layer, of prompts and of new tokens. The prompt runs compiled, on
    shards of the sequence. The tokens are those of one device.

    All ranks call `generate()` together, with the same inputs and, if they sample, the same seed. The model is one of
    transformers that generates with a `DynamicCache` and calls the attention function that its configuration selects,
    such as Llama, Qwen, Mistral and Gemma; other models are refused. A single rank generates as without the context.

    Args:
        model: The model, or a wrapper such as one of PEFT or torch.compile.
        mesh: The ranks that share the cache, as in the option `mesh`. None selects the default process group.
        **options: Fields of `sp_compile.SPConfig` for the prompt, such as `attention="ring"`.

    Returns:
        A context manager that yields the model.

    Raises:
        SpError: The model is not supported (SP841), or an option is invalid (SP101 to SP116). In the context, by
            `generate()`: an argument or a cache is not supported (SP842), so is an attention (SP843), or the ranks'
            inputs, seeds or tokens differ (SP844).
    """
    options = {"mesh": mesh, "outputs": "lazy", **options}
    ranks = SPConfig.of(options).ranks()
    if not ranks.has_other_processes:
        yield model
        return
    generating = _find_generating(model)
    sharing = CacheSharing(generating, ranks, options)
    with (
        mock.patch.object(generating, "forward", sharing.wrap(generating.forward)),
        mock.patch.object(generating, "generate", sharing.wrap_generate(generating.generate)),
    ):
        yield model


def _find_generating(model: nn.Module) -> Any:
    """Return the model of transformers inside of a model or wrapper.

    Raises:
        SpError: There is none, or its keys and values are not those of a decoder with exchangeable attention (SP841).
    """
    from transformers import GenerationMixin

    from ._compat.attention_names import has_attention_interface

    found: Any = next((module for module in model.modules() if isinstance(module, GenerationMixin)), None)
    name = type(model if found is None else found).__name__
    if found is None:
        raise SpError("SP841", f"model: expected a model of transformers with generate(), got {name}.")
    if found.config.is_encoder_decoder:
        raise SpError("SP841", f"model: expected a decoder, got {name}, whose cross attention has a cache of its own.")
    if not has_attention_interface(found):
        raise SpError("SP841", f"model: expected attention by transformers' AttentionInterface, got {name} without it.")
    return found


class CacheSharing:
    """State of `shard_cache` for one model: it replaces the model's methods in the context."""

    def __init__(self, model: Any, ranks: Ranks, options: Mapping[str, Any]) -> None:
        """Create the state, and register the attention function.

        Args:
            model: The model that generates.
            ranks: The ranks that share the cache.
            options: The options with which prompts are compiled.
        """
        from ._compat.attention_names import register_attention
        from .cached_rows import ROWS_ATTENTION, attend_to_rows

        register_attention(ROWS_ATTENTION, attend_to_rows)
        self.model, self.ranks, self.options = model, ranks, options
        self.name = type(model).__name__

    def wrap_generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in place of `generate()` that first refuses what is not supported."""

        @functools.wraps(generate)
        def generate_sharded(*args: Any, **kwargs: Any) -> Any:
            """Run `generate()` with a sharded cache."""
            config = kwargs.get("generation_config") or self.model.generation_config
            values = {name: kwargs.get(name, getattr(config, name, None)) for name in (*UNSUPPORTED, "do_sample")}
            refused = [name for name in UNSUPPORTED if values[name] is not None]
            error = SpError("SP842", f"{refused[0]}: expected None, got a value.") if refused else None
            seed = _digest(torch.get_rng_state()) if values["do_sample"] else ""
            self._agree("generate", error, seed=seed)
            return generate(*args, **kwargs)

        return generate_sharded

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in place of the model's forward that runs prompts and steps with the sharded cache."""
        signature = inspect.signature(forward)

        @torch.compiler.disable
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            """Run the model."""
            arguments = signature.bind_partial(*args, **kwargs)
            arguments = {**arguments.arguments, **arguments.arguments.get("kwargs", {})}
            arguments.pop("kwargs", None)
            cache = next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
            if cache is None:  # generate(use_cache=False), or a call that is no part of generation
                return forward(*args, **kwargs)
            return self._run(forward, cache, arguments)

        return run

    def _run(self, forward: Callable[..., Any], cache: Any, arguments: dict[str, Any]) -> Any:
        """Run a prompt if the cache is empty, else a step."""
        from .cached_rows import RowsLayer

        tokens = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
        is_new = not any(isinstance(layer, RowsLayer) for layer in cache.layers)
        error = self._cache_error(cache) if is_new else None
        self._agree("a step", error, tokens=_digest(tokens), length=str(cache.get_seq_length()))
        if not is_new:
            return self._step(forward, arguments)
        return self._prompt(forward, cache, arguments, tokens.shape[1])

    def _agree(self, subject: str, error: SpError | None, **fields: str) -> None:
        """Raise on all ranks if one has an error, or if fields differ (SP844)."""
        mismatch = SpError("SP844", f"{self.name}.generate: the ranks differ")
        message = Message(CALL_VERB, f"{self.name}: {subject}", fields=fields, error=error)
        require_agreement(self.ranks, message, mismatch)

    def _cache_error(self, cache: Any) -> SpError | None:
        """Return the error for a cache that cannot be sharded, or None."""
        from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        if not isinstance(cache, DynamicCache):
            return SpError("SP842", f"cache: expected a DynamicCache, got {type(cache).__name__}.")
        kinds = {type(layer) for layer in cache.layers} - {DummyLayer, DynamicLayer, DynamicSlidingWindowLayer}
        if kinds:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            return SpError("SP841", f"model: expected layers with keys and values only, got {names} in {self.name}.")
        if cache.offloading:
            return SpError("SP842", "cache: expected one that is not offloaded, got offloading=True.")
        if cache.get_seq_length() > 0:
            return SpError("SP842", f"cache: expected an empty cache, got one of {cache.get_seq_length()} positions.")
        return None

    def _step(self, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run the model eagerly, with the attention function that merges the ranks."""
        from ._compat.attention_names import select_attention
        from .cached_rows import ROWS_ATTENTION

        with select_attention(self.model, ROWS_ATTENTION), torch.compiler.set_stance("force_eager"):
            return forward(**arguments)

    def _prompt(self, forward: Callable[..., Any], cache: Any, arguments: dict[str, Any], length: int) -> Any:
        """Run the model compiled, and replace the layers of the cache by ones with this rank's rows."""
        from sp_compile.generation import compile_prompt

        from .cached_rows import PromptLayer, RowsLayer

        windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        new = [RowsLayer(self.ranks, window) for window in windows]
        is_dummy = cache.is_dummy
        if length <= self.ranks.n:  # fewer than two positions a rank
            cache.layers = [old if dummy else layer for old, layer, dummy in zip(cache.layers, new, is_dummy)]
            return self._step(forward, arguments)
        prompt = type(cache)(config=self.model.config)
        prompt.layers = [
            old if dummy else PromptLayer(old.is_sliding, window or 0)
            for old, window, dummy in zip(cache.layers, windows, is_dummy)
        ]
        name = next(name for name in CACHE_NAMES if arguments.get(name) is not None)
        with compile_prompt():
            out = self._compiled(forward)(**{**arguments, name: prompt})
        for i, layer in enumerate(prompt.layers):
            if not is_dummy[i]:
                new[i].fill(layer.keys, layer.values)
                layer.keys = layer.values = None
                cache.layers[i] = new[i]
        for name in CACHE_NAMES:
            if getattr(out, name, None) is prompt:
                out[name] = cache
        return out

    def _compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled forward, that of an earlier context with the same options if there is one."""
        from sp_compile.backend import sp

        of_model = _prompts.setdefault(self.model, {})
        key = repr([self.ranks, *sorted((name, repr(value)) for name, value in self.options.items())])
        if key not in of_model:
            of_model[key] = torch.compile(forward, backend=sp, options=self.options)
        return of_model[key]


def _digest(x: torch.Tensor) -> str:
    """Return the shape and a digest of integers, which must be equal on all ranks; the shape of other tensors."""
    if x.is_floating_point():
        return str(tuple(x.shape))
    return f"{tuple(x.shape)} {hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()[:16]}"
