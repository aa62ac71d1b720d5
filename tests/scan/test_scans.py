"""The public scans of local tensors: values and errors."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scans.scanning import (
    DTYPES,
    FLOATS,
    LENGTHS,
    OPS,
    TORCH,
    ids_of,
    is_as_exact_as,
    linear_scan_by_loop,
    sample,
    scan_by_loop,
)
from torch import Tensor

from sp_compile import exclusive_scan, inclusive_scan, linear_scan, segmented_scan

cases = pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op in OPS for dtype in (FLOATS if op == "logsumexp" else DTYPES)], ids=str
)
SHAPES = [((), 0), ((7,), -1), ((4, 7), 0), ((4, 7), 1), ((2, 7, 3), 1), ((2, 3, 7, 1), -2)]


def starts_of(ids: Tensor, x: Tensor, dim: int, reverse: bool) -> Tensor:
    """Return the segment starts in scan order, of the shape of x, for ids of the shape of x."""
    ids = ids.flip(dim) if reverse else ids
    starts = torch.ones_like(ids, dtype=torch.bool)
    if ids.shape[dim] > 1:
        changes = ids.diff(dim=dim) != 0
        starts = torch.cat([starts.narrow(dim, 0, 1), changes], dim)
    return starts.flip(dim) if reverse else starts


@cases
@pytest.mark.sampled(every=3)
def test_inclusive_is_torchs(op: str, dtype: torch.dtype) -> None:
    """Results have torch's dtype, and torch's values or equally exact ones."""
    for shape, dim in SHAPES:
        for length in LENGTHS:
            x = sample(tuple(length if size == 7 else size for size in shape), dtype, op)
            ours, torchs = inclusive_scan(x, dim, op), TORCH[op](x, dim)
            assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
            wide = torch.float64 if x.is_floating_point() else torchs.dtype
            assert is_as_exact_as(ours, torchs, TORCH[op](x.to(wide), dim))


@pytest.mark.sampled(every=1)
@cases
def test_every_way(op: str, dtype: torch.dtype) -> None:
    """Exclusive, reverse and segmented, as the loop over elements has it."""
    for seed, (shape, dim) in enumerate(SHAPES):
        x = sample(shape, dtype, op, seed)
        wide = torch.float64 if x.is_floating_point() else inclusive_scan(x, dim, op).dtype
        for reverse in (False, True):
            found = exclusive_scan(x, dim, op, reverse=reverse)
            expected = scan_by_loop(x.to(wide), dim, op, True, reverse)
            assert is_as_exact_as(found, expected.to(found.dtype), expected)
            if not x.ndim:
                continue
            ids = ids_of(x.shape[dim])
            whole = ids.view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]).expand_as(x)
            starts = starts_of(whole, x, dim, reverse)
            for exclusive in (False, True):
                found = segmented_scan(x, ids, dim, op, exclusive=exclusive, reverse=reverse)
                expected = scan_by_loop(x.to(wide), dim, op, exclusive, reverse, starts)
                assert is_as_exact_as(found, expected.to(found.dtype), expected)


@given(data=st.data())
@settings(max_examples=50)
def test_segments_of_any_lengths(data: st.DataObject) -> None:
    """Each segment equals torch's result for it alone, for all broadcasts and strides."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    outer, inner = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    op, dtype = data.draw(st.sampled_from(OPS)), data.draw(st.sampled_from((torch.float64, torch.int64)))
    dtype = torch.float64 if op == "logsumexp" else dtype
    x = sample((inner, sum(lengths), outer), dtype, op, data.draw(st.integers(0, 99))).transpose(0, 2)
    ids = torch.repeat_interleave(torch.randperm(len(lengths)), torch.tensor(lengths))
    kind = data.draw(st.sampled_from(("vector", "whole", "column", "narrow")))
    given_ids = {
        "vector": ids,
        "whole": ids[None, :, None].expand_as(x),
        "column": ids[:, None],
        "narrow": ids[None, :, None].int(),
    }[kind]
    expected = torch.cat([TORCH[op](part, 1) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(segmented_scan(x, given_ids, 1, op), expected)


def test_ids_differ_between_rows() -> None:
    x = torch.ones(2, 4, dtype=torch.int64)
    ids = torch.tensor([[0, 0, 0, 1], [5, 6, 6, 6]])
    assert segmented_scan(x, ids, 1).tolist() == [[1, 2, 3, 1], [1, 1, 2, 3]]


def test_a_repeated_id_starts_another_segment() -> None:
    x, ids = torch.ones(5, dtype=torch.int64), torch.tensor([1, 1, 0, 1, 1])
    assert segmented_scan(x, ids, 0).tolist() == [1, 2, 1, 1, 2]


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sampled(every=2)
def test_indices(op: str, dtype: torch.dtype) -> None:
    torchs = torch.cummax if op == "max" else torch.cummin
    for shape, dim in SHAPES:
        for length in LENGTHS:
            x = sample(tuple(length if size == 7 else size for size in shape), dtype)
            x = x.round() if dtype.is_floating_point else x
            expected = torchs(x, dim)
            values, indices = inclusive_scan(x, dim, op, indices=True)
            assert torch.equal(values, expected.values)
            assert torch.equal(indices, expected.indices)


def test_indices_in_reverse() -> None:
    values, indices = inclusive_scan(torch.tensor([1, 3, 3, 2]), 0, "max", indices=True, reverse=True)
    assert values.tolist() == [3, 3, 3, 2]
    assert indices.tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identities(op: str, dtype: torch.dtype) -> None:
    """The first of an exclusive scan changes nothing that it is combined with."""
    if op == "logsumexp" and not dtype.is_floating_point:
        return
    x = sample((3,), dtype, op)
    first = exclusive_scan(x, 0, op)[0]
    with contextlib.nullcontext() if op != "logsumexp" else torch.no_grad():
        again = inclusive_scan(torch.stack([first, *x.to(first.dtype)]), 0, op)[1:]
    assert torch.equal(again, inclusive_scan(x, 0, op))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16, torch.int8])
