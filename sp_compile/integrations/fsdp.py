"""Compile a model to which `fully_shard` was applied, by torch or accelerate.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "sp"))
    for layer in model.model.layers:
        fully_shard(layer)                          # over all ranks
    fully_shard(model)
    compile_under_fsdp(model, mesh["sp"])

If `fully_shard` was applied to layers, FSDP's hooks end a graph before and after each of them: the layers are compiled
separately, and so is the code after the last one, with the head and the loss.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from sp_compile.backend import sp
from sp_compile.generation import add_model, wrap_generation
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.layers import MODULE_LISTS
from sp_compile.lowering.base.options import MeshOptions, SPConfig
from sp_compile.lowering.base.ranks import resolve
from sp_compile.lowering.torch_compat import compile_in_place, is_compiled
from sp_compile.runtime.eager_fallback import class_before_fsdp, find_fsdp_submodules, mute_fsdp_warning

from .ddp import COMPILED
from .layer_calls import compare_layer_calls

__all__ = ["compile_under_fsdp"]

# Maximum number of graphs of one function. A decorator of transformers is one function that wraps many: between layers
# that are units of FSDP, it has a graph for each function that it wraps, in training and in evaluation.
MAX_GRAPHS = 64
CHECKPOINTED = "_checkpoint_wrapped_module"  # the attribute of torch's `checkpoint_wrapper` with the wrapped module
TRANSFORMERS = "transformers.modeling_utils"  # imported by every model of transformers
IDS_ARGUMENT = "embedded_ids"  # the argument of the forward in _trace_embedding, by which `seq_dims` names the sequence


def compile_under_fsdp(
    model: torch.nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Unpack[MeshOptions],
) -> torch.nn.Module:
    """Compile a model in place with backend="sp", after `fully_shard` was applied over all ranks.

    Gradients stay partial, so that FSDP's mean over all ranks is the mean over the replicas. If `fully_shard` was
    applied to layers, results between graphs stay sharded, from the embedding to the loss. The embedding is the module
    that `model.get_input_embeddings()` returns, if the model has this method of transformers, or else each
    `nn.Embedding` outside of the layers. If a forward has a loop over the layers, other operations in it, such as a
    loss, run eagerly on gathered values. Layers of transformers compute their attention masks, from positions, and the
    model gets `config.use_cache = False`. Weights of ranks that differed before `fully_shard` are not noticed: call
    `sp_compile.compare_weights` before it.

    Args:
        model: The model, a result of `fully_shard`, not compiled.
        mesh: The ranks that share a sequence. None selects the default process group.
        fullgraph: As for `torch.compile`.
        dynamic: As for `torch.compile`.
        **options: See `sp_compile.SPConfig` (`attention="ring"`). `param_grads` is "partial" by default.

    Returns:
        The model.

    Raises:
        SpError: The model is already compiled (SP831), `fully_shard` was not applied to it (SP833), or an option is
            invalid (SP101 to SP116).
    """
    if is_compiled(model):
        raise SpError("SP831", COMPILED)
    if not isinstance(model, FSDPModule):
        raise SpError("SP833", f"model: expected a result of fully_shard, got a {type(model).__name__} without it.")
    # Replace `generate()` by one that runs the model eagerly, before other code reads the method, such as
    # `register_fsdp_forward_method`. A wrapper, such as one of PEFT, calls that of a module.
    wrap_generation()
    for module in model.modules():
        if module is model or isinstance(module, FSDPModule) or hasattr(module, "generate"):
            add_model(module)
    merged: dict[str, Any] = {"mesh": mesh, "param_grads": "partial", **options}
    config = SPConfig.of(merged)  # raises here, not at the first call
    if find_fsdp_submodules(model):  # FSDP's hooks split the model into several graphs
        merged = _prepare_graphs(model, {"outputs": "lazy", **merged}, config.seq_dims == "auto", dynamic)
    compare_layer_calls(model, resolve(mesh, config.mesh_dim))
    limit = {"recompile_limit": MAX_GRAPHS}
    # The second argument is a check before each call; none is needed here.
    compile_in_place(model, lambda: None, limit, backend=sp, options=merged, fullgraph=fullgraph, dynamic=dynamic)
    return model


def _prepare_graphs(
    model: torch.nn.Module, options: dict[str, Any], detects_sequence: bool, dynamic: bool | None
) -> dict[str, Any]:
    """Prepare a model that runs as several graphs, and compile layers that Dynamo does not trace as a part of it.

    Args:
        model: The model.
        options: The options of the model.
        detects_sequence: True if the user has not named the sequence by `seq_dims`.
        dynamic: As for `torch.compile`.

    Returns:
        The options, with `seq_dims` for the ids of the embedding.
    """
    disable_cache(model)
    layers = dict.fromkeys([*_checkpointed_layers(model), *_prepare_attention(model)])
    of_torch = _modules_of_torch(model)
    embeddings = _find_embeddings(model, of_torch) if detects_sequence else []
    # The user's `seq_dims` names arguments of the model, and those below the argument of the embedding.
    of_layers = {name: value for name, value in options.items() if name != "seq_dims"}
    if embeddings:
        options = {**options, "seq_dims": {IDS_ARGUMENT: -1}}  # the last dim of the ids
    for embedding in embeddings:
        _trace_embedding(embedding)
    for module in of_torch:
        if module not in embeddings:
            _trace_module(module)
    for layer in layers:
        has_embedding = not {*embeddings}.isdisjoint(layer.modules())
        layer.compile(backend=sp, options=options if has_embedding else of_layers, dynamic=dynamic)
    _run_tables_eagerly(model)
    mute_fsdp_warning(model)
    return options


def disable_cache(model: torch.nn.Module) -> None:
    """Set `use_cache = False` in the configurations of a model of transformers.

    The state of a cache differs between layers, so that Dynamo would compile the code of a layer again for each layer.
    A layer that is computed again in the backward would also find its own keys in the cache.

    Args:
        model: The model; other models are not changed.

    Returns:
        None.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def find_input_embedding(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the input embedding of a model of transformers.

    Args:
        model: The model.

    Returns:
        None for other models, and for models without an embedding.
    """
    try:
        embedding: torch.nn.Module | None = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return embedding


def _find_embeddings(model: torch.nn.Module, of_torch: list[torch.nn.Module]) -> list[torch.nn.Embedding]:
    """Return the embeddings of ids: those with the weight of the input embedding, such as of an encoder and a decoder.

    Without an input embedding, return all of `of_torch`, the result of `_modules_of_torch`.
    """
    first = find_input_embedding(model)
    if first is None:
        return [x for x in of_torch if isinstance(x, torch.nn.Embedding)]
    weight = getattr(first, "weight", None)
    return [x for x in model.modules() if isinstance(x, torch.nn.Embedding) and (x is first or x.weight is weight)]


def _prepare_attention(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Make a model of transformers compute masks in its layers, and run its image encoders for images of any size.

    The forward of such an encoder computes positions on the host, from the sizes of the images. It runs eagerly, since
    Dynamo would compile this code for each size.

    Args:
        model: The model; other models are not changed.

    Returns:
        The layers of the encoders, which are compiled separately.
    """
    if TRANSFORMERS not in sys.modules:
        return []
    from ._compat.attention_names import (
        attend_to_packed_images,
        compute_masks_in_layers,
        count_features_eagerly,
        find_image_encoders,
    )

    layers: list[torch.nn.Module] = []
    for encoder, of_encoder in find_image_encoders(model).items():
        attend_to_packed_images(encoder)
        encoder.forward = torch.compiler.disable(encoder.forward)
        layers += [getattr(layer, CHECKPOINTED, layer) for layer in of_encoder]
    count_features_eagerly(model)
    units = [model.get_submodule(name) for name in find_fsdp_submodules(model)]
    compute_masks_in_layers(model, [getattr(unit, CHECKPOINTED, unit) for unit in units])
    return [layer for layer in layers if not is_compiled(layer)]


def _run_tables_eagerly(model: torch.nn.Module) -> None:
    """Run modules with tables alone eagerly, such as rotary positions, if they are parts of a model of transformers.

    The function with the loop over the layers runs eagerly, so that such a module would be a program of its own. If
    the function calls it for each of a set of strings, as that of Gemma 3 does, the order of the calls differs between
    processes, and ranks would run different programs.
    """
    if TRANSFORMERS not in sys.modules:
        return
    from ._compat.attention_names import find_tables

    for module in find_tables(model):
        module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]


