"""Where Triton kernels may run."""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

AVAILABLE = find_spec("triton") is not None


def is_plain_memory(x: Tensor) -> bool:
    """Whether ``x`` is memory and nothing else: a parameter is, a subclass with a mind of its own is not."""
    return type(x) in (Tensor, Parameter)


def can_use_triton(x: Tensor) -> bool:
    """Whether a Triton kernel may read ``x`` now: a compiler at work writes its own kernels."""
    return AVAILABLE and x.is_cuda and is_plain_memory(x) and not torch.compiler.is_compiling()


def use_device(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
