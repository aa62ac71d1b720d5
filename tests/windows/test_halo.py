"""Windows on shards, on simulated ranks: every op against torch's on the full value."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.scans.halos import RANKS, SIZES, check, frame, operand

from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.lowering.windows.halo_exchange import HaloPart, split_by_owner
from sp_compile.lowering.windows.window_ops import roll_shifts, window_shifts

sp = torch.ops.sp


WEIGHT = torch.randn(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BIAS = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("size", "start"), SIZES)
@pytest.mark.parametrize(("before", "after", "dilation"), [(2, 0, 1), (1, 1, 1), (0, 2, 1), (4, 0, 2), (3, 1, 2)])
def test_conv1d(n: int, size: int, start: int, before: int, after: int, dilation: int) -> None:
    check(
        sp.conv_along,
        lambda x: F.conv1d(F.pad(x, (before, after)), WEIGHT, BIAS, dilation=dilation),
        operand(size, start),
        (WEIGHT, BIAS, 2, before, after, [1], [0], [dilation], 1),
        [frame(size, start)] * 2,
        2,
        n,
    )


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("size", "start"), SIZES)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 0)])
@pytest.mark.sampled(every=3)
def test_images_along_one_dim(n: int, size: int, start: int, before: int, after: int) -> None:
    x, frames = operand(size, start), [frame(size, start)] * 2
    weight = torch.randn(4, x.shape[0], 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    args = (weight, BIAS, 2, before, after, [1, 1], [1, 0], [1, 1], 1)
    check(
        sp.conv_along,
        lambda x: F.conv2d(F.pad(x, (before, after)), weight, BIAS, padding=(1, 0)),
        x,
        args,
        frames,
        2,
        n,
    )


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("place", "before", "after"), [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 1), (0, 2, 0)])
def test_conv1d_of_a_window_into_another(n: int, place: int, before: int, after: int) -> None:
    """11 rows of 13, and the result of 9 or 11 wherever it fits."""
    length = 11 + before + after - 2
    check(
        sp.conv_along,
        lambda x: F.conv1d(F.pad(x, (before, after)), WEIGHT),
        operand(13, 2),
        (WEIGHT, None, 2, before, after, [1], [0], [1], 1),
        [frame(13, 2), frame(13, place, length)],
        2,
        n,
    )


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stride", [2, 4])
def test_strides(n: int, stride: int) -> None:
    size = 24
    frames = [frame(size), frame(size // stride)]
    x = operand(size, 0)
    args = (WEIGHT, BIAS, 2, 1, 2 - stride, [stride], [0], [1], 1)
    check(sp.conv_along, lambda x: F.conv1d(F.pad(x, (1, 2 - stride)), WEIGHT, BIAS, stride), x, args, frames, 2, n)
    check(sp.max_pool1d, lambda x: F.max_pool1d(x, stride), x, (0, 0, -math.inf, stride, stride, 1), frames, 2, n)
    check(sp.avg_pool1d, lambda x: F.avg_pool1d(x, stride), x, (0, 0, stride, stride), frames, 2, n)
    check(sp.unfold, lambda x: x.unfold(2, stride, stride), x, (2, 0, 0, 0, stride, stride), frames, 2, n)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("size", "start"), SIZES)
def test_pools(n: int, size: int, start: int) -> None:
    x, frames = operand(size, start) - 3, [frame(size, start)] * 2
    check(sp.max_pool1d, lambda x: F.max_pool1d(x, 3, 1, 1), x, (1, 1, -math.inf, 3, 1, 1), frames, 2, n)
    check(
        sp.max_pool1d,
        lambda x: F.max_pool1d(F.pad(x, (2, 2), value=-2.5), 3, 1, 0, 2),
        x,
        (2, 2, -2.5, 5, 1, 2),
        frames,
        2,
        n,
    )
    check(sp.avg_pool1d, lambda x: F.avg_pool1d(x, 3, 1, 1), x, (1, 1, 3, 1), frames, 2, n)
    check(sp.avg_pool1d, lambda x: F.avg_pool1d(F.pad(x, (3, 0)), 4, 1), x, (3, 0, 4, 1), frames, 2, n)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("size", "start"), SIZES)
@pytest.mark.parametrize("dim", [1, -2])
def test_unfold(n: int, size: int, start: int, dim: int) -> None:
    check(
        sp.unfold,
        lambda x: F.pad(x, (0, 0, 2, 0), value=0.5).unfold(1, 3, 1),
        operand(size, start, 1),
        (dim, 2, 0, 0.5, 3, 1),
        [frame(size, start)] * 2,
        1,
        n,
    )


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("size", "start"), SIZES)
@pytest.mark.parametrize("by", [1, -1, 3, -2, 9, 0])
def test_shift(n: int, size: int, start: int, by: int) -> None:
    check(
        sp.shift,
        lambda x: F.pad(x, (0, 0, by, -by), value=0.5) if abs(by) < x.shape[1] else torch.full_like(x, 0.5) + 0 * x,
        operand(size, start, 1),
        (1, by, -by, 0.5) if abs(by) < size - start else (1, size - start, start - size, 0.5),
        [frame(size, start)] * 2,
        1,
        n,
    )


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex128])
def test_any_dtype_is_shifted_and_rolled(n: int, dtype: torch.dtype) -> None:
    x = operand(10, 0, 1) + 0.5
    x = x > 0.5 if dtype == torch.bool else (x * 10).to(dtype)
    frames = [frame(10)]
    check(sp.shift, lambda x: F.pad(x, (0, 0, 2, -2)), x, (1, 2, -2, 0), frames * 2, 1, n)
    check(sp.roll, lambda x: x.roll(3, 1), x, (1, 3), frames, 1, n)
    check(sp.unfold, lambda x: x.unfold(1, 2, 1), x, (1, 0, 0, 0, 2, 1), [frame(10), frame(10, 0, 9)], 1, n)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("size", "start"), SIZES)
@pytest.mark.parametrize("by", [0, 1, -1, 2, -2, 4, -4])
def test_roll(n: int, size: int, start: int, by: int) -> None:
    if abs(by) < size - start:
        x = operand(size, start, 1)
        check(sp.roll, lambda x: x.roll(by, 1), x, (1, by), [frame(size, start)], 1, n)


@pytest.mark.parametrize(
    ("low", "high", "s", "expected"),
    [
        (-3, 8, 8, [(1, 5, 8), (0, 0, 8)]),
        (-1, 9, 8, [(1, 7, 8), (0, 0, 8), (-1, 0, 1)]),
        (-5, 2, 2, [(3, 1, 2), (2, 0, 2), (1, 0, 2), (0, 0, 2)]),
        (-3, 5, 8, [(1, 5, 8), (0, 0, 5)]),
        (2, 10, 8, [(0, 2, 8), (-1, 0, 2)]),
        (8, 16, 8, [(-1, 0, 8)]),
    ],
)
def test_parts(low: int, high: int, s: int, expected: list[tuple[int, int, int]]) -> None:
    assert split_by_owner(low, high, s) == [HaloPart(*part) for part in expected]


def test_shifts() -> None:
    """One for each direction that is needed, of the rows that are needed; several only from further than a shard."""
    whole, half = frame(32), frame(16)
    assert window_shifts(3, 4, 1, whole, whole, 4) == [(1, 3)]
    assert window_shifts(1, 3, 1, whole, whole, 4) == [(1, 1), (-1, 1)]
    assert window_shifts(0, 2, 2, whole, half, 4) == []
    assert window_shifts(10, 11, 1, whole, whole, 4) == [(2, 2), (1, 8)]
    assert window_shifts(10, 1, 1, whole, whole, 4) == [(2, 2), (1, 6)]
    assert window_shifts(3, 4, 1, whole, whole, 1) == []
    assert roll_shifts(3, whole, 4) == [(1, 3)]
    assert roll_shifts(-3, whole, 4) == [(-1, 3)]
    assert roll_shifts(16, whole, 4) == [(2, 8)]
    assert roll_shifts(2, frame(31), 4) == [(1, 2), (1, 2)]


def test_zigzag_is_refused() -> None:
    x, where = torch.randn(4, 2), [1, 8, 0, 8, 2]
    with pytest.raises(AssertionError, match="zigzag"):
        sp.shift(x, 0, 1, -1, 0, where, where, 2, SIMULATED_GROUP)
