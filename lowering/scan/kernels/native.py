"""Scans in C++, in one pass over memory, compiled by Inductor's toolchain when first asked for.

x is (outer, length, inner), contiguous; starts None or bool (outer|1, length, inner|1). Neighbouring columns go down
the rows together, in registers; a line of neighbours is scanned vector by vector.
One library for every operation and type to compute in, about a second to compile, kept in Inductor's cache on disk.
Without a compiler no problem fits.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sp_compile._compat import compile_cpp, has_cpp_compiler
from sp_compile.lowering.scan.monoids import MONOIDS, Pair
from sp_compile.lowering.scan.table import Problem, register

SOURCES = ("vectors", "steps", "walks", "tensors", "grid", "lines", "passes")
FLAGS = ("-ffp-contract=fast", "-g0")
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
COMPUTED = {torch.float32: "float", torch.float64: "double", torch.int64: "int64_t"}
COMBINING = {"sum": "Add", "prod": "Multiply", "max": "Larger", "min": "Smaller"}

GRAIN = 1 << 15
"""Elements from which on threads are worth their start."""
POINTERS = ("x", "b", "initial", "starts", "out", "indices", "total", "factor")

Kernel = Callable[[bytes], None]
_PROBLEM = struct.Struct("8Q7qd5i")  # as in native_tensors.cpp
_lock = threading.Lock()
_failures: list[str] = []


def fits(problem: Problem) -> bool:
    """On a CPU, of dtypes that the C++ has, where a compiler makes it."""
    if problem.device != "cpu" or problem.dtype not in ELEMENTS or problem.result not in ELEMENTS:
        return False
    compute = _computed(problem)
    return compute in COMPUTED and _kernel(_steps(problem.kind, problem.op, compute)) is not None


def available() -> bool:
    """Is there a compiler, and does it compile one of the kernels?"""
    return _kernel(_steps("scan", "sum", torch.float64)) is not None


def _computed(problem: Problem) -> torch.dtype | None:
    """The type to compute in; None if there is no kernel."""
    floats = problem.result.is_floating_point
    if problem.kind == "scan" and problem.op in ("max", "min"):
        return _holding(problem.result)
    if problem.kind == "extremes":
        return _with_index(problem.result)
    if problem.kind == "scan" and problem.op != "logsumexp" and not floats:
        return torch.int64 if problem.accumulate is torch.int64 and problem.result is not torch.bool else None
    if not floats or problem.accumulate not in (torch.float32, torch.float64):
        return None
    return torch.float64 if problem.op == "logsumexp" else problem.accumulate


def _holding(dtype: torch.dtype) -> torch.dtype:
    """What has every value of a dtype, among the types to compute in."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype is torch.float64 else torch.float32


def _with_index(dtype: torch.dtype) -> torch.dtype:
    """What has every value of a dtype and every index."""
    return torch.float64 if dtype.is_floating_point else torch.int64


@cache
def _steps(kind: str, op: str, compute: torch.dtype) -> str:
    """The machine of native_steps.cpp."""
    c = COMPUTED[compute]
    if kind == "scan":
        return "LogSumExp" if op == "logsumexp" else f"Scan<{c}, {COMBINING[op]}>"
    if kind == "extremes":
        return f"Extremes<{c}, {COMBINING[op]}>"
    return f"Linear<{c}>" if kind == "linear" else f"LinearTotal<{c}>"


def _kernel(steps: str) -> Kernel | None:
    with _lock:
        return _compiled(steps)


@cache
def _compiled(steps: str) -> Kernel | None:
    if not has_cpp_compiler():
        return None
    try:
        kernel = compile_cpp(f"#define STEPS {steps}\n{_source()}", FLAGS).scan
    except Exception as error:  # of the compiler, the loader or the file system: there are other ways to scan
        _failures.append(steps)
        if len(_failures) == 1:
            warnings.warn(f"scans are slower than they could be: {steps} does not compile: {error}", stacklevel=2)
        return None
    kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
    return kernel


@cache
def _source() -> str:
    return "".join((Path(__file__).parent / f"native_{name}.cpp").read_text() for name in SOURCES)


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
    compute = {"logsumexp": torch.float64, "max": _holding(dtype), "min": _holding(dtype)}.get(op, accumulate)
    out, total = x.new_empty(x.shape, dtype=dtype), _one_row(x, compute)
    empty = MONOIDS[op].identity(dtype)
    _run("scan", op, compute, x, out, reverse, starts, empty=empty, flag=exclusive, total=total)
    return out, total.to(accumulate)


def extremes(x: Tensor, starts: Tensor | None, op: str, reverse: bool) -> Pair:
    """-> the running max or min, like x, and its index, int64."""
    out, indices = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)
    empty = MONOIDS[op].identity(x.dtype)
    _run("extremes", op, _with_index(x.dtype), x, out, reverse, starts, empty=empty, indices=indices)
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
    h = b.new_empty(b.shape, dtype=dtype)
    initial = None if initial is None else initial.to(accumulate).contiguous()
    _run("linear", "", accumulate, a, h, reverse, flag=lagged, b=b, initial=initial)
    return h


def linear_total(a: Tensor, b: Tensor, reverse: bool, lagged: bool, accumulate: torch.dtype) -> Pair:
    """-> factor and state (outer, inner): what goes into the recurrence comes out as factor * it + state."""
    a, b = _of_one_dtype(a, b)
    factor, state = _one_row(b, accumulate), _one_row(b, accumulate)
    _run("linear_total", "", accumulate, a, None, reverse, flag=lagged, b=b, total=state, factor=factor)
    return factor, state


def _as_operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to dtype, unless the C++ reads the same values from x itself."""
    wider = torch.promote_types(x.dtype, dtype) == dtype
    return x if wider and x.dtype.is_floating_point == dtype.is_floating_point else x.to(dtype)


def _of_one_dtype(a: Tensor, b: Tensor) -> Pair:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _one_row(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]), dtype=dtype)


def _run(
    kind: str,
    op: str,
    compute: torch.dtype,
    x: Tensor,
    out: Tensor | None,
    reverse: bool,
    starts: Tensor | None = None,
    empty: float = 0,
    flag: bool = False,
    **others: Tensor | None,
) -> None:
    """Fill `out` and those of `others` that are results; all contiguous. flag: exclusive, or lagged."""
    kernel = _kernel(_steps(kind, op, compute))
    assert kernel is not None, "a problem that does not fit"
    tensors = {"x": x, "starts": starts, "out": out, **others}
    pointers = ((tensor.data_ptr() if (tensor := tensors.get(name)) is not None else 0) for name in POINTERS)
    empties = (0, empty) if compute.is_floating_point else (int(empty), 0.0)
    elements = ELEMENTS[x.dtype], ELEMENTS[x.dtype if out is None else out.dtype]
    options = flag, reverse, torch.get_num_threads() if x.numel() >= GRAIN else 1
    kernel(_PROBLEM.pack(*pointers, *x.shape, *_steps_of(starts), *empties, *elements, *options))


def _steps_of(starts: Tensor | None) -> tuple[int, int, int]:
    """From one outer, row and inner to the next: 0 where all share them."""
    if starts is None:
        return 0, 0, 0
    outer, length, inner = starts.shape
    return length * inner if outer > 1 else 0, inner, int(inner > 1)


register("native", sys.modules[__name__], rank=lambda problem: 10)
