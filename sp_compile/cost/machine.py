"""What one rank and its links can do: the constants of the attention cost model, and times that follow from them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sp_compile.errors import SpError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of one rank. Seconds, bytes, bytes/s and FLOP/s; a bandwidth is that of one rank, one direction.

    flops: attention on long sequences. block_keys: the keys at which an attention kernel reaches half of that: a call
        over `k` keys runs at flops / (1 + block_keys / k).
    ring_efficiency: the rate of a block of a ring, over that of the same block alone (transfers take some cores).
    overlap: how much of a transfer hides behind the compute that runs with it: 1 all of it, 0 nothing.
    call: fixed seconds of one attention block or one merge (launches, Python).
    all_to_all_*, all_gather_*, hop_*: bandwidth and seconds per call of an all-to-all (bytes sent to others), of an
        all-gather or reduce-scatter (bytes received), and of a shift around a ring, between ranks of one node.
    inter_node_bandwidth: between nodes. ranks_per_node: neighbouring ranks on one node.
    memory_bandwidth: bytes read plus bytes written. memory: bytes one attention may use on top of its shards.

    Raises SpError: a value that is no number or is out of range.
    """

    flops: float
    block_keys: float
    ring_efficiency: float
    overlap: float
    call: float
    all_to_all_bandwidth: float
    all_to_all_latency: float
    all_gather_bandwidth: float
    all_gather_latency: float
    hop_bandwidth: float
    hop_latency: float
    inter_node_bandwidth: float
    ranks_per_node: float
    memory_bandwidth: float
    memory: float = math.inf

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not _in_range(f.name, value):
                raise SpError(
                    f"machine: {f.name}={value!r}: expected {_RANGES.get(f.name, 'a number above 0')}"
                )

    @staticmethod
    def of(device_type: str, override: Mapping[str, Any] | None = None) -> Machine:
        """The default constants of a device type ("cpu", else those of a GPU), with some replaced.

        Raises SpError: an unknown constant, a value out of range.
        """
        known = [f.name for f in fields(Machine)]
        for name in override or {}:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise SpError(f"machine: unknown constant {name!r}{hint}; known: {', '.join(known)}")
        return replace(CPU if device_type == "cpu" else GPU, **(override or {}))

    def attention(self, flops: float, keys: float) -> float:
        """Seconds of attention kernels that do `flops`, in calls over `keys` keys each."""
        return flops / self.flops * (1 + self.block_keys / max(keys, 1))

    def copy(self, nbytes: float) -> float:
        """Seconds to read and write `nbytes` in all."""
        return nbytes / self.memory_bandwidth

    def all_to_all(self, nbytes: float, ranks: int) -> float:
        """Seconds to exchange equal shares of the `nbytes` that each of so many neighbouring ranks holds."""
        if ranks == 1:
            return 0.0
        inside = nbytes * (min(ranks, self.ranks_per_node) - 1) / ranks / self.all_to_all_bandwidth
        outside = nbytes * max(ranks - self.ranks_per_node, 0) / ranks / self.inter_node_bandwidth
        return max(inside, outside) + self.all_to_all_latency

    def all_gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds to gather the `nbytes` of each of the ranks, `stride` apart (or to reduce-scatter as many)."""
        if ranks == 1:
            return 0.0
        node = max(1.0, self.ranks_per_node / stride)
        inside = (ranks - 1) * nbytes / self.all_gather_bandwidth
        outside = max(ranks - node, 0) * nbytes / node / self.inter_node_bandwidth
        return max(inside, outside) + self.all_gather_latency

    def hop(self, nbytes: float, ranks: int) -> float:
        """Seconds of one shift of `nbytes` around a ring that lies within so many neighbouring ranks."""
        crosses = ranks > self.ranks_per_node
        return nbytes / (self.inter_node_bandwidth if crosses else self.hop_bandwidth) + self.hop_latency

    def together(self, compute: float, transfer: float) -> float:
        """Seconds of a transfer issued with the compute that does not depend on it."""
        return compute + transfer - self.overlap * min(compute, transfer)


_RANGES = {
    "block_keys": "a number from 0",
    "ring_efficiency": "a number above 0, at most 1",
    "overlap": "a number from 0 to 1",
    "call": "a number from 0",
    "all_to_all_latency": "a number from 0",
    "all_gather_latency": "a number from 0",
    "hop_latency": "a number from 0",
    "ranks_per_node": "a number from 1",
}


def _in_range(name: str, value: float) -> bool:
    if name == "overlap":
        return 0 <= value <= 1
    if name == "ring_efficiency":
        return 0 < value <= 1
    if name == "ranks_per_node":
        return value >= 1
    return value >= 0 if name in _RANGES else value > 0


# Two to four Gloo processes of one thread each on a shared two-core virtual machine, float32. A transfer is copied by
# the same cores that compute, so nothing of it hides.
CPU = Machine(
    flops=5e10,
    block_keys=100,
    ring_efficiency=1.0,
    overlap=0.0,
    call=1e-4,
    all_to_all_bandwidth=6e8,
    all_to_all_latency=3e-4,
    all_gather_bandwidth=5e8,
    all_gather_latency=3e-4,
    hop_bandwidth=6e8,
    hop_latency=3e-4,
    inter_node_bandwidth=1e9,
    ranks_per_node=math.inf,
    memory_bandwidth=2e10,
)

# One H100 of a node of eight, bfloat16. flops: causal FlashAttention-3 as published for context parallelism over 8 to
# 64 of them; block_keys: its published fall towards 1K keys. Links: NVLink at 370 GB/s, 80 % of it in an all-to-all;
# one 400 Gbit/s NIC per GPU at 90 %. Memory: 85 % of 3.35 TB/s. ring_efficiency: half blocks of 4K keys then run at
# 82 % of `flops`, which is still 8 to 18 % above published ring throughput.
GPU = Machine(
    flops=650e12,
    block_keys=340,
    ring_efficiency=0.888,
    overlap=1.0,
    call=1e-5,
    all_to_all_bandwidth=296e9,
    all_to_all_latency=1e-5,
    all_gather_bandwidth=370e9,
    all_gather_latency=1e-5,
    hop_bandwidth=370e9,
    hop_latency=1e-5,
    inter_node_bandwidth=45e9,
    ranks_per_node=8,
    memory_bandwidth=2.85e12,
)
