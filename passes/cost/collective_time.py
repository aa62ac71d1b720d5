"""What a collective sends and how long that takes: the formula of bytes and the model of time that everything shares.

A collective over a group of ranks takes alpha + bytes / beta, where the bytes are those that one rank sends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_SENT_SHARE: dict[str, Callable[[int], tuple[int, int]]] = {
    "all_to_all": lambda n: (n - 1, n),
    "all_gather": lambda n: (n - 1, 1),
    "reduce_scatter": lambda n: (n - 1, 1),
    "all_reduce": lambda n: (2 * (n - 1), n),
    "broadcast": lambda n: (1, 1),
    "shift": lambda n: (1, 1),
    # Of 2 n chunks rank r has 2 r and 2 r + 1 and is to have r and 2 n - 1 - r: from three ranks on one keeps neither.
    "fold": lambda n: (min(n - 1, 2), 2),
}


def collective_bytes(collective: str, nbytes: Any, n: int) -> Any:
    """What one of n ranks sends in a collective; a number or an expression, as `nbytes` is.

    nbytes: of all that a rank holds (all_to_all, all_reduce, broadcast, shift: one step around a ring, and fold: from
    contiguous to zigzag order or back), of its part (all_gather), or of its part of the result (reduce_scatter).
    """
    times, over = _SENT_SHARE[collective](n)
    return nbytes * times // over if isinstance(nbytes, int) else nbytes * times / over


@dataclass(frozen=True)
class LatencyBandwidth:
    """What one collective over one group takes. bandwidth: of the bytes that one rank sends, in a second."""

    latency: float
    bandwidth: float

    def seconds(self, sent: float) -> float:
        """Of a call in which one rank sends so many bytes; see `collective_bytes`."""
        return self.latency + sent / self.bandwidth


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> LatencyBandwidth:
    """The line through measured times whose relative errors are the least squares; nothing takes no time."""
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
