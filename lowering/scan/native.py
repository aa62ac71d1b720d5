"""Scans in C++, in one pass over memory; compiled once by Inductor's toolchain, and again only where that changes.

x is (outer, length, inner), contiguous; starts None or bool (outer|1, length, inner|1). Every column is a chain of its
own, and a vector of them goes down the rows together; columns that are few lie side by side in a buffer first.
The file is compiled when a scan first fits; without a compiler none does.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._compat import compile_cpp, has_cpp_compiler
from .monoids import MONOIDS, Pair
from .problem import Problem

ELEMENTS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 8,
}
WORKS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "logsumexp": 4}
EXTREMES = {"max": 5, "min": 6}
LINEAR, LINEAR_TOTAL = 7, 8
FLOATS = (torch.float32, torch.float64)
SOURCES = ("native_vectors.cpp", "native_steps.cpp", "native_tiles.cpp", "native.cpp")

_lock = threading.Lock()


class _Problem(ctypes.Structure):
    """As native.cpp's Problem."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "x b initial starts out indices total factor".split()),
        *(
            (name, ctypes.c_int64)
            for name in "outer length inner starts_outer starts_length starts_inner empty_integer".split()
        ),
        ("empty_number", ctypes.c_double),
        *((name, ctypes.c_int32) for name in "work element result compute flag reverse threads".split()),
    ]


def fits(problem: Problem) -> bool:
    """On a CPU, in dtypes that the C++ has, where there is a compiler."""
    if problem.device != "cpu" or problem.dtype not in ELEMENTS or problem.result not in ELEMENTS:
        return False
    if problem.kind == "extremes" or problem.op in ("max", "min"):
        return available()
    wanted = FLOATS if problem.result.is_floating_point else (torch.int64,)
    if problem.kind != "scan" or problem.op == "logsumexp":
        wanted = FLOATS
    return problem.accumulate in wanted and problem.result is not torch.bool and available()


def available() -> bool:
    """Is there a C++ compiler, and does it compile what it should? Compiles on the first call."""
    return _library() is not None


@cache
def _compiled() -> Any:
    if not has_cpp_compiler():
        return None
    folder = Path(__file__).parent
    try:
        library = compile_cpp("\n".join((folder / name).read_text() for name in SOURCES))
        library.scan.argtypes = [ctypes.POINTER(_Problem)]
        return library.scan
    except Exception as error:
        warnings.warn(f"scans run slower than they could, their C++ did not compile: {error}", stacklevel=2)
        return None


def _library() -> Any:
    with _lock:
        return _compiled()


def scan(
    x: Tensor,
    starts: Tensor | None,
    op: str,
    exclusive: bool,
    reverse: bool,
    dtype: torch.dtype,
    accumulate: torch.dtype,
) -> Pair:
    """-> out, like x in dtype, and total (outer, inner) in accumulate: of the last segment in scan order."""
    x = _as_operand(x, dtype)
    compute = _computed(dtype) if op in ("max", "min") else accumulate
    if op == "logsumexp":
        compute = torch.float64
    out = torch.empty(x.shape, dtype=dtype)
    total = torch.empty(x.shape[0], x.shape[2], dtype=compute)
    empty = MONOIDS[op].identity(dtype)
    _run(WORKS[op], x, out, compute, reverse, starts=starts, total=total, flag=exclusive, empty=empty)
    return out, total.to(accumulate)


def extremes(x: Tensor, starts: Tensor | None, op: str, reverse: bool) -> Pair:
    """-> the running max or min, like x, and its index, int64."""
    out, indices = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=torch.int64)
    compute = torch.float64 if x.dtype.is_floating_point else torch.int64
    empty = MONOIDS[op].identity(x.dtype)
    _run(EXTREMES[op], x, out, compute, reverse, starts=starts, indices=indices, empty=empty)
    return out, indices


def linear(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    reverse: bool,
    lagged: bool,
    dtype: torch.dtype,
    accumulate: torch.dtype,
) -> Tensor:
    """-> h like b in dtype: h_i = a_i * h_(i-1) + b_i; lagged: h_i = s_(i-1) + b_i with s_i = a_i * h_i."""
    a, b = _of_one_dtype(a, b)
    h = torch.empty(b.shape, dtype=dtype)
    if initial is not None:
        initial = initial.to(accumulate).contiguous()
    _run(LINEAR, a, h, accumulate, reverse, b=b, initial=initial, flag=lagged)
    return h


def linear_total(a: Tensor, b: Tensor, reverse: bool, lagged: bool, accumulate: torch.dtype) -> Pair:
    """-> factor and state (outer, inner): what goes into the recurrence comes out as factor * it + state."""
    a, b = _of_one_dtype(a, b)
    factor, state = (torch.empty(b.shape[0], b.shape[2], dtype=accumulate) for _ in range(2))
    _run(LINEAR_TOTAL, a, None, accumulate, reverse, b=b, total=state, factor=factor, flag=lagged)
    return factor, state


def _as_operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to dtype, unless the C++ reads the same values from x itself."""
    same = x.dtype == dtype or (
        torch.promote_types(x.dtype, dtype) == dtype and x.dtype.is_floating_point == dtype.is_floating_point
    )
    return x if same else x.to(dtype)


def _computed(dtype: torch.dtype) -> torch.dtype:
    """What holds every value of a dtype, among those that the C++ computes in."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype is torch.float64 else torch.float32


def _of_one_dtype(a: Tensor, b: Tensor) -> Pair:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _run(
    work: int,
    x: Tensor,
    out: Tensor | None,
    compute: torch.dtype,
    reverse: bool,
    starts: Tensor | None = None,
    flag: bool = False,
    empty: float = 0,
    **others: Tensor | None,
) -> None:
    problem = _Problem(work=work, x=x.data_ptr(), element=ELEMENTS[x.dtype], compute=ELEMENTS[compute])
    problem.outer, problem.length, problem.inner = x.shape
    problem.reverse, problem.flag, problem.threads = reverse, flag, torch.get_num_threads()
    problem.result = problem.element if out is None else ELEMENTS[out.dtype]
    problem.out = None if out is None else out.data_ptr()
    if compute.is_floating_point:
        problem.empty_number = empty
    else:
        problem.empty_integer = int(empty)
    for name, tensor in others.items():
        setattr(problem, name, None if tensor is None else tensor.data_ptr())
    if starts is not None:
        problem.starts = starts.data_ptr()
        outer, length, inner = starts.shape
        problem.starts_length = inner
        problem.starts_outer = length * inner if outer > 1 else 0
        problem.starts_inner = 1 if inner > 1 else 0
    if _library()(problem):
        raise AssertionError(f"no such scan in C++: work {work} of {x.dtype} computed in {compute}")
