"""The lowering table: which implementation runs a scan.

The first row that fits a problem runs it. A row names a module with `fits(problem) -> bool` and the functions scan,
extremes, linear and linear_total, as `kernels.Kernels` describes them; it needs only those for which it fits.

One call of a kernel, as the lowering table sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from sp_compile.errors import SpError


class Problem(NamedTuple):
    """What a row of the table decides by. kind: "scan", "extremes", "linear" or "linear_total".

    x is (outer, length, inner) of dtype, the result of result's. total: is a scan asked for its total?
    """

    kind: str
    device: str
    outer: int
    length: int
    inner: int
    dtype: torch.dtype
    result: torch.dtype
    accumulate: torch.dtype
    op: str = ""
    segmented: bool = False
    exclusive: bool = False
    reverse: bool = False
    lagged: bool = False
    total: bool = True


MODULES = {
    "aten": "sp_compile.lowering.scan.kernels.aten",
    "native": "sp_compile.lowering.scan.kernels.native",
    "triton": "sp_compile.lowering.scan.kernels.triton.scan",
    "blocked": "sp_compile.lowering.scan.kernels.blocked",
    "tree": "sp_compile.lowering.scan.kernels.tree",
}
SMALL = 1 << 17  # elements; to call what Python launches takes longer than torch's loop over so few
SHORT = 64  # rows, of lines that the C++ takes longer to begin than torch to sum up


def is_small(problem: Problem) -> bool:
    """Does it take longer to launch a kernel from Python than to let torch scan?"""
    return problem.outer * problem.length * problem.inner <= SMALL


def has_short_lines(problem: Problem) -> bool:
    """Are there many lines on a CPU, of few rows each, which torch need not compute much for?"""
    simple = problem.kind == "scan" and problem.op != "logsumexp" and not problem.reverse
    return problem.device == "cpu" and problem.inner == 1 and problem.length < SHORT and simple


class Row(NamedTuple):
    """An implementation, for the problems of which also `when` holds."""

    name: str
    when: Callable[[Problem], bool] = lambda problem: True


ROWS = (
    Row("aten", lambda problem: is_small(problem) or has_short_lines(problem)),
    Row("native"),  # on a CPU with a compiler
    Row("triton"),  # on a GPU
    Row("aten"),  # the last dim
    Row("blocked"),
    Row("tree"),
)
_forced: list[str] = []


def kernel(problem: Problem) -> Callable[..., Any]:
    """The function that solves a problem."""
    return getattr(_module(choose(problem)), problem.kind)


def choose(problem: Problem) -> str:
    """The name of the row. Raises SpError if the one that `using` names does not fit."""
    if not _forced:
        return next(row.name for row in ROWS if row.when(problem) and _module(row.name).fits(problem))
    name = _forced[-1]
    if not _module(name).fits(problem):
        raise SpError(f"scan: the {name!r} row of the lowering table does not fit {problem}")
    return name


@contextmanager
def using(name: str) -> Iterator[None]:
    """Every scan inside, on any thread, runs by the named row: for tests and measurements."""
    if name not in MODULES:
        raise SpError(f"scan: the lowering table has no row {name!r}, but {', '.join(MODULES)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _module(name: str) -> ModuleType:
    return import_module(MODULES[name])
