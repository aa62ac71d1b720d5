"""Kernels in Triton, where it is installed and the tensors are on a GPU in eager mode."""

from torch import Tensor

from .device import AVAILABLE, is_plain, usable

__all__ = ["AVAILABLE", "copy", "is_plain", "usable"]


def copy(target: Tensor, source: Tensor) -> None:
    """target.copy_(source), of equal shape and dtype and any strides, reading and writing whole cache lines."""
    if usable(source):
        from . import move_kernel as move

        if move.copy(target, source):
            return
    target.copy_(source)
