"""What reductions over groups of ranks take: measured on these ranks where that is possible, else the ring formula."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sp_compile._compat import process_group
from sp_compile.errors import SpError
from sp_compile.lowering.communicator import current

from .measure import cache_path, finish, load, save

REPEATS = 40
CPU_SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 21, 1 << 22)
GPU_SIZES = (1 << 12, 1 << 18, 1 << 22, 1 << 24, 1 << 26)


@dataclass(frozen=True)
class Line:
    """An all_reduce over one communicator takes latency + bytes / bandwidth: seconds, bytes/s."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        """Of an all_reduce of so many bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Links:
    """Constants of a ring of k ranks. Their all_reduce of M bytes: call + 2 (k - 1) hop + 2 M (k - 1) / k / bandwidth.

    Seconds and bytes/s of one rank, one direction; inter_*: of rings that leave a machine.
    Raises SpError: a constant that is no number or out of range.
    """

    call: float
    hop: float
    bandwidth: float
    inter_hop: float
    inter_bandwidth: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), "above 0" if "bandwidth" in f.name else "from 0"
            number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            if not number or (value == 0 and least == "above 0"):
                raise SpError(f"links: {f.name}={value!r}: expected a number {least}")

    def line(self, ranks: int, inside: bool) -> Line:
        """Of a group of so many ranks, all of them on one machine or not."""
        hop, bandwidth = (self.hop, self.bandwidth) if inside else (self.inter_hop, self.inter_bandwidth)
        sent = 2 * (ranks - 1) / ranks
        return Line(self.call + 2 * (ranks - 1) * hop, bandwidth / sent if ranks > 1 else math.inf)

    @staticmethod
    def of(device_type: str) -> Links:
        """The defaults of a device type ("cpu", else those of a GPU)."""
        return CPU if device_type == "cpu" else GPU


# Gloo processes of one thread each that share two cores; NVLink and one 400 Gbit/s NIC per GPU, latencies as
# torch._inductor.comm_analysis has them for NCCL.
CPU = Links(call=2e-4, hop=5e-4, bandwidth=4e8, inter_hop=5e-4, inter_bandwidth=4e8)
GPU = Links(call=7e-6, hop=6e-7, bandwidth=370e9, inter_hop=3e-6, inter_bandwidth=45e9)


def seconds(kind: str, nbytes: float, line: Line) -> float:
    """Of a collective on `nbytes`: those that are reduced, gathered in all, or scattered in all.

    Gathering and scattering are the halves that a ring's all_reduce consists of.
    """
    return line.seconds(nbytes) / (1 if kind == "all_reduce" else 2)


_measured: weakref.WeakKeyDictionary[Any, dict[Any, Line]] = weakref.WeakKeyDictionary()

Named: TypeAlias = Sequence[tuple[str | None, tuple[tuple[int, ...], ...]]]
"""What this rank calls its communicator (None if it has none), and the ranks of all communicators of that kind."""


def measured(
    groups: Named, turns: Sequence[Sequence[int]], device: torch.device, where: torch.device
) -> tuple[dict[str, Line], dict[frozenset[str], Line]]:
    """The lines of this rank's communicators, and of reductions over several in turn; equal on all ranks.

    turns: which of the groups, by number, one behind the other: what a merged one is compared with, measured as a whole
    because the second of two does not find its ranks as the first one did. where: the device whose tensors they reduce.
    All ranks have to ask together. Of what this process has not measured yet, what rank 0 finds on its disk counts; if
    that is nothing, all measure, and the slowest rank decides.
    """
    numbers = [[i] for i in range(len(groups))] + [list(turn) for turn in turns]
    jobs = [[groups[i][0] for i in job] for job in numbers]
    keys = [(where.type, *(groups[i][1] for i in job)) for job in numbers]
    done = _measured.setdefault(dist.group.WORLD, {})
    new = {key: job for key, job in zip(keys, jobs) if key not in done}
    if new:
        path = cache_path("reductions", device, dist.group.WORLD, list(new))
        lines = _shared(load(path) if dist.get_rank() == 0 else None, len(new), where)
        if lines is None:
            lines = _fit(list(new.values()), where)
            if dist.get_rank() == 0:
                save(path, {"lines": [[line.latency, line.bandwidth] for line in lines]})
        done.update(zip(new, lines))
    found = [done[key] for key in keys]
    known = [(job, line) for job, line in zip(jobs, found) if None not in job]
    alone = {str(job[0]): line for job, line in known if len(job) == 1}
    return alone, {frozenset(map(str, job)): line for job, line in known if len(job) > 1}


