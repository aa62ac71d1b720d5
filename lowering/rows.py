"""A tensor-parallel program's own way of sharing out rows: each rank takes its block, and blocks are put together.

In the view of the program a block is a small value of each rank's own. Propagation sees that a block of a sharded value
is what the rank holds already, and blocks put together are a sharded value: then neither costs anything.
"""

from __future__ import annotations

from torch import Tensor

from .communicator import current
from .frames import own_positions
from .library import composite


@composite("own_rows(Tensor x, int dim, int n, str group) -> Tensor")
def own_rows(x: Tensor, dim: int, n: int, group: str) -> Tensor:
    """This rank's block of a value that every rank has whole.

    Shapes: dim of n * s -> s. Bytes: none. Source: index_select at the rank's positions.
    """
    length = x.shape[dim]
    return x.index_select(dim, own_positions((1, length, 0, length), n, group, x.device))


@composite("all_rows(Tensor x, int dim, int n, str group) -> Tensor")
def all_rows(x: Tensor, dim: int, n: int, group: str) -> Tensor:
    """Every rank's block, in the order of the ranks.

    Shapes: dim of s -> n * s. Bytes: (n - 1) * bytes(x). Source: all_gather_into_tensor, then a view.
    """
    return current().all_gather(x.movedim(dim, 0), n, group).movedim(0, dim)
