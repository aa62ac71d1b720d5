"""Compare all weights and buffers of a model over the ranks, on request, and its weights before they are sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks, ranks_of, resolve
from sp_compile.runtime.control.message import Message, hash_text

from .agreement import (
    all_gather_object,
    describe_field_mismatch,
    format_mismatch,
    format_rank_rows,
    publish_failure,
    require_agreement,
)
from .fingerprint import value_digest
from .input_checks import local_value


def compare_weights(model: torch.nn.Module, mesh: DeviceMesh | None = None, mesh_dim: str | None = None) -> None:
    """Compare all weights and buffers of a model bitwise over the ranks that share its sequence.

    The backend compares checksums on the first call of a model and every `check_every` calls. Use this function between
    those calls: before a checkpoint is saved, after one is loaded, and to find the step of a drift. Every rank of the
    mesh must call it at the same point. It reads every weight once and synchronizes with the device. For a DTensor the
    local shards are compared, unless it is sharded over these ranks.

    Args:
        model: The module, compiled or not.
        mesh: The mesh, as in the options of the backend.
        mesh_dim: The dim of the mesh, as in the options of the backend.

    Returns:
        None.

    Raises:
        SpError: On every rank, if weights or buffers differ in a value, shape, dtype or name, with the first of them on
            each rank; if a rank is at another point of its program or does not arrive; or if the model has nothing to
            compare. If the mesh of a rank lacks the axis, the waiting ranks receive that error.
    """
    with publish_failure():
        ranks = resolve(mesh, mesh_dim)
    inner = getattr(model, "_orig_mod", model)
    state = [*inner.named_parameters(), *inner.named_buffers()]
    fields = {name: value_digest(local_value(x.detach())) for name, x in state if not _is_sharded_over(x, ranks)}
    error = None
    if not fields:
        expected = "a weight or buffer that every rank has in full"
        error = SpError("SP652", f"model: expected {expected}, got a {type(inner).__name__} without one.")
    mine = Message("compares", f"the weights of {type(inner).__name__}", fields=fields, error=error)
    all_fields = [message.fields for message in require_agreement(ranks, mine)]  # [] if all are equal
    names = dict.fromkeys(name for rank_fields in all_fields for name in rank_fields)
    differing = [name for name in names if len({rank_fields.get(name) for rank_fields in all_fields}) > 1]  # or missing
    if differing:
        rows = format_rank_rows(all_fields, differing)
        raise SpError("SP651", format_mismatch("the ranks of this group have different weights", rows))


def require_equal_weights(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Raise if the weights of a model differ between ranks of a mesh, before each of them stores a shard of its own.

    The sharded model would otherwise be composed of parts of different models. Weights on "meta" and DTensors are not
    compared. Every rank of the mesh must call it at the same point.

    Args:
        model: The model, before `fully_shard`.
        mesh: All ranks with equal weights, on any number of axes.

    Returns:
        None.

    Raises:
        SpError: On every rank, if a weight differs (SP642).
    """
    groups = [ranks for ranks in map(ranks_of, mesh.get_all_groups()) if ranks.has_other_processes]
    if not groups:
        return
    weights = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta and not isinstance(p, DTensor)}
    # Checksums of a CPU and of another device differ, so that weights are compared with those on the same one.
    fields = {f"{name} on {x.device.type}": value_digest(local_value(x)) for name, x in weights.items()}

    def gather(value: Any) -> list[Any]:
        """Return the value of each rank of the mesh, by an exchange along one axis after the other."""
        values = [(dist.get_rank(), value)]
        for ranks in groups:
            parts = all_gather_object(ranks, "shards", f"the weights of {type(model).__name__}", values)
            values = [pair for part in parts for pair in part]
        return [value for _, value in sorted(values, key=lambda pair: pair[0])]

    if len({*gather(hash_text(str(fields)))}) == 1:
        return
    cause = describe_field_mismatch(gather(fields), "weights differ between ranks, as with another seed on each")
    if cause:  # else the ranks have no weights in common, as on "meta"
        raise SpError("SP642", cause)


def _is_sharded_over(x: torch.Tensor, ranks: Ranks) -> bool:
    """Return True for a DTensor of which two of these ranks have different shards: it is not compared."""
    if not isinstance(x, DTensor) or ranks.process_group is None:
        return False
    members = {*dist.get_process_group_ranks(ranks.process_group)}
    for axis, placement in enumerate(x.placements):
        if not placement.is_replicate():
            axis_ranks = dist.get_process_group_ranks(x.device_mesh.get_group(axis))
            if len(members.intersection(axis_ranks)) > 1:
                return True
    return False
