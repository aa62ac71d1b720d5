"""Select the implementation of a scan from the lowering table.

Operands are (outer, length, inner): a scan along `length`, of outer * inner independent lines. With segments, `starts`
is bool (outer|1, length, inner|1), True for rows at which a segment begins, so that nothing is carried into them; a dim
of size 1 has the same starts for all of x. The kinds "linear" and "linear_total" are recurrences.

An implementation registers itself, under a name and with a priority; of those that fit a problem, the one with the
lowest number runs it. It is a `ScanLowering` (or another object) with `can_run(problem) -> bool` and the functions
scan, extremes, linear and linear_total of a problem and its tensors, as `kernels.generic.GenericKernels` describes
them. It needs only those for which it fits. The implementations in `kernels` have the priorities 0 (torch, for small
problems), 10 (C++), 20 (Triton), 30 (torch) and 40 (blocks of torch operations, which always fit). One that only calls
an operator of torch has is_torch=True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.registry import Table


class ScanProblem(NamedTuple):
    """Properties of a scan by which the table selects an implementation."""

    kind: str  # "scan", "extremes", "linear" or "linear_total"
    device: str  # device type
    outer: int  # x is (outer, length, inner)
    length: int  # number of rows
    inner: int  # number of elements of a row
    dtype: torch.dtype  # the dtype of x
    result: torch.dtype  # the dtype of the result
    accumulate: torch.dtype  # the dtype of the accumulation
    op: str = ""  # a key of `MONOIDS`; "" for recurrences
    segmented: bool = False  # with starts of segments
    exclusive: bool = False  # combine the rows before each, without the row
    reverse: bool = False  # scan from the last row
    lagged: bool = False  # see ``sp::local_linear_scan``
    total: bool = True  # True if the total of a scan is requested

    @classmethod
    def of(cls, kind: str, x: Tensor, result: torch.dtype, accumulate: torch.dtype, **options: Any) -> ScanProblem:
        """Return the problem of x, (outer, length, inner)."""
        outer, length, inner = x.shape
        return cls(kind, x.device.type, outer, length, inner, x.dtype, result, accumulate, **options)


class ScanLowering(NamedTuple):
    """A row of the table: functions of a problem and its tensors, None for kinds that never fit."""

    can_run: Callable[[ScanProblem], bool]  # whether the functions support a problem
    # functions by the kind of problem, as methods of `GenericKernels`
    scan: Callable[..., Any] | None = None
    extremes: Callable[..., Any] | None = None  # running max or min, and its index
    linear: Callable[..., Any] | None = None  # linear recurrence
    linear_total: Callable[..., Any] | None = None  # affine map of all rows
    linear_grads: Callable[..., Any] | None = None  # gradients of a recurrence in one pass; optional
    is_torch: bool = False  # the functions only call an operator of torch


SMALL_SCAN = 1 << 17  # elements; up to here a launch from Python takes longer than torch's loop
LOWERINGS: Table[Any] = Table("scan: the lowering table")
register_lowering, choose_lowering, using_lowering = LOWERINGS.register, LOWERINGS.choose, LOWERINGS.use_row


def choose_kernel(problem: ScanProblem) -> Callable[..., Any]:
    """Return the function that runs the problem: of the first implementation that fits, the one of its kind."""
    return getattr(LOWERINGS[choose_lowering(problem)], problem.kind)


def one_pass_gradients(problem: ScanProblem) -> Callable[..., Any] | None:
    """Return the function by which the implementation of a recurrence computes its gradients in one pass, if any."""
    return getattr(LOWERINGS[choose_lowering(problem)], "linear_grads", None)


def is_torch_lowering(problem: ScanProblem) -> bool:
    """Return True if an operator of torch would run the problem, so that replacing torch's scan gains nothing."""
    return getattr(LOWERINGS[choose_lowering(problem)], "is_torch", False)


def start_strides(starts: Tensor | None) -> tuple[int, int, int]:
    """Return the strides (outer, row, inner), in elements, with which a kernel reads the start of an element of x.

    `starts` is bool (outer|1, length, inner|1), True where a segment begins, or None. A dim of size 1 has stride 0: all
    of x reads the same entry, and starts are not repeated in memory.
    """
    if starts is None:
        return 0, 0, 0
    outer, length, inner = starts.shape
    return length * inner if outer > 1 else 0, inner, int(inner > 1)
