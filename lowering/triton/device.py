"""Determine whether Triton kernels can run on a tensor, and select its device."""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

AVAILABLE = find_spec("triton") is not None  # whether Triton is installed


def is_plain_memory(x: Tensor) -> bool:
    """Return True if ``x`` is a plain tensor or parameter, not a subclass: a kernel may access its data by address."""
    return type(x) in (Tensor, Parameter)


def can_use_triton(x: Tensor) -> bool:
    """Return True if a Triton kernel may read ``x`` now; False in a trace, where the compiler generates kernels."""
    return AVAILABLE and x.is_cuda and is_plain_memory(x) and not torch.compiler.is_compiling()


def use_device(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the device of ``x`` is current, as a launch requires."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
