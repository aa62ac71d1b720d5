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
from typing import Any, Unpack
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.generation import compile_prompt, must_gather_weights
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import MeshOptions, SPConfig
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.runtime.agreement import require_agreement
from sp_compile.runtime.control.channel import channel_of
from sp_compile.runtime.control.failures import announce_failures, mark_agreed
from sp_compile.runtime.control.message import CALL_VERB, Message
from sp_compile.runtime.control.watch import mark_running
from sp_compile.runtime.eager_fallback import mute_fsdp_warning

__all__ = ["shard_cache"]

CACHE_NAMES = "cache", "past_key_values"  # of the argument and the output of a model, new and old
STEP = "a step of generation"  # of a prompt or of one token, in messages
TOKEN_NAMES = "input_ids", "inputs_embeds"  # of the argument with the tokens
# Arguments of generate() that need another cache, a second model whose cache would be complete on every rank, or a
# clock: ranks would stop after other numbers of tokens.
REFUSED = "assistant_model", "prompt_lookup_num_tokens", "cache_implementation", "max_time"
LOCAL = "local"  # value of the options `inputs` and `outputs`: a rank passes, or receives, its rows only

_sharing_models = weakref.WeakSet[nn.Module]()  # models whose cache is sharded now
_tried = weakref.WeakSet[nn.Module]()  # models whose attention was found to support it


@contextmanager
def shard_cache(
    model: nn.Module, mesh: DeviceMesh | None = None, **options: Unpack[MeshOptions]
) -> Iterator[nn.Module]:
    """Shard the cache of keys and values in calls of a model's `generate()` in the context.

    Each rank stores `1 / n` of the positions of every layer, of prompts and of new tokens. The prompt runs compiled, on
    shards of the sequence. The tokens are those of a single device.

    All ranks call `generate()` together, with the same inputs and, if they sample, the same seed. The model is one of
    transformers that generates with a `DynamicCache` and calls the attention function that its configuration selects,
    such as Llama, Qwen, Mistral and Gemma; other models are refused. A single rank generates as without the context.

    Args:
        model: The model, or a wrapper such as one of PEFT or torch.compile.
        mesh: The ranks that share the cache, as in the option `mesh`. None selects the default process group.
        **options: Fields of `sp_compile.SPConfig` for the prompt, such as `attention="ring"`. Inputs and outputs of the
            prompt are complete on every rank: `inputs="local"` and `outputs="local"` are refused.

    Returns:
        A context manager that yields the model.

    Raises:
        SpError: The model is not supported (SP841), an option is invalid (SP101 to SP116), or inputs or outputs are
            local (SP845). In the context, by `generate()`: an argument or a cache is not supported (SP842), so is an
            attention (SP843), or the ranks' inputs, settings, seeds or tokens differ (SP844).
    """
    for name in ("inputs", "outputs"):
        given = options.get(name)
        values = given.values() if isinstance(given, Mapping) else [given]  # one for each input or output
        if LOCAL in values:
            raise SpError(
                "SP845", f"{name}: expected prompts and results of all positions on every rank, got {given!r}."
            )
    merged: dict[str, Any] = {"mesh": mesh, "outputs": "lazy", **options}
    ranks = SPConfig.of(merged).ranks()
    generating = _find_generating_model(model) if ranks.has_other_processes else None
    if generating is None or generating in _sharing_models:  # a single rank, or a context within another one
        yield model
        return
    sharing = CacheSharing(generating, ranks, merged)
    mute_fsdp_warning(generating)  # the results between the graphs stay sharded
    _sharing_models.add(generating)
    try:
        forward, generate = sharing.wrap_forward(generating.forward), sharing.wrap_generate(generating.generate)
        with mock.patch.multiple(generating, forward=forward, generate=generate):
            yield model
    finally:
        _sharing_models.discard(generating)


def _find_generating_model(model: nn.Module) -> Any:
    """Return the model of transformers inside of a model or wrapper.

    Raises:
        SpError: There is none, or its keys and values are not those of a decoder with exchangeable attention (SP841).
    """
    from transformers import GenerationMixin

    from ._compat.attention_names import has_attention_interface

    found: Any = next((module for module in model.modules() if isinstance(module, GenerationMixin)), None)
    name = type(model if found is None else found).__name__
    if found is None:
        fix = "Pass a model with generate(), such as AutoModelForCausalLM.from_pretrained(...)."
        raise SpError("SP841", f"model: expected a model of transformers with generate(), got {name}.", fix)
    if found.config.is_encoder_decoder:
        raise SpError("SP841", f"model: expected a decoder, got {name}, whose cross attention has a cache of its own.")
    if not has_attention_interface(found):
        raise SpError("SP841", f"model: expected attention by transformers' AttentionInterface, got {name} without it.")
    return found


