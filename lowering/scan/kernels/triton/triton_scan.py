"""Implement scans in Triton for the lowering table.

They run CUDA tensors, and all tensors in Triton's interpreter. A function describes the scan as a `Sweep`, and
`dispatch.run_sweep` runs it. Modules that need triton are imported at the first call.

x is (outer, length, inner), contiguous; starts is None or bool (outer|1, length, inner|1); every size may be 0.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sp_compile.lowering.scan.monoids import MONOIDS, Pair, is_scannable
from sp_compile.lowering.scan.scan_table import ScanLowering, ScanProblem, register_lowering
from sp_compile.lowering.triton import AVAILABLE

if TYPE_CHECKING:
    from .triton_tiles import Sweep


def can_run_triton(problem: ScanProblem) -> bool:
    """Return True if the kernels support the problem."""
    if not all(map(is_scannable, (problem.dtype, problem.result, problem.accumulate))):
        return False
    return AVAILABLE and (problem.device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def scan_triton(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """Return the scan of x, and the total of the last segment, (outer, inner), if it is requested."""
    from .dispatch import run_sweep
    from .triton_tiles import State, Sweep

    dtype, accumulate = problem.result, problem.accumulate
    neutral, compute = MONOIDS[problem.op].identity(accumulate), _state_dtype(accumulate)
    out = x.new_empty(x.shape, dtype=compute if dtype is torch.bool else dtype)  # bools are cast after the kernel
    if not x.numel():
        return out.to(dtype), x.new_full((x.shape[0], x.shape[2]), neutral, dtype=accumulate)
    sweep = Sweep(
        x, problem.op, neutral, compute, index=torch.int32,  # these scans have no indices
        starts=starts, shift=problem.exclusive, reverse=problem.reverse,
    )  # fmt: skip
    total = run_sweep(sweep, initial=None, out=State(out), total=problem.total)
    if total is None:
        return out.to(dtype), x.new_empty(0)
    return out.to(dtype), total.value.view(x.shape[0], x.shape[2]).to(accumulate)


def extremes_triton(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """Return the running extremes, and their row indices, int64."""
    from .dispatch import run_sweep
    from .triton_tiles import State, Sweep

    out, indices = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)
    if x.numel():
        neutral = MONOIDS[problem.op].identity(x.dtype)
        compute = _state_dtype(x.dtype)
        index = torch.int32 if x.shape[1] < 2**31 else torch.int64
        sweep = Sweep(x, f"arg{problem.op}", neutral, compute, index, starts=starts, reverse=problem.reverse)
        run_sweep(sweep, initial=None, out=State(out, indices), total=False)
    return out, indices


def linear_triton(problem: ScanProblem, a: Tensor, b: Tensor, initial: Tensor | None) -> Tensor:
    """Return h with h_i = a_i * h_(i-1) + b_i, from h_(-1) = initial, (outer, inner), or zeros."""
    from .dispatch import run_sweep
    from .triton_tiles import State

    h = b.new_empty(b.shape, dtype=problem.result)
    if b.numel():
        sweep = _recurrence_sweep(problem, a, b)
        before = None if initial is None else State(initial.to(sweep.compute).reshape(1, -1))
        run_sweep(sweep, initial=before, out=State(h), total=False)
    return h


def linear_grads_triton(
    problem: ScanProblem, a: Tensor, grad: Tensor, initial: Tensor | None, h: Tensor, before: Tensor | None
) -> Pair:
    """Return the gradients w and da of ``sp::local_linear_scan_grads``; before is (outer, inner)."""
    from .dispatch import run_sweep
    from .triton_tiles import ResultProducts, State

    w, da = grad.new_empty(grad.shape, dtype=problem.result), torch.empty_like(a)
    if grad.numel():
        sweep = _recurrence_sweep(problem, a, grad)
        sweep = replace(sweep, product=ResultProducts(h, None if before is None else before.reshape(-1), da))
        first = None if initial is None else State(initial.to(sweep.compute).reshape(1, -1))
        run_sweep(sweep, initial=first, out=State(w), total=False)
    return w, da


def linear_total_triton(problem: ScanProblem, a: Tensor, b: Tensor) -> Pair:
    """Return the factor and the state of the affine map of all rows, h -> factor * h + state, (outer, inner) each."""
    from .dispatch import run_sweep

    shape, accumulate = (a.shape[0], a.shape[2]), problem.accumulate
    if not a.numel():
        return a.new_ones(shape, dtype=accumulate), b.new_zeros(shape, dtype=accumulate)
    total = run_sweep(_recurrence_sweep(problem, a, b), initial=None, out=None, total=True)
    assert total is not None
    assert total.second is not None  # the product of the factors a
    return total.second.view(shape).to(accumulate), total.value.view(shape).to(accumulate)


def _recurrence_sweep(problem: ScanProblem, a: Tensor, b: Tensor) -> Sweep:
    """Return the sweep of the recurrence h_i = a_i * h_(i-1) + b_i.

    A lagged one has the factor of the row before, h_i = a_(i-1) * h_(i-1) + b_i: the sweep shifts the factors by a row.
    """
    from .triton_tiles import Sweep

    compute = _state_dtype(problem.accumulate)
    # The neutral factor is 1. int32: the dtype of indices, which a recurrence does not have.
    return Sweep(a, "linear", 1, compute, index=torch.int32, second=b, shift=problem.lagged, reverse=problem.reverse)


def _state_dtype(accumulate: torch.dtype) -> torch.dtype:
    """Return the dtype of states in registers: the accumulation dtype, widened to at least 32 bits."""
    if accumulate.itemsize == 8:
        return accumulate
    return torch.float32 if accumulate.is_floating_point else torch.int32


TRITON_LOWERING = ScanLowering(
    can_run_triton, scan_triton, extremes_triton, linear_triton, linear_total_triton, linear_grads_triton
)
register_lowering("triton", TRITON_LOWERING, priority=lambda problem: 20)
