"""Provide Triton kernels for CUDA tensors in eager mode, if Triton is installed."""

from torch import Tensor

from .device import AVAILABLE, can_use_triton, is_plain_memory

__all__ = ["AVAILABLE", "can_use_triton", "copy_tensor", "is_plain_memory"]


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Run target.copy_(source), with a kernel that reads and writes full cache lines where Triton is usable.

    Exchanges call it to pack and unpack heads and rows.

    Args:
        target: Any shape, dtype and strides.
        source: Shape and dtype of target, any strides.
    """
    if can_use_triton(source):
        from . import move_kernel as move

        if move.copy_strided(target, source):
            return
    target.copy_(source)
