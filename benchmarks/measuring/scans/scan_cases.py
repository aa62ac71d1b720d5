"""Cases of benchmarks/scans.py: a scan of ours, its equivalent in torch, and a copy of its input."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sp_compile import exclusive_scan, inclusive_scan, linear_scan, segmented_scan

Job = Callable[[], object]
F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
COLUMNS = [((65536, 64), 0), ((65536, 128), 0), ((8, 8192, 256), 1)]
LINES = [(1 << 22,), (64, 65536), (4096, 1024), (131072, 32)]
SHORTEST = 0.02
"""Seconds for which a job repeats: clocks of CPU time tick in milliseconds."""


@dataclass(frozen=True)
class Case:
    """One row. others: jobs to compare with, the first one by the target; copy: a clone of the input."""

    part: str
    name: str
    ours: Job
    others: dict[str, Job]
    target: float | None = None
    copy: Job | None = None


@dataclass
class Times:
    """Milliseconds in each round."""

    part: str
    name: str
    target: float | None
    ours: list[float] = field(default_factory=list)
    others: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, other: str) -> float:
        """Return the median ratio of another job's time to ours over the rounds."""
        return statistics.median(a / b for a, b in zip(self.others[other], self.ours))


def cases(small: bool) -> Iterator[Callable[[], Case]]:
    """Made one at a time: they are large."""
    for (shape, dim), dtype in itertools.product(COLUMNS, (F32, BF16, I64)):
        yield lambda s=shape, d=dim, t=dtype: plain(reduced(s, small), d, t, 4.0)
    for shape, dtype in itertools.product(LINES, (F32, BF16, I64)):
        yield lambda s=shape, t=dtype: plain(reduced(s, small), len(s) - 1, t, 0.95)
    for shape, dim in (((65536, 64), 0), ((64, 65536), 1)):
        for make in (reverse, exclusive, product, extremes, logsumexp, segmented):
            yield lambda s=shape, d=dim, m=make: m(draw(reduced(s, small), F32), d)
    for backward in (False, True):
        yield lambda b=backward: recurrence(reduced((65536, 64), small), b)


def reduced(shape: tuple[int, ...], small: bool) -> tuple[int, ...]:
    return tuple(min(size, 16) for size in shape) if small else shape


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(shape)).to(dtype)


def titled(x: Tensor, dim: int, what: str = "") -> str:
    return f"{list(x.shape)} dim {dim}, {str(x.dtype)[6:]}{what and ', '}{what}"


def plain(shape: tuple[int, ...], dim: int, dtype: torch.dtype, target: float) -> Case:
    x = draw(shape, dtype)
    part = "sum along the last dim" if dim == x.ndim - 1 else "sum along another dim"
    name = titled(x, dim)
    jobs = {"torch.cumsum": partial(x.cumsum, dim)}
    return Case(part, name, partial(inclusive_scan, x, dim), jobs, target, x.clone)


def reverse(x: Tensor, dim: int) -> Case:
    jobs = {"flip, cumsum, flip": lambda: x.flip(dim).cumsum(dim).flip(dim)}
    name = titled(x, dim, "reverse")
    return Case("others", name, partial(inclusive_scan, x, dim, reverse=True), jobs, None, x.clone)


def exclusive(x: Tensor, dim: int) -> Case:
    jobs = {"cumsum - x": lambda: x.cumsum(dim) - x}
    return Case("others", titled(x, dim, "exclusive"), partial(exclusive_scan, x, dim), jobs, None, x.clone)


def product(x: Tensor, dim: int) -> Case:
    jobs = {"torch.cumprod": partial(x.cumprod, dim)}
    return Case("others", titled(x, dim, "prod"), partial(inclusive_scan, x, dim, "prod"), jobs, None, x.clone)


def extremes(x: Tensor, dim: int) -> Case:
    jobs = {"torch.cummax": partial(x.cummax, dim)}
    ours = partial(inclusive_scan, x, dim, "max", indices=True)
    return Case("others", titled(x, dim, "max, indices"), ours, jobs, None, x.clone)


def logsumexp(x: Tensor, dim: int) -> Case:
    jobs = {"torch.logcumsumexp": partial(x.logcumsumexp, dim)}
    name = titled(x, dim, "logsumexp")
    return Case("others", name, partial(inclusive_scan, x, dim, "logsumexp"), jobs, None, x.clone)


def segmented(x: Tensor, dim: int) -> Case:
    """Return a scan of segments of 1 to 199 rows; with torch, cumsum minus its value before the segment."""
    ids = torch.repeat_interleave(torch.arange(x.shape[dim]), torch.randint(1, 200, (x.shape[dim],)))
    ids = ids[: x.shape[dim]]
    starts = torch.searchsorted(ids, ids)

    def subtracted() -> Tensor:
        sums = x.cumsum(dim)
        return sums - (sums - x).index_select(dim, starts)

    jobs = {"cumsum less its starts": subtracted}
    name = titled(x, dim, "segmented")
    return Case("others", name, partial(segmented_scan, x, ids, dim), jobs, None, x.clone)


def recurrence(shape: tuple[int, ...], backward: bool) -> Case:
    a, b = torch.rand(shape, requires_grad=backward), torch.randn(shape, requires_grad=backward)
    step = (lambda h: torch.autograd.grad(h.sum(), (a, b))) if backward else (lambda h: h)
    jobs = {"associative_scan, eager": lambda: step(associative(a, b))}
    name = titled(a, 0, "forward and backward" if backward else "forward")
    return Case("recurrence", name, lambda: step(linear_scan(a, b, 0)), jobs, 1.2, a.detach().clone)


def associative(a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t * h_(t-1) + b_t as torch has it."""
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(composed, (a, b), 0, combine_mode="generic")[1]


def composed(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left[0] * right[0], right[0] * left[1] + right[1]


def time_of(case: Case, rounds: int) -> Times:
    """Time all jobs in every round in turn, after a warm-up round."""
    times = Times(case.part, case.name, case.target)
    jobs = {**case.others, **({"copy": case.copy} if case.copy else {})}
    for round in range(rounds + 1):
        found = {name: milliseconds(job) for name, job in {"": case.ours, **jobs}.items()}
        if round:
            times.ours.append(found.pop(""))
            for name, value in found.items():
                times.others.setdefault(name, []).append(value)
    return times


def milliseconds(job: Job) -> float:
    """CPU time of this process for one call, of several."""
    begin, calls = time.process_time(), 0
    while True:
        job()
        calls += 1
        spent = time.process_time() - begin
        if spent >= SHORTEST:
            return 1000 * spent / calls
