"""The sp::local_* operators by every row of the lowering table, against torch and against loops."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scanning import (
    DTYPES,
    FLOATS,
    OPS,
    TORCH,
    as_exact_as,
    by_hand,
    linear_by_hand,
    run,
    sample,
    starts_like,
)
from torch import Tensor

from sp_compile.lowering.scan import native, table
from sp_compile.lowering.scan.monoids import MONOIDS, accumulate_dtype, result_dtype
from sp_compile.lowering.scan.table import using

sp = torch.ops.sp
ROWS = [row for row in table.MODULES if row != "triton" and (row != "native" or native.available())]
rows = pytest.mark.parametrize("row", ROWS)
rows_of_all = pytest.mark.parametrize("row", [row for row in ROWS if row != "aten"])
cases = pytest.mark.parametrize(
    ("op", "dtype"), [(op, d) for op in OPS for d in (FLOATS if op == "logsumexp" else DTYPES)]
)
WAYS = list(itertools.product((False, True), repeat=3))  # exclusive, reverse, segmented
SHAPES = [((5,), 0), ((2, 5), 1), ((5, 3), 0), ((2, 5, 3), 1), ((2, 3, 5, 2), -2)]


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
    x: Tensor,
    dim: int,
    op: str,
    exclusive: bool = False,
    reverse: bool = False,
    starts: Tensor | None = None,
) -> Tensor:
    """By hand, in float64 or the integers of the result."""
    wide = torch.float64 if x.is_floating_point() else result_dtype(op, x.dtype)
    return by_hand(x.to(wide), dim, op, exclusive, reverse, starts)


def operands(dtype: torch.dtype, op: str = "sum") -> Iterator[tuple[Tensor, int]]:
    """Tensors of every shape and length, and the dim."""
    for seed, (shape, dim) in enumerate(SHAPES):
        for length in (0, 1, 2, 3, 7, 8, 33):
            sizes = list(shape)
            sizes[dim] = length
            yield sample(tuple(sizes), dtype, op, seed), dim


@rows
@cases
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
    assert as_exact_as(out, expected.to(out.dtype), expected)
    if total is None:
        return
    wide = accumulate_dtype(op, out.dtype, x.device)
    last = exact(x, dim, op, False, reverse, starts)
    size = x.shape[dim]
    if size:
        last = last.select(dim, 0 if reverse else size - 1)
    else:
        last = torch.full(total.shape, MONOIDS[op].identity(last.dtype), dtype=last.dtype)
    assert (total.dtype, total.shape) == (wide, last.shape)
    assert total.is_contiguous()
    torch.testing.assert_close(total, last.to(wide))


@rows
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_is_as_exact_as_torch_over_a_thousand(row: str, op: str, dtype: torch.dtype) -> None:
    for shape, dim in (((1000,), 0), ((3, 1000), 1), ((1000, 4), 0), ((2, 1000, 3), 1)):
        x = sample(shape, dtype, op)
        results = run(row, scan, x, dim, op, False, False, None, False)
        assert row == "aten" or results is not None
        assert results is None or as_exact_as(results[0], TORCH[op](x, dim), exact(x, dim, op))


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
        with using(row):
            values, indices = sp.local_extremes(x, None, 1, op, True)
        expected = torchs(x.flip(1), 1)
        assert torch.equal(values, expected.values.flip(1))
        assert torch.equal(indices, length - 1 - expected.indices.flip(1))
        for reverse in (False, True):
            starts = starts_like(x)
            with using(row):
                values, indices = sp.local_extremes(x, starts, 1, op, reverse)
            assert torch.equal(values, by_hand(x, 1, op, False, reverse, starts))
            assert torch.equal(x.gather(1, indices), values)


@rows_of_all
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear(row: str, dtype: torch.dtype, lagged: bool, reverse: bool) -> None:
    wide = accumulate_dtype("sum", dtype, "cpu")
    for seed, (b, dim) in enumerate(operands(dtype)):
        a = sample(b.shape, dtype, seed=seed + 50).sigmoid()
        zeros = torch.zeros(
            [size for d, size in enumerate(a.shape) if d != dim % a.ndim], dtype=torch.float64
        )
        initial = sample(zeros.shape, wide, seed=seed + 100) if seed % 2 else None
        with using(row):
            h = sp.local_linear_scan(a, b, initial, dim, reverse, lagged, dtype, wide)
            factor, state = sp.local_linear_total(a, b, dim, reverse, lagged, wide)
        started = zeros if initial is None else initial.double()
        out, final = recurrence_by_hand(a.double(), b.double(), started, dim, reverse, lagged)
        assert (h.dtype, h.shape, h.is_contiguous()) == (dtype, a.shape, True)
        assert as_exact_as(h, out.to(dtype), out)
        torch.testing.assert_close(factor, a.double().prod(dim).to(wide))
        torch.testing.assert_close((factor * started + state).to(wide), final.to(wide))


def recurrence_by_hand(
    a: Tensor, b: Tensor, initial: Tensor, dim: int, reverse: bool, lagged: bool
) -> tuple[Tensor, Tensor]:
    """All h, and what comes out: the last h, or if lagged a times it."""
    if not a.shape[dim]:
        return b, initial
    if not lagged:
        h = linear_by_hand(a, b, dim, initial, reverse)
        return h, h.select(dim, 0 if reverse else -1)
    carried, out = initial, [initial] * a.shape[dim]
    for i in reversed(range(len(out))) if reverse else range(len(out)):
        out[i] = carried + b.select(dim, i)
        carried = a.select(dim, i) * out[i]
    return torch.stack(out, dim), carried


@pytest.mark.parametrize("row", [row for row in ROWS if row not in ("aten", "tree")])
def test_a_product_that_overflows_takes_nothing_of_the_initial_state(row: str) -> None:
    a, b = torch.full((1, 600, 2), 4.0), torch.zeros(1, 600, 2)
    with using(row):
        h = sp.local_linear_scan(a, b, torch.zeros(1, 2), 1, False, False, torch.float32, torch.float32)
    assert torch.equal(h, b)


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


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_strides_and_starts(data: st.DataObject) -> None:
    """Whatever the table chooses, of views too."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    op = data.draw(st.sampled_from(OPS))
    dtype = data.draw(st.sampled_from(FLOATS if op == "logsumexp" else DTYPES))
    x = sample(tuple(2 * size for size in shape), dtype, op, data.draw(st.integers(0, 9)))
    x = x[tuple(slice(random.Random(d).randint(0, 1), None, 2) for d in range(len(shape)))]
    order = data.draw(st.permutations(range(len(shape))))
    x = x.permute(order)
    exclusive, reverse = data.draw(st.booleans()), data.draw(st.booleans())
    kind = data.draw(st.sampled_from(("none", "vector", "whole", "narrow")))
    starts = given_starts(kind, x, dim)
    out, last = scan(x, dim, op, exclusive, reverse, starts)
    check(x, dim, op, exclusive, reverse, None if starts is None else like(starts, x, dim), out, last)


