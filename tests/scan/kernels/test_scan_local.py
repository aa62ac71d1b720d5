"""The sp::local_* operators by every row of the lowering table, against torch and against loops."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from support.scans.local_scans import check, exact, has_native, scan
from support.scans.scanning import (
    DTYPES,
    FLOATS,
    OPS,
    TORCH,
    is_as_exact_as,
    linear_scan_by_loop,
    run,
    sample,
    scan_by_loop,
    starts_like,
)
from torch import Tensor

from sp_compile.lowering.scan import scan_table as table
from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.lowering.scan.scan_table import using_lowering

sp = torch.ops.sp
ROWS = [row for row in table.LOWERINGS if row != "triton" and (row != "native" or has_native())]
rows = pytest.mark.parametrize("row", ROWS)
rows_of_all = pytest.mark.parametrize("row", [row for row in ROWS if row != "aten"])
cases = pytest.mark.parametrize(
    ("op", "dtype"), [(op, d) for op in OPS for d in (FLOATS if op == "logsumexp" else DTYPES)]
)
WAYS = list(itertools.product((False, True), repeat=3))  # exclusive, reverse, segmented
SHAPES = [((5,), 0), ((2, 5), 1), ((5, 3), 0), ((2, 5, 3), 1), ((2, 3, 5, 2), -2)]


def operands(dtype: torch.dtype, op: str = "sum") -> Iterator[tuple[Tensor, int]]:
    """Tensors of every shape and length, and the dim."""
    for seed, (shape, dim) in enumerate(SHAPES):
        for length in (0, 1, 2, 3, 7, 8, 33):
            sizes = list(shape)
            sizes[dim] = length
            yield sample(tuple(sizes), dtype, op, seed), dim


@rows
@cases
@pytest.mark.sampled(every=62)
def test_scans(row: str, op: str, dtype: torch.dtype) -> None:
    """Every way, at lengths around a power of two; integers exactly, others as exactly as torch."""
    ran = 0
    for seed, (x, dim) in enumerate(operands(dtype, op)):
        for exclusive, reverse, cut in random.Random(seed).sample(WAYS, 3):
            starts, total = starts_like(x, seed) if cut else None, seed % 2 == 0
            results = run(row, scan, x, dim, op, exclusive, reverse, starts, total)
            if results is not None:
                ran += 1
                check(x, dim, op, exclusive, reverse, starts, results[0], results[1] if total else None)
    assert ran >= (5 if row == "aten" else 3 * 35)


@rows
@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_is_as_exact_as_torch_over_a_thousand(row: str, op: str, dtype: torch.dtype) -> None:
    for shape, dim in (((1000,), 0), ((3, 1000), 1), ((1000, 4), 0), ((2, 1000, 3), 1)):
        x = sample(shape, dtype, op)
        results = run(row, scan, x, dim, op, False, False, None, False)
        assert row == "aten" or results is not None
        assert results is None or is_as_exact_as(results[0], TORCH[op](x, dim), exact(x, dim, op))


@pytest.mark.sampled(every=38)
@rows
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(row: str, op: str, dtype: torch.dtype) -> None:
    """Values and indices are torch's: of equal ones the last, and NaN over all."""
    torchs = torch.cummax if op == "max" else torch.cummin
    for x, dim in operands(dtype):
        if dtype.is_floating_point:
            x = x.round().masked_fill(torch.rand(x.shape) < 0.05, torch.nan)
        results = run(row, sp.local_extremes, x, None, dim, op, False)
        if row == "aten" and results is None:
            continue
        (values, indices), expected = results, torchs(x, dim)
        torch.testing.assert_close(values, expected.values, equal_nan=True, rtol=0, atol=0)
        assert torch.equal(indices, expected.indices)
        assert values.is_contiguous()
        assert indices.is_contiguous()


