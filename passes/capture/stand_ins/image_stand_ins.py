"""Define what Dynamo traces in place of methods of vision-language models in transformers.

    h[mask, :] = h[mask, :] + features           ->  torch.where(mask, h + masked_scatter(0, mask, features), h)
    get_rope_index(input_ids, token_types, ...)  ->  a call between two graphs

Dynamo does not trace the first read, whose size is a value. It traces a part of the second method, which computes the
positions of tokens in Python from token types and sizes of images, in many graphs for each row of a batch. Methods are
found by their names in classes of models. Eager code runs the original ones.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.origin import has_code_of

# Arguments with which `get_rope_index` reads values on the host; without them some versions only compute on tensors.
READ_ON_HOST = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
# The body of the method that `add_at_mask` replaces, without comments; another body is traced as it is.
ADDITION = """
visual_pos_masks = visual_pos_masks.to(hidden_states.device)
visual_embeds = visual_embeds.to(hidden_states.device, hidden_states.dtype)
hidden_states = hidden_states.clone()
local_this = hidden_states[visual_pos_masks, :] + visual_embeds
hidden_states[visual_pos_masks, :] = local_this
return hidden_states
""".strip()


def replace_methods(model_class: type) -> None:
    """Replace methods of a class that has a stand-in by functions that call it while Dynamo traces.

    Args:
        model_class: A class of a model; methods that it inherits are replaced in the class that defines them.

    Returns:
        None.
    """
    for name, make in STAND_IN_METHODS.items():
        method = vars(model_class).get(name)
        if inspect.isfunction(method) and not hasattr(method, "is_stand_in"):
            stand_in = functools.wraps(method)(make(method))
            stand_in.is_stand_in = True  # type: ignore[attr-defined]
            setattr(model_class, name, stand_in)


def add_at_mask(hidden: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Add features to the rows at a mask, in the order of the rows.

    Args:
        hidden: [..., D].
        mask: Bool [...], of the rows.
        features: [the number of rows at the mask, D].

    Returns:
        A tensor of the shape of `hidden`.
    """
    rows = mask.to(hidden.device).unsqueeze(-1)
    # As the read at the mask does, raise if the numbers differ.
    torch_compat.assert_at_run(rows.sum() == features.shape[0], "features: expected one for each row at the mask.")
    added = torch.zeros_like(hidden).masked_scatter(rows, features.to(hidden.device, hidden.dtype))
    return torch.where(rows, hidden + added, hidden)


def _is_in_transformers(module: str) -> bool:
    """Return True for a module of transformers."""
    return module.startswith("transformers.")


def _body_of(method: Callable[..., Any]) -> str:
    """Return the statements of a method without comments, as `ast.unparse` formats them."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    return "\n".join(ast.unparse(statement) for statement in getattr(function, "body", ()))


def _make_addition(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with `add_at_mask` for programs, if it is transformers' own and has the body `ADDITION`."""
    try:
        can_replace = has_code_of(method, _is_in_transformers) and _body_of(method) == ADDITION
    except OSError:  # no source
        can_replace = False

    def add(self: Any, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Any:
        """Return hidden states with the features of images."""
        if can_replace and torch.compiler.is_compiling():
            return add_at_mask(hidden_states, visual_pos_masks, visual_embeds)
        return method(self, hidden_states, visual_pos_masks, visual_embeds)

    return add


def run_between_graphs(
    method: Callable[..., Any], reason: str, reads_on_host: Callable[[dict[str, Any]], bool]
) -> Callable[..., Any]:
    """Return a method such that Dynamo does not trace some of its calls: they run between two graphs.

    Args:
        method: The method, or the function of one.
        reason: The reason, for messages about the graph break.
        reads_on_host: Returns True for the arguments, by name, of a call that is not to be traced.

    Returns:
        A function with the same results.
    """
    names = tuple(inspect.signature(method).parameters)
    run_untraced = torch_compat.run_eagerly(method, reason)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Return the method's result."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        is_untraced = torch.compiler.is_compiling() and reads_on_host(given)
        return run_untraced(*args, **kwargs) if is_untraced else method(*args, **kwargs)

    return run


def _make_positions(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method such that Dynamo does not trace calls that read values on the host."""

    def reads_on_host(given: dict[str, Any]) -> bool:
        """Return True if an argument is given whose values the method reads."""
        return any(given.get(name) is not None for name in READ_ON_HOST)

    return run_between_graphs(method, f"{method.__name__} computes positions in Python", reads_on_host)


# Name of a method -> the function that makes its replacement.
STAND_IN_METHODS = {"_deepstack_process": _make_addition, "get_rope_index": _make_positions}
