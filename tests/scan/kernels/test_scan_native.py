"""Details of the C++ scans: tiles, buffers, threads, two-byte dtypes."""

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from measuring.scans.scan_direct import Direct
from support.scans.local_scans import has_native
from support.scans.scanning import FLOATS, OPS, is_as_exact_as, linear_scan_by_loop, sample, scan_by_loop
from torch import Tensor

from sp_compile.lowering.scan.kernels import native
from sp_compile.lowering.scan.monoids import accumulate_dtype, result_dtype

needs_compiler = pytest.mark.skipif(not has_native(), reason="no C++ compiler")

DIRECT = Direct(native.NATIVE_LOWERING)
INF, NAN = math.inf, math.nan

# Columns: fewer than a vector has lanes, a vector, a tile and a rest of it, several tiles, more than one slab.
# Lines: whole vectors, a rest, more than a buffer and than an item.
SHAPES = [
    (5, 70, 2), (3, 33, 7), (200, 6, 3), (2, 70, 8), (2, 40, 16), (2, 40, 67), (1, 100, 64), (2, 70, 136),
    (1, 20, 4200), (1, 64, 1), (3, 1, 1), (70, 13, 1), (2, 2500, 1), (1, 0, 3), (0, 4, 3), (2, 3, 0), (2, 0, 1),
]  # fmt: skip
WAYS = list(itertools.product((False, True), repeat=2))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def scan(
    x: Tensor, op: str, exclusive: bool = False, reverse: bool = False, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dtype = result_dtype(op, x.dtype)
    return DIRECT.scan(x, starts, op, exclusive, reverse, dtype, accumulate_dtype(op, dtype, "cpu"))


def exact(x: Tensor, op: str, *how: object) -> Tensor:
    wide = torch.float64 if x.dtype.is_floating_point else torch.int64
    return scan_by_loop(x if op in ("max", "min") else x.to(wide), 1, op, *how)


@pytest.mark.sampled(every=11)
@needs_compiler
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_tiles_and_lines(op: str, dtype: torch.dtype, reverse: bool) -> None:
    if op == "logsumexp" and not dtype.is_floating_point:
        return
    for shape in SHAPES:
        x = sample(shape, dtype, op)
        out, total = scan(x, op, False, reverse)
        shifted, same_total = scan(x, op, True, reverse)
        if not x.numel():
            assert (out.shape, total.shape) == (x.shape, (shape[0], shape[2]))
            continue
        expected = exact(x, op, False, reverse)
        assert is_as_exact_as(out, expected.to(out.dtype), expected.double() if out.is_floating_point() else expected)
        assert torch.equal(total, same_total)
        assert torch.equal(total.to(out.dtype), out[:, 0 if reverse else -1])
        assert torch.equal(*((shifted[:, :-1], out[:, 1:]) if reverse else (shifted[:, 1:], out[:, :-1])))


@pytest.mark.sampled(every=6)
@needs_compiler
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("exclusive", "reverse"), WAYS)
def test_segments_of_all_some_or_one(op: str, exclusive: bool, reverse: bool) -> None:
    """starts of every column, of every outer, of every inner, and of rows that all share."""
    for outer, length, inner in ((3, 50, 5), (2, 50, 64), (2, 50, 70), (20, 9, 3), (3, 1100, 1)):
        x = sample((outer, length, inner), torch.float64, op)
        for broadcast in itertools.product((1, outer), (1, inner)):
            starts = torch.rand(broadcast[0], length, broadcast[1]) < 0.1
            out, total = scan(x, op, exclusive, reverse, starts)
            expected = scan_by_loop(x, 1, op, exclusive, reverse, starts.expand_as(x))
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            last = scan_by_loop(x, 1, op, False, reverse, starts.expand_as(x))[:, 0 if reverse else -1]
            torch.testing.assert_close(total, last, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(every=4)
@needs_compiler
@pytest.mark.parametrize("shape", [(1, 20000, 1), (1, 9000, 16), (2, 13000, 3), (1, 8200, 300), (9, 30, 20)])
@pytest.mark.parametrize("number", [2, 5])
def test_threads(shape: tuple[int, ...], number: int) -> None:
    """Integers are the same to the last bit, whether threads share columns, lines, or pieces of the length."""
    x = torch.randint(-9, 9, shape)
    a, b, initial = torch.rand(shape), torch.randn(shape), torch.rand(shape[0], shape[2], dtype=torch.float64)
    starts = torch.rand(1, shape[1], 1) < 0.001

    def results() -> list[Tensor]:
        whole = [scan(x, op, *way, cut) for op in ("sum", "max") for way in WAYS for cut in (None, starts)]
        whole += [DIRECT.extremes(x, cut, "min", reverse) for reverse in (False, True) for cut in (None, starts)]
        return [tensor for pair in whole for tensor in pair]

    def recurrences() -> list[Tensor]:
        wide = torch.float64
        found = [DIRECT.linear(a, b, initial, *way, torch.float64, wide) for way in WAYS]
        found += [state for way in WAYS for state in DIRECT.linear_total(a, b, *way, wide)]
        return [*found, *scan(b, "logsumexp")]

    with threads(1):
        alone = results(), recurrences()
    with threads(number):
        shared = results(), recurrences()
    for one, other in zip(alone[0], shared[0]):
        assert torch.equal(one, other)
    for one, other in zip(alone[1], shared[1]):
        torch.testing.assert_close(one, other, rtol=1e-6 if one.dtype is torch.float32 else 1e-12, atol=1e-300)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_two_bytes(dtype: torch.dtype) -> None:
    """All of them survive, and products are rounded as torch rounds them, subnormal and infinite ones too."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for x in (every.view(1, 1, -1), every.view(-1, 1, 2), every.view(-1, 1, 1)):
        out, _ = DIRECT.scan(x, None, "sum", False, False, dtype, torch.float32)
        torch.testing.assert_close(out, x, rtol=0, atol=0, equal_nan=True)
    others = every[torch.randperm(2**16)]
    for x in (torch.stack([every, others])[None], torch.stack([every, others], 1)[..., None]):
        out, _ = DIRECT.scan(x, None, "prod", False, False, dtype, torch.float32)
        expected = torch.stack([x[:, 0], (x[:, 0].float() * x[:, 1].float()).to(dtype)], 1)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@needs_compiler
def test_logsumexp_is_exact_to_the_last_digits() -> None:
    """logsumexp of two numbers with our exp and log1p: the smaller counts even if the larger is 0."""
    for large in (0.0, 1.0, -700.0, 1e5):
        gaps = torch.cat([torch.linspace(0, 800, 100_001), torch.logspace(-300, 2, 10_001)]).double()
        x = torch.stack([torch.full_like(gaps, large), large - gaps])
        for both in (x, x.flip(0)):
            for rows in (both[None], both.t()[..., None].contiguous()):
                out, _ = scan(rows, "logsumexp")
                expected = torch.logaddexp(rows[:, 0], rows[:, 1])
                wrong = ((out[:, 1] - expected) / expected.abs().clamp(min=1e-280)).nan_to_num().abs().max()
                assert wrong <= 3 * torch.finfo(torch.float64).eps


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS)
def test_logsumexp_is_at_most_twice_as_wrong_as_torch(dtype: torch.dtype) -> None:
    for shape, scale in itertools.product(((1, 4000, 20), (3, 4000, 1)), (0.01, 1, 30)):
        x = (scale * torch.randn(shape)).to(dtype)
        out, _ = scan(x, "logsumexp")
        assert is_as_exact_as(out, x.logcumsumexp(1), x.double().logcumsumexp(1))


@needs_compiler
@pytest.mark.parametrize("op", OPS)
@pytest.mark.sampled(every=3)
def test_nonfinite_values_propagate_as_in_torch(op: str) -> None:
    """Every order of infinities, NaN and finite numbers, in columns and rows, against torch."""
    torchs = {"sum": torch.cumsum, "prod": torch.cumprod, "logsumexp": torch.logcumsumexp}
    orders = torch.tensor(list(itertools.product((INF, -INF, NAN, 0.0, -2.0), repeat=4)))
    for x in (orders[..., None], orders.t()[None], orders.double().t()[None, :, :6]):
        x = x.contiguous()
        if op in ("max", "min"):
            (values, indices), ends = DIRECT.extremes(x, None, op, False), getattr(torch, f"cum{op}")(x, 1)
            assert torch.equal(indices, ends.indices)
            torch.testing.assert_close(values, ends.values, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(scan(x, op)[0], ends.values, rtol=0, atol=0, equal_nan=True)
        else:
            torch.testing.assert_close(scan(x, op)[0], torchs[op](x, 1), equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("inner", [1, 3, 8, 64])
def test_recurrences_whose_products_overflow(inner: int, lagged: bool) -> None:
    """A line joins products of a; where one overflows, a state of 0 is still 0, and an infinite a still shows."""
    b = torch.zeros(2, 300, inner, dtype=torch.float64)
    h = DIRECT.linear(torch.full_like(b, 1e200), b, None, False, lagged, b.dtype, b.dtype)
    assert torch.equal(h, b)
    a = torch.full_like(b, 0.5)
    a[:, 100] = INF
    h = DIRECT.linear(a, b, None, False, lagged, b.dtype, b.dtype)
    assert h[:, :100].eq(0).all()
    assert h[:, 101:].isnan().all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrences_of_two_dtypes(dtype: torch.dtype) -> None:
    a, b = torch.rand(2, 40, 9, dtype=torch.float64), torch.randn(2, 40, 9).to(dtype)
    h = DIRECT.linear(a, b, None, True, False, dtype, torch.float64)
    expected = linear_scan_by_loop(a, b.double(), 1, None, True)
    assert h.dtype is dtype
    torch.testing.assert_close(h, expected.to(dtype))


@needs_compiler
def test_integers_wrap_as_in_torch() -> None:
    x = torch.full((1, 100, 3), 2**62 - 1)
    assert torch.equal(scan(x, "sum")[0], x.cumsum(1))
    assert torch.equal(scan(x, "prod")[0], x.cumprod(1))
    narrow, _ = DIRECT.scan(x, None, "sum", False, False, torch.int8, torch.int64)
    assert torch.equal(narrow, x.cumsum(1, dtype=torch.int8))


@needs_compiler
def test_threads_of_python() -> None:
    """ctypes lets them run at once."""
    x = torch.randn(4, 3000, 70, dtype=torch.float64)
    found: list[Tensor] = []
    work = [threading.Thread(target=lambda: found.append(scan(x, "sum")[0])) for _ in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(out, found[0]) for out in found)
