"""Checks of the Triton row of the scans' lowering table, for a process with Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import torch
from measuring.scans.scan_direct import Direct
from measuring.scans.scan_schedules import SCHEDULES, using_schedule
from support.scans.scanning import DTYPES, OPS, linear_scan_by_loop, sample, scan_by_loop
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sp_compile import exclusive_scan, inclusive_scan, linear_scan, segmented_scan
from sp_compile.lowering.scan import scan_autograd as autograd
from sp_compile.lowering.scan import scan_table as table
from sp_compile.lowering.scan.affine_scan import ALL_READ, ROW_LAGS
from sp_compile.lowering.scan.kernels.triton import triton_scan as row
from sp_compile.lowering.scan.kernels.triton import walk
from sp_compile.lowering.scan.kernels.triton.dispatch import TileSizes, choose_schedule
from sp_compile.lowering.scan.kernels.triton.triton_tiles import Sweep
from sp_compile.lowering.scan.monoids import accumulate_dtype, result_dtype
from sp_compile.lowering.triton.affine_kernel import scan_affine_rows, total_affine_rows

ROW = Direct(row.TRITON_LOWERING)
ORDER = list(SCHEDULES)
SHAPES = (1, 90, 1), (3, 13, 2), (2, 30, 5), (1, 6, 17), (20, 4, 1), (1, 1, 3)
FLAGS = tuple(itertools.product((False, True), repeat=3))
"""exclusive, reverse, segmented"""


def starts_of(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random starts, shared along lines, rows or columns, or separate for each line."""
    sizes = [(1, shape[1], 1), shape, (shape[0], shape[1], 1), (1, *shape[1:])][seed % 4]
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < 0.15


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    eps = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 0)
    return {"rtol": eps, "atol": eps}


def check_scan(
    x: Tensor, starts: Tensor | None, op: str, exclusive: bool, reverse: bool, accumulate: torch.dtype | None = None
) -> None:
    """Against the loop, in float64 or int64 or the ints' own dtype."""
    dtype = result_dtype(op, x.dtype)
    accumulate = accumulate or accumulate_dtype(op, dtype, "cuda")
    out, total = ROW.scan(x, starts, op, exclusive, reverse, dtype, accumulate)
    exact = x.double() if dtype.is_floating_point else x.to(dtype)
    where = None if starts is None else starts.expand(x.shape)
    expected = scan_by_loop(exact, 1, op, exclusive, reverse, where)
    ends = scan_by_loop(exact, 1, op, False, reverse, where)[:, 0 if reverse else -1]
    assert (out.dtype, total.dtype) == (dtype, accumulate)
    torch.testing.assert_close(out, expected.to(dtype), equal_nan=True, **tolerance(dtype))
    torch.testing.assert_close(total, ends.to(accumulate), equal_nan=True, **tolerance(accumulate))


def check_shapes(way: str) -> None:
    """Every option of every operation, each at another shape."""
    for o, op in enumerate(OPS):
        for i, (exclusive, reverse, segmented) in enumerate(FLAGS, o + ORDER.index(way)):
            shape = SHAPES[i % len(SHAPES)]
            x = sample(shape, torch.float32, op, i)
            check_scan(x, starts_of(shape, i) if segmented else None, op, exclusive, reverse)


def check_dtypes(way: str) -> None:
    """Loads and stores are the same code in every way: each way takes a third of them."""
    for i, (op, dtype) in enumerate(itertools.product(OPS, DTYPES)):
        if i % 3 != ORDER.index(way) or (op == "logsumexp" and not dtype.is_floating_point):
            continue
        x = sample((2, 11, 2), dtype, op, i)
        if op == "prod" and dtype in (torch.int64, torch.int32):
            x[:, 4] = 3
        starts = starts_of(tuple(x.shape), i) if i % 5 == 0 else None
        check_scan(x, starts, op, i % 2 == 0, i % 4 > 1)


