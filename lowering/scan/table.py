"""The lowering table: which implementation runs a scan.

The first row that fits a problem runs it. A row is a module with `fits(problem) -> bool` and the functions scan,
extremes, linear and linear_total, as `kernels.Kernels` describes them; it needs only those for which it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from ...errors import SpError
from .problem import Problem

ROWS = {
    "aten": "sp_compile.lowering.scan.aten",
    "native": "sp_compile.lowering.scan.native",
    "triton": "sp_compile.lowering.triton.scan",
    "blocked": "sp_compile.lowering.scan.blocked",
    "tree": "sp_compile.lowering.scan.tree",
}

_forced: list[str] = []


def kernel(problem: Problem) -> Callable[..., Any]:
    """The function that solves a problem."""
    return getattr(_module(choose(problem)), problem.kind)


def choose(problem: Problem) -> str:
    """The name of the row. Raises SpError if the one that `using` names does not fit."""
    if not _forced:
        return next(name for name in ROWS if _module(name).fits(problem))
    name = _forced[-1]
    if not _module(name).fits(problem):
        raise SpError(f"scan: the {name!r} row of the lowering table does not fit {problem}")
    return name


@contextmanager
def using(name: str) -> Iterator[None]:
    """Every scan inside, on any thread, runs by the named row: for tests and measurements."""
    if name not in ROWS:
        raise SpError(f"scan: the lowering table has no row {name!r}, but {', '.join(ROWS)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _module(name: str) -> ModuleType:
    return import_module(ROWS[name])