@rows_of_all
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_reversed_and_segmented(row: str, op: str) -> None:
    torchs = torch.cummax if op == "max" else torch.cummin
    for length in (0, 1, 2, 7, 40):
        x = sample((2, length, 3), torch.int32)
        with using_lowering(row):
            values, indices = sp.local_extremes(x, None, 1, op, True)
        expected = torchs(x.flip(1), 1)
        assert torch.equal(values, expected.values.flip(1))
        assert torch.equal(indices, length - 1 - expected.indices.flip(1))
        for reverse in (False, True):
            starts = starts_like(x)
            with using_lowering(row):
                values, indices = sp.local_extremes(x, starts, 1, op, reverse)
            assert torch.equal(values, scan_by_loop(x, 1, op, False, reverse, starts))
            assert torch.equal(x.gather(1, indices), values)


@pytest.mark.sampled(every=26)
@rows_of_all
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear(row: str, dtype: torch.dtype, lagged: bool, reverse: bool) -> None:
    wide = accumulate_dtype("sum", dtype, "cpu")
    for seed, (b, dim) in enumerate(operands(dtype)):
        a = sample(b.shape, dtype, seed=seed + 50).sigmoid()
        zeros = torch.zeros([size for d, size in enumerate(a.shape) if d != dim % a.ndim], dtype=torch.float64)
        initial = sample(zeros.shape, wide, seed=seed + 100) if seed % 2 else None
        with using_lowering(row):
            h = sp.local_linear_scan(a, b, initial, dim, reverse, lagged, dtype, wide)
            factor, state = sp.local_linear_total(a, b, dim, reverse, lagged, wide)
        started = zeros if initial is None else initial.double()
        out, final = recurrence_reference(a.double(), b.double(), started, dim, reverse, lagged)
        assert (h.dtype, h.shape, h.is_contiguous()) == (dtype, a.shape, True)
        assert is_as_exact_as(h, out.to(dtype), out)
        torch.testing.assert_close(factor, a.double().prod(dim).to(wide))
        torch.testing.assert_close((factor * started + state).to(wide), final.to(wide))


def recurrence_reference(
    a: Tensor, b: Tensor, initial: Tensor, dim: int, reverse: bool, lagged: bool
) -> tuple[Tensor, Tensor]:
    """Return all h, and the carry: the last h, multiplied with a if lagged."""
    if not a.shape[dim]:
        return b, initial
    if not lagged:
        h = linear_scan_by_loop(a, b, dim, initial, reverse)
        return h, h.select(dim, 0 if reverse else -1)
    carried, out = initial, [initial] * a.shape[dim]
    for i in reversed(range(len(out))) if reverse else range(len(out)):
        out[i] = carried + b.select(dim, i)
        carried = a.select(dim, i) * out[i]
    return torch.stack(out, dim), carried


@pytest.mark.parametrize("row", [row for row in ROWS if row != "aten"])
def test_a_product_that_overflows_takes_nothing_of_the_initial_state(row: str) -> None:
    a, b = torch.full((1, 600, 2), 4.0), torch.zeros(1, 600, 2)
    with using_lowering(row):
        h = sp.local_linear_scan(a, b, torch.zeros(1, 2), 1, False, False, torch.float32, torch.float32)
    assert torch.equal(h, b)


@pytest.mark.sampled(every=3)
@rows
@pytest.mark.parametrize("op", OPS)
def test_infinities_and_nan(row: str, op: str) -> None:
    inf, nan = torch.inf, torch.nan
    for values in (
        [-inf, -inf, 1.0, -inf, 2.0],
        [inf, 1.0, inf, -inf, 1.0],
        [1.0, nan, 2.0, -inf, inf],
        [0.0, inf, 1.0, 0.0, 2.0],
    ):
        x = torch.tensor(values)
        out, _ = run(row, scan, x, 0, op, False, False, None, False)
        torch.testing.assert_close(out, TORCH[op](x, 0), equal_nan=True)