def given_starts(kind: str, x: Tensor, dim: int) -> Tensor | None:
    if kind == "none":
        return None
    whole = starts_like(x)
    if kind == "vector":
        return whole.movedim(dim, -1).reshape(-1, x.shape[dim])[0]
    narrow = tuple(slice(None) if d in (0, dim % x.ndim) else slice(0, 1) for d in range(x.ndim))
    return whole[narrow] if kind == "narrow" else whole


def like(starts: Tensor, x: Tensor, dim: int) -> Tensor:
    if starts.ndim == 1:
        starts = starts.view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
    return starts.expand_as(x)


@rows_of_all
@pytest.mark.parametrize("length", [0, 1, 5])
def test_results_share_no_memory(row: str, length: int) -> None:
    x = torch.rand(2, length, 1, dtype=torch.float64)
    with using(row):
        out, total = scan(x, 1, "sum")
        h = sp.local_linear_scan(x, x, None, 1, False, False, x.dtype, x.dtype)
        factor, state = sp.local_linear_total(x, x, 1, False, False, x.dtype)
        values, _ = sp.local_extremes(x, None, 1, "max", False)
    results = [out, total, h, factor, state, values, x]
    pointers = [result.untyped_storage().data_ptr() for result in results if result.numel()]
    assert len(set(pointers)) == len(pointers)


def test_numbers_are_rounded_before_they_are_added() -> None:
    x = torch.tensor([0.6, 0.6, 0.6, 300.0])
    for dtype in (torch.int64, torch.bfloat16):
        wide = accumulate_dtype("sum", dtype, "cpu")
        out, _ = sp.local_scan(x, None, 0, "sum", False, False, dtype, wide)
        assert torch.equal(out, x.cumsum(0, dtype=dtype))


ARGUMENTS: list[tuple[Any, tuple[Any, ...]]] = [
    (sp.local_scan, (torch.rand(3, 4), None, 1, "sum", True, False, torch.float32, torch.float64)),
    (sp.local_scan, (torch.ones(3, 4), None, 0, "sum", False, False, torch.float64, torch.float64, False)),
    (sp.local_scan, (torch.rand(()), None, 0, "max", False, False, torch.float32, torch.float32)),
    (sp.local_extremes, (torch.rand(4, 3).t(), torch.tensor([True, False, True, False]), -1, "min", True)),
    (sp.local_linear_scan, (*torch.rand(2, 3, 4), None, 1, False, True, torch.float32, torch.float64)),
    (sp.local_linear_total, (*torch.rand(2, 3, 4, 2), 1, True, False, torch.float64)),
]


@pytest.mark.parametrize(("op", "arguments"), ARGUMENTS)
def test_are_good_operators(op: Any, arguments: tuple[Any, ...]) -> None:
    """Schemas and fakes say what the kernels do."""
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.default, arguments, test_utils=checks)


def test_fakes_take_symbolic_sizes() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def totals(x: Tensor) -> Tensor:
        out, total = sp.local_scan(x, None, 1, "sum", False, False, torch.float32, torch.float64)
        return out.sum((0, 1)) + total.sum(0)

    for length in (7, 12):
        x = torch.rand(3, length, 2)
        torch.testing.assert_close(totals(x).float(), x.cumsum(1).sum((0, 1)) + x.sum((0, 1)))
