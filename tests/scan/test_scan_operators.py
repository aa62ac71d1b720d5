"""The sp::local_* operators as operators: any shape and strides, results of their own, fakes, symbolic sizes."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scans.local_scans import check, has_native, scan
from support.scans.scanning import DTYPES, FLOATS, OPS, sample, starts_like
from torch import Tensor

from sp_compile.lowering.scan import scan_table as table
from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.lowering.scan.scan_table import using_lowering

sp = torch.ops.sp
ROWS = [row for row in table.LOWERINGS if row != "triton" and (row != "native" or has_native())]
rows_of_all = pytest.mark.parametrize("row", [row for row in ROWS if row != "aten"])


@given(data=st.data())
@settings(max_examples=10)
def test_any_shape_strides_and_starts(data: st.DataObject) -> None:
    """Every kernel choice of the table gives the same result, also for views."""
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
    with using_lowering(row):
        out, total = scan(x, 1, "sum")
        h = sp.local_linear_scan(x, x, None, 1, False, False, x.dtype, x.dtype)
        w, da = sp.local_linear_scan_grads(x, x, None, x, None, 1, True, x.dtype, x.dtype)
        factor, state = sp.local_linear_total(x, x, 1, False, False, x.dtype)
        values, _ = sp.local_extremes(x, None, 1, "max", False)
    results = [out, total, h, w, da, factor, state, values, x]
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
    (
        sp.local_linear_scan_grads,
        (*torch.rand(2, 3, 4), None, *torch.rand(1, 3, 4), None, 1, True, *[torch.float32] * 2),
    ),
    (sp.local_linear_total, (*torch.rand(2, 3, 4, 2), 1, True, False, torch.float64)),
]


@pytest.mark.parametrize(("op", "arguments"), ARGUMENTS)
def test_are_good_operators(op: Any, arguments: tuple[Any, ...]) -> None:
    """Schemas and fakes agree with the kernels."""
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
