"""sp::reduce_pair: the reductions of a tensor-parallel program, with the gradient that its author wrote for them.

Over other ranks than those that share the sequence, and of every element by itself, so that shards pass.

A tensor-parallel program's own way of sharing out rows: each rank takes its block, and blocks are put together.

In the view of the program a block is a small value of each rank's own. Propagation sees that a block of a sharded value
is what the rank holds already, and blocks put together are a sharded value: then neither costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import own_positions
from sp_compile.lowering.base.library import LinearMap, composite
from sp_compile.lowering.comm.communicator import current

c10d = torch.ops._c10d_functional


def _reduced(x: Tensor, first: Sequence[str], then: Sequence[str]) -> Tensor:
    for reduction in first:
        op, group = reduction.split(" ", 1)
        x = c10d.wait_tensor(c10d.all_reduce(x.contiguous(), op, group))
    return x.view_as(x)


def _reduced_back(x: Tensor, first: Sequence[str], then: Sequence[str]) -> Tensor:
    return _reduced(x, then, first)


@composite("reduce_pair(Tensor x, str[] forward, str[] backward) -> Tensor", padded="as given")
def reduce_pair(x: Tensor, forward: list[str], backward: list[str]) -> Tensor:
    """All-reduces of x, one behind the other, each "op group"; backward: those of the cotangent.

    Megatron's f is ([], ["sum g"]) and its g (["sum g"], []). Shapes: any -> same. Bytes: those of the all-reduces.
    Source: _c10d_functional.all_reduce.
    """
    return LinearMap.apply(x, _reduced, _reduced_back, list(forward), list(backward))


@composite("own_rows(Tensor x, int dim, int n, str group) -> Tensor")
def own_rows(x: Tensor, dim: int, n: int, group: str) -> Tensor:
    """This rank's block of a value that every rank has whole.

    Shapes: dim of n * s -> s. Bytes: none. Source: index_select at the rank's positions.
    """
    length = x.shape[dim]
    return x.index_select(dim, own_positions((1, length, 0, length), n, group, x.device))


@composite("all_rows(Tensor x, int dim, int n, str group) -> Tensor", padded="nearest")
def all_rows(x: Tensor, dim: int, n: int, group: str) -> Tensor:
    """Every rank's block, in the order of the ranks.

    Shapes: dim of s -> n * s. Bytes: (n - 1) * bytes(x). Source: all_gather_into_tensor, then a view.
    """
    return current().all_gather(x.movedim(dim, 0), n, group).movedim(0, dim)