def check_specials(way: str) -> None:
    """Infinities, NaN, zeros, and a sum that only wide accumulation holds."""
    inf, nan = torch.inf, torch.nan
    rows = {
        "sum": [1.0, 2, inf, 3, -inf, 4, nan, 5],
        "prod": [2.0, 0, 3, -0.5, inf, 4, 5, 6],
        "max": [1.0, 3, 3, 2, nan, 9, inf, 1],
        "min": [1.0, 3, -inf, 2, nan, 9, inf, 1],
        "logsumexp": [-inf, -inf, 1, -1e30, 700, -inf, inf, 2],
    }
    for op, values in rows.items():
        x = torch.tensor(values).repeat(9)[:39].view(1, -1, 1)
        starts = (torch.arange(x.shape[1]) % 8 == 7).view(1, -1, 1)
        for exclusive, reverse, segmented in FLAGS[::3]:
            check_scan(x, starts if segmented else None, op, exclusive, reverse)
    ones = torch.ones(1, 300, 1, dtype=torch.bfloat16)
    check_scan(ones, None, "sum", False, False)
    check_scan(ones.bool(), None, "sum", True, True)


def check_extremes(way: str) -> None:
    """Values and indices as torch's, where values are equal and where they are NaN; in segments as torch's of each."""
    for i, (op, shape) in enumerate(itertools.product(("max", "min"), SHAPES)):
        if i % 3 == ORDER.index(way):
            continue
        of_torch = torch.cummax if op == "max" else torch.cummin
        x = sample(shape, torch.float32, seed=i).round()
        x[0, ::13] = torch.nan if i % 3 == 0 else -torch.inf
        x = x.to((torch.float32, torch.bfloat16, torch.float64)[i % 3])
        assert_same(ROW.extremes(x, None, op, False), of_torch(x, 1))
        given = x.nan_to_num().to(torch.int16) if i % 2 else x > 0
        flipped = of_torch(given.flip(1), 1)
        turned = flipped[0].flip(1), given.shape[1] - 1 - flipped[1].flip(1)
        assert_same(ROW.extremes(given, None, op, True), turned)
        starts = starts_of(shape, i)
        found = ROW.extremes(x, starts, op, False)
        for o, e in itertools.product(range(shape[0]), range(shape[2])):
            begins = starts.expand(shape)[o, :, e].nonzero().flatten().tolist()
            edges = [0, *begins, shape[1]]
            for begin, end in itertools.pairwise(edges):
                values, indices = of_torch(x[o, begin:end, e], 0)
                assert_same((found[0][o, begin:end, e], found[1][o, begin:end, e]), (values, indices + begin))


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check_linear(way: str) -> None:
    for i, (reverse, lagged, with_initial) in enumerate(FLAGS, ORDER.index(way)):
        shape = SHAPES[i % 6]
        a, b = (sample(shape, torch.float64, seed=2 * i + j) for j in range(2))
        initial = sample((shape[0], shape[2]), torch.float64, seed=i) if with_initial else None
        dtype = (torch.float32, torch.float64, torch.bfloat16)[i % 3]
        a, b = (0.9 * a).to(dtype), b.to(dtype)
        accumulate = accumulate_dtype("sum", dtype, "cuda")
        h = ROW.linear(a, b, initial, reverse, lagged, dtype, accumulate)
        factor, state = ROW.linear_total(a, b, reverse, lagged, accumulate)
        expected, after = linear_exactly(a.double(), b.double(), initial, reverse, lagged)
        assert (h.dtype, factor.dtype, state.dtype) == (dtype, accumulate, accumulate)
        scale = {"rtol": 0.0, "atol": tolerance(dtype)["atol"] * expected.abs().max().item() * 2}
        torch.testing.assert_close(h.double(), expected, **scale)
        start = torch.zeros(shape[0], shape[2]) if initial is None else initial
        torch.testing.assert_close((factor * start + state).double(), after, **scale)


