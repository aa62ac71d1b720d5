"""Kernels in Triton, where it is installed and the tensors are on a GPU in eager mode."""

from importlib.util import find_spec

import torch
from torch import Tensor

AVAILABLE = find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Whether a Triton kernel may read ``x`` now: a compiler at work writes its own kernels."""
    return AVAILABLE and x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling()


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``sp_compile.lowering.merge.merge`` as one kernel: reads each operand once, writes each result once."""
    from .merge import launch

    return launch(out_a, lse_a, out_b, lse_b)
