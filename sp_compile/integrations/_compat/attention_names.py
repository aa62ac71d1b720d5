"""Access private parts of transformers: how a model selects its attention function, and how it creates masks.

Tested with transformers 5.24.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sp_compile.lowering.base.origin import has_code_of
from sp_compile.lowering.torch_compat import pytree, run_eagerly
from sp_compile.passes.capture.stand_ins.image_stand_ins import run_between_graphs
from sp_compile.runtime.eager_fallback import class_before_fsdp

SDPA = "sdpa"  # the name that selects scaled_dot_product_attention
MASK_FUNCTIONS = {SDPA: sdpa_mask, "eager": eager_mask}  # name of an attention -> the function that computes its masks
CODES: dict[str, CodeType] = {}  # class of a layer -> the code of its forward that computes masks
DELAYED: dict[int, bool] = {}  # ids of configurations of models whose layers compute masks, which Dynamo looks up here
# The same function for the images of a batch, in one call. To names with "flash", vision models pass the cumulated
# lengths of the images. For other names they read the lengths on the host, and call the function for each image.
PACKED_IMAGES = "sdpa_of_packed_images_as_flash"
PLACEHOLDER_METHOD = "get_placeholder_mask"  # returns the masks of tokens that features of images replace
FEATURES_REASON = "the text of an error has a number of features"
CUMULATED_LENGTHS = "cu_seq_lens_q"  # the argument with these lengths
# Arguments that describe the images, and that functions without "flash" in their names do not get.
OF_PACKED_IMAGES = (CUMULATED_LENGTHS, "cu_seq_lens_k", "max_length_q", "max_length_k")
EAGER_ATTENTION = "eager_attention_forward"  # the function in the file of a model that the name "eager" selects
OWN_PACKAGES = ("transformers", "sp_compile")  # packages whose functions have the documented values


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


def find_replaced_attention(model: torch.nn.Module) -> str | None:
    """Return the name of an attention that a model selects, and whose functions are not those of transformers.

    Args:
        model: The model.

    Returns:
        The name, with the function in parentheses: one that a user registered under this name, for attention or for
        masks. None if all functions are those of transformers.
    """
    configs = _with_parts(m.config for m in model.modules() if isinstance(m, PreTrainedModel))
    names = {config._attn_implementation_internal for config in configs} - {None}
    files = {sys.modules.get(class_before_fsdp(module).__module__) for module in model.modules()}
    eager = [getattr(file, EAGER_ATTENTION) for file in files if hasattr(file, EAGER_ATTENTION)]
    for name in sorted(names):
        own = [*eager] if name == "eager" else []
        attention = [ALL_ATTENTION_FUNCTIONS[name]] if name in ALL_ATTENTION_FUNCTIONS else own
        for function in [*attention, ALL_MASK_ATTENTION_FUNCTIONS.get(name)]:
            if not _is_own(function):
                return f"{name} ({getattr(function, '__qualname__', function)})"
    return None


def _is_in_own_package(module: str) -> bool:
    """Return True for a module of transformers or of this package."""
    return module.partition(".")[0] in OWN_PACKAGES


def _is_own(function: Any) -> bool:
    """Return True for a function of transformers, or of this package in place of one; False for None."""
    is_delaying = isinstance(function, functools.partial) and function.func is _delay_mask
    return is_delaying or (function is not None and has_code_of(function, _is_in_own_package))


class MaskArguments:
    """A function of transformers for masks with its arguments, of which a layer computes its mask.

    They have tensors of B x S elements at most, and the mask B x S x S. Attributes, indexing, operators and functions
    of torch use the mask. `isinstance(x, torch.Tensor)` is False.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Store the function and its arguments: functions of positions, sizes, and tensors that the functions index."""
        self.function = function
        self.arguments = arguments

    def compute_mask(self) -> Any:
        """Compute the mask.

        Returns:
            A tensor of shape [B, 1, S, S], or None if the attention function has a flag for the mask.
        """
        return self.function(**self.arguments)

    def __getattr__(self, name: str) -> Any:
        if name in {"arguments", "function"} or name.startswith("__"):  # such as those that `copy` reads
            raise AttributeError(name)
        return getattr(self._compute_tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        return self._compute_tensor()[index]

    def __len__(self) -> int:
        return len(self._compute_tensor())

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with masks in place of these objects, which may be in lists."""
        args, kwargs = pytree.tree_map_only(cls, cls._compute_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _compute_tensor(self) -> torch.Tensor:
        """Return the mask as a tensor, without the flags by which it would be None."""
        flags = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: torch.Tensor = self.function(**{**self.arguments, **flags})
        return mask


def _use_mask(operator: str) -> Callable[..., Any]:
    """Return a method that calls the operator of the mask, such as "__lt__"."""
    return lambda self, *others: getattr(self._compute_tensor(), operator)(*others)


_REFLECTED = (
    "and or xor add sub mul truediv floordiv mod pow matmul".split()
)  # operators with a form for the second operand
for _name in (*"eq ne lt le gt ge neg invert abs".split(), *_REFLECTED, *(f"r{name}" for name in _REFLECTED)):
    setattr(MaskArguments, f"__{_name}__", _use_mask(f"__{_name}__"))


def compute_masks_in_layers(model: torch.nn.Module, units: Iterable[torch.nn.Module]) -> None:
    """Make the layers of a model of transformers compute their masks, if they are compiled separately.

    Otherwise the model computes a mask of S x S before its layers, and the mask is an input of each, on every rank.
    The names of attention functions do not change, since the code of some models compares them. A mask function that
    the user registers, before or after, is not replaced: it gets the same arguments as without this package.

    Args:
        model: The model, or a wrapper of one.
        units: The modules that are compiled separately; those outside of models of transformers are not changed.

    Returns:
        None.
    """
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    for name, function in MASK_FUNCTIONS.items():
        if AttentionMaskInterface()[name] is function:  # not a function of the user, nor the one registered here before
            AttentionMaskInterface.register(name, functools.partial(_delay_mask, function))
    for config in (m.config for m in parts):
        if id(config) not in DELAYED:
            DELAYED[id(config)] = True
            weakref.finalize(config, DELAYED.pop, id(config), None)
    inside = {id(module) for part in parts for module in part.modules()}
    layers = [m for m in units if id(m) in inside and not any(isinstance(x, PreTrainedModel) for x in m.modules())]
    # Layers that share weights are not units, and run in the program of the model. Other layers have their classes.
    classes = tuple({class_before_fsdp(layer) for layer in layers if [*layer.children()]})
    for module in model.modules():
        if isinstance(module, classes):
            _compute_masks_before(module)


def find_tables(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the parts of models of transformers that have buffers alone, such as rotary positions.

    Args:
        model: The model, or a wrapper of one.

    Returns:
        Children of models of transformers, without weights, parts, and entries of a state dict.
    """
    parents = [parent for parent in model.modules() if isinstance(parent, PreTrainedModel)]
    return [
        child
        for parent in parents
        for child in parent.children()
        if [*child.buffers()] and not [*child.parameters(), *child.children()] and not child.state_dict()
    ]


def find_image_encoders(model: torch.nn.Module) -> dict[Any, list[torch.nn.Module]]:
    """Return the parts of a model of transformers that encode packed images, and use sdpa.

    Args:
        model: The model, or a wrapper of one.

    Returns:
        The innermost models of transformers whose attention accepts cumulated lengths of images, with their layers: the
        modules in a ModuleList that have such an attention.
    """
    found: dict[Any, list[torch.nn.Module]] = {}
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part.config._attn_implementation_internal != SDPA:
            continue
        if any(isinstance(inner, PreTrainedModel) for inner in [*part.modules()][1:]):
            continue
        lists = [m for m in part.modules() if isinstance(m, torch.nn.ModuleList)]
        layers = [layer for one in lists for layer in one if any(map(_packs_images, layer.modules()))]
        if layers:
            found[part] = layers
    return found


def attend_to_packed_images(encoder: torch.nn.Module) -> None:
    """Make an encoder attend to all images of a batch in one call, so that its program fits all sizes of images.

    The configuration of the encoder is copied, since other models may have the same one, and are created from it.

    Args:
        encoder: A result of `find_image_encoders`.

    Returns:
        None.
    """
    AttentionInterface.register(PACKED_IMAGES, _attend_to_images)
    AttentionMaskInterface.register(PACKED_IMAGES, _mask_as_sdpa)
    shared, config = encoder.config, copy.copy(encoder.config)
    config._attn_implementation_internal = PACKED_IMAGES
    for module in encoder.modules():
        if getattr(module, "config", None) is shared:
            module.config = config


def count_features_eagerly(model: torch.nn.Module) -> None:
    """Make a model of transformers check the number of features of images outside of its programs.

    The text of the error has this number, so that Dynamo would compile the merge of features again for each number.
    The check reads sizes of embeddings and features, and the ids.

    Args:
        model: The model, or a wrapper of one.

    Returns:
        None.
    """
    for part in model.modules():
        method = getattr(part, PLACEHOLDER_METHOD, None) if isinstance(part, PreTrainedModel) else None
        if method is not None and any(name.endswith("_features") for name in inspect.signature(method).parameters):
            setattr(part, PLACEHOLDER_METHOD, run_between_graphs(method, FEATURES_REASON, _reads_ids))


def _reads_ids(given: dict[str, Any]) -> bool:
    """Return True for a search by the ids of tokens; others compare the embeddings, on shards."""
    return given.get("input_ids") is not None


def _packs_images(module: torch.nn.Module) -> bool:
    """Return True for an attention module that passes cumulated lengths to its attention function."""
    try:
        return f"{CUMULATED_LENGTHS}=cu_seqlens" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):  # no source
        return False


def _attend_to_images(
    module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """Return the result of sdpa for images that follow each other in the sequence, each of which attends to itself.

    Args:
        module: The attention module.
        query: [1, H, S, D], of the patches of all images.
        key: [1, H, S, D].
        value: [1, H, S, D].
        attention_mask: None.
        **kwargs: Arguments of sdpa, and `cu_seq_lens_q`, the first patch of each image and S, int [images + 1].
    """
    attention = ALL_ATTENTION_FUNCTIONS[SDPA]  # a user may have replaced it
    starts = kwargs.get(CUMULATED_LENGTHS)
    if starts is None:
        return attention(module, query, key, value, attention_mask, **kwargs)
    kwargs = {name: x for name, x in kwargs.items() if name not in OF_PACKED_IMAGES}
    if not torch.compiler.is_compiling():
        return _attend_to_each_image(attention, starts, module, query, key, value, attention_mask, **kwargs)
    if attention is not sdpa_attention_forward:  # its values may depend on the mask, which is None without this package
        return _attend_between_graphs(attention, starts, module, query, key, value, attention_mask, **kwargs)
    image = torch.searchsorted(starts[1:], torch.arange(query.shape[2], device=query.device), right=True)
    mask = image[None, None, :, None] == image[None, None, None, :]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _attend_to_each_image(
    attention: Callable[..., Any],
    starts: torch.Tensor,
    module: torch.nn.Module,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    **kwargs: Any,
) -> Any:
    """Call an attention function for each image, as transformers does for names without "flash"."""
    lengths = starts.diff().tolist()
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    return torch.cat([attention(module, *part, mask, **kwargs)[0] for part in parts], dim=1), None


_attend_between_graphs = run_eagerly(_attend_to_each_image, "a registered attention function gets one image a call")


def _mask_as_sdpa(*args: Any, **kwargs: Any) -> Any:
    """Return the mask of the function that is registered for sdpa."""
    return ALL_MASK_ATTENTION_FUNCTIONS[SDPA](*args, **kwargs)


def _delay_mask(function: Callable[..., Any], config: Any = None, **arguments: Any) -> Any:
    """Return the arguments of a mask in place of it, in a compiled program of a prepared model; otherwise the mask."""
    given = arguments.get("attention_mask")
    if isinstance(given, MaskArguments):  # a mask that was already created: transformers returns such a tensor
        return given
    if torch.compiler.is_compiling() and id(config) in DELAYED:
        return MaskArguments(function, arguments)
    return function(**arguments)


def _compute_masks_before(layer: torch.nn.Module) -> None:
    """Make the forward of a layer compute masks of which it gets the arguments, in the program of the layer.

    Dynamo stores its programs, and which sizes are dynamic, by code object: there is one for each class of layers.
    """
    forward = layer.forward

    def run_with_masks(*args: Any, **kwargs: Any) -> Any:
        """Return the result of the layer's forward."""
        computed = {key: _compute_given_mask(value) for key, value in kwargs.items()}
        return forward(*map(_compute_given_mask, args), **computed)

    name = class_before_fsdp(layer).__name__
    run_with_masks.__code__ = CODES.setdefault(name, run_with_masks.__code__.replace(co_name=name))
    layer.forward = functools.wraps(forward)(run_with_masks)  # type: ignore[method-assign]


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


def _compute_given_mask(value: Any) -> Any:
    """Return the mask if an argument of a layer is `MaskArguments`, and a new dict if a dict has some.

    Other arguments are returned as they are, since a layer may write to them, as to a cache.
    """
    if isinstance(value, MaskArguments):
        return value.compute_mask()
    if type(value) is dict and any(isinstance(mask, MaskArguments) for mask in value.values()):
        return {key: _compute_given_mask(mask) for key, mask in value.items()}
    return value
