"""Kernels in Triton, where it is installed and the tensors are on a GPU in eager mode."""

from torch import Tensor

from .device import AVAILABLE, can_use_triton, is_plain_memory

__all__ = ["AVAILABLE", "can_use_triton", "copy_tensor", "is_plain_memory"]


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """target.copy_(source), of equal shape and dtype and any strides, reading and writing whole cache lines."""
    if can_use_triton(source):
        from . import move_kernel as move

        if move.copy_strided(target, source):
            return
    target.copy_(source)
