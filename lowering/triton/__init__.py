"""Kernels in Triton, where it is installed and the tensors are on a GPU in eager mode."""

import os
from collections.abc import Sequence

from torch import Tensor

from .device import AVAILABLE, is_plain, on_device, usable

__all__ = ["AVAILABLE", "copy", "from_peers", "is_plain", "merge", "on_device", "reads_peers", "usable"]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``sp_compile.lowering.attention.merge.merge`` as one kernel: reads each operand once, writes each result once."""
    from .merge import launch

    return launch(out_a, lse_a, out_b, lse_b)


MOST_DIMS = 6
"""Of tensors that `from_peers` takes: three are in a tile, four are looped over, one is the peers'."""


def copy(target: Tensor, source: Tensor) -> None:
    """target.copy_(source), of equal shape and dtype and any strides, reading and writing whole cache lines."""
    if usable(source):
        from . import move

        if move.copy(target, source):
            return
    target.copy_(source)


def reads_peers(x: Tensor) -> bool:
    """Whether `from_peers` can run now; in Triton's interpreter on a CPU too."""
    interpreted = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1" and is_plain(x)
    return usable(x) or interpreted


def from_peers(target: Tensor, peers: Tensor, offset: int, strides: Sequence[int], dim: int, first: int) -> None:
    """Block r of ``dim`` of the target is what peer r holds, offset elements into its memory, at these strides."""
    from . import move

    done = move.from_peers(target, peers, offset, strides, dim, first)
    assert done, f"{target.ndim} dims are more than {MOST_DIMS}"
