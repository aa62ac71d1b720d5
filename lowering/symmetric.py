"""Memory of this rank that the other ranks of a group read and write: declared once, together, never while running.

One buffer a group. An exchange puts its operand there, unless it lies there already, and the peers read it from where
it lies; see ``all_to_all_permute.py``. ``sp_compile.declare_symmetric_memory`` is the collective that makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Buffer:
    """memory: uint8 (bytes,), this rank's; peers: int64 (n,) on its device, the addresses of all ranks' memory.

    barrier: waits, on the current stream, until all ranks have come to it.
    """

    memory: Tensor
    peers: Tensor
    rank: int
    barrier: Callable[[], None]

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The beginning of the memory as a contiguous tensor."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[:size].view(dtype).view(shape)

    def holds(self, x: Tensor) -> bool:
        """Is x what `view` gives for its shape and dtype?"""
        return x.data_ptr() == self.memory.data_ptr() and x.is_contiguous()

    def fits(self, x: Tensor) -> bool:
        """Is there room for it?"""
        same = x.device == self.memory.device
        return same and x.numel() * x.element_size() <= self.memory.numel()


_buffers: dict[str, Buffer] = {}


def keep(group: str, buffer: Buffer) -> None:
    """From now on the group's exchanges may use the buffer: on all of its ranks, or on none."""
    _buffers[group] = buffer


def buffer_of(group: str) -> Buffer | None:
    """What was declared for the group."""
    return _buffers.get(group)


def forget(group: str) -> None:
    """Give the group's buffer up, on all of its ranks."""
    _buffers.pop(group, None)
