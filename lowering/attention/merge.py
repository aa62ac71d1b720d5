"""Attention over some keys and over others, into attention over both."""

import torch
from torch import Tensor

from sp_compile.lowering.triton import usable


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax averages ``out`` (..., S, E) with log-sum-exps ``lse`` (..., S) of two disjoint sets of keys.

    Computed and returned in lse's dtype (float32 or float64). An lse of -inf stands for no key at all: its
    out must be finite and counts for nothing; with two of them the result is 0 and -inf. Any other logits
    are safe, however large. One pass over the accumulators: Inductor fuses the expression, eager CUDA
    tensors take the kernel in ``triton/merge.py``.
    """
    if usable(out_a):
        from sp_compile.lowering.triton.merge import launch

        return launch(out_a, lse_a, out_b, lse_b)
    return merge_pointwise(out_a, lse_a, out_b, lse_b)


def merge_pointwise(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``merge`` as pointwise operations."""
    top = torch.maximum(lse_a, lse_b)
    finite = torch.where(top == -torch.inf, 0.0, top)
    a, b = torch.exp(lse_a - finite), torch.exp(lse_b - finite)
    total = a + b
    # The larger of the two is 1, so that only the empty sum of 0 is below it.
    share = (b / total.clamp_min(1.0)).unsqueeze(-1)
    kept = (a / total.clamp_min(1.0)).unsqueeze(-1)
    return out_a.to(top.dtype) * kept + out_b.to(top.dtype) * share, finite + torch.log(total)