def test_dtype_casts_first(dtype: torch.dtype) -> None:
    x = torch.tensor([0.6, 1.6, 2.6])
    for dim in (0, -1):
        assert torch.equal(inclusive_scan(x, dim, dtype=dtype), x.cumsum(dim, dtype=dtype))
    assert inclusive_scan(x, 0, "max", dtype=dtype).dtype == dtype


def test_half_precision_is_added_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.full((2, 3000), 0.01, dtype=dtype)
        for dim_last in (x, x.t()):
            total = inclusive_scan(dim_last, 1 if dim_last is x else 0).double()
            exact = dim_last.double().cumsum(1 if dim_last is x else 0)
            assert ((total - exact).abs() <= torch.finfo(dtype).eps * exact).all()


def test_accumulate_dtype() -> None:
    """Small numbers after a large one show the rounding of intermediate sums."""
    x = torch.tensor([1e8] + [1.0] * 1000 + [-1e8]).view(-1, 1).expand(-1, 3)
    for scan in (inclusive_scan, lambda x, *rest, **options: linear_scan(torch.ones_like(x), x, *rest, **options)):
        assert (scan(x, 0, accumulate_dtype=torch.float64)[-1] == 1000).all()
        assert (scan(x, 0, accumulate_dtype=torch.float32)[-1] != 1000).all()


def test_integers_that_overflow_wrap_as_in_torch() -> None:
    x = torch.tensor([2**62, 2**62, 1])
    assert torch.equal(inclusive_scan(x, 0), x.cumsum(0))


# linear_scan.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_linear(dtype: torch.dtype, reverse: bool) -> None:
    for shape, dim in SHAPES[1:]:
        for length in LENGTHS:
            sizes = tuple(length if size == 7 else size for size in shape)
            a, b = sample(sizes, dtype).sigmoid(), sample(sizes, dtype, seed=1)
            first = sample(tuple(s for d, s in enumerate(sizes) if d != dim % len(sizes)), dtype, seed=2)
            for initial in (None, first):
                h = linear_scan(a, b, dim, initial=initial, reverse=reverse)
                exact = linear_scan_by_loop(
                    a.double(), b.double(), dim, None if initial is None else initial.double(), reverse
                )
                assert h.dtype == dtype
                assert is_as_exact_as(h, exact.to(dtype), exact)


def test_linear_broadcasts() -> None:
    a, b = torch.rand(5, 1), torch.rand(3, 5, 2)
    expected = linear_scan_by_loop(a.expand(3, 5, 2), b, 1, torch.full((3, 2), 2.0))
    torch.testing.assert_close(linear_scan(a, b, 1, initial=torch.tensor(2.0)), expected)
    torch.testing.assert_close(linear_scan(a, b, -2, initial=torch.full((3, 1), 2.0)), expected)
    assert linear_scan(a, b.bfloat16(), 1).dtype == torch.float32
    assert linear_scan(torch.tensor(0.5), torch.tensor(1.0), 0, initial=torch.tensor(4.0)) == 3.0
