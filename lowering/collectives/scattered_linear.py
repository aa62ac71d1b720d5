"""Run the reductions of a tensor-parallel program with its own backward: ``sp::reduce_pair``.

The reductions run over other ranks than those that share the sequence, and so are unaffected by sharding it: they are
elementwise, and shards are valid operands. The program pairs the reductions of a forward with those of its backward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_compile.lowering.base.library import LinearMap, composite

c10d = torch.ops._c10d_functional


def _reduce_value(x: Tensor, forward: Sequence[str], backward: Sequence[str]) -> Tensor:
    """Return x after the all-reduces of the forward, each a text "op group", such as "sum 3".

    `backward` is not used here: `_reduce_cotangent`, the adjoint, is called with the same arguments.
    """
    for reduction in forward:
        op, group = reduction.split(" ", 1)
        x = c10d.wait_tensor(c10d.all_reduce(x.contiguous(), op, group))
    return x.view_as(x)  # without reductions too, a result is not the operand itself


def _reduce_cotangent(x: Tensor, forward: Sequence[str], backward: Sequence[str]) -> Tensor:
    """Return the cotangent x after the all-reduces of the backward."""
    return _reduce_value(x, backward, forward)


@composite("reduce_pair(Tensor x, str[] forward, str[] backward) -> Tensor", padded="as given")
def reduce_pair(x: Tensor, forward: list[str], backward: list[str]) -> Tensor:
    """All-reduce x several times in sequence, and its cotangent in the backward.

    The pairs of tensor parallelism over a group tp, named as in Megatron-LM: f, before a column-parallel linear, is
    ([], ["sum tp"]), and g, after a row-parallel linear, is (["sum tp"], []). Shapes: any -> same. Bytes: those of the
    all-reduces. Runs: _c10d_functional.all_reduce.

    Args:
        x: Any shape and floating dtype.
        forward: Reductions of x in order, each "op group".
        backward: Reductions of the cotangent.
    """
    return LinearMap.apply(x, _reduce_value, _reduce_cotangent, list(forward), list(backward))
