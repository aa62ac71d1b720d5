"""The lowering table: which implementation runs a scan.

A way registers itself, under a name and with a rank; the one of lowest rank that fits a problem runs it. It is a
`ScanLowering` (or another object) with `fits(problem) -> bool` and the functions scan, extremes, linear and
linear_total of a problem and its tensors, as `kernels.generic.GenericKernels` describes them; it needs only those for
which it fits. The ways here are of the modules of `kernels`, which imports them. They have rank 0 (torch, of what is
small), 10 (C++), 20 (Triton), 30 (torch) and 40 (in blocks of torch operations, which always fits). One that only calls
torch's own operator has is_torch=True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.registry import Table


class ScanProblem(NamedTuple):
    """What a row of the table decides by. kind: "scan", "extremes", "linear" or "linear_total".

    x is (outer, length, inner) of dtype, the result of result's. total: is a scan asked for its total?
    """

    kind: str
    device: str
    outer: int
    length: int
    inner: int
    dtype: torch.dtype
    result: torch.dtype
    accumulate: torch.dtype
    op: str = ""
    segmented: bool = False
    exclusive: bool = False
    reverse: bool = False
    lagged: bool = False
    total: bool = True

    @classmethod
    def of(cls, kind: str, x: Tensor, result: torch.dtype, accumulate: torch.dtype, **options: Any) -> ScanProblem:
        """The problem of x, (outer, length, inner)."""
        outer, length, inner = x.shape
        return cls(kind, x.device.type, outer, length, inner, x.dtype, result, accumulate, **options)


class ScanLowering(NamedTuple):
    """A row of the table: functions of a problem and its tensors, None for kinds that it never fits."""

    fits: Callable[[ScanProblem], bool]
    scan: Callable[..., Any] | None = None
    extremes: Callable[..., Any] | None = None
    linear: Callable[..., Any] | None = None
    linear_total: Callable[..., Any] | None = None
    is_torch: bool = False


SMALL_SCAN = 1 << 17  # elements; to call what Python launches takes longer than torch's loop over so few


LOWERINGS: Table[Any] = Table("scan: the lowering table")
register_lowering, choose_lowering, using_lowering = LOWERINGS.register, LOWERINGS.choose, LOWERINGS.use_row


def solve(problem: ScanProblem) -> Callable[..., Any]:
    """The function that solves a problem."""
    return getattr(LOWERINGS[choose_lowering(problem)], problem.kind)


def is_torch_lowering(problem: ScanProblem) -> bool:
    """Is torch's own operator the first way that fits?"""
    return getattr(LOWERINGS[choose_lowering(problem)], "is_torch", False)


def start_strides(starts: Tensor | None) -> tuple[int, int, int]:
    """From one outer, row and inner of (outer|1, length, inner|1) to the next: 0 where all share them."""
    if starts is None:
        return 0, 0, 0
    outer, length, inner = starts.shape
    return length * inner if outer > 1 else 0, inner, int(inner > 1)
