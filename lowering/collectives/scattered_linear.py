"""Run the reductions of a tensor-parallel program with its own backward: ``sp::reduce_pair``.

The reductions run over other ranks than those that share the sequence. They are elementwise, so that shards are valid
operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_compile.lowering.base.library import LinearMap, composite

c10d = torch.ops._c10d_functional


def _reduce_twice(x: Tensor, first: Sequence[str], then: Sequence[str]) -> Tensor:
    for reduction in first:
        op, group = reduction.split(" ", 1)
        x = c10d.wait_tensor(c10d.all_reduce(x.contiguous(), op, group))
    return x.view_as(x)


def _reduce_twice_backward(x: Tensor, first: Sequence[str], then: Sequence[str]) -> Tensor:
    return _reduce_twice(x, then, first)


@composite("reduce_pair(Tensor x, str[] forward, str[] backward) -> Tensor", padded="as given")
def reduce_pair(x: Tensor, forward: list[str], backward: list[str]) -> Tensor:
    """All-reduce x several times in sequence, and its cotangent in the backward.

    Megatron's f is ([], ["sum g"]) and its g (["sum g"], []). Shapes: any -> same. Bytes: those of the all-reduces.
    Source: _c10d_functional.all_reduce.

    Args:
        x: Any shape and floating dtype.
        forward: Reductions of x in order, each "op group".
        backward: Reductions of the cotangent.
    """
    return LinearMap.apply(x, _reduce_twice, _reduce_twice_backward, list(forward), list(backward))
