"""torch's own scans, along the last dim: forwards in one pass, in reverse with two more to turn the rows round."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.scan.monoids import MONOIDS, Monoid, Pair, accumulate_dtype
from sp_compile.lowering.scan.scan_table import SMALL_SCAN, ScanLowering, ScanProblem, register_lowering

from .generic import DIM

MIN_LINE_LENGTH = 64  # rows, of lines that the C++ takes longer to begin than torch to sum up


def fits_aten(problem: ScanProblem) -> bool:
    """Contiguous rows, no segments, and no total that torch has rounded already."""
    if problem.inner != 1 or problem.segmented:
        return False
    return problem.kind == "extremes" or (problem.kind == "scan" and _is_exact(problem))


def _launch_rank(problem: ScanProblem) -> int:
    """First of what takes longer to launch from Python, and of many short lines on a CPU that need little computing."""
    small = problem.outer * problem.length * problem.inner <= SMALL_SCAN
    simple = problem.kind == "scan" and problem.op != "logsumexp" and not problem.reverse
    short = problem.device == "cpu" and problem.inner == 1 and problem.length < MIN_LINE_LENGTH and simple
    return 0 if small or short else 30


def _is_exact(problem: ScanProblem) -> bool:
    """Does torch combine in the wanted dtype or a wider one, and return what the total must not lose?"""
    result, wanted = problem.result, problem.accumulate
    own = accumulate_dtype(problem.op, result, "cpu") if problem.device == "cpu" else result
    return torch.promote_types(own, wanted) == own and (not problem.total or result == wanted)


def scan_aten(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """torch.cumsum or its like; an exclusive one is written one row further. No total if torch has rounded it.

    The total may be a view of the result.
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
    x = x.to(out.dtype)
    if monoid.has_index:
        monoid.cumulative(x, DIM, out=(out, torch.empty_like(x, dtype=torch.int64)))
    else:
        monoid.cumulative(x, DIM, out=out)


def extremes_aten(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """torch.cummax or torch.cummin."""
    values, indices = MONOIDS[problem.op].cumulative(x.flip(DIM) if problem.reverse else x, DIM)
    if not problem.reverse:
        return values, indices
    return values.flip(DIM), x.shape[DIM] - 1 - indices.flip(DIM)


register_lowering("aten", ScanLowering(fits_aten, scan_aten, extremes_aten, is_torch=True), _launch_rank)
