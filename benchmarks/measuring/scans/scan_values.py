"""Right values of the Triton row of the scans' lowering table, against float64 by other code."""

import itertools
from collections.abc import Iterator

import torch
from measuring.scans.scan_direct import Direct
from measuring.scans.scan_schedules import SCHEDULES, using_schedule
from torch import Tensor

from sp_compile.lowering.scan.affine_scan import ROW_LAGS
from sp_compile.lowering.scan.kernels.triton.triton_scan import TRITON_LOWERING as row
from sp_compile.lowering.scan.scan_table import LOWERINGS
from sp_compile.lowering.triton.affine_kernel import scan_affine_rows

ROW, EXACT = Direct(row), Direct(LOWERINGS["blocked"])
F32, F64, I64 = torch.float32, torch.float64, torch.int64
Shape = tuple[int, int, int]
CHECKED: list[Shape] = [(1, 2**20 + 13, 1), (1, 100003, 3), (7, 999, 33), (4096, 17, 1)]
FEW = 512
"""Lines below which one program for each would take longer than anyone wants to wait."""
ALLOWED = 2e-5
"""Largest error of float32, relative to the largest value."""


def draw(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Values around 0, integers from -4 to 4."""
    generator = torch.Generator(device).manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-4, 5, shape, generator=generator, device=device, dtype=dtype)
    return torch.randn(shape, generator=generator, device=device, dtype=F32).to(dtype)


def draw_starts(shape: Shape, device: torch.device, every: int = 500) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.rand(shape, generator=generator, device=device) < 1 / every


def values(shapes: list[Shape], device: torch.device) -> list[str]:
    """Return a line for each wrong value."""
    wrong = []
    for i, (shape, way) in enumerate(itertools.product(shapes, SCHEDULES)):
        if way == "one" and shape[0] * shape[2] < FEW and shape[1] > 10**5:
            continue
        with using_schedule(way):
            for name, error in _errors(shape, device, i):
                if not error <= 1:
                    wrong.append(f"{name} {list(shape)} {way}: {error:.1f} times the limit")
    return wrong


def _errors(shape: Shape, device: torch.device, seed: int) -> Iterator[tuple[str, float]]:
    """Yield the name and error of some problems of a shape, as a multiple of the limit; the seed selects them."""
    x, starts = draw(shape, F32, device, seed), draw_starts(shape, device, 50)
    ops = ["sum", "prod", "max", "logsumexp"]
    op, exclusive, reverse = ops[seed % 4], bool(seed % 2), bool(seed // 2 % 2)
    # Of factors that are all a little above 1, float32 would round every product down.
    given = torch.exp(x / shape[1] ** 0.5) if op == "prod" else x
    for begin in (None, starts, starts[:1, :, :1].contiguous()):
        kind = "scan" if begin is None else "segmented scan"
        found = ROW.scan(given, begin, op, exclusive, reverse, F32, F32)
        expected = EXACT.scan(given.double(), begin, op, exclusive, reverse, F64, F64)
        yield f"{kind} {op}", max(_error(a, b) for a, b in zip(found, expected))
    counts = draw(shape, torch.int32, device, seed)
    found = ROW.scan(counts, starts, "sum", not exclusive, reverse, I64, I64)
    expected = EXACT.scan(counts, starts, "sum", not exclusive, reverse, I64, I64)
    yield "integer scan", _differ(found, expected)
    peaks = torch.cummax(x.bfloat16(), 1) if not reverse else torch.cummin(x.bfloat16(), 1)
    ties = ROW.extremes(x.bfloat16(), None, "min" if reverse else "max", False)
    yield "extremes", _differ(ties, peaks)
    a, initial = draw(shape, F32, device, seed + 1).sigmoid(), x[:, 0].contiguous()
    h = ROW.linear(a, x, initial, reverse, exclusive, F32, F32)
    yield "linear scan", _error(h, EXACT.linear(a.double(), x.double(), initial, reverse, exclusive, F64, F64))
    factor, state = ROW.linear_total(a, x, reverse, exclusive, F32)
    exact = EXACT.linear_total(a.double(), x.double(), reverse, exclusive, F64)
    yield "linear total", max(_error(factor, exact[0]), _error(state, exact[1]))
    yield "recurrence of matrices", _matrix_error(seed, reverse, device)


def _matrix_error(seed: int, reverse: bool, device: torch.device) -> float:
    """Return the error of the kernel of recurrences of matrices, against products in float64 on a CPU."""
    form = list(ROW_LAGS)[seed % 3]
    size, terms, rows = ((4, 7, 5), (64, 64, 9), (96, 40, 6), (128, 128, 17))[seed % (2 if device.type == "cpu" else 4)]
    m, b = draw((2, rows, size * size), F32, device, seed), draw((2, rows, size * terms), F32, device, seed + 1)
    m, b = m.view(2, rows, size, size) / size, b.view(2, rows, size, terms)
    exact = torch.ops.sp.local_affine_scan(m.double().cpu(), b.double().cpu(), None, reverse, form)
    return _error(scan_affine_rows(m, b, None, reverse, *ROW_LAGS[form]).cpu(), exact)


def _differ(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    return 0.0 if all(torch.equal(a, b) for a, b in zip(found, exact)) else torch.inf


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative to the greatest true value; 0 where both are the same infinity."""
    finite = exact.isfinite()
    if not torch.equal(found[~finite].double(), exact[~finite]):
        return torch.inf
    if not finite.any():
        return 0.0
    scale = exact[finite].abs().max().clamp_min(1)
    return ((found[finite].double() - exact[finite]).abs().max() / scale).item() / ALLOWED
