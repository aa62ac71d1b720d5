"""Attention over some keys and over others, into attention over both; and accumulators that stay one.

A compiler that sees additions postpones them: it adds all parts at the end in one kernel, and keeps them until then.
The accumulators of a ring are therefore changed in place, by operators that it does not see into.
"""

import torch
from torch import Tensor

from sp_compile.lowering.library import opaque
from sp_compile.lowering.triton import usable

from .case import finite_lse


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
    kept, share, lse = _shares(lse_a, lse_b)
    return out_a.to(lse.dtype) * kept + out_b.to(lse.dtype) * share, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` (B, H, S, E) and its ``lse`` (B, H, S), with one key more, of the logits ``sinks`` (H,) and the value 0.

    Computed and returned in lse's dtype. What is kept is computed from the new lse, so that whoever keeps both results
    for a backward in another graph does so: a partitioner computes again what no result needs.
    """
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.to(lse.dtype) * torch.exp(lse - finite_lse(both)).unsqueeze(-1), both


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient (H,) of ``sinks``, of the cotangent of ``out``, which is with them, as is ``lse``."""
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - finite_lse(lse))
    return -(weights * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What counts of either (..., S, 1), and the lse of both (..., S)."""
    top = torch.maximum(lse_a, lse_b)
    finite = torch.where(top == -torch.inf, 0.0, top)
    a, b = torch.exp(lse_a - finite), torch.exp(lse_b - finite)
    total = a + b
    # The larger of the two is 1, so that only the empty sum of 0 is below it.
    divisor = total.clamp_min(1.0)
    return (a / divisor).unsqueeze(-1), (b / divisor).unsqueeze(-1), finite + torch.log(total)


@opaque(
    "merge_into(Tensor(a!) out, Tensor(b!) lse, Tensor block, Tensor block_lse) -> ()",
    lambda out, lse, block, block_lse: None,
)
def merge_into(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """``merge`` in the place of its first two operands.

    Shapes: out (..., S, E) and lse (..., S), contiguous and in lse's dtype; block (..., S, E) of any dtype and strides,
    block_lse (..., S). Bytes: none.
    """
    if usable(out):
        from sp_compile.lowering.triton.merge import launch

        launch(out, lse, block, block_lse, into=(out, lse))
    else:
        kept, share, both = _shares(lse, block_lse)
        out.mul_(kept).addcmul_(block, share)
        lse.copy_(both)


@opaque("add_into(Tensor(a!) total, Tensor part) -> ()", lambda total, part: None)
def add_into(total: Tensor, part: Tensor) -> None:
    """total += part, now. Shapes: any, equal. Bytes: none."""
    total.add_(part)
