"""Access torch.distributed's private state: groups by name, flattened meshes, symmetric memory.

Functional collectives (torch.ops._c10d_functional), the ones in graphs, refer to a process group by its name. A group
has one backend per device type: NCCL for GPUs, Gloo for CPUs. Symmetric memory is memory on each GPU of a group that
the other GPUs can read and write directly.
"""

import contextlib
import ctypes
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Registers the meta kernels of torch.ops._c10d_functional, which need no process group.
import torch.distributed._functional_collectives

_FUNCTIONAL = torch.library.Library("_c10d_functional", "IMPL", "CPU")


@torch.library.impl(_FUNCTIONAL, "all_gather_into_tensor")
def gather_on_cpu(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """Run the functional all-gather of CPU tensors as the one into a given result.

    Torch's own kernel corrupts the heap on Gloo. After each operation, a thread of ProcessGroupGloo assigns the name of
    the operation to one std::string of the group, without a lock (runLoop, torch 2.13). A group has two such threads.
    The next operation may end in the other one at the same time, even if the program waits for each. A name of more
    than 15 characters is on the heap, and both threads may free it. Among collectives, only this kernel has one:
    ALLGATHER_COALESCED. `tests/support/programs/gloo_names.py` shows the crash without this package.

    Args:
        x: (s, ...), any dtype, on a CPU.
        n: Number of ranks.
        group: Name of the process group.

    Returns:
        (n * s, ...), to be waited for.
    """
    gathered = x.new_empty((n * x.shape[0], *x.shape[1:]))
    return torch.ops._c10d_functional.all_gather_into_tensor_out(x.contiguous(), n, group, out=gathered)


@torch.library.impl(_FUNCTIONAL, "all_gather_into_tensor_coalesced")
def gather_each_on_cpu(xs: list[torch.Tensor], n: int, group: str) -> list[torch.Tensor]:
    """Run the functional all-gather of several CPU tensors as one of each, see `gather_on_cpu`.

    Args:
        xs: (s, ...) each, any dtypes, on a CPU.
        n: Number of ranks.
        group: Name of the process group.

    Returns:
        (n * s, ...) of each, to be waited for.
    """
    return [gather_on_cpu(x, n, group) for x in xs]


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name, the one on which functional collectives run."""
    return dist.distributed_c10d._resolve_process_group(name)


def is_known_process_group(name: str) -> bool:
    """Return True if this process has registered a group of this name, so that collectives can run."""
    try:
        return process_group(name) is not None
    except RuntimeError:
        return False


def register_process_group(name: str, group: dist.ProcessGroup) -> None:
    """Register a group that the package implements itself, for functional collectives in graphs."""
    torch._C._distributed_c10d._register_process_group(name, group)


class GroupRecord(NamedTuple):
    """Description of a process group."""

    name: str  # by which functional collectives find it
    ranks: tuple[int, ...]  # global ranks in group order
    backends: str  # such as "cpu:gloo,cuda:nccl"


def process_groups() -> list[GroupRecord]:
    """Return the name, ranks and backends of every group of this process, oldest first."""
    world, records = dist.distributed_c10d._world, list[GroupRecord]()
    for group in all_groups():
        group_ranks = world.pg_group_ranks[group]  # rank in the group by global rank
        ranks = tuple(sorted(group_ranks, key=group_ranks.__getitem__))
        records.append(GroupRecord(world.pg_names[group], ranks, str(world.pg_backend_config[group])))
    return records


def all_groups() -> list[dist.ProcessGroup]:
    """Return every group of this process, oldest first."""
    world = dist.distributed_c10d._world
    return [group for group in world.pg_group_ranks if group in world.pg_names]


def abort_waits(group: dist.ProcessGroup) -> None:
    """Abort every collective of the group that waits in this process, after another rank has failed.

    The group is unusable afterwards.

    Gloo cannot abort (torch 2.13: `abort()` does nothing). There a receive with a timeout ends all waits on the group's
    connections and closes them, which also ends the waits of the other ranks.
    """
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if backend.name() != "gloo":
            backend.abort()
            continue
        for rank in range(backend.size()):
            if rank != backend.rank() and _time_out_receive(backend, rank):
                break  # this has ended the waits for all ranks


def _time_out_receive(backend: Any, rank: int) -> bool:
    """Time out a Gloo receive from a rank; return False if the rank is not connected.

    Gloo then closes all connections of the group, so that every wait on them raises (see `abort_waits`).
    """
    buffer = torch.empty(1, device="cpu")
    with contextlib.suppress(RuntimeError):
        work = backend.recv([buffer], rank, NEVER_SENT)
        leak((work, buffer))  # never destroyed: the receive never completes
        try:
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            return "Timed out" in str(error)
    return False


NEVER_SENT = 0x5B_0057  # tag of a message that no rank sends, so that a receive of it times out


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's collectives, the shortest one of its backends."""
    backend_options: list[Any] = [getattr(group._get_backend(kind), "options", None) for kind in group._device_types]
    timeouts: list[timedelta] = [options._timeout for options in backend_options if hasattr(options, "_timeout")]
    return min(timeouts, default=timedelta(minutes=30))  # torch's default


def group_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of the group for a device, such as "nccl"; "" if it has none."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return ""


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store through which the ranks of the group connected."""
    _backend, store = dist.distributed_c10d._world.pg_map[group]
    return store


def store_host(store: dist.Store) -> str:
    """Return the host of a key-value store, a name or an address; "" for one without a server, such as a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def leak(x: object) -> None:
    """Leak an object whose destructor would block or crash, so that it is never destroyed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))


def drain_gloo_threads(seconds: float = 1.0) -> None:
    """Wait until Gloo's threads have released the tensors of their last exchange, before Python ends.

    The threads are those of all groups of the process. They are idle if two checks in a row find none that runs.

    A waiting caller resumes before the thread of its exchange has released the tensors. To release a tensor with a
    Python object the thread takes the GIL. If Python has ended by then, the process aborts ("terminate called without
    an active exception", torch 2.13; pytorch/pytorch#190489). `destroy_process_group` waits for the threads, but only
    users may call it.

    Args:
        seconds: Maximum time to wait, in seconds.
    """
    deadline, idle_polls = time.monotonic() + seconds, 0
    while idle_polls < 2 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # releases the GIL, for which a thread may wait
        threads = Path("/proc/self/task").iterdir() if sys.platform == "linux" else ()
        idle_polls = 0 if any(map(_is_gloo_thread_busy, threads)) else idle_polls + 1


POLL_SECONDS = 0.002  # seconds between checks


def _is_gloo_thread_busy(thread: Path) -> bool:
    """Return True if a thread is Gloo's and is not asleep. Threads that wait for ranks or work sleep.

    Args:
        thread: Folder of the thread in /proc. Its file `stat` is "42 (pt_gloo_runloop) S ...": id, name, state.
    """
    try:
        name, _, state = (thread / "stat").read_text().partition("(")[2].rpartition(") ")
    except OSError:  # the thread has ended
        return False
    return name == "pt_gloo_runloop" and state[0] != "S"


def group_names(mesh: dist.DeviceMesh) -> list[str]:
    """Return the name of this rank's process group along each axis of a mesh, in order."""
    return [mesh.get_group(i).group_name for i in range(mesh.ndim)]


def flatten_mesh(mesh: dist.DeviceMesh, name: str) -> dist.DeviceMesh:
    """Flatten the axes of a mesh to one, called `name`. The first call on a mesh is collective."""
    return mesh._flatten(name)


def find_root_mesh(mesh: dist.DeviceMesh) -> dist.DeviceMesh:
    """Return the mesh from which a mesh was sliced or flattened; the mesh itself if it was not."""
    return mesh._get_root_mesh()


def symmetric_all_to_all() -> Callable[..., None] | None:
    """Return torch's all-to-all on symmetric memory, or None before 2.14.

    Its signature is all_to_all_nd(input, out, scatter_dim, gather_dim, *, group).
    """
    from torch.distributed import _symmetric_memory

    return getattr(_symmetric_memory, "all_to_all_nd", None)


def symmetric_memory(size: int, device: torch.device, group: str) -> tuple[torch.Tensor, Any]:
    """Allocate symmetric memory for the ranks of a group, all of which must call it.

    Tests do not run it, as it requires a GPU per rank. It is kept since torch's `all_to_all_nd`, which is used where it
    exists, requires a buffer of symmetric memory. Tests cover the code around it with a stand-in of the op.

    Args:
        size: Bytes.
        device: Device of this rank.
        group: Name of the process group.

    Returns:
        The memory of this rank, uint8 (size,), and torch's handle of the memory of all ranks, whose method
        barrier(channel) waits for them.
    """
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    return memory, _symmetric_memory.rendezvous(memory, group)


def is_lost_connection(error: BaseException) -> bool:
    """Return True if a collective raised this because it timed out or lost a connection to a rank."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    pattern = "Timed out waiting|Application timeout|Connection (closed|reset) by peer|Broken pipe|Read error"
    return isinstance(error, RuntimeError) and re.search(pattern, str(error)) is not None  # Gloo's messages
