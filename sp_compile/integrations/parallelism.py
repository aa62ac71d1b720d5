"""Derive the mesh of an Accelerator whose ranks share sequences from accelerate's ParallelismConfig."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from typing import Any, NamedTuple

from accelerate.utils import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.warn import warn_once
from sp_compile.lowering.torch_compat import flatten_mesh

log = logging.getLogger(__name__)

# Axes of the mesh, with accelerate's names. Ranks along "cp" receive the same batches from accelerate's loaders.
REPLICA_AXIS, SHARD_AXIS, SEQUENCE_AXIS = "dp_replicate", "dp_shard", "cp"
WEIGHT_AXIS = "dp_shard_cp"  # the ranks over which FSDP shards weights: of the axes "dp_shard" and "cp"
BATCH_AXIS = "dp"  # ranks with different batches: of the axes "dp_replicate" and "dp_shard"

SHARD_FIX = (
    "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or TrainingArguments(fsdp=True), which shard "
    "weights; or leave out dp_shard_size."
)
SIZES = "dp_replicate_size", "dp_shard_size", "cp_size", "sp_size"
HANDLER_NAMES = "cp_handler", "sp_handler", "tp_handler"  # they configure packages that do not run
# Fields of the handlers: the values that have no effect in these packages either, and a fix for others. Any other field
# must have its default.
LENGTH_FIX = "Omit it. Batches may have sequences of any length."
HANDLER_FIELDS = {
    "cp_comm_strategy": (("allgather",), "Omit it, and pass sp_options={'attention': 'ring'}."),
    "sp_attn_implementation": ((None, "sdpa"), "Set attn_implementation of the model."),
    "sp_seq_length": ((None,), LENGTH_FIX),
    "sp_seq_length_is_variable": ((True,), LENGTH_FIX),
}


class AxisSizes(NamedTuple):
    """The numbers of ranks along the axes of the mesh."""

    replicate: int  # ranks with the same shard of the weights, and other batches
    shard: int  # ranks with other shards of the weights, and other batches
    sequence: int  # ranks that share sequences; with FSDP they have other shards of the weights


def config_of_environment() -> ParallelismConfig | None:
    """Return the sizes of the config file or the options of `accelerate launch`.

    `accelerate launch` passes them to each process in environment variables.

    Returns:
        The sizes; None if none were passed, as in a program that `accelerate launch` did not start.
    """
    is_given = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return ParallelismConfig() if is_given else None  # without arguments it reads the environment variables


def axis_sizes(config: ParallelismConfig | None, processes: int, is_sharded: bool = False) -> AxisSizes:
    """Return the sizes of the axes of the mesh. Of the sizes that are 1, one is derived from the number of processes.

    Args:
        config: The sizes that the user has passed. None: all ranks share each sequence.
        processes: The number of processes. With one, all sizes are 1, and others in `config` are ignored, with a
            warning.
        is_sharded: True if FSDP shards the weights.

    Returns:
        Numbers whose product is the number of processes.

    Raises:
        SpError: The product of the sizes differs (SP826), or a size or a setting of a handler is not supported (SP827).
    """
    if config is None:
        return AxisSizes(1, 1, processes)
    _check_handlers(config)
    if processes == 1:
        if passed := _passed_sizes(config):
            warn_once(log, "ParallelismConfig: %s has no effect with one process, which runs unsplit.", passed)
        return AxisSizes(1, 1, 1)
    if config.tp_size > 1:
        raise SpError("SP827", f"ParallelismConfig: tp_size={config.tp_size} is not supported.")
    replicate, shard = config.dp_replicate_size, config.dp_shard_size
    if shard > 1 and not is_sharded:
        raise SpError("SP827", f"ParallelismConfig: dp_shard_size={shard} requires FSDP, got DDP.", SHARD_FIX)
    sequence = max(config.sp_size, config.cp_size)  # they have the same meaning; the one that is not passed is 1
    if sequence == 1:
        sequence = max(processes // (replicate * shard), 1)
    elif is_sharded and shard == 1:
        shard = max(processes // (replicate * sequence), 1)
    elif replicate == 1:
        replicate = max(processes // (shard * sequence), 1)
    if replicate * shard * sequence != processes:
        expected = f"sizes whose product is {processes}, the number of processes"
        raise SpError("SP826", f"ParallelismConfig: expected {expected}, got {_passed_sizes(config)}.")
    return AxisSizes(replicate, shard, sequence)


def _passed_sizes(config: ParallelismConfig) -> str:
    """Return the sizes that are not 1 as text."""
    return " and ".join(f"{name}={getattr(config, name)}" for name in SIZES if getattr(config, name) > 1)


def _check_handlers(config: ParallelismConfig) -> None:
    """Raise SpError for settings of handlers, which configure the parallelism of torch and DeepSpeed.

    Raises:
        SpError: A setting is not the default (SP827).
    """
    for handler_name in HANDLER_NAMES:
        handler: Any = getattr(config, handler_name, None)
        for setting in fields(handler) if handler is not None else ():
            defaults, fix = HANDLER_FIELDS.get(setting.name, ((setting.default,), "Omit it."))
            value = getattr(handler, setting.name)
            if value not in defaults:
                cause = f"ParallelismConfig: {handler_name} with {setting.name}={value!r} is not supported."
                raise SpError("SP827", cause, fix)


def make_mesh(device_type: str, sizes: AxisSizes) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of all ranks, with a joint axis for weights, and the mesh of ranks with different batches.

    Args:
        device_type: The type of the devices, such as "cuda".
        sizes: The sizes of the axes.

    Returns:
        A mesh with axes ("dp_replicate", "dp_shard", "cp"), and one with the axis "dp".
    """
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=(REPLICA_AXIS, SHARD_AXIS, SEQUENCE_AXIS))
    flatten_mesh(mesh[SHARD_AXIS, SEQUENCE_AXIS], WEIGHT_AXIS)  # `mesh` then has this joint axis, too
    return mesh, flatten_mesh(mesh[REPLICA_AXIS, SHARD_AXIS], BATCH_AXIS)
