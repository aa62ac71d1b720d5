"""Shard the weights of a model layer by layer with FSDP2, and compile it, in one call.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "sp"))
    model = AutoModelForCausalLM.from_pretrained(...)
    sp_compile.fully_shard_and_compile(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(input_ids=ids, labels=ids).loss          # ids from a loader with sp_compile.data.SequenceSampler

`compile_under_fsdp` compiles a model to which `fully_shard` was applied by other code. A unit is a module to which
`fully_shard` is applied: FSDP gathers its weights before it runs.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.layers import MODULE_LISTS
from sp_compile.lowering.base.options import MeshOptions, SPConfig
from sp_compile.lowering.base.warn import warn_once
from sp_compile.lowering.torch_compat import find_root_mesh, flatten_mesh, wrap_in_checkpoint
from sp_compile.runtime.weights import require_equal_weights

__all__ = ["fully_shard_and_compile"]

log = logging.getLogger(__name__)

AXES_OF_OTHER_WEIGHTS = "pp", "tp", "ep"  # along which the ranks have other weights of a model
HSDP_AXIS = "dp_replicate"  # the axis of ranks that store equal shards, as torchtitan and accelerate name it
SHARDED_AXES = "sp_compile_weights"  # the flattened axes of the ranks that store different shards
SHARED_WEIGHTS = (
    "fully_shard is not applied to %d of the %d layers of %s, such as %s, since they share weights with other modules: "
    "these layers are gathered for the whole step."
)
NO_LAYERS = (
    "fully_shard_and_compile found no layers in %s: all of its weights are gathered for the whole step, and "
    'checkpoint=True has no effect. Name the classes of its layers, as in layers=["Block"].'
)


def fully_shard_and_compile(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    layers: Collection[str | type[nn.Module]] | None = None,
    checkpoint: bool = False,
    fsdp: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **options: Unpack[MeshOptions],
) -> nn.Module:
    """Apply `fully_shard` to the layers and the root of a model, and compile it in place with backend="sp".

    The layers are of the classes that transformers names in `_no_split_modules`, or several modules of one class in a
    list, or else in attributes of one module (`block1`, `block2`). Rank 0 warns if there are none. The weights of one
    layer are gathered at a time; those outside of layers, such as the last norm and the head, are gathered for the
    whole step. The embedding, the layers, the head, and the loss that the model returns are computed on shards of the
    sequence. A model of transformers gets `config.use_cache = False`.

    Without a process group the model is compiled only.

    Args:
        model: The model, without `fully_shard`, DDP or `compile`, with equal weights on all ranks of the mesh, on the
            device of this rank; or on "meta".
        mesh: All ranks, with an axis "sp" whose ranks share a sequence, or the axis that `mesh_dim` names. Weights are
            sharded over all axes except "dp_replicate". A slice of a mesh may leave out "pp", "tp" and "ep", along
            which ranks have other weights. None: all ranks share each sequence.
        layers: Classes of the layers, or their names, instead of those that are found.
        checkpoint: If True, each layer is computed again in the backward.
        fsdp: Arguments of `fully_shard`: `mp_policy`, `offload_policy`, `reshard_after_forward`.
        dynamic: As for `torch.compile`.
        **options: See `sp_compile.SPConfig` (`attention="ring"`).

    Returns:
        The model.

    Raises:
        SpError: The model is prepared already (SP831, SP835, SP846), it has no layers of the given classes (SP836), the
            mesh lacks an axis or has them in another order (SP118, SP115), an option is invalid (SP101 to SP116), or
            the weights differ between ranks (SP642).
    """
    from sp_compile.backend import sp

    from .fsdp import compile_under_fsdp, disable_cache

    _refuse_prepared(model)
    names = find_layers(model, layers)
    if not names and (checkpoint or dist.is_initialized()):
        warn_once(log, NO_LAYERS, type(model).__name__)
    if mesh is None and dist.is_initialized():
        mesh = init_device_mesh(_device_to_train_on(model), (dist.get_world_size(),))
    SPConfig.of({"mesh": mesh, **options}).ranks()  # raises before the model is changed
    if (weight_mesh := None if mesh is None else _weight_mesh(mesh)) is not None:
        require_equal_weights(model, weight_mesh)
    disable_cache(model)
    _wrap_layers_in_checkpoints(model, names if checkpoint else [])
    if mesh is None:
        model.compile(backend=sp, options=options, dynamic=dynamic)
        return model
    _shard_weights(model, names, {"mesh": weight_mesh, **(fsdp or {})})
    return compile_under_fsdp(model, mesh, dynamic=dynamic, **options)


def _refuse_prepared(model: nn.Module) -> None:
    """Refuse a model that is compiled or wrapped in DDP, or to a module of which `fully_shard` was applied.

    Raises:
        SpError: The model is compiled (SP831), wrapped in DDP (SP846) or sharded (SP835).
    """
    from torch.distributed.fsdp import FSDPModule

    from .ddp import require_unprepared

    require_unprepared(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise SpError("SP835", "model: expected a model without fully_shard, got one to which it was applied.")


def find_layers(model: nn.Module, classes: Collection[str | type[nn.Module]] | None = None) -> list[str]:
    """Return the names of the layers of a model: modules of given classes that are not inside of another layer.

    Args:
        model: The model.
        classes: The classes or their names. None: the classes in `_no_split_modules`, an attribute of the models of
            transformers and diffusers; without it, classes with several modules in one container, or else in the
            attributes of one module.

    Returns:
        Names for `get_submodule`, in the order of `named_modules`; empty if no classes are given and none is found.

    Raises:
        SpError: A given class has no module in the model, or a string is given in place of a list (SP836).
    """
    if isinstance(classes, str):
        raise SpError("SP836", f"layers: expected a list of classes or names, got {classes!r}.")
    given = {name if isinstance(name, str) else name.__name__ for name in classes or ()}
    present = {type(module).__name__ for module in model.modules()}
    if given - present:
        raise SpError("SP836", f"layers: expected classes of modules of the model, got {sorted(given - present)}.")
    no_split = {*(getattr(model, "_no_split_modules", None) or ())}
    selected = given or (present & no_split)
    for parents in (MODULE_LISTS, nn.Module):
        selected = selected or _repeated_classes(model, parents)
    names: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{layer}.") for layer in names)
        if name and type(module).__name__ in selected and not is_inside:
            names.append(name)
    return names


def _wrap_layers_in_checkpoints(model: nn.Module, names: list[str]) -> None:
    """Wrap each layer in a checkpoint wherever it is in the model."""
    paths = defaultdict[nn.Module, list[str]](list)  # module -> its names: several, if it is in several places
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(path)
    for layer in [model.get_submodule(name) for name in names]:
        wrapper = wrap_in_checkpoint(layer)
        for path in paths[layer]:
            model.set_submodule(path, wrapper)


def _shard_weights(model: nn.Module, names: list[str], arguments: Mapping[str, Any]) -> None:
    """Apply `fully_shard` with the arguments to the input embedding, the layers with the names, and the model.

    An embedding or a layer that shares a weight with another module, such as an embedding with a tied head, is not
    sharded separately: its weights are gathered with those of the model. An embedding in a layer is a part of it.
    """
    from torch.distributed.fsdp import fully_shard

    from .fsdp import find_input_embedding

    units = [model.get_submodule(name) for name in names]
    embedding = find_input_embedding(model)
    is_in_layer = any(embedding is module for unit in units for module in unit.modules())
    if isinstance(embedding, nn.Embedding) and names and not is_in_layer:  # without layers, the model is the only unit
        units.insert(0, embedding)
    shared = find_shared_units(model, units)
    for unit in units:
        if unit not in shared:
            fully_shard(unit, **arguments)
    fully_shard(model, **arguments)
    left = [name for name in names if model.get_submodule(name) in shared]
    if left:
        warn_once(log, SHARED_WEIGHTS, len(left), len(names), type(model).__name__, left[0])


def _repeated_classes(model: nn.Module, parents: type[nn.Module] | tuple[type[nn.Module], ...]) -> set[str]:
    """Return the names of classes of which one module of the classes `parents` contains several modules.

    Containers, and modules without submodules, such as Linear, are not layers.
    """
    repeated: set[str] = set()
    for module in model.modules():
        if isinstance(module, parents):
            with_submodules = [child for child in module.children() if list(child.children())]
            counts = Counter(type(child).__name__ for child in with_submodules)
            repeated |= {name for name, count in counts.items() if count > 1}
    return repeated - {container.__name__ for container in MODULE_LISTS}


def _device_to_train_on(model: nn.Module) -> str:
    """Return the type of the device of a model; for a model on "meta" that of the accelerator, or "cpu"."""
    device = next(model.parameters()).device.type
    if device != "meta":
        return device
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _weight_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for `fully_shard`: all axes as one, after the axis of replicas if there is one.

    Raises:
        SpError: The axis of replicas is not the first one (SP115), or axes are left out (SP118).
    """
    names = mesh.mesh_dim_names or ()
    root = find_root_mesh(mesh)
    sizes = dict(zip(root.mesh_dim_names or (), root.shape, strict=False))
    left_out = root.size() // mesh.size()
    if left_out > math.prod(sizes.get(name, 1) for name in AXES_OF_OTHER_WEIGHTS):
        raise SpError("SP118", f"mesh: expected all axes of {tuple(sizes)}, of sizes {root.shape}, got {names}.")
    if HSDP_AXIS in names[1:]:
        raise SpError("SP115", f"mesh: expected {HSDP_AXIS!r} as the first axis, got axes {names}.")
    if HSDP_AXIS not in names or mesh.ndim == 1:  # no axis of replicas, or no other axis to shard over
        return flatten_mesh(mesh, SHARDED_AXES) if mesh.ndim > 1 else mesh
    others = tuple(name for name in names if name != HSDP_AXIS)
    if len(others) > 1:
        flatten_mesh(mesh[others], SHARDED_AXES)  # torch registers the result, by whose name `mesh` is then indexed
        others = (SHARDED_AXES,)
    return mesh[(HSDP_AXIS, *others)]


def find_shared_units(model: nn.Module, units: list[nn.Module]) -> set[nn.Module]:
    """Return the units that share a weight with a module outside of the unit.

    Args:
        model: The model.
        units: Modules of the model, none of which is inside of another one.

    Returns:
        The units with a shared weight.
    """
    paths = [*model.named_modules(remove_duplicate=False)]
    paths_of_units = [(path, module) for path, module in paths if module in units]
    owners = defaultdict[nn.Parameter, set[nn.Module]](set)  # weight -> units with it; the model for other modules
    for path, module in paths:
        # The unit that contains the module; the model, if none does.
        owner = next((unit for unit_path, unit in paths_of_units if f"{path}.".startswith(f"{unit_path}.")), model)
        for weight in module.parameters(recurse=False):
            owners[weight].add(owner)
    return {unit for sharing in owners.values() if len(sharing) > 1 for unit in sharing} - {model}
