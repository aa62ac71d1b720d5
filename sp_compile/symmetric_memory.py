"""declare_symmetric_memory: memory that ranks read from each other, for exchanges without a send buffer."""

from __future__ import annotations

import torch

from . import _compat
from .agreement import agree, numbers
from .errors import SpError
from .lowering import symmetric
from .mesh import Mesh, Ranks, ranks_of


def declare_symmetric_memory(size: int, group: Mesh = None, device: torch.device | None = None) -> bool:
    """Give the group's eager all_to_all_permute a buffer of `size` bytes on every rank, on a GPU of its own.

    Every rank of the group calls it, once, when the group is made. Operands of at most `size` bytes are put there, and
    the peers read them by one kernel that permutes as it reads; larger ones are exchanged as before. Returns False, on
    every rank, where the GPUs cannot reach each other or this torch has no symmetric memory.

    Raises SpError, on every rank, for a size that is not positive or differs between the ranks.
    """
    ranks = ranks_of(group)
    device = _device(device)
    problem = (
        None if isinstance(size, int) and size > 0 else f"size={size!r}: expected a positive number of bytes"
    )
    if ranks.n > 1:
        agree("declare_symmetric_memory", problem, f"size={size}", ranks, "the size is the same")
    if problem is not None:
        raise SpError(f"declare_symmetric_memory: {problem}")
    buffer = _buffer(size, ranks, device) if ranks.n > 1 and device.type == "cuda" else None
    able = ranks.n > 1 and all(flag for (flag,) in numbers([buffer is not None], ranks))
    if buffer is not None and able:
        symmetric.keep(ranks.group, buffer)
    return able


def _device(given: torch.device | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _buffer(size: int, ranks: Ranks, device: torch.device) -> symmetric.Buffer | None:
    """None where this machine cannot: what torch raises then is many things."""
    try:
        memory, handle = _compat.symmetric_memory(size, device, ranks.group)
        peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    except (RuntimeError, ImportError, AttributeError, NotImplementedError):
        return None
    return symmetric.Buffer(memory, peers, handle.rank, lambda: handle.barrier(channel=0))