def fitted(sizes: Sequence[int], times: Sequence[float]) -> Line:
    """The line through measured times whose relative errors are the least squares."""
    w = [1 / t for t in times]
    a, b, c = (sum(x * x * s**p for x, s in zip(w, sizes)) for p in (0, 1, 2))
    y, z = sum(w), sum(x * s for x, s in zip(w, sizes))
    slope = (a * z - b * y) / (a * c - b * b)
    latency = (y - slope * b) / a
    if slope <= 0:
        return Line(statistics.median(times), math.inf)
    if latency < 0:
        return Line(0.0, c / z)
    return Line(latency, 1 / slope)


def typical(rounds: Tensor) -> Tensor:
    """(rounds, ...) -> (...), the mean of the middle half: without what disturbed a round, steadier than a median."""
    quarter = len(rounds) // 4
    return rounds.sort(0).values[quarter : len(rounds) - quarter].mean(0)


def _fit(jobs: Sequence[Sequence[str | None]], where: torch.device) -> list[Line]:
    """The slowest rank of a round counts: that is what the next collective waits for.

    The jobs take turns, so that what disturbs one disturbs all; the sizes do not: a small message behind a large one
    finds other caches than in a program that sends small ones.
    """
    sizes = CPU_SIZES if where.type == "cpu" else GPU_SIZES
    rounds = torch.zeros(REPEATS + 1, len(jobs), len(sizes), dtype=torch.float64)
    with torch.no_grad():
        for j, size in enumerate(sizes):
            for times in rounds:
                for i, job in enumerate(jobs):
                    times[i, j] = _time(job, size, where)
    slowest = rounds[1:].to(where)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rows = typical(slowest).tolist()
    return [fitted(sizes, row) if min(row) > 0 else Line(0.0, math.inf) for row in rows]


def _time(job: Sequence[str | None], nbytes: int, where: torch.device) -> float:
    """Seconds of all_reduces that ranks come to from elsewhere; 0 for a rank without the groups, or groups of one.

    Several in a row would have no rank to wake up, which is what a small one mostly waits for.
    """
    groups = [(name, dist.get_world_size(process_group(name))) for name in job if name is not None]
    x = torch.ones(nbytes // 4, device=where)
    dist.barrier()
    if len(groups) < len(job) or all(n == 1 for _, n in groups):
        return 0.0
    finish(where)
    start = time.perf_counter()
    for name, n in groups:
        x = current().all_reduce(x, n, name)
    finish(where)
    return time.perf_counter() - start


def _shared(found: Any, count: int, where: torch.device) -> list[Line] | None:
    """Rank 0's lines on every rank, or None on every rank: one broadcast."""
    values = [math.nan] * (2 * count)
    lines: Any = found.get("lines") if isinstance(found, dict) else None
    if _are_lines(lines, count):
        values = [float(value) for line in lines for value in line]
    tensor = torch.tensor(values, dtype=torch.float64, device=where)
    dist.broadcast(tensor, 0)
    values = tensor.tolist()
    if any(math.isnan(v) for v in values):
        return None
    return [Line(*values[i : i + 2]) for i in range(0, len(values), 2)]


def _are_lines(found: Any, count: int) -> bool:
    """Is this what `measured` writes for so many communicators?"""
    return (
        isinstance(found, list)
        and len(found) == count
        and all(isinstance(line, list) and len(line) == 2 for line in found)
        and all(isinstance(v, int | float) for line in found for v in line)
        and all(latency >= 0 and bandwidth > 0 for latency, bandwidth in found)
    )