def check_linear_grads(way: str) -> None:
    """In one pass, against separate products."""
    f32 = torch.float32
    for i, (reverse, with_initial, with_before) in enumerate(FLAGS, ORDER.index(way)):
        shape = SHAPES[i % 6]
        a, grad, h = (sample(shape, (f32, torch.bfloat16)[i % 2], seed=3 * i + j) for j in range(3))
        initial = sample((shape[0], shape[2]), f32, seed=i) if with_initial else None
        before = sample((shape[0], shape[2]), f32, seed=i + 9) if with_before else None
        results = []
        for name in ("triton", "blocked"):
            with table.using_lowering(name):
                given = (0.9 * a, grad, initial, h, before, 1, reverse, f32, f32)
                results.append(torch.ops.sp.local_linear_scan_grads(*given))
        (w, da), (expected_w, expected_da) = results
        assert da.dtype == a.dtype
        torch.testing.assert_close(w, expected_w, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(da, expected_da, **tolerance(a.dtype) if i % 2 else {"rtol": 1e-4, "atol": 1e-4})


def check_linear_backward() -> None:
    """Gradients of the function that users call, in one pass, against those of separate products."""
    x, a = (sample((2, 30, 3), torch.float32, seed=i).requires_grad_() for i in range(2))
    initial = sample((2, 3), torch.float32, seed=3).requires_grad_()
    for reverse in (False, True):
        found = []
        for is_fused in (False, True):
            fused = mock.patch.object(autograd, "_can_fuse_gradients", return_value=is_fused)
            with table.using_lowering("triton"), fused:
                h = linear_scan(0.9 * a, x, 1, initial=initial, reverse=reverse)
                found.append(torch.autograd.grad((h * h.detach().sin()).sum(), (a, x, initial)))
        for y, z in zip(*found):
            torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)


def linear_exactly(a: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, lagged: bool) -> tuple[Tensor, Tensor]:
    """h and what goes out of the recurrence; s = a * (s + b) is a recurrence too."""
    end = 0 if reverse else -1
    if not lagged:
        h = linear_scan_by_loop(a, b, 1, initial, reverse)
        return h, h[:, end]
    s = linear_scan_by_loop(a, a * b, 1, initial, reverse)
    first = (torch.zeros_like(b[:, 0]) if initial is None else initial).unsqueeze(1)
    before = torch.cat((s[:, 1:], first), 1) if reverse else torch.cat((first, s[:, :-1]), 1)
    return before + b, s[:, end]


def check_matrices(takes_all: bool) -> None:
    """Recurrences of matrices against the products of torch, which run on a CPU.

    Of all cases, or of half of them: each combination of three of the four properties.
    """
    for i, (with_initial, reverse, size, terms) in enumerate(
        itertools.product((False, True), (False, True), (4, 70), (7, 33))
    ):
        if not takes_all and (with_initial + reverse + (size == 70) + (terms == 33)) % 2:
            continue
        form = list(ROW_LAGS)[i % 3]
        m, b, initial = (
            torch.randn(shape) / 4 for shape in ((2, 5, size, size), (2, 5, size, terms), (2, size, terms))
        )
        first = initial if with_initial else None
        found = scan_affine_rows(m, b, first, reverse, *ROW_LAGS[form])
        torch.testing.assert_close(
            found, torch.ops.sp.local_affine_scan(m, b, first, reverse, form), rtol=1e-4, atol=1e-4
        )
        identity = torch.eye(size, size + terms).repeat(2, 1, 1)
        parts = total_affine_rows(m, b, identity, reverse, form == "lagged").split([size, terms], -1)
        expected = torch.ops.sp.local_affine_total(m, b, reverse, form, ALL_READ, ALL_READ, "")
        for part, other in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-4)


def check_way(way: str) -> None:
    with using_schedule(way):
        for check in (check_shapes, check_dtypes, check_specials, check_extremes, check_linear, check_linear_grads):
            check(way)


