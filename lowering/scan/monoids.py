"""What a scan combines: the five operations, the segments laid over them, and the diagonal recurrence.

All are associative, none needs to commute: ``combine(left, right)`` takes the earlier state first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.torch_compat import pytree

Combine = Callable[[Any, Any], Any]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Monoid:
    """An operation and its neutral element.

    neutral: 0 and 1, or -inf and inf, which stand for the least and the greatest value of a dtype without infinities.
    cumulative: the scan that torch has. floating: defined for floating-point numbers only.
    """

    name: str
    combine: Combine
    neutral: float
    cumulative: Callable[..., Tensor | Pair]
    floating: bool = False

    @property
    def has_index(self) -> bool:
        """Is the result one of the operands, so that it has an index?"""
        return self.name in ("max", "min")

    def identity(self, dtype: torch.dtype) -> float:
        """e with combine(e, x) == x for every x of the dtype."""
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
    """States (start, values): nothing is carried into a state that holds the start of a segment."""

    def join(left: Any, right: Any) -> Any:
        start = right[0]
        carried = combine(left[1], right[1])
        values = pytree.tree_map(lambda own, both: torch.where(start, own, both), right[1], carried)
        return left[0] | start, values

    return join


def is_later_extreme(op: str, later: Tensor, earlier: Tensor) -> Tensor:
    """Under max or min, bool: the later of equal values wins, NaN over all, as in torch.cummax."""
    won = later >= earlier if op == "max" else later <= earlier
    return won | later.isnan() if later.is_floating_point() else won


def select_combine(op: str) -> Combine:
    """States (value, index) under max or min."""

    def select(left: Pair, right: Pair) -> Pair:
        later = is_later_extreme(op, right[0], left[0])
        return torch.where(later, right[0], left[0]), torch.where(later, right[1], left[1])

    return select


def compose_affine(left: Pair, right: Pair) -> Pair:
    """States (a, b) are maps h -> a * h + b; left is applied first."""
    return left[0] * right[0], torch.addcmul(right[1], right[0], left[1])


def accumulate_dtype(op: str, dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """What a scan adds in unless told otherwise: as torch, so float32 adds in float64 on a CPU."""
    if op in ("max", "min"):
        return dtype
    if not dtype.is_floating_point:
        return torch.int64
    if dtype is torch.float32 and torch.device(device).type == "cpu":
        return torch.float64
    return torch.promote_types(dtype, torch.float32)


def is_scannable(dtype: torch.dtype) -> bool:
    """Are there scans of it? Bool, uint8, int8 to int64, and floating-point numbers of 16 bits or more."""
    if dtype.is_floating_point:
        return dtype.itemsize > 1
    return not dtype.is_complex and (dtype.is_signed or dtype.itemsize == 1)


def result_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a scan's result unless told otherwise: torch's."""
    return torch.int64 if op in ("sum", "prod") and not dtype.is_floating_point else dtype
