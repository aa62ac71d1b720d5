"""What torch.distributed keeps to itself: process groups by name, flattened meshes, symmetric memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
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


def all_groups() -> list[dist.ProcessGroup]:
    """Every group that this process is in, oldest first."""
    world = dist.distributed_c10d._world
    return [group for group in world.pg_group_ranks if group in world.pg_names]


def abort_waits(group: dist.ProcessGroup) -> None:
    """Let every collective of the group raise that waits in this process, from any thread; it is of no use afterwards.

    Gloo cannot abort (torch 2.13: `abort()` does nothing). There a receive that gives up ends all that waits for the
    group's connections and closes these, which ends what the other ranks wait for as well.
    """
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if backend.name() != "gloo":
            backend.abort()
            continue
        for peer in range(backend.size()):
            if peer != backend.rank() and _abort_peer(backend, peer):
                break


def _abort_peer(backend: Any, peer: int) -> bool:
    """Give up to receive from a rank; False if the connection to that one, and perhaps no other, is closed already."""
    never = torch.empty(1, device="cpu")
    with contextlib.suppress(RuntimeError):
        work = backend.recv([never], peer, NEVER_SENT)
        leak((work, never))
        try:
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            return "Timed out" in str(error)
    return False


NEVER_SENT = 0x5B_0057  # a tag


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """After how long a collective of the group gives up."""
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return min((one._timeout for one in options if hasattr(one, "_timeout")), default=timedelta(minutes=30))


def group_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that moves the group's tensors of a device, as in "nccl"; "" where it has none for them."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return ""


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that the ranks of the group have met in."""
    return dist.distributed_c10d._world.pg_map[group][1]


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A communicator on the CPU that is in no table of torch's: neither destroyed nor named with the others.

    timeout: of connecting, which no signal interrupts. Raises RuntimeError if a rank does not connect.
    """
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def leak(it: object) -> None:
    """Never destroy it, at the end of the process either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(it))


def drain_gloo_threads(seconds: float = 1.0) -> None:
    """Give Gloo's threads, those of the user's groups too, so many seconds to drop what they exchanged last.

    Whoever waits for an exchange goes on before its thread has dropped the tensors. For one that Python knows it
    takes the GIL, and if Python has ended by then the process aborts ("terminate called without an active exception",
    torch 2.13; pytorch/pytorch#190489). `destroy_process_group` waits for them, and is the user's to call.
    """
    deadline, idle = time.monotonic() + seconds, 0
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # without the GIL: a thread that waits for it goes on here
        idle = (
            0
            if sys.platform == "linux" and any(map(_is_gloo_thread_busy, Path("/proc/self/task").iterdir()))
            else idle + 1
        )


POLL_SECONDS = 0.002  # seconds


def _is_gloo_thread_busy(thread: Path) -> bool:
    """Is it one of Gloo's, and does it run, or want to? One that waits for ranks, or for work, sleeps."""
    try:
        name, _, state = (thread / "stat").read_text().partition("(")[2].rpartition(") ")
    except OSError:  # it has ended
        return False
    return name == "pt_gloo_runloop" and state[0] != "S"


def group_names(mesh: dist.DeviceMesh) -> list[str]:
    """The process group of every axis of a mesh that this rank is in."""
    return [mesh.get_group(i).group_name for i in range(mesh.ndim)]


def flatten_mesh(mesh: dist.DeviceMesh, name: str) -> dist.DeviceMesh:
    """The mesh's axes as one, called `name`; creates a group once, so every rank of the mesh must call it."""
    return mesh._flatten(name)


def symmetric_all_to_all() -> Callable[..., None] | None:
    """Return torch's all_to_all_nd(input, out, scatter_dim, gather_dim, *, group), from 2.14 on; None before."""
    from torch.distributed import _symmetric_memory

    return getattr(_symmetric_memory, "all_to_all_nd", None)


def symmetric_memory(size: int, device: torch.device, group: str) -> tuple[torch.Tensor, Any]:
    """`size` bytes that all ranks of the group can reach, and the handle to the others'; every rank calls it.

    The handle has barrier(channel). Not run by the tests: it takes a GPU for each rank.
    """
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    return memory, _symmetric_memory.rendezvous(memory, group)


def is_lost_connection(error: BaseException) -> bool:
    """Has a collective waited for a rank in vain, or lost it?"""
    named = (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)
    words = """Timed out waiting, Application timeout, Connection closed by peer, Connection reset by peer, Broken pipe,
    Read error""".split(", ")
    return isinstance(error, named) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