class CacheSharing:
    """Methods in place of those of a model in `shard_cache`."""

    def __init__(self, model: Any, ranks: Ranks, options: Mapping[str, Any]) -> None:
        """Register the attention function.

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
        """Return a function in place of `generate()` that first refuses what is not supported.

        Args:
            generate: The model's `generate()`.

        Returns:
            The function, with the arguments of `generate()`.
        """

        @functools.wraps(generate)
        def generate_sharded(*args: Any, **kwargs: Any) -> Any:
            """Return the result of `generate()` with a sharded cache."""
            own = self.model.generation_config
            given = kwargs.get("generation_config") or own
            settings = _plain_settings(given, kwargs)
            refused = [name for name in REFUSED if kwargs.get(name) or settings.get(name)]
            # The kind of cache in the model's own configuration is not refused: it is replaced below.
            if not kwargs.get("cache_implementation") and given is own:
                refused = [name for name in refused if name != "cache_implementation"]
            error = _find_attention_error(self.model)
            if refused:
                error = SpError("SP842", f"{refused[0]}: expected None with shard_cache, got a value.")
            seed = _digest(_generator_state(self.model.device)) if settings.get("do_sample") else ""
            text = ", ".join(f"{name}={settings[name]!r}" for name in sorted(settings))
            # Raises on all ranks if one has an error, or if seeds or settings differ.
            self._require_agreement("generate", error, seed=seed, settings=text)
            if own.cache_implementation is not None:  # the model's default, such as "hybrid"
                kwargs["cache_implementation"] = "dynamic"
            # With FSDP, replicas that stop at an earlier step still take part in the all_gathers of weights.
            if must_gather_weights([*self.model.modules()]):
                kwargs.setdefault("synced_gpus", True)
            found = generate(*args, **kwargs)
            self._require_agreement("the end of generate", None, tokens=_digest(getattr(found, "sequences", found)))
            return found

        return generate_sharded

    def wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in place of the model's forward that runs prompts and steps with the sharded cache.

        Args:
            forward: The model's forward.

        Returns:
            The function, with the arguments of the forward.
        """
        signature = inspect.signature(forward)
        # The name of the parameter **kwargs of the forward; "" if it has none.
        kwargs_name = next((p.name for p in signature.parameters.values() if p.kind == p.VAR_KEYWORD), "")

        @torch.compiler.disable
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            """Return the model's result; without a cache, as in `generate(use_cache=False)`, it runs as it is."""
            arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
            arguments |= arguments.pop(kwargs_name, {})
            cache_name = next((name for name in CACHE_NAMES if arguments.get(name) is not None), None)
            return forward(*args, **kwargs) if cache_name is None else self._run(forward, arguments, cache_name)

        return run

    def _run(self, forward: Callable[..., Any], arguments: dict[str, Any], cache_name: str) -> Any:
        """Return the model's result for a prompt if the cache is empty, else for a step."""
        from .cached_rows import RowsLayer

        cache = arguments[cache_name]
        tokens = next(arguments[name] for name in TOKEN_NAMES if arguments.get(name) is not None)
        is_step = any(isinstance(layer, RowsLayer) for layer in getattr(cache, "layers", ()))
        error = None if is_step else _find_cache_error(cache, self.name)
        self._require_agreement(STEP, error, tokens=_digest(tokens), cache="" if error else str(cache.get_seq_length()))
        if is_step:
            return self._run_step(forward, arguments)
        if not cache.layers:  # a cache that creates its layers at the first use
            cache.layers = self._new_cache().layers
            cache.layer_class_to_replicate = None  # it then adds no further layers
        if self.model not in _tried:  # once per model: unsupported attention raises here, before any work
            self._try_step(forward, tokens, cache_name)
        if tokens.shape[1] <= self.ranks.n:  # at most one position a rank: too short to shard, so it runs eagerly
            cache.layers = self._rows_layers(cache)
            return self._run_step(forward, arguments)
        return self._run_prompt(forward, arguments, cache_name)

    def _require_agreement(self, subject: str, error: SpError | None, **fields: str) -> None:
        """Raise on all ranks if one has an error, or if fields differ (SP844)."""
        mismatch = SpError("SP844", f"{self.name}.generate: the ranks differ")
        message = Message(CALL_VERB, f"{self.name}: {subject}", fields=fields, error=error)
        require_agreement(self.ranks, message, mismatch)

    def _new_cache(self) -> Any:
        """Return an empty cache, as `generate()` creates it."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _rows_layers(self, cache: Any) -> list[Any]:
        """Return layers with rows of the rank in place of those of an empty cache.

        Dummy layers are kept: those of model layers that have no keys and values of their own.
        """
        from .cached_rows import RowsLayer

        return [
            old if dummy else RowsLayer(self.ranks, getattr(old, "sliding_window", None), number)
            for number, (old, dummy) in enumerate(zip(cache.layers, cache.is_dummy))
        ]

    def _try_step(self, forward: Callable[..., Any], tokens: torch.Tensor, cache_name: str) -> None:
        """Run a step of one token with a cache of its own, so that unsupported attention raises before any work."""
        cache = self._new_cache()
        cache.layers = self._rows_layers(cache)
        ids_name, embeddings_name = TOKEN_NAMES
        name = embeddings_name if tokens.is_floating_point() else ids_name
        devices = [tokens.device] if tokens.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices):  # restores the random state of the CPU and the device
            self._run_step(forward, {name: tokens[:1, :1], cache_name: cache, "use_cache": True})
        _tried.add(self.model)

    def _run_step(self, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Return the eager model's result for a new token or a short prompt. It attends to the rows of all ranks."""
        from ._compat.attention_names import select_attention
        from .cached_rows import ROWS_ATTENTION

        message = Message(CALL_VERB, f"{self.name}: {STEP}")
        with (
            # For ranks that wait in the attention. Nothing is compiled, so there are no lines of collectives or nodes.
            announce_failures(channel_of(self.ranks), message, places={}, lines={}),
            mark_running([self.ranks]),  # raises if the channel of the ranks was ended in the block
            mark_agreed(),  # every rank refuses an attention that is not supported
            select_attention(self.model, ROWS_ATTENTION),
            torch.compiler.set_stance("force_eager"),
        ):
            return forward(**arguments)

    def _run_prompt(self, forward: Callable[..., Any], arguments: dict[str, Any], cache_name: str) -> Any:
        """Return the compiled model's result, and replace the cache's layers by ones with this rank's rows.

        Dummy layers of transformers, those of model layers without keys and values of their own, remain as they are.
        """
        from sp_compile.backend import sp

        from .cached_rows import PromptLayer

        cache, prompt = arguments[cache_name], self._new_cache()
        is_dummy, layers = cache.is_dummy, self._rows_layers(cache)
        prompt.layers = [old if dummy else PromptLayer(old.is_sliding) for old, dummy in zip(cache.layers, is_dummy)]
        # torch.compile finds the code of an earlier prompt if function, backend and options are equal.
        compiled = torch.compile(forward, backend=sp, options=dict(self.options))
        with compile_prompt():
            out = compiled(**{**arguments, cache_name: prompt})
        for new, layer, dummy in zip(layers, prompt.layers, is_dummy):
            if not dummy:
                new.fill(layer.keys, layer.values)
                layer.keys = layer.values = None  # frees the rows that the new layer has not kept
        cache.layers = layers
        for name in CACHE_NAMES:
            if getattr(out, name, None) is prompt:
                out[name] = cache
        return out


