"""Compare all weights and buffers of a model over the ranks, on request."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks, resolve
from sp_compile.runtime.control.message import Message

from .agreement import (
    all_gather_messages,
    describe_operation_mismatch,
    format_mismatch,
    format_rank_rows,
    publish_failure,
)
from .fingerprint import value_digest
from .input_checks import local_value


def compare_weights(model: torch.nn.Module, mesh: DeviceMesh | None = None, mesh_dim: str | None = None) -> None:
    """Compare all weights and buffers of `model` over the ranks that share its sequence: now, every bit.

    The backend compares checksums by itself on a model's first call and every `check_every` calls. This is for what is
    between: before a checkpoint is saved, after one was loaded, and to find the step of a drift. Every rank of the mesh
    calls it at the same place of its program; mesh and mesh_dim are those of the options. Of a DTensor each rank's part
    is compared, unless it is sharded over these ranks. It reads every weight once, and waits for the device.

    Raises SpError, on every rank: weights or buffers differ in a value, a shape, a dtype or a name, with the first of
    them and what each rank has; a rank is at another place of its program, or does not come; the model holds nothing
    that could be compared. Where the mesh of one rank alone has no such axis, the others hear of it while they wait.
    """
    with publish_failure():
        ranks = resolve(mesh, mesh_dim)
    inner = getattr(model, "_orig_mod", model)
    held = [*inner.named_parameters(), *inner.named_buffers()]
    fields = {name: value_digest(local_value(x.detach())) for name, x in held if not _is_sharded_over(x, ranks)}
    error = None
    if not fields:
        error = SpError("SP652", f"model: {type(inner).__name__} has no weight that these ranks share.")
    everyone = all_gather_messages(
        ranks, Message("compares", f"the weights of {type(inner).__name__}", fields=fields, error=error)
    )
    if everyone is None:
        return
    failed = next((one.error for one in everyone if one.error is not None), None) or describe_operation_mismatch(
        everyone
    )
    if failed is not None:
        raise failed
    names = dict.fromkeys(name for one in everyone for name in one.fields)
    other = [name for name in names if len({one.fields.get(name) for one in everyone}) > 1]
    rows = format_rank_rows([one.fields for one in everyone], other)
    raise SpError("SP651", format_mismatch("the ranks of this group hold different weights", rows))


def _is_sharded_over(x: torch.Tensor, ranks: Ranks) -> bool:
    """Is it a DTensor of which each of these ranks has another part?"""
    if not isinstance(x, DTensor) or ranks.process_group is None:
        return False
    ours = {*dist.get_process_group_ranks(ranks.process_group)}
    axes = [i for i, placement in enumerate(x.placements) if not placement.is_replicate()]
    return any(len(ours.intersection(dist.get_process_group_ranks(x.device_mesh.get_group(i)))) > 1 for i in axes)
