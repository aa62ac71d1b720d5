"""The Triton row of the scans' lowering table: CUDA tensors, and any in Triton's interpreter.

x is (outer, length, inner), contiguous; starts None or bool (outer|1, length, inner|1); every size may be 0.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sp_compile.lowering.scan.monoids import MONOIDS, Pair
from sp_compile.lowering.scan.table import Problem, register
from sp_compile.lowering.triton import AVAILABLE

if TYPE_CHECKING:
    from .tiles import Sweep

READABLE = frozenset(
    (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
)  # fmt: skip


def fits(problem: Problem) -> bool:
    """Whether the kernels can run this."""
    if {problem.dtype, problem.result, problem.accumulate} - READABLE:
        return False
    return AVAILABLE and (problem.device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def scan(
    x: Tensor,
    starts: Tensor | None,
    op: str,
    exclusive: bool,
    reverse: bool,
    dtype: torch.dtype,
    accumulate: torch.dtype,
) -> Pair:
    """-> out, like x in dtype, and total (outer, inner) in accumulate: of the last segment in scan order."""
    from .tiles import State, Sweep
    from .ways import run

    neutral = MONOIDS[op].identity(accumulate)
    compute = _compute_dtype(accumulate)
    out = x.new_empty(x.shape, dtype=compute if dtype is torch.bool else dtype)
    if not x.numel():
        return out.to(dtype), x.new_full((x.shape[0], x.shape[2]), neutral, dtype=accumulate)
    sweep = Sweep(x, op, _number(neutral), compute, torch.int32, None, starts, exclusive, reverse)
    total = run(sweep, None, State(out), True)
    assert total is not None
    return out.to(dtype), total.value.view(x.shape[0], x.shape[2]).to(accumulate)


def extremes(x: Tensor, starts: Tensor | None, op: str, reverse: bool) -> Pair:
    """-> the running max or min, like x, and its index, int64."""
    from .tiles import State, Sweep
    from .ways import run

    out, indices = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)
    if x.numel():
        neutral = _number(MONOIDS[op].identity(x.dtype))
        compute = _compute_dtype(x.dtype)
        sweep = Sweep(x, f"arg{op}", neutral, compute, _index_dtype(x), None, starts, False, reverse)
        run(sweep, None, State(out, indices), False)
    return out, indices


def linear(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    reverse: bool,
    lagged: bool,
    dtype: torch.dtype,
    accumulate: torch.dtype,
) -> Tensor:
    """-> h like b in dtype: h_i = a_i * h_(i-1) + b_i; lagged: h_i = s_(i-1) + b_i with s_i = a_i * h_i."""
    from .tiles import State
    from .ways import run

    h = b.new_empty(b.shape, dtype=dtype)
    if b.numel():
        sweep = _recurrence(a, b, reverse, lagged, accumulate)
        before = None if initial is None else State(initial.to(sweep.compute).reshape(1, -1))
        run(sweep, before, State(h), False)
    return h


def linear_total(a: Tensor, b: Tensor, reverse: bool, lagged: bool, accumulate: torch.dtype) -> Pair:
    """-> factor and state (outer, inner): what goes into the recurrence comes out as factor * it + state."""
    from .ways import run

    shape = a.shape[0], a.shape[2]
    if not a.numel():
        return a.new_ones(shape, dtype=accumulate), b.new_zeros(shape, dtype=accumulate)
    total = run(_recurrence(a, b, reverse, lagged, accumulate), None, None, True)
    assert total is not None
    assert total.second is not None
    return total.second.view(shape).to(accumulate), total.value.view(shape).to(accumulate)


def _recurrence(a: Tensor, b: Tensor, reverse: bool, lagged: bool, accumulate: torch.dtype) -> Sweep:
    from .tiles import Sweep

    return Sweep(a, "linear", 1, _compute_dtype(accumulate), torch.int32, b, None, lagged, reverse)


def _compute_dtype(accumulate: torch.dtype) -> torch.dtype:
    """What states are held in: no narrower than 32 bits."""
    if accumulate.itemsize == 8:
        return accumulate
    return torch.float32 if accumulate.is_floating_point else torch.int32


def _number(neutral: float) -> float:
    return int(neutral) if isinstance(neutral, bool) else neutral


def _index_dtype(x: Tensor) -> torch.dtype:
    return torch.int32 if x.shape[1] < 2**31 else torch.int64


register("triton", sys.modules[__name__], rank=lambda problem: 20)
