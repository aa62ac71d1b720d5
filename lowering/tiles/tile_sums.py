"""Add the parts of tiles to a sum in place, without a temporary sum per tile.

""         x                                                   sum += x
product    a (m, k), b (k, n)                                  sum += a @ b
groups     a (R, m), b (R, n), ends (E,) of groups of rows     sum[e] += a[rows of e].T @ b[rows of e]
rows       x (R.., n..), index (R..)                           sum[index[r]] += x[r]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sp_compile.lowering.torch_compat import size_hint


@dataclass(frozen=True)
class TileSum:
    """Accumulation of the parts of a tile into a sum."""

    parts: int  # number of tensors that a tile returns
    add: Callable[..., Any]  # adds the parts to the sum in place: (sum, *parts)
    flops: Callable[..., int] = lambda *shapes: 0  # FLOPs of the addition, from the shapes of the parts


def _add_groups(total: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """Add the product of each group of rows to the group's matrix in ``total`` (E, m, n), in place."""
    first = 0
    for group, end in enumerate(ends.tolist()):
        if end > first:
            _add_product(total[group], a[first:end].t(), b[first:end])
        first = end


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` in place; it is computed in its own dtype if that of the sum is wider."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _product_flops(a_shape: Any, b_shape: Any) -> int:
    (m, k), (_, n) = a_shape, b_shape
    return 2 * math.prod(map(size_hint, (m, k, n)))


def _group_flops(a_shape: Any, b_shape: Any, ends_shape: Any) -> int:
    (rows, m), (_, n) = a_shape, b_shape
    return 2 * math.prod(map(size_hint, (rows, m, n)))


# Kinds of sums by name; "" is the default.
TILE_SUMS = {
    "": TileSum(1, Tensor.add_),
    "product": TileSum(2, _add_product, _product_flops),
    "groups": TileSum(3, _add_groups, _group_flops),
    "rows": TileSum(2, lambda total, x, index: total.index_put_((index,), x, accumulate=True)),
}
