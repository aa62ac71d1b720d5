"""Run scans in C++ (`native.cpp`), in one pass over memory.

Inductor's toolchain compiles it at the first call.

x is (outer, length, inner), contiguous; starts is None or bool (outer|1, length, inner|1). Each operation and pair of
dtypes has its own library, which takes about a second to compile and is stored in Inductor's cache on disk. Without a
compiler, no problem fits.
"""

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

from sp_compile.lowering.scan.monoids import MONOIDS, Pair
from sp_compile.lowering.scan.scan_table import ScanLowering, ScanProblem, register_lowering, start_strides
from sp_compile.lowering.torch_compat import compile_cpp, has_cpp_compiler

CPP_FLAGS = ("-ffp-contract=fast", "-g0")
# Types of elements, and operations, in native.cpp.
CPP_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "BFloat",
    torch.float16: "Half",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.bool: "uint8_t",
}
OPERATORS = {"sum": "Add", "prod": "Multiply", "max": "Select<true>", "min": "Select<false>"}

HUGE_PAGE, MADV_HUGEPAGE = 1 << 21, 14  # bytes of a large page of Linux; the argument of madvise that requests them
GRAIN = 1 << 15  # elements from which starting threads is worthwhile
POINTERS = ("x", "b", "starts", "out", "indices", "states")  # the first fields of Problem in native.cpp

_compile_lock = threading.Lock()


def can_run_native(problem: ScanProblem) -> bool:
    """Return True if the problem is on a CPU, has supported dtypes, and its kernel compiles.

    The kernel is compiled here at the first call for its types, and stored.
    """
    if problem.device != "cpu" or problem.dtype not in CPP_TYPES or problem.result not in CPP_TYPES:
        return False
    if _compute_dtype(problem) is None:
        return False
    # The operand of a scan is cast to this dtype before the kernel runs, the factors of a recurrence are not.
    dtype = problem.dtype if problem.kind.startswith("linear") else _kernel_dtype(problem.dtype, problem.result)
    return _native_kernel(problem, dtype) is not None


def _compute_dtype(problem: ScanProblem) -> torch.dtype | None:
    """Return the dtype of the states, in which C++ computes; None if there is no kernel of the problem."""
    is_float = problem.result.is_floating_point
    if problem.op in ("max", "min"):
        # Every value must be exact in the dtype of the state, and so must the index of an extreme, which only float64
        # represents for long dims. A problem of the kind "scan" has no indices.
        if not is_float:
            return torch.int64
        return torch.float32 if problem.kind == "scan" and problem.result is not torch.float64 else torch.float64
    if problem.op in ("sum", "prod") and not is_float:
        # A bool result is stored as uint8_t (`CPP_TYPES`), in which a sum would not be 0 or 1.
        return torch.int64 if problem.accumulate is torch.int64 and problem.result is not torch.bool else None
    if not is_float or problem.accumulate not in (torch.float32, torch.float64):
        return None
    # LogSumExp of native.cpp exists for double only.
    return torch.float64 if problem.op == "logsumexp" else problem.accumulate


def _cpp_machine(problem: ScanProblem) -> str:
    """Return the class of native.cpp that runs the scan, such as "Scan<float, Add>"."""
    compute = CPP_TYPES[_compute_dtype(problem)]
    if problem.kind.startswith("linear"):
        return f"Linear<{compute}, {problem.lagged:d}, {problem.kind == 'linear_total':d}>"
    if problem.op == "logsumexp":
        return "LogSumExp"
    return f"{'Scan' if problem.kind == 'scan' else 'Extremes'}<{compute}, {OPERATORS[problem.op]}>"


def _native_kernel(problem: ScanProblem, dtype: torch.dtype) -> Callable[[bytes], None] | None:
    """Return the compiled C++ function, which takes the struct Problem as bytes; None if it does not compile.

    Args:
        problem: The problem.
        dtype: The dtype of the operands, see `_kernel_dtype`.
    """
    with _compile_lock:
        return _compile(_cpp_machine(problem), CPP_TYPES[dtype], CPP_TYPES[problem.result])


@cache
def _compile(machine: str, operand: str, result: str) -> Callable[[bytes], None] | None:
    """Compile native.cpp and return its function; None, with a warning, if that is not possible.

    Args:
        machine: The result of `_cpp_machine`.
        operand: The C++ type of the elements of operands.
        result: The C++ type of the elements of results.
    """
    if not has_cpp_compiler():
        return None
    source = Path(__file__).with_name("native.cpp").read_text()
    types = f"#define MACHINE {machine}\n#define IN {operand}\n#define OUT {result}\n"
    try:
        kernel = compile_cpp(types + source, CPP_FLAGS).scan
    except Exception as error:  # of the compiler, the loader or the file system: other implementations remain
        warnings.warn(f"Scans on this CPU are slow, because their C++ kernels did not compile: {error}", stacklevel=2)
        return None
    kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
    return kernel


