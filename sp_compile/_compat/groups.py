"""What torch.distributed keeps to itself: process groups by name, flattened meshes, symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Registers the meta kernels of torch.ops._c10d_functional, which need no process group.
import torch.distributed._functional_collectives


def process_group(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives know by this name."""
    return dist.distributed_c10d._resolve_process_group(name)


def known_process_group(name: str) -> bool:
    """Can functional collectives find a process group of this name?"""
    try:
        return process_group(name) is not None
    except RuntimeError:
        return False


def register_process_group(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` by this name."""
    torch._C._distributed_c10d._register_process_group(name, group)


def process_groups() -> list[tuple[str, tuple[int, ...], str]]:
    """(name, global ranks in the order of the group, backends) of every group that this process is in, oldest first."""
    world = dist.distributed_c10d._world
    return [
        (world.pg_names[group], tuple(sorted(ranks, key=ranks.__getitem__)), str(world.pg_backend_config[group]))
        for group, ranks in world.pg_group_ranks.items()
        if group in world.pg_names
    ]


def default_timeout() -> timedelta | None:
    """After how long a collective of the default group gives up; new_group takes a longer one unless told."""
    group = dist.group.WORLD
    backend = group._get_backend(dist.distributed_c10d._get_pg_default_device(group))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def group_names(mesh: dist.DeviceMesh) -> list[str]:
    """The process group of every axis of a mesh that this rank is in."""
    return [mesh.get_group(i).group_name for i in range(mesh.ndim)]


def flat_mesh(mesh: dist.DeviceMesh, name: str) -> dist.DeviceMesh:
    """The mesh's axes as one, called `name`; creates a group once, so every rank of the mesh must call it."""
    return mesh._flatten(name)


def symmetric_all_to_all() -> Callable[..., None] | None:
    """torch's all_to_all_nd(input, out, scatter_dim, gather_dim, *, group), which 2.11 to 2.13 do not have."""
    from torch.distributed import _symmetric_memory

    return getattr(_symmetric_memory, "all_to_all_nd", None)


def symmetric_memory(size: int, device: torch.device, group: str) -> tuple[torch.Tensor, Any]:
    """`size` bytes that all ranks of the group can reach, and the handle to the others'; every rank calls it.

    The handle has rank, buffer_ptrs (a list of addresses) and barrier(channel). Not tried: it takes a GPU a rank.
    """
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    return memory, _symmetric_memory.rendezvous(memory, group)
