"""Kernels in Triton, where it is installed and the tensors are on a GPU in eager mode."""

import os

from torch import Tensor

from .device import AVAILABLE, is_plain, usable

__all__ = ["AVAILABLE", "copy", "is_plain", "reads_peers", "usable"]


MOST_DIMS = 6
"""Of tensors that `move.from_peers` takes: three are in a tile, four are looped over, one is the peers'."""


def copy(target: Tensor, source: Tensor) -> None:
    """target.copy_(source), of equal shape and dtype and any strides, reading and writing whole cache lines."""
    if usable(source):
        from . import move_kernel as move

        if move.copy(target, source):
            return
    target.copy_(source)


def reads_peers(x: Tensor) -> bool:
    """Whether `move.from_peers` can run now; in Triton's interpreter on a CPU too."""
    interpreted = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1" and is_plain(x)
    return usable(x) or interpreted
