"""Add the tensors of each tile to a sum over the tiles in place, without a temporary sum per tile.

Each kind of sum has a name, the tensors that a tile returns for it (its summands), and the addition:

""         x                                                   sum += x
product    a (m, k), b (k, n)                                  sum += a @ b
groups     a (R, m), b (R, n), ends (E,) of groups of rows     sum[e] += a[rows of e].T @ b[rows of e]
rows       x (R.., n..), index (R..)                           sum[index[r]] += x[r]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sp_compile.lowering.torch_compat import size_hint


@dataclass(frozen=True)
class TileSum:
    """Kind of a sum over the tiles."""

    num_summands: int  # number of tensors that a tile returns for the sum
    add: Callable[..., Any]  # adds the summands to the sum in place: (sum, *summands)
    flops: Callable[..., int] = lambda *shapes: 0  # FLOPs of the addition, from the shapes of the summands


def _add_groups(total: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """Add a[rows of g].T @ b[rows of g] to ``total[g]`` (m, n) for each group g, in place.

    ``ends`` has the end of each group's rows; a group starts at the end of the previous one.
    """
    first = 0
    for group, end in enumerate(ends.tolist()):
        if end > first:
            _add_product(total[group], a[first:end].t(), b[first:end])
        first = end


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` in place. If the dtypes differ, the product is rounded to its own dtype first."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _product_flops(a_shape: Any, b_shape: Any, *_: Any) -> int:
    """Return the FLOPs of a @ b, or of `_add_groups`, for one tile.

    Each row of (R, m) and (R, n) is in one group, so that all groups together have the FLOPs of one product.
    """
    return 2 * math.prod(map(size_hint, (*a_shape, b_shape[-1])))


# Kinds of sums by name; "" is the default.
TILE_SUMS = {
    "": TileSum(1, Tensor.add_),
    "product": TileSum(2, _add_product, _product_flops),
    "groups": TileSum(3, _add_groups, _product_flops),
    "rows": TileSum(2, lambda total, x, index: total.index_put_((index,), x, accumulate=True)),
}
