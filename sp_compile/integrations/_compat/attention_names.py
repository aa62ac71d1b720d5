"""Access private parts of transformers that a sharded cache requires: how a model selects its attention function.

Tested with transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


def register_attention(name: str, attention: Callable[..., Any]) -> None:
    """Register an attention function that a configuration selects by name, and that always gets a bool mask.

    For sdpa, transformers replaces some masks by None and a flag.

    Args:
        name: The name that a configuration selects.
        attention: The function.

    Returns:
        None.
    """

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        """Return the mask of sdpa as a tensor, without the flags by which it would return None."""
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)


def has_attention_interface(model: torch.nn.Module) -> bool:
    """Return True if a model of transformers calls the attention function that its configuration selects.

    Args:
        model: The model.

    Returns:
        False for models with attention code of their own.
    """
    return all(m._supports_attention_backend for m in model.modules() if isinstance(m, PreTrainedModel))


@contextmanager
def select_attention(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Select a registered attention function for all parts of a model in the context.

    Args:
        model: The model.
        name: The name of the function.

    Returns:
        A context manager that yields None.
    """
    configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    before = [(config, config._attn_implementation_internal) for config in _with_parts(configs)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, selected in before:
            config._attn_implementation_internal = selected


def _with_parts(configs: Iterable[Any]) -> list[Any]:
    """Return configurations and those of their parts, such as the text model's, each once."""
    found = {id(config): config for config in configs}
    pending = [*found.values()]  # configurations whose parts are not added yet
    while pending:
        config = pending.pop()
        parts = [getattr(config, name, None) for name in config.sub_configs]
        new = [part for part in parts if part is not None and id(part) not in found]
        found.update((id(part), part) for part in new)
        pending += new
    return [*found.values()]
