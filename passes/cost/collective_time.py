"""Bytes sent by collectives, and a linear model of their time.

A collective over a group of ranks takes alpha + bytes / beta, where the bytes are those that one rank sends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sp_compile.passes.graph.sizes import Size

_SENT_SHARE: dict[str, Callable[[int], tuple[int, int]]] = {
    "all_to_all": lambda n: (n - 1, n),
    "all_gather": lambda n: (n - 1, 1),
    "reduce_scatter": lambda n: (n - 1, 1),
    "all_reduce": lambda n: (2 * (n - 1), n),
    "broadcast": lambda n: (1, 1),
    "shift": lambda n: (1, 1),
    # Rank r has chunks 2 r and 2 r + 1 of 2 n and needs r and 2 n - 1 - r: from 3 ranks on, some rank retains none.
    "fold": lambda n: (min(n - 1, 2), 2),
}


def collective_bytes(collective: str, nbytes: Any, n: int) -> Any:
    """Return the bytes that one of n ranks sends in a collective, as a number or an expression.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of a rank's tensor (all_to_all, all_reduce, broadcast; shift: one step around a ring; fold: from
            contiguous to zigzag order or back), of its input (all_gather), or of its result (reduce_scatter).
        n: Number of ranks.
    """
    times, over = _SENT_SHARE[collective](n)
    return nbytes * times // over if isinstance(nbytes, int) else nbytes * times / over


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of one attention on one rank."""

    queries: Size
    results: Size
    keys: Size  # keys and values
    key_heads: Size  # number of key heads
    element_size: int  # bytes of an element of keys

    @property
    def widening(self) -> int:
        """Return the ratio of bytes per element of accumulators (float32, float64 for float64) and operands."""
        return max(4, self.element_size) // self.element_size

    def repeat_keys(self, ranks: int) -> Size:
        """Return the bytes of keys and values, repeated so that `ranks` divides their heads."""
        heads = self.key_heads
        return self.keys * (math.lcm(heads, ranks) // heads) if isinstance(heads, int) else self.keys

    def exchange_bytes(self, ranks: int) -> Size:
        """Return the bytes that an exchange of heads for rows moves, with repeated keys."""
        return self.queries + self.results + self.repeat_keys(ranks)


@dataclass(frozen=True)
class LatencyBandwidth:
    """Time of a collective over one group."""

    latency: float  # seconds
    bandwidth: float  # bytes per second that one rank sends

    def seconds(self, sent: float) -> float:
        """Return the seconds of a call in which one rank sends `sent` bytes; see `collective_bytes`."""
        return self.latency + sent / self.bandwidth


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> LatencyBandwidth:
    """Fit a line to measured times with least squares of relative errors."""
    if min(times) <= 0:
        return LatencyBandwidth(0.0, math.inf)
    w = [1 / t for t in times]
    a, b, c = (sum(x * x * s**p for x, s in zip(w, sizes)) for p in (0, 1, 2))
    y, z = sum(w), sum(x * s for x, s in zip(w, sizes))
    slope = (a * z - b * y) / (a * c - b * b)
    latency = (y - slope * b) / a
    if slope <= 0:
        return LatencyBandwidth(statistics.median(times), math.inf)
    if latency < 0:
        return LatencyBandwidth(0.0, c / z)
    return LatencyBandwidth(latency, 1 / slope)
