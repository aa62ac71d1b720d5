"""Run a local scan, and check its error."""

import torch
from support.scans.scanning import is_as_exact_as, scan_by_loop
from torch import Tensor

from sp_compile.lowering.scan.kernels import native
from sp_compile.lowering.scan.monoids import MONOIDS, accumulate_dtype, result_dtype
from sp_compile.lowering.scan.scan_table import ScanProblem

sp = torch.ops.sp


def has_native() -> bool:
    """Return True if native kernels can be compiled."""
    double = torch.float64
    return native.can_run_native(ScanProblem("scan", "cpu", 0, 0, 0, double, double, double, "sum"))


def scan(
    x: Tensor,
    dim: int,
    op: str,
    exclusive: bool = False,
    reverse: bool = False,
    starts: Tensor | None = None,
    total: bool = True,
) -> tuple[Tensor, Tensor]:
    result = result_dtype(op, x.dtype)
    wide = accumulate_dtype(op, result, x.device)
    return sp.local_scan(x, starts, dim, op, exclusive, reverse, result, wide, total)


def exact(
    x: Tensor, dim: int, op: str, exclusive: bool = False, reverse: bool = False, starts: Tensor | None = None
) -> Tensor:
    """Return the scan by a loop, in float64 or the integer dtype of the result."""
    wide = torch.float64 if x.is_floating_point() else result_dtype(op, x.dtype)
    return scan_by_loop(x.to(wide), dim, op, exclusive, reverse, starts)


def check(
    x: Tensor,
    dim: int,
    op: str,
    exclusive: bool,
    reverse: bool,
    starts: Tensor | None,
    out: Tensor,
    total: Tensor | None,
) -> None:
    expected = exact(x, dim, op, exclusive, reverse, starts)
    assert (out.dtype, out.shape) == (result_dtype(op, x.dtype), x.shape)
    assert out.is_contiguous()
    assert is_as_exact_as(out, expected.to(out.dtype), expected)
    if total is None:
        return
    wide = accumulate_dtype(op, out.dtype, x.device)
    last = exact(x, dim, op, False, reverse, starts) if exclusive else expected
    size = x.shape[dim]
    if size:
        last = last.select(dim, 0 if reverse else size - 1)
    else:
        last = torch.full(total.shape, MONOIDS[op].identity(last.dtype), dtype=last.dtype)
    assert (total.dtype, total.shape) == (wide, last.shape)
    assert total.is_contiguous()
    torch.testing.assert_close(total, last.to(wide))
