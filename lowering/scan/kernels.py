"""The four kernels of the lowering table, made of any inclusive scan of states.

x is (outer, length, inner), starts None or bool (outer|1, length, inner|1), all contiguous; every size may be 0.
Results are contiguous, and no views of operands or of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .monoids import MONOIDS, Pair, compose, segmented, selecting

DIM = 1


@dataclass(frozen=True)
class Kernels:
    """inclusive(combine, states, dim) scans a tree of states along dim; total(combine, states, dim) is its last row."""

    inclusive: Callable[[Any, Any, int], Any]
    total: Callable[[Any, Any, int], Any]

    def scan(
        self,
        x: Tensor,
        starts: Tensor | None,
        op: str,
        exclusive: bool,
        reverse: bool,
        dtype: torch.dtype,
        accumulate: torch.dtype,
    ) -> Pair:
        """-> out, like x in dtype, and total (outer, inner) in accumulate: of the last segment in scan order."""
        identity = MONOIDS[op].identity(accumulate)
        values, starts = _in_scan_order(reverse, x.to(accumulate), starts)
        sums = self._segmented(MONOIDS[op].combine, values, starts)
        total = sums[:, -1].clone() if x.shape[DIM] else _row(sums, identity)[:, 0]
        if exclusive:
            sums = torch.cat((_row(sums, identity), sums[:, :-1]), DIM) if x.shape[DIM] else sums
            sums = sums if starts is None else sums.masked_fill(starts, identity)
        (sums,) = _in_scan_order(reverse, sums)
        return _own(sums.to(dtype), x), total

    def extremes(self, x: Tensor, starts: Tensor | None, op: str, reverse: bool) -> Pair:
        """-> the running max or min, like x, and its index, int64."""
        index = torch.arange(x.shape[DIM], device=x.device)[:, None].expand_as(x)
        values, index, starts = _in_scan_order(reverse, x, index, starts)
        values, index = self._segmented(selecting(op), (values, index), starts)
        values, index = _in_scan_order(reverse, values, index)
        return _own(values, x), index

    def linear(
        self,
        a: Tensor,
        b: Tensor,
        initial: Tensor | None,
        reverse: bool,
        lagged: bool,
        dtype: torch.dtype,
        accumulate: torch.dtype,
    ) -> Tensor:
        """-> h like b in dtype: h_i = a_i * h_(i-1) + b_i; lagged: h_i = s_(i-1) + b_i with s_i = a_i * h_i."""
        a, b = _in_scan_order(reverse, a.to(accumulate), b.to(accumulate))
        first = _row(b, 0) if initial is None else initial.to(accumulate).unsqueeze(DIM)
        added = a * b if lagged else b
        # In the first state rather than in the result: there the product of all a may overflow.
        added = torch.cat((added[:, :1] + a[:, :1] * first, added[:, 1:]), DIM)
        h = self.inclusive(compose, (a, added), DIM)[1]
        if lagged and h.shape[DIM]:
            h = b + torch.cat((first, h[:, :-1]), DIM)
        (h,) = _in_scan_order(reverse, h)
        return h.to(dtype)

    def linear_total(
        self, a: Tensor, b: Tensor, reverse: bool, lagged: bool, accumulate: torch.dtype
    ) -> Pair:
        """-> factor and state (outer, inner): what goes into the recurrence comes out as factor * it + state."""
        a, b = _in_scan_order(reverse, a.to(accumulate), b.to(accumulate))
        if not a.shape[DIM]:
            return _row(a, 1)[:, 0], _row(b, 0)[:, 0]
        factor, state = self.total(compose, (a, a * b if lagged else b), DIM)
        return factor[:, -1].clone(), state[:, -1].clone()

    def _segmented(self, combine: Callable[[Any, Any], Any], values: Any, starts: Tensor | None) -> Any:
        if starts is None:
            return self.inclusive(combine, values, DIM)
        return self.inclusive(segmented(combine), (starts, values), DIM)[1]


def _in_scan_order(reverse: bool, *tensors: Any) -> tuple[Any, ...]:
    """The same tensors, or if reverse all turned round, which also undoes it."""
    return tuple(x if x is None or not reverse else x.flip(DIM) for x in tensors)


def _own(result: Tensor, operand: Tensor) -> Tensor:
    """A copy if the result is the operand, as the scan of one row may be."""
    return result.clone() if result.data_ptr() == operand.data_ptr() else result


def _row(x: Tensor, value: float) -> Tensor:
    return x.new_full((x.shape[0], 1, x.shape[2]), value)