def _modules_of_torch(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of `torch.nn` with `fully_shard`, and the outermost modules of `torch.nn` outside of layers.

    Lists of modules, and modules that contain layers with `fully_shard`, are not counted: their parts are.
    """
    units = {model.get_submodule(name) for name in find_fsdp_submodules(model)} | {*_checkpointed_layers(model)}
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()  # parts of units and of the modules that are found
    for module in model.modules():  # each before its parts
        parts = {*module.modules()} - {module}
        is_of_torch = class_before_fsdp(module).__module__.startswith("torch.nn.")
        is_outermost = module not in inside and not isinstance(module, MODULE_LISTS) and units.isdisjoint(parts)
        if module in units or (is_of_torch and is_outermost):
            inside |= parts
            found += [module] if is_of_torch else []
    return found


def _trace_module(module: torch.nn.Module) -> None:
    """Make torch.compile trace the forward of a module of `torch.nn`.

    If the forward of a model has a loop over layers with `fully_shard`, Dynamo runs it eagerly and compiles each
    function that it calls. It skips code in files of `torch.nn`, which then gathers its inputs. Therefore a function in
    this file, which Dynamo does not skip, calls the forward. In code that Dynamo traces, it is inlined.
    """
    forward = module.forward

    @functools.wraps(forward)
    def call_module(*args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's forward."""
        return forward(*args, **kwargs)

    module.forward = call_module  # type: ignore[method-assign]


def _checkpointed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules to which torch's `checkpoint_wrapper` was applied and that are not compiled yet."""
    wrapped = (getattr(module, CHECKPOINTED, None) for module in model.modules())
    return [layer for layer in wrapped if layer is not None and not is_compiled(layer)]


def _trace_embedding(embedding: torch.nn.Embedding) -> None:
    """Replace the forward of an embedding by a function that torch.compile traces as a graph of its own.

    Dynamo would skip the forward of a unit of FSDP, as code of `torch.nn`, and run it eagerly on full rows. It traces
    `embed`, which is code of this package. The graph of the embedding has no attention, from which its sequence would
    follow. The caller therefore names the argument `embedded_ids` in the option `seq_dims`. An embedding that is not a
    unit, such as one with a tied head, is called by a function at which the graph of its caller ends. Without a batch
    dim, ids may be classes of images as well as positions, so that their dim is no sequence.
    """
    forward = type(embedding).forward

    def embed(embedded_ids: torch.Tensor) -> Any:
        """Return the embeddings of ids, whose last dim is the sequence."""
        return forward(embedding, embedded_ids)

    @torch.compiler.disable(recursive=False)
    def end_graph_and_embed(embedded_ids: torch.Tensor) -> Any:
        """Return the embeddings of ids; a graph starts here, or in `embed` if Dynamo skips this function."""
        return embed(embedded_ids) if embedded_ids.dim() > 1 else forward(embedding, embedded_ids)

    run = embed if isinstance(embedding, FSDPModule) else end_graph_and_embed
    embedding.forward = functools.wraps(embedding.forward)(run)  # type: ignore[method-assign]
