"""The lowering table: which implementation runs a scan.

A way registers itself, under a name and with a rank; the one of lowest rank that fits a problem runs it. It is a module
with `fits(problem) -> bool` and the functions scan, extremes, linear and linear_total of a problem and its tensors, as
`kernels.generic.Kernels` describes them; it needs only those for which it fits. The ways here are the modules of
`kernels`, which imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.table import Table


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

    @classmethod
    def of(cls, kind: str, x: Tensor, result: torch.dtype, accumulate: torch.dtype, **options: Any) -> Problem:
        """The problem of x, (outer, length, inner)."""
        outer, length, inner = x.shape
        return cls(kind, x.device.type, outer, length, inner, x.dtype, result, accumulate, **options)


SMALL = 1 << 17  # elements; to call what Python launches takes longer than torch's loop over so few


class Way(NamedTuple):
    """A row: the module, or any object with such functions, and when its turn comes."""

    kernels: Any
    rank: Callable[[Problem], int]

    def fits(self, problem: Problem) -> bool:
        """Can it run the problem?"""
        return bool(self.kernels.fits(problem))


WAYS: Table[Way] = Table("scan: the lowering table", rank=lambda way, problem: way.rank(problem))
choose, using = WAYS.choose, WAYS.using


def register(name: str, kernels: Any, rank: Callable[[Problem], int]) -> ExitStack:
    """Add a way: for good, or `with register(...):` for a block.

    rank: its turn, low first. The ways here have 0 (torch, of what is small), 10 (C++), 20 (Triton), 30 (torch), 40
    (in blocks of torch operations) and 50 (a tree of them, which always fits).
    """
    return WAYS.register(name, Way(kernels, rank))


def kernel(problem: Problem) -> Callable[..., Any]:
    """The function that solves a problem."""
    return getattr(WAYS[choose(problem)].kernels, problem.kind)
