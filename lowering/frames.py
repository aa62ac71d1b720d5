"""Where a sharded sequence lies in a dim, as tensor code: padding, trimming, row order.

A frame argument is ``[outer, size, start, length]``. The dim is a product outer * window * inner; the
sequence has ``size`` positions, rank r of n holds the s = ceil(size / n) from r * s on, and the positions
of the value itself are ``start <= position < start + length``. ``inner`` follows from the dim's length.
All sizes may be symbolic.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._compat import statically_known_true

Frame = Sequence[int]


def known(condition: bool | torch.SymBool) -> bool:
    """Whether the condition holds for every size; asking adds no guard."""
    return statically_known_true(condition)


def shard_length(size: int, n: int) -> int:
    """Positions that each of ``n`` ranks holds: ceil(size / n)."""
    return (size + n - 1) // n


def rows_within(extent: int, rows: int) -> int:
    """extent / rows, the inner factor of a dim; 1 wherever that is known, so that shapes stay simple."""
    return 1 if known(extent == rows) else extent // rows


def is_padded(frame: Frame, n: int) -> bool:
    """Whether some rank may hold positions outside the window; False only when proved."""
    _, size, start, length = frame
    return not (known(start == 0) and known(length == size) and known(n * shard_length(size, n) == size))


def own_positions(frame: Frame, n: int, group: str, device: torch.device) -> Tensor:
    """The positions this rank holds, int64 (s,). The rank is read at run time: no graph holds it."""
    s = shard_length(frame[1], n)
    positions = torch.arange(s, device=device)
    return positions if n == 1 else positions + torch.ops.sp.rank(group, device) * s


def nearest_rows(positions: Tensor, frame: Frame, inner: int) -> Tensor:
    """Indices into a dim of outer * length * inner, int64 (outer * k * inner,), of k positions.

    A position outside the window is given the nearest one inside.
    """
    outer, _, start, length = frame
    offsets = positions if known(start == 0) else positions - start
    rows = offsets.clamp(0, length - 1)
    if known(outer * inner == 1):
        return rows
    blocks = torch.arange(outer, device=rows.device) * length
    within = torch.arange(inner, device=rows.device)
    return ((blocks[:, None] + rows)[:, :, None] * inner + within).reshape(-1)


def outside_window(x: Tensor, dim: int, frame: Frame, n: int, group: str) -> Tensor:
    """Bool, broadcastable to the sharded ``x``: True at positions that the window does not hold."""
    outer, size, start, length = frame
    inner = rows_within(x.shape[dim], outer * shard_length(size, n))
    positions = own_positions(frame, n, group, x.device)
    outside = positions >= start + length
    if not known(start == 0):
        outside = outside | (positions < start)
    if not known(outer * inner == 1):
        outside = outside[:, None].expand(outer, -1, inner).reshape(-1)
    return outside.view([-1 if d == dim else 1 for d in range(x.ndim)])


def rows_first(x: Tensor, dim: int, outer: int) -> Tensor:
    """View (..., outer * rows, ...) as (rows, ..., outer, ...), or (rows, ...) when outer is 1."""
    if known(outer == 1):
        return x.movedim(dim, 0)
    return x.unflatten(dim, (outer, x.shape[dim] // outer)).movedim(dim + 1, 0)


def rows_back(y: Tensor, dim: int, outer: int) -> Tensor:
    """Undo ``rows_first``; a view when outer is 1."""
    if known(outer == 1):
        return y.movedim(0, dim)
    return y.movedim(0, dim + 1).flatten(dim, dim + 1)


def trim(x: Tensor, dim: int, frame: Frame, n: int, inner: int) -> Tensor:
    """View the window's rows of a dim that holds all n * s * inner of them (outer 1)."""
    _, _, start, length = frame
    return x.narrow(dim, start * inner, length * inner) if is_padded(frame, n) else x


def pad(x: Tensor, dim: int, frame: Frame, n: int, edge: bool) -> Tensor:
    """Extend a dim of the window's rows to all n * s * inner (outer 1).

    The new rows repeat the nearest of the window when ``edge``, as padded positions do; a cotangent's are
    zero.
    """
    if not is_padded(frame, n):
        return x
    _, size, start, length = frame
    inner = rows_within(x.shape[dim], length)
    total = n * shard_length(size, n)
    if edge:
        return x.index_select(dim, nearest_rows(torch.arange(total, device=x.device), frame, inner))
    widths = [0, 0] * (x.ndim - 1 - dim) + [start * inner, (total - start - length) * inner]
    return torch.constant_pad_nd(x, widths)
