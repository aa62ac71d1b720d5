"""Define the combine functions of scans: five operations, their segmented forms and the recurrence.

All are associative, none needs to commute: ``combine(left, right)`` has the earlier state first. A state is a tensor or
a pytree of tensors, such as (value, index) of a running maximum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.torch_compat import pytree

Combine = Callable[[Any, Any], Any]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Monoid:
    """An operation and its neutral element."""

    name: str  # key of `MONOIDS`
    combine: Combine  # of two tensors
    neutral: float  # 0, 1, -inf or inf; `identity` converts infinities to dtypes without them
    cumulative: Callable[..., Tensor | Pair]  # the scan of torch
    floating: bool = False  # True if it is defined for floating-point numbers only

    @property
    def has_index(self) -> bool:
        """Return True if the result is one of the operands, so that it has an index."""
        return self.name in ("max", "min")

    def identity(self, dtype: torch.dtype) -> float:
        """Return the neutral element e in a dtype, with combine(e, x) == x: the result before any row.

        In integers, -inf and inf are the least and the greatest value.
        """
        if dtype.is_floating_point or abs(self.neutral) != torch.inf:
            return self.neutral
        if dtype is torch.bool:
            return int(self.neutral > 0)
        bounds = torch.iinfo(dtype)
        return bounds.max if self.neutral > 0 else bounds.min


MONOIDS = {
    monoid.name: monoid
    for monoid in (
        Monoid("sum", torch.add, 0, torch.cumsum),
        Monoid("prod", torch.mul, 1, torch.cumprod),
        Monoid("max", torch.maximum, -torch.inf, torch.cummax),
        Monoid("min", torch.minimum, torch.inf, torch.cummin),
        Monoid("logsumexp", torch.logaddexp, -torch.inf, torch.logcumsumexp, floating=True),
    )
}


def segment_combine(combine: Combine) -> Combine:
    """Return the combine function of states (start, values) for a scan of segments.

    A state is the combination of some adjacent rows. `start` is True if a segment begins at one of them; `values` are
    then those of the last segment only, and nothing of earlier rows is combined with them.
    """

    def join(left: Any, right: Any) -> Any:
        """Combine two states; if a segment begins in the right one, the left values are discarded."""
        (left_start, left_values), (start, values) = left, right
        carried = combine(left_values, values)
        return left_start | start, pytree.tree_map(lambda own, both: torch.where(start, own, both), values, carried)

    return join


def is_later_extreme(op: str, later: Tensor, earlier: Tensor) -> Tensor:
    """Return a bool tensor: True where the max or min of two values is `later`.

    Of equal values the later is selected, and NaN before all others, as in torch.cummax.
    """
    is_later = later >= earlier if op == "max" else later <= earlier
    return is_later | later.isnan() if later.is_floating_point() else is_later


def select_combine(op: str) -> Combine:
    """Return the combine function of states (value, index) for a running max or min with its index."""

    def select(left: Pair, right: Pair) -> Pair:
        """Return the greater value for max, the smaller one for min, with its index."""
        (left_value, left_index), (value, index) = left, right
        is_later = is_later_extreme(op, value, left_value)
        return torch.where(is_later, value, left_value), torch.where(is_later, index, left_index)

    return select


def compose_affine(left: Pair, right: Pair) -> Pair:
    """Compose states (a, b), the maps h -> a * h + b of rows of a recurrence; left is applied first."""
    (left_a, left_b), (a, b) = left, right
    return left_a * a, torch.addcmul(b, a, left_b)


def accumulate_dtype(op: str, dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """Return the default dtype of a scan's accumulation, as in torch: float64 for float32 on a CPU."""
    if op in ("max", "min"):
        return dtype
    if not dtype.is_floating_point:
        return torch.int64
    if dtype is torch.float32 and torch.device(device).type == "cpu":
        return torch.float64
    return accumulation_dtype(dtype)


def is_scannable(dtype: torch.dtype) -> bool:
    """Return True if the scans of this package support the dtype, so that they may replace torch's.

    These are bool, uint8, int8 to int64, and floating-point numbers of 16 bits or more.
    """
    if dtype.is_floating_point:
        return dtype.itemsize > 1
    return not dtype.is_complex and (dtype.is_signed or dtype.itemsize == 1)


def result_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Return the default dtype of a scan's result, as in torch: int64 for sums and products of integers."""
    return torch.int64 if op in ("sum", "prod") and not dtype.is_floating_point else dtype
