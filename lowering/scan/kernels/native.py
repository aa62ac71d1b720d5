"""Scans in C++, in one pass over memory, compiled by Inductor's toolchain when first asked for.

x is (outer, length, inner), contiguous; starts None or bool (outer|1, length, inner|1). Neighbouring columns go down
the rows together, in registers; a line of neighbours is scanned vector by vector.
One library for every operation and type to compute in, about a second to compile, kept in Inductor's cache on disk; if
others may write there, in a folder of this process alone. Without a compiler no problem fits.
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
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from sp_compile.lowering.scan.monoids import MONOIDS, Pair
from sp_compile.lowering.scan.scan_table import Problem, register, strides_of
from sp_compile.lowering.torch_compat import compile_cpp, has_cpp_compiler

from .trusted import open_to_others, require_trusted

SOURCES = ("vectors", "steps", "walks", "tensors", "grid", "lines", "passes")
FLAGS = ("-ffp-contract=fast", "-g0")
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
ELEMENTS = {dtype: number for number, dtype in enumerate((*_FLOATS, *_INTEGERS))}  # as in native_tensors.cpp
ELEMENTS[torch.bool] = ELEMENTS[torch.uint8]
COMPUTE_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "int64_t"}
COMBINE_TYPES = {"sum": "Add", "prod": "Multiply", "max": "Larger", "min": "Smaller"}

GRAIN = 1 << 15
"""Elements from which on threads are worth their start."""
POINTERS = ("x", "b", "initial", "starts", "out", "indices", "total", "factor")

EntryPoint = Callable[[bytes], None]  # takes a packed _PROBLEM
_PROBLEM = struct.Struct("8Q7qd5i")  # as in native_tensors.cpp
_lock = threading.Lock()
_failures: list[str] = []
_private: list[TemporaryDirectory[str]] = []


def fits(problem: Problem) -> bool:
    """On a CPU, of dtypes that the C++ has, where a compiler makes it."""
    if problem.device != "cpu" or problem.dtype not in ELEMENTS or problem.result not in ELEMENTS:
        return False
    return _kernel(problem) is not None


def _computed(problem: Problem) -> torch.dtype | None:
    """The type to compute in; None if there is no kernel."""
    floats = problem.result.is_floating_point
    if problem.op in ("max", "min"):
        # What has every value of the dtype, and every index.
        narrow = problem.kind == "scan" and problem.result is not torch.float64
        return (torch.float32 if narrow else torch.float64) if floats else torch.int64
    if problem.op in ("sum", "prod") and not floats:
        return torch.int64 if problem.accumulate is torch.int64 and problem.result is not torch.bool else None
    if not floats or problem.accumulate not in (torch.float32, torch.float64):
        return None
    return torch.float64 if problem.op == "logsumexp" else problem.accumulate


@cache
def _steps(kind: str, op: str, compute: torch.dtype) -> str:
    """The machine of native_steps.cpp."""
    c = COMPUTE_TYPES[compute]
    if kind == "scan":
        return "LogSumExp" if op == "logsumexp" else f"Scan<{c}, {COMBINE_TYPES[op]}>"
    if kind == "extremes":
        return f"Extremes<{c}, {COMBINE_TYPES[op]}>"
    return f"Linear<{c}>" if kind == "linear" else f"LinearTotal<{c}>"


def _kernel(problem: Problem) -> EntryPoint | None:
    compute = _computed(problem)
    if compute not in COMPUTE_TYPES:
        return None
    with _lock:
        return _compiled(_steps(problem.kind, problem.op, compute))


@cache
def _compiled(steps: str) -> EntryPoint | None:
    if not has_cpp_compiler():
        return None
    try:
        kernel = compile_cpp(f"#define STEPS {steps}\n{_source()}", FLAGS, _folder, require_trusted).scan
    except Exception as error:  # of the compiler, the loader or the file system: there are other ways to scan
        _failures.append(steps)
        if len(_failures) == 1:
            warnings.warn(f"scans are slower than they could be: no library of {steps}: {error}", stacklevel=2)
        return None
    kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
    return kernel


@cache
def _folder(cache: str) -> str:
    """Where libraries are kept: in Inductor's cache, unless others may write there."""
    theirs = open_to_others(cache)
    if theirs is None:
        return cache
    mend = f"chmod go-w {theirs}, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
    warnings.warn(f"every process compiles its scans anew: others may write to {theirs}; {mend}", stacklevel=2)
    _private.append(TemporaryDirectory(prefix="sp_compile"))  # gone when the process ends
    return _private[0].name


@cache
def _source() -> str:
    return "".join((Path(__file__).parent / f"native_{name}.cpp").read_text() for name in SOURCES)


def scan(problem: Problem, x: Tensor, starts: Tensor | None) -> Pair:
    x = _as_operand(x, problem.result)
    out, total = x.new_empty(x.shape, dtype=problem.result), _one_row(x, _computed(problem))
    _run(problem, x, starts=starts, out=out, total=total)
    return out, total.to(problem.accumulate)


def extremes(problem: Problem, x: Tensor, starts: Tensor | None) -> Pair:
    out, indices = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)
    _run(problem, x, starts=starts, out=out, indices=indices)
    return out, indices


def linear(problem: Problem, a: Tensor, b: Tensor, initial: Tensor | None) -> Tensor:
    a, b = _of_one_dtype(a, b)
    h = b.new_empty(b.shape, dtype=problem.result)
    initial = None if initial is None else initial.to(problem.accumulate).contiguous()
    _run(problem, a, b=b, initial=initial, out=h)
    return h


def linear_total(problem: Problem, a: Tensor, b: Tensor) -> Pair:
    a, b = _of_one_dtype(a, b)
    factor, state = (_one_row(b, problem.accumulate) for _ in range(2))
    _run(problem, a, b=b, total=state, factor=factor)
    return factor, state


def _as_operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to dtype, unless the C++ reads the same values from x itself."""
    wider = torch.promote_types(x.dtype, dtype) == dtype
    return x if wider and x.dtype.is_floating_point == dtype.is_floating_point else x.to(dtype)


def _of_one_dtype(a: Tensor, b: Tensor) -> Pair:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _one_row(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]), dtype=dtype)


def _run(problem: Problem, x: Tensor, **others: Tensor | None) -> None:
    """Fill those of `others` that are results; all contiguous."""
    kernel = _kernel(problem)
    assert kernel is not None, "a problem that does not fit"
    tensors = {"x": x, **others}
    pointers = ((tensor.data_ptr() if (tensor := tensors.get(name)) is not None else 0) for name in POINTERS)
    empty = MONOIDS[problem.op].identity(problem.result) if problem.op else 0
    empties = (0, empty) if problem.result.is_floating_point else (int(empty), 0.0)
    out = others.get("out")
    elements = ELEMENTS[x.dtype], ELEMENTS[x.dtype if out is None else out.dtype]
    options = problem.exclusive or problem.lagged, problem.reverse, torch.get_num_threads() if x.numel() >= GRAIN else 1
    kernel(_PROBLEM.pack(*pointers, *x.shape, *strides_of(others.get("starts")), *empties, *elements, *options))


register("native", sys.modules[__name__], rank=lambda problem: 10)