def scan_native(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """Return the scan of x, and the total of the last segment."""
    x = x.to(_kernel_dtype(x.dtype, problem.result))
    out = x.new_empty(x.shape, dtype=problem.result)
    states = _run_native(problem, x, starts=starts, out=out)
    # The state of a logsumexp is the maximum m, and the sum of exp(x - m) over all rows except that of the maximum. The
    # term of the maximum is 1, which log1p adds.
    total = states[0] + states[1].log1p() if problem.op == "logsumexp" else states[0]
    return out, total.to(problem.accumulate)


def extremes_native(problem: ScanProblem, x: Tensor, starts: Tensor | None) -> Pair:
    """Return the running extremes, and their row indices."""
    out, indices = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)
    _run_native(problem, x, starts=starts, out=out, indices=indices)
    return out, indices


def linear_native(problem: ScanProblem, a: Tensor, b: Tensor, initial: Tensor | None) -> Tensor:
    """Return h with h_i = a_i * h_(i-1) + b_i, from h_(-1) = initial, (outer, inner), or zeros."""
    a, b = _promote(a, b)
    h = b.new_empty(b.shape, dtype=problem.result)
    _run_native(problem, a, initial, b=b, out=h)
    return h


def linear_total_native(problem: ScanProblem, a: Tensor, b: Tensor) -> Pair:
    """Return the factor and the state of the affine map of all rows."""
    a, b = _promote(a, b)
    state, factor = _run_native(problem, a, b=b)
    return factor.clone(), state.clone()  # results of an operator share no memory


def _kernel_dtype(dtype: torch.dtype, result: torch.dtype) -> torch.dtype:
    """Return the dtype of the operands: `dtype` if `result` represents its values exactly, else `result`."""
    is_wider = torch.promote_types(dtype, result) == result
    return dtype if is_wider and dtype.is_floating_point == result.is_floating_point else result


def _promote(a: Tensor, b: Tensor) -> Pair:
    """Return both operands of a recurrence in their common dtype, since a compiled kernel has one operand type."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _run_native(problem: ScanProblem, x: Tensor, initial: Tensor | None = None, **others: Tensor | None) -> Tensor:
    """Run the C++ kernel, which writes `out` and `indices` among the other tensors.

    Args:
        problem: The problem.
        x: The operand, or the factors of a recurrence.
        initial: The state before all rows of a recurrence, (outer, inner).
        **others: Tensors by their names in POINTERS; out and indices are results. All are contiguous.

    Returns:
        The states after all rows, (2, outer, inner). states[0] is the total of a scan, an extreme, h of a recurrence,
        or the maximum m of a logsumexp. states[1] is the index of the extreme, the factor of the recurrence, or the sum
        of exp(x - m) over the other rows.
    """
    dtype, kernel = _compute_dtype(problem), _native_kernel(problem, x.dtype)
    assert kernel is not None, "the problem does not fit"
    neutral = MONOIDS[problem.op].identity(problem.result) if problem.op else 0
    states = x.new_zeros((2, x.shape[0], x.shape[2]), dtype=dtype)
    states[0] = neutral if initial is None else initial
    states[1] = problem.kind.startswith("linear")  # 1, the factor of no rows; else 0
    for result in (others.get("out"), others.get("indices")):
        if result is not None:
            _use_large_pages(result)
    # Pack the struct Problem of native.cpp: 6 pointers, 9 integers, and the neutral element.
    tensors = [({"x": x, "states": states} | others).get(name) for name in POINTERS]
    pointers = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    threads = torch.get_num_threads() if x.numel() >= GRAIN else 1
    integers = (
        *x.shape,
        *start_strides(others.get("starts")),
        problem.exclusive or problem.lagged,  # the state before a row determines its result
        problem.reverse,
        threads,
    )
    if dtype is torch.int64:
        kernel(struct.pack("6Q9qq", *pointers, *integers, int(neutral)))
    else:
        kernel(struct.pack("6Q9qd", *pointers, *integers, float(neutral)))
    return states


def _use_large_pages(result: Tensor) -> None:
    """Advise Linux to use large pages for the result.

    Allocating new memory in small pages takes longer than a scan takes to fill it.
    """
    # The first and the last boundary of large pages inside of the result: multiples of HUGE_PAGE, rounded up and down.
    begin = -(-result.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (result.data_ptr() + result.nbytes) // HUGE_PAGE * HUGE_PAGE
    if sys.platform == "linux" and end - begin > HUGE_PAGE:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)


NATIVE_LOWERING = ScanLowering(can_run_native, scan_native, extremes_native, linear_native, linear_total_native)
register_lowering("native", NATIVE_LOWERING, priority=lambda problem: 10)
