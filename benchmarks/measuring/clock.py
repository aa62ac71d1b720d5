"""Milliseconds on a GPU, and how many of them simulated ranks spend on their exchanges."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sp_compile.lowering.comm import simulate

Job = Callable[[], object]


class Clock:
    """Milliseconds of a job: CUDA events, or the wall clock on a CPU.

    exchanged: of each job of the last `interleaved`, the part that simulated the ranks' exchanges.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.exchanged: dict[str, float] = {}

    def milliseconds(self, job: Job, inner: int = 1) -> float:
        stop = self.start()
        for _ in range(inner):
            job()
        return stop() / inner

    def start(self) -> Callable[[], float]:
        """Start to count; the function returned stops. On a GPU it waits."""
        end = self.span()
        return lambda: end()()

    def span(self) -> Callable[[], Callable[[], float]]:
        """Mark a begin. Returns a function that marks the end and returns a function that returns the time in ms."""
        if not self.cuda:
            begin = time.perf_counter()
            return lambda: _constant(1000 * (time.perf_counter() - begin))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()

        def end() -> Callable[[], float]:
            last.record()
            return lambda: last.synchronize() or first.elapsed_time(last)

        return end

    def interleaved(self, jobs: dict[str, Job], repeats: int, inner: int) -> dict[str, float]:
        """The median of each; in every repeat all of them in turn, after one turn that does not count."""
        times: dict[str, list[float]] = {name: [] for name in jobs}
        exchanged: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(repeats + 1):
            for name, job in jobs.items():
                with self.exchanges() as found:
                    times[name].append(self.milliseconds(job, inner))
                exchanged[name].append(sum(read() for read in found) / inner)
        self.exchanged = {name: statistics.median(found[1:]) for name, found in exchanged.items()}
        return {name: statistics.median(found[1:]) for name, found in times.items()}

    @contextmanager
    def exchanges(self) -> Iterator[list[Callable[[], float]]]:
        """Record the times of simulated exchanges, for which real ranks have a network."""
        found: list[Callable[[], float]] = []
        real = simulate._SimulatedWorld.exchange

        def exchange(world: Any, rank: int, name: str, x: Tensor, combine: Any) -> Tensor:
            def timed(xs: list[Tensor]) -> list[Tensor]:
                end = self.span()
                out = combine(xs)
                found.append(end())
                return out

            return real(world, rank, name, x, timed)

        with mock.patch.object(simulate._SimulatedWorld, "exchange", exchange):
            yield found


def _constant(value: float) -> Callable[[], float]:
    return lambda: value
