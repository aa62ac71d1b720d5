"""The project's Triton kernels, compiled for sm_90: registers, spills and load widths of every launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cuda.worker import AbsentGpu
from torch import Tensor

bf16, f32, f64, i32, i64 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64


def empty(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def merge(width: int) -> None:
    from sp_compile.lowering.triton.merge_kernel import launch_merge

    rows = 1, 8, 4096
    out, lse = empty(*rows, width), empty(*rows)
    launch_merge(out, lse, empty(*rows, width, dtype=bf16), empty(*rows), into=(out, lse))


def packs() -> dict[str, Tensor]:
    """Return the packed views of head exchanges over 8 ranks, of (B, s, H, D) and (B, H, s, D)."""
    rows_first = empty(1, 16384, 32, 128, dtype=bf16).unflatten(2, (8, 4)).movedim(2, 0)
    heads_first = empty(1, 32, 16384, 128, dtype=bf16).unflatten(1, (8, 4)).movedim(1, 0).movedim(3, 1)
    return {"rows first": rows_first, "heads first": heads_first, "transpose": empty(4096, 4096).T}


def pack(name: str) -> None:
    from sp_compile.lowering.triton.move_kernel import copy_strided

    source = packs()[name]
    assert copy_strided(torch.empty(source.shape, dtype=source.dtype), source)


def checksum() -> None:
    from sp_compile.lowering.triton.checksum_kernel import add_checksum

    add_checksum(empty(1 << 22, dtype=i32), torch.empty((), dtype=i64))


def scan(op: str, dtype: torch.dtype, shape: tuple[int, int, int], segmented: bool = False) -> None:
    from sp_compile.lowering.scan.kernels.triton import triton_scan as row
    from sp_compile.lowering.scan.scan_table import ScanProblem

    x, accumulate = empty(*shape, dtype=dtype), i64 if dtype is i32 and op == "sum" else f32 if dtype is bf16 else dtype
    starts = torch.empty(1, shape[1], 1, dtype=torch.bool) if segmented else None
    row.scan_triton(ScanProblem.of("scan", x, dtype, accumulate, op=op, segmented=segmented), x, starts)


def linear(shape: tuple[int, int, int], reverse: bool) -> None:
    from sp_compile.lowering.scan.kernels.triton import triton_scan as row
    from sp_compile.lowering.scan.scan_table import ScanProblem

    a, b = empty(*shape), empty(*shape)
    row.linear_triton(ScanProblem.of("linear", b, f32, f32, reverse=reverse, lagged=reverse), a, b, None)


def affine(size: int, terms: int, rows: int) -> None:
    from sp_compile.lowering.triton.affine_kernel import scan_affine_rows, total_affine_rows

    m, b = empty(32, rows, size, size), empty(32, rows, size, terms)
    scan_affine_rows(m, b, empty(32, size, terms), False, 1, 1)
    total_affine_rows(m, b, empty(32, size, size + terms), True, is_lagged=True)


def launched(fn: Callable[..., None], *args: Any) -> list[Any]:
    from support.cuda.kernels import launches

    return launches(lambda: fn(*args))


LINE, LANES, COLUMNS = (1, 1 << 20, 1), (1, 1 << 16, 64), (8, 4096, 1024)
slow = pytest.mark.slow
CASES: list[Any] = [
    (merge, 128),
    (pack, "rows first"),
    (checksum,),
    (scan, "sum", f32, LANES),
    (scan, "sum", i32, LANES),
    (linear, LANES, False),
    *(pytest.param((merge, width), marks=slow) for width in (64, 96, 256)),
    (pack, "heads first"),
    pytest.param((pack, "transpose"), marks=slow),
    *(
        pytest.param((scan, op, dtype, shape), marks=slow)
        for op in ("sum", "max", "logsumexp")
        for dtype in (f32, bf16, i32, i64, f64)
        for shape in (LINE, LANES, COLUMNS)
        if (op != "logsumexp" or dtype.is_floating_point) and (op, dtype, shape) != ("sum", i32, LANES)
    ),
    *(pytest.param((scan, "sum", dtype, LANES, True), marks=slow) for dtype in (f32, i32, i64)),
    *(pytest.param((linear, shape, reverse), marks=slow) for shape in (LANES, COLUMNS) for reverse in (False, True)),
]


def name_of(case: tuple[Any, ...]) -> str:
    return " ".join([case[0].__name__, *(str(x).removeprefix("torch.") for x in case[1:])])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_no_kernel_spills_and_all_read_in_wide_words(gpu: AbsentGpu, case: tuple[Any, ...]) -> None:
    """Seven programs of 128 threads have registers on a multiprocessor, and memory is read 128 bits a thread at a time.

    But where neighbors in memory are apart in the result.
    """
    found = gpu.run(launched, *case)
    assert found
    for launch in found:
        assert launch.spills == 0, launch
        assert launch.registers <= 72, launch
        assert max(launch.loads) == (32 if case == (pack, "transpose") else 128), launch
        assert max(launch.stores, default=128) in (32, 64, 128), launch  # totals of lines are single words


@pytest.mark.parametrize("size", [128, pytest.param(64, marks=slow), pytest.param(256, marks=slow)])
def test_a_recurrence_of_matrices_is_one_launch_for_any_length(gpu: AbsentGpu, size: int) -> None:
    short, long = (gpu.run(launched, affine, size, size, rows) for rows in (16, 2048))
    assert short == long
    for launch, columns in zip(short, (size, 2 * size), strict=True):
        assert launch.programs == 32 * columns // 32
        assert launch.spills == 0, launch
        assert launch.loads == launch.stores == (128,), launch


def bytes_a_program(name: str) -> float:
    (launch,) = launched(pack, name)
    return packs()[name].nbytes / launch.programs


def test_a_pack_moves_enough_a_program(gpu: AbsentGpu) -> None:
    assert gpu.run(bytes_a_program, "rows first") >= 4096


@pytest.mark.slow
def test_a_pack_of_heads_first_moves_enough_a_program(gpu: AbsentGpu) -> None:
    assert gpu.run(bytes_a_program, "heads first") >= 4096


def spilling() -> None:
    from support.cuda.kernels import crowded

    crowded[(1,)](empty(1 << 14), empty(1 << 14), N=1 << 14, num_warps=1)


@slow
def test_a_spill_is_seen(gpu: AbsentGpu) -> None:
    assert gpu.run(launched, spilling)[0].spills > 0
