"""Scans of sharded sequences on every rank, and the expected loop over segments of the full sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.attention.attending import randn
from torch import Tensor

from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

sp = torch.ops.sp
OPS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sum": (lambda x: x.cumsum(0), 0),
    "prod": (lambda x: x.cumprod(0), 1),
    "max": (lambda x: x.cummax(0)[0], -math.inf),
    "min": (lambda x: x.cummin(0)[0], math.inf),
    "logsumexp": (lambda x: x.logcumsumexp(0), -math.inf),
}
DIM = 1


@dataclass(frozen=True)
class Case:
    """A scan along dim 1 of (2, size, 3), of which the rows [start, start + length) are the sequence.

    runs: lengths of the segments, () for none; wide: ids of x's shape, another pattern in each column.
    """

    op: str = "sum"
    exclusive: bool = False
    reverse: bool = False
    runs: tuple[int, ...] = ()
    wide: bool = False
    layout: str = "contiguous"
    size: int = 23
    start: int = 0
    length: int = -1
    exchange: str = "gather"
    dtype: torch.dtype = torch.float64

    @property
    def window(self) -> int:
        return self.size - self.start if self.length < 0 else self.length

    def frame(self) -> list[int]:
        return [1, self.size, self.start, self.window, *([2] if self.layout == "zigzag" else [])]

    def operand(self) -> Tensor:
        """Return the full sequence (2, length, 3), with zeros, equal elements or -inf as edge cases of the op."""
        x = randn(2, self.window, 3, seed=3)
        if self.op in ("max", "min"):
            x = (x * 2).round() + 0.0
        if self.op == "prod":
            x[0, ::7], x[1, 1::5, 2] = 0, 0
        if self.op == "logsumexp":
            x[0, :2], x[1, 3::4, 1] = -math.inf, -math.inf
        return x.to(self.dtype)

    def ids(self) -> Tensor | None:
        """(length,) or, if wide, (2, length, 3). An id may come again."""
        if not self.runs:
            return None
        runs = self.runs * (self.window // sum(self.runs) + 2)
        ids = torch.cat([torch.full((size,), i % 3) for i, size in enumerate(runs)])
        if not self.wide:
            return ids[: self.window]
        shifts = torch.arange(6).view(2, 1, 3)
        return ids[torch.arange(self.window).view(1, -1, 1) + shifts % sum(self.runs)]

    def cotangent(self) -> Tensor:
        return randn(2, self.window, 3, seed=9).to(self.dtype)


def reference(case: Case, x: Tensor) -> Tensor:
    """Return the scan of the full sequence, segment by segment by torch."""
    ids = case.ids()
    columns = []
    for i in range(x.shape[0]):
        for j in range(x.shape[2]):
            own = ids if ids is None or not case.wide else ids[i, :, j]
            columns.append(_column(case, x[i, :, j], own))
    return torch.stack(columns).unflatten(0, (x.shape[0], x.shape[2])).movedim(2, 1)


def _column(case: Case, x: Tensor, ids: Tensor | None) -> Tensor:
    fn, neutral = OPS[case.op]
    turned = x.flip(0) if case.reverse else x
    marks = torch.zeros(len(x)) if ids is None else ids
    lengths = (marks.flip(0) if case.reverse else marks).unique_consecutive(return_counts=True)[1].tolist()
    out = []
    for segment in turned.split(lengths):
        y = fn(segment)
        out.append(torch.cat([y.new_full((1,), neutral), y[:-1]]) if case.exclusive else y)
    whole = torch.cat(out)
    return whole.flip(0) if case.reverse else whole


def finite(y: Tensor) -> Tensor:
    """y as a loss may read it: an infinite element has no cotangent."""
    return torch.where(y.isfinite(), y, 0) if y.is_floating_point() else y


def positions(case: Case, rank: int, n: int) -> Tensor:
    """Return the positions of a rank's rows in the frame."""
    folds = 2 if case.layout == "zigzag" else 1
    chunk = -(-case.size // (folds * n))
    chunks = torch.arange(folds * n * chunk).chunk(folds * n)
    return chunks[rank] if folds == 1 else torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


def inside(case: Case, rank: int, n: int) -> Tensor:
    """Return a mask of the rank's rows in the window."""
    at = positions(case, rank, n)
    return (at >= case.start) & (at < case.start + case.window)


def cut(case: Case, x: Tensor, rank: int, n: int, dim: int = DIM, fill: float | None = None) -> Tensor:
    """A rank's rows of the window's; outside it the nearest one, or `fill`."""
    at = (positions(case, rank, n) - case.start).clamp(0, case.window - 1)
    rows = x.index_select(dim, at)
    if fill is None:
        return rows
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    return rows.masked_fill(~inside(case, rank, n).view(shape), fill)


def joined(case: Case, shards: list[Tensor], dim: int = DIM) -> Tensor:
    """The window's rows of all ranks' rows."""
    n = len(shards)
    at = torch.cat([positions(case, rank, n) for rank in range(n)]).argsort()
    return torch.cat(shards, dim).index_select(dim, at[case.start : case.start + case.window])


def scan(case: Case, x: Tensor, ids: Tensor | None, n: int, group: str = SIMULATED_GROUP) -> Tensor:
    """The operator on one rank's rows."""
    options = (case.op, case.exclusive, case.reverse, None, None, case.frame(), case.exchange, n, group)
    return sp.scan(x, ids, DIM, *options)


def on_rank(case: Case, rank: int, n: int, group: str = SIMULATED_GROUP, fill: float | None = None) -> list[Tensor]:
    """One rank's rows of the result and of the gradient of x."""
    x = cut(case, case.operand(), rank, n, fill=fill).requires_grad_()
    ids = case.ids()
    if ids is not None:
        ids = cut(case, ids, rank, n, DIM if case.wide else 0, None if fill is None else 7)
    y = scan(case, x, ids, n, group)
    grad = cut(case, case.cotangent(), rank, n, fill=0.0)
    return [y.detach(), torch.autograd.grad(finite(y), x, grad)[0]]


def expected(case: Case) -> list[Tensor]:
    """Return the expected result and gradient of the full sequence."""
    x = case.operand().requires_grad_()
    y = reference(case, x)
    (grad,) = torch.autograd.grad(finite(y), x, case.cotangent())
    return [y.detach(), torch.where(x == -math.inf, 0, grad) if case.op == "logsumexp" else grad]


def simulated(case: Case, n: int, fill: float | None = None) -> list[Tensor]:
    """Return the full tensor of all simulated ranks' rows."""
    found = run_ranks(n, lambda rank: on_rank(case, rank, n, fill=fill))
    return [joined(case, list(shards)) for shards in zip(*found)]


def every(case: Case, **options: Any) -> list[Case]:
    """The case exclusive or not, reverse or not."""
    both = (False, True)
    return [replace(case, exclusive=e, reverse=r, **options) for e in both for r in both]


@dataclass(frozen=True)
class Recurrence(Case):
    """h = a * h + b along dim 1, from `initial` or zeros; a holds zeros."""

    initial: bool = True

    def operands(self) -> list[Tensor]:
        """a, b, and the initial state if there is one."""
        a, b, first = randn(2, self.window, 3, seed=1), randn(2, self.window, 3, seed=2), randn(2, 3, seed=3)
        a[0, ::6] = 0
        return [x.to(self.dtype) for x in (a, b, *([first] if self.initial else []))]

    def on_rank(self, rank: int, n: int, group: str = SIMULATED_GROUP, fill: float | None = None) -> list[Tensor]:
        """One rank's h, and gradients of a and b, and of initial, the same on all ranks."""
        a, b, *first = self.operands()
        leaves = [cut(self, a, rank, n, fill=fill), cut(self, b, rank, n, fill=fill), *first]
        leaves = [x.clone().requires_grad_() for x in leaves]
        h = recur(self, leaves[0], leaves[1], leaves[2] if first else None, n, group)
        return [h.detach(), *torch.autograd.grad(h, leaves, cut(self, self.cotangent(), rank, n, fill=0.0))]

    def expected(self) -> list[Tensor]:
        """Return the expected result and gradients of the full sequence by a loop."""
        leaves = [x.requires_grad_() for x in self.operands()]
        state = leaves[2] if self.initial else torch.zeros(2, 3, dtype=self.dtype)
        out = []
        steps = reversed(range(self.window)) if self.reverse else range(self.window)
        for t in steps:
            state = leaves[0][:, t] * state + leaves[1][:, t]
            out.append(state)
        h = torch.stack(out[::-1] if self.reverse else out, 1)
        return [h.detach(), *torch.autograd.grad(h, leaves, self.cotangent())]


def recur(case: Case, a: Tensor, b: Tensor, first: Tensor | None, n: int, group: str = SIMULATED_GROUP) -> Tensor:
    """The operator on one rank's rows."""
    return sp.linear_scan(a, b, first, DIM, case.reverse, None, case.frame(), case.exchange, n, group)
