"""Run the scans of torch along the last dim.

A forward scan is one pass; a reverse scan flips the rows in two more.
"""

import torch
from torch import Tensor

from sp_compile.lowering.scan.monoids import MONOIDS, Monoid, Pair, accumulate_dtype
from sp_compile.lowering.scan.scan_table import SMALL_SCAN, ScanLowering, ScanProblem, register_lowering

from .generic import DIM

MIN_LINE_LENGTH = 64  # rows of a line, up to which starting the C++ takes longer than a sum in torch


def can_run_aten(problem: ScanProblem) -> bool:
    """Return True for scans along the last dim, without segments, that torch computes precisely enough."""
    if problem.inner != 1 or problem.segmented:
        return False
    return problem.kind == "extremes" or (problem.kind == "scan" and _is_exact(problem))


def _aten_priority(problem: ScanProblem) -> int:
    """Return the priority of torch's scans in the lowering table; low numbers are first.

    They are first (0) for small problems, where a launch from Python dominates, and on a CPU for short lines (few
    elements along the scanned dim) and cheap operations, where starting the C++ kernel takes longer than the scan. In
    all other cases they follow the C++ and Triton kernels (30).
    """
    if problem.outer * problem.length * problem.inner <= SMALL_SCAN:
        return 0
    is_simple = problem.kind == "scan" and problem.op != "logsumexp" and not problem.reverse
    has_short_lines = problem.device == "cpu" and problem.inner == 1 and problem.length < MIN_LINE_LENGTH
    return 0 if is_simple and has_short_lines else 30


def _is_exact(problem: ScanProblem) -> bool:
    """Return True if torch accumulates in the requested dtype or a wider one, and a requested total is not rounded.

    The total is read from the result, which is rounded unless it has the accumulation dtype.
    """
    result, accumulate = problem.result, problem.accumulate
    # On a CPU torch accumulates in a wider dtype than that of the result, on other devices in the same.
    torch_accumulate = accumulate_dtype(problem.op, result, "cpu") if problem.device == "cpu" else result
    if torch.promote_types(torch_accumulate, accumulate) != torch_accumulate:
        return False
    return not problem.total or result == accumulate


def scan_aten(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """Run `torch.cumsum` or a similar scan, and return its result and the total, which may be a view of the result.

    `starts` is None, since `can_run_aten` excludes segments. An exclusive result is the inclusive one, written one row
    later. The total is empty if torch has rounded it; by `_is_exact` it is then not requested.
    """
    monoid, dtype, accumulate = MONOIDS[problem.op], problem.result, problem.accumulate
    out = torch.empty_like(x, dtype=dtype)
    if not out.shape[DIM]:
        return out, x.new_full((x.shape[0], x.shape[2]), monoid.identity(accumulate), dtype=accumulate)
    x = x.flip(DIM) if problem.reverse else x
    if problem.exclusive:
        out[:, :1] = monoid.identity(dtype)
        _write_scan(monoid, x[:, :-1], out[:, 1:])
    else:
        _write_scan(monoid, x, out)
    if dtype != accumulate:
        total = out.new_empty(0, dtype=accumulate)
    else:
        total = monoid.combine(out[:, -1], x[:, -1]) if problem.exclusive else out[:, -1]
    return out.flip(DIM) if problem.reverse else out, total


def _write_scan(monoid: Monoid, x: Tensor, out: Tensor) -> None:
    """Write torch's inclusive scan of x, in the dtype of out, into out, which may be a view."""
    x = x.to(out.dtype)
    if monoid.has_index:
        monoid.cumulative(x, DIM, out=(out, torch.empty_like(x, dtype=torch.int64)))
    else:
        monoid.cumulative(x, DIM, out=out)


def extremes_aten(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """Run `torch.cummax` or `torch.cummin`; `starts` is None, since `can_run_aten` excludes segments."""
    values, indices = MONOIDS[problem.op].cumulative(x.flip(DIM) if problem.reverse else x, DIM)
    if not problem.reverse:
        return values, indices
    return values.flip(DIM), x.shape[DIM] - 1 - indices.flip(DIM)


register_lowering("aten", ScanLowering(can_run_aten, scan_aten, extremes_aten, is_torch=True), _aten_priority)
