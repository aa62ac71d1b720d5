"""Bytes sent by collectives, and a linear model of their time.

A collective over a group of ranks takes alpha + bytes / beta, where the bytes are those that one rank sends.
Besides NCCL's collectives there are "shift", which sends a tensor to the next rank of a ring, and "fold", which moves
rows from contiguous order to zigzag order (rank r of n has the chunks r and 2n - 1 - r of 2n) or back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sp_compile.passes.graph.sizes import Size

# collective -> number of ranks n -> bytes that a rank sends over `nbytes` of `collective_bytes`, as a fraction
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
    numerator, denominator = _SENT_SHARE[collective](n)
    return nbytes * numerator // denominator if isinstance(nbytes, int) else nbytes * numerator / denominator


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of the operands and the result of one attention on one rank.

    Strategies derive from them the bytes of their exchanges, for predicted times and for reports.
    """

    queries: Size  # all queries of the rank
    results: Size  # all results of the rank
    keys: Size  # keys and values
    key_heads: Size  # number of key heads
    element_size: int  # bytes of an element of keys

    @property
    def widening(self) -> int:
        """Return the bytes per element of a float32 (float64) accumulator, divided by those of an operand."""
        return max(4, self.element_size) // self.element_size

    def repeat_keys(self, ranks: int) -> Size:
        """Return the bytes of keys and values after their heads are repeated until `ranks` divides them.

        For 2 heads and 4 ranks each head is repeated once: twice the bytes. A symbolic number of heads is not repeated.
        """
        heads = self.key_heads
        if not isinstance(heads, int):
            return self.keys
        repeats = math.lcm(heads, ranks) // heads
        return self.keys * repeats

    def exchange_bytes(self, ranks: int) -> Size:
        """Return the bytes of queries, results and repeated keys.

        Heads of keys and values are repeated until `ranks` divides their number. An all-to-all over `ranks` ranks moves
        all these: before it, a rank has its rows of all heads; after it, the rows of all these ranks for its part of
        the heads.
        """
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
    """Fit a line to the measured seconds of messages of these sizes in bytes.

    It minimizes the squares of relative errors, so that small messages count as much as large ones. If noise results in
    a negative slope or latency, the line is constant or starts at zero.
    """
    if min(times) <= 0:
        return LatencyBandwidth(0.0, math.inf)
    # Minimize sum(((latency + slope * size) / time - 1) ** 2) by the normal equations. Each name below is a sum:
    # w2_size is that of weight ** 2 * size.
    weights = [1 / seconds for seconds in times]
    w2, w2_size, w2_size2 = (sum(w * w * size**power for w, size in zip(weights, sizes)) for power in (0, 1, 2))
    w, w_size = sum(weights), sum(w * size for w, size in zip(weights, sizes))
    slope = (w2 * w_size - w2_size * w) / (w2 * w2_size2 - w2_size * w2_size)
    latency = (w - slope * w2_size) / w2
    if slope <= 0:
        return LatencyBandwidth(statistics.median(times), math.inf)
    if latency < 0:
        return LatencyBandwidth(0.0, w2_size2 / w_size)
    return LatencyBandwidth(latency, 1 / slope)