def _find_attention_error(model: nn.Module) -> SpError | None:
    """Return the error for an attention that a user registered: steps would call the one of the sharded cache."""
    from ._compat.attention_names import find_replaced_attention

    name = find_replaced_attention(model)
    if name is None:
        return None
    cause = f"attn_implementation: expected functions of transformers for attention and masks, got {name}."
    fix = "Select another one by model.set_attn_implementation(...), or call generate() without shard_cache."
    return SpError("SP843", cause, fix)


def _find_cache_error(cache: Any, name: str) -> SpError | None:
    """Return the error for a cache that cannot be sharded, of a model with this name, or None."""
    from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if type(cache) is not DynamicCache:
        return SpError("SP842", f"past_key_values: expected a DynamicCache, got {type(cache).__name__}.")
    unknown = {type(layer) for layer in cache.layers} - {DummyLayer, DynamicLayer, DynamicSlidingWindowLayer}
    if unknown:
        kinds = ", ".join(sorted(kind.__name__ for kind in unknown))
        return SpError("SP841", f"model: expected layers with keys and values only, got {kinds} in {name}.")
    if cache.offloading:
        return SpError("SP842", "past_key_values: expected one that is not offloaded, got offloading=True.")
    if cache.get_seq_length() > 0:
        return SpError(
            "SP842", f"past_key_values: expected an empty cache, got one of {cache.get_seq_length()} positions."
        )
    return None


def _plain_settings(config: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `generate()`: the arguments, and a configuration's other values that are not the defaults.

    Only numbers, strings, and lists of them are returned, since ranks compare their text.
    """
    found = config.to_diff_dict() | {name: x for name, x in kwargs.items() if x is not None}
    found.pop("transformers_version", None)
    return {name: x for name, x in found.items() if _is_plain(x)}


def _is_plain(x: Any) -> bool:
    """Return True for a number, a string, and a list or tuple of such values."""
    return isinstance(x, int | float | str) or (isinstance(x, list | tuple) and all(map(_is_plain, x)))


def _generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator of a device, from which tokens are sampled."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _digest(x: torch.Tensor) -> str:
    """Return the shape and a digest of integers, which must be equal on all ranks; the shape of other tensors."""
    if x.is_floating_point():
        return str(tuple(x.shape))
    return f"{tuple(x.shape)} {hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()[:16]}"