class _Launches(TorchDispatchMode):
    """Count launches of the scan kernel, which do not run, and record kernels of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.others = 0, list[str]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count += 1
        return lambda *args, **options: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name() and func.namespace == "aten":
            self.others.append(func.name())
        return func(*args, **kwargs or {})


def check_launches() -> None:
    """A scan is one launch if every line has one program, else two, and no kernel of torch."""
    ops, f32 = torch.ops.sp, torch.float32
    x, starts = sample((1, 90, 2), f32), torch.arange(90) % 40 == 3
    calls = {
        "scan": lambda: ops.local_scan(x, None, 1, "sum", False, False, f32, f32),
        "segments": lambda: ops.local_scan(x, starts, 1, "logsumexp", True, True, f32, f32, False),
        "extremes": lambda: ops.local_extremes(x, None, 1, "max", False),
        "linear": lambda: ops.local_linear_scan(x, x, x[:, 0], 1, False, True, f32, f32),
        "linear gradients": lambda: ops.local_linear_scan_grads(x, x, None, x, x[:, 0], 1, True, f32, f32),
        "linear total": lambda: ops.local_linear_total(x, x, 1, False, True, f32),
    }
    for schedule, (name, call) in itertools.product(SCHEDULES, calls.items()):
        launches = _Launches()
        stub = mock.patch.object(walk, "_walk_lines", launches)
        with table.using_lowering("triton"), using_schedule(schedule), stub, launches:
            call()
        assert (launches.count, launches.others) == (SCHEDULES.index(schedule) + 1, []), name


def check_operators() -> None:
    """The opaque operators along any dim of any strides, by this row."""
    x = sample((3, 7, 2, 2), torch.float32).transpose(0, 2)
    a = sample((3, 7, 2, 2), torch.float32, seed=1).transpose(0, 2)
    ops, f32 = torch.ops.sp, torch.float32
    with table.using_lowering("triton"):
        for dim in (0, -1, 2):
            out, total = ops.local_scan(x, None, dim, "sum", False, False, f32, f32)
            torch.testing.assert_close(out, x.cumsum(dim))
            torch.testing.assert_close(total, x.sum(dim))
            assert_same(ops.local_extremes(x, None, dim, "max", False), torch.cummax(x, dim))
            h = ops.local_linear_scan(a, x, None, dim, True, False, f32, f32)
            torch.testing.assert_close(h, linear_scan_by_loop(a, x, dim, None, True))
            factor, _ = ops.local_linear_total(a, x, dim, False, False, f32)
            torch.testing.assert_close(factor, a.prod(dim))
            for result in (out, total, h, factor):
                assert result.is_contiguous()


def check_public() -> None:
    """The functions that users call, with gradients, in which only the scans are this row's."""
    ids = torch.tensor([0, 0, 1, 1, 1, 4, 4, 4, 4])
    x, a = (sample((9, 3), torch.float32, seed=i).requires_grad_() for i in range(2))

    def results() -> list[Tensor]:
        out = [
            *(inclusive_scan(x, 0, op) for op in OPS),
            exclusive_scan(x, 0, "sum", reverse=True),
            segmented_scan(x, ids, 0, "logsumexp"),
            linear_scan(a, x, 0),
        ]
        weights = [sample(tuple(y.shape), y.dtype, seed=i) for i, y in enumerate(out)]
        loss = sum((y * w).sum() for y, w in zip(out, weights))
        return [*out, *torch.autograd.grad(loss, (x, a))]

    with table.using_lowering("blocked"):
        expected = results()
    with table.using_lowering("triton"):
        found = results()
    for y, z in zip(found, expected):
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)


def check_empty() -> None:
    f32 = torch.float32
    for shape in ((2, 0, 3), (0, 4, 3), (2, 4, 0), (0, 0, 0)):
        x = torch.empty(shape)
        for op in OPS:
            out, total = ROW.scan(x, None, op, True, False, f32, f32)
            assert out.shape == shape
            assert total.shape == (shape[0], shape[2])
            neutral = {"sum": 0.0, "prod": 1.0, "min": math.inf}.get(op, -math.inf)
            assert total.tolist() == torch.full(total.shape, neutral).tolist()
        assert [y.shape for y in ROW.extremes(x, None, "max", False)] == [shape] * 2
        assert ROW.linear(x, x, None, False, True, f32, f32).shape == shape
        factor, state = ROW.linear_total(x, x, False, True, f32)
        assert factor.eq(1).all()
        assert state.eq(0).all()


def check_choice() -> None:
    """Enough lines to keep a GPU busy: one program each; a length that is worth it is divided."""

    def chosen(across: int, along: int) -> str:
        return choose_schedule(across, along, 132, TileSizes())

    assert [chosen(1, 2), chosen(1, 2**18), chosen(64, 500), chosen(2**12, 2**9)] == [
        "one", "parts", "parts", "one",
    ]  # fmt: skip
    for shape, tile in {
        (1, 2**20, 1): (2048, 1),
        (1, 2**20, 8): (256, 8),
        (1, 2**20, 100): (64, 32),
        (4, 512, 4096): (64, 32),
        (2**16, 16, 1): (16, 128),
        (2**16, 3, 2): (4, 512),
        (1, 1, 1): (1, 1),
    }.items():
        sweep = Sweep(torch.empty(shape, device="meta"), "sum", 0, torch.float32, torch.int32)
        found = sweep.tile(2048, 4)
        assert (found.steps, found.lines) == tile
