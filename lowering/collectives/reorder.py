"""Permute the rows of a full tensor with ``sp::reorder``, and its gradient's rows back.

Programs in balanced layout permute a full tensor before ``sp::shard``, and back after ``sp::unshard``: each rank then
has rows of equal work. An order is a permutation of positions that is computed at run time.
"""

from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, inner_rows, is_known, nearest_rows
from sp_compile.lowering.base.library import LinearMap, composite


def _permute_rows(x: Tensor, dim: int, frame: FrameArg, order: Tensor, inverse: Tensor) -> Tensor:
    """Return x with the row of position order[i] as its i-th row.

    x has the positions of the frame's window, start, ..., start + length - 1, out of `size`. `nearest_rows` returns the
    index in x of each position, for all outer and inner factors. `inverse` is not used here: `_undo_rows`, the adjoint,
    is called with the same arguments.
    """
    outer, size, start, length = frame
    positions = order if is_known(length == size) else order.narrow(0, start, length)  # those of the window
    return x.index_select(dim, nearest_rows(positions, frame, inner_rows(x.shape[dim], outer * length)))


def _undo_rows(x: Tensor, dim: int, frame: FrameArg, order: Tensor, inverse: Tensor) -> Tensor:
    """Return x with the rows in the order before `_permute_rows`. This inverse is also the adjoint."""
    return _permute_rows(x, dim, frame, inverse, order)


@composite("reorder(Tensor x, int dim, SymInt[] frame, Tensor order, Tensor inverse) -> Tensor")
def reorder(x: Tensor, dim: int, frame: FrameArg, order: Tensor, inverse: Tensor) -> Tensor:
    """Permute rows: the i-th row is that of position order[i]. Replicate -> Replicate.

    Shapes: dim of outer * length * inner, for a frame [outer, size, start, length] -> same; order and its inverse are
    int64 (size,) and do not move positions outside of [start, start + length).
    Bytes: none.
    Backward: the same with the two orders exchanged.
    Runs: one index_select each way, which a compiler fuses into the reader.
    """
    return LinearMap.apply(x, _permute_rows, _undo_rows, dim % x.ndim, frame, order, inverse)
