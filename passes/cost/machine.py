"""What one rank and its links can do: the constants of the cost model, and times that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sp_compile.lowering.base.errors import SpError, did_you_mean

from .collective_time import LatencyBandwidth, collective_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of one rank. Seconds, bytes, bytes/s and FLOP/s; a bandwidth is that of one rank, one direction.

    flops: attention on long sequences. block_keys: the keys at which an attention kernel reaches half of that: a call
        over `k` keys runs at flops / (1 + block_keys / k).
    cudnn_efficiency, flash_efficiency, flash3_efficiency, flash4_efficiency, efficient_efficiency: the rate of one of
        the kernels that have a name, over `flops`: cuDNN's, FlashAttention-2, -3 and -4, memory-efficient attention.
    fused_efficiency: that of attention whose scores or mask one kernel reads as texts.
    dense_efficiency: that of arithmetic on all scores, which takes what no kernel knows.
    ring_efficiency: the rate of a block of a ring, over that of the same block alone (transfers take some cores).
    overlap: how much of a transfer hides behind the compute that runs with it: 1 all of it, 0 nothing.
    call: fixed seconds of one attention block or one merge (launches, Python).
    all_to_all_*, all_gather_*, hop_*, all_reduce_*: bandwidth and seconds per call of an all-to-all, an all-gather or
        reduce-scatter, a shift around a ring, and an all-reduce, between ranks of one node.
    step_latency, inter_node_step_latency: seconds that every step of an all-reduce adds, of 2 (n - 1).
    inter_node_bandwidth: between nodes. ranks_per_node: neighbouring ranks on one node.
    memory_bandwidth: bytes read plus bytes written. host_bandwidth: of copies to the host's memory, or back.
    memory: bytes of the device; of those that weights, gradients and what is kept for the backward leave, an attention
        may use all on top of its shards.

    Raises SpError: a value that is no number or is out of range.
    """

    flops: float
    block_keys: float
    cudnn_efficiency: float
    flash_efficiency: float
    flash3_efficiency: float
    flash4_efficiency: float
    efficient_efficiency: float
    fused_efficiency: float
    dense_efficiency: float
    ring_efficiency: float
    overlap: float
    call: float
    all_to_all_bandwidth: float
    all_to_all_latency: float
    all_gather_bandwidth: float
    all_gather_latency: float
    hop_bandwidth: float
    hop_latency: float
    all_reduce_bandwidth: float
    all_reduce_latency: float
    step_latency: float
    inter_node_step_latency: float
    inter_node_bandwidth: float
    ranks_per_node: float
    memory_bandwidth: float
    host_bandwidth: float
    memory: float = math.inf

    def __post_init__(self) -> None:
        for f in fields(self):
            value, expected = getattr(self, f.name), _check_constant(f.name, getattr(self, f.name))
            if expected:
                raise SpError("SP702", f"cost: {f.name}: expected {expected}, got {value!r}.")

    @staticmethod
    def of(device_type: str, override: Mapping[str, Any] | None = None, measured: Machine | None = None) -> Machine:
        """The constants as they were measured; or the defaults of a device type ("cpu", else a GPU), some replaced.

        override: what the option `cost` replaces, beside which nothing that was measured counts, but for the size of a
        device, which nobody measures: that leaves the rest as it is.
        Raises SpError: an unknown constant, a value out of range.
        """
        if measured is not None and (override is None or set(override) == {"memory"}):
            return replace(measured, **(override or {}))
        known = [f.name for f in fields(Machine)]
        for name in override or {}:
            if name not in known:
                hint = did_you_mean(name, known)
                raise SpError("SP703", f"cost: unknown constant {name!r}{hint}, expected one of {', '.join(known)}.")
        return replace(CPU if device_type == "cpu" else GPU, **(override or {}))

    def efficiency(self, kernel: str) -> float:
        """The rate of a kernel of attention over `flops`, by its `rate`; "named" is `flops` itself."""
        return 1.0 if kernel == "named" else float(getattr(self, f"{kernel}_efficiency"))

    def attention(self, flops: float, keys: float) -> float:
        """Seconds of attention kernels that do `flops`, in calls over `keys` keys each."""
        return flops / self.flops * (1 + self.block_keys / max(keys, 1))

    def copy(self, nbytes: float) -> float:
        """Seconds to read and write `nbytes` in all."""
        return nbytes / self.memory_bandwidth

    def line(self, collective: str, ranks: int, stride: int = 1, inside: bool | None = None) -> LatencyBandwidth:
        """What a collective takes among so many ranks, `stride` apart. inside: do they share a node?"""
        node = max(1.0, self.ranks_per_node / stride)
        inside = ranks <= node if inside is None else inside
        kind = _EFFICIENCIES.get(collective, collective)
        latency, bandwidth = getattr(self, f"{kind}_latency"), getattr(self, f"{kind}_bandwidth")
        if kind == "all_reduce":
            latency += 2 * (ranks - 1) * (self.step_latency if inside else self.inter_node_step_latency)
        if inside:
            return LatencyBandwidth(latency, bandwidth)
        within, across = {  # of what a rank sends, over its links to its node and over those to others
            "all_to_all": ((node - 1) / (ranks - 1), (ranks - node) / (ranks - 1)),
            "all_gather": (1, (ranks - node) / (ranks - 1) / node),
            "all_reduce": (1, 1),
            "hop": (0, 1),
        }[kind]
        return LatencyBandwidth(latency, 1 / max(within / bandwidth, across / self.inter_node_bandwidth))

    def seconds(self, collective: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Of a collective on `nbytes`, as `collective_bytes` counts them; nothing for one rank."""
        if ranks == 1:
            return 0.0
        return self.line(collective, ranks, stride).seconds(collective_bytes(collective, nbytes, ranks))

    def together(self, compute: float, transfer: float) -> float:
        """Seconds of a transfer issued with the compute that does not depend on it."""
        return compute + transfer - self.overlap * min(compute, transfer)


_EFFICIENCIES = {"reduce_scatter": "all_gather", "shift": "hop", "fold": "hop", "broadcast": "hop"}


def _check_constant(name: str, value: Any) -> str:
    """What this constant has to be, if the value is something else."""
    share = name == "overlap" or name.endswith("efficiency")
    low, high = float(name == "ranks_per_node"), 1.0 if share else math.inf
    least = name.endswith("latency") or name in ("block_keys", "overlap", "call", "ranks_per_node")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and low <= value <= high and (least or value > low):
        return ""
    return f"a number {'from' if least else 'above'} {low:g}" + (", at most 1" if high == 1 else "")


# Of a CPU: two to four Gloo processes of one thread each on a shared two-core virtual machine, float32. A transfer is
# copied by the same cores that compute, so nothing of it hides. dense_efficiency: a soft-cap against none, 4,096 keys
# of 64.
#
# Of a GPU: one H100 of a node of eight, bfloat16. flops: causal FlashAttention-3 as published for context parallelism
# over 8 to 64 of them; block_keys: its published fall towards 1K keys. Links: NVLink at 370 GB/s, 80 % of it in an
# all-to-all; one 400 Gbit/s NIC per GPU at 90 %. Memory: 85 % of 3.35 TB/s. ring_efficiency: half blocks of 4K keys
# then run at 82 % of `flops`, which is still 8 to 18 % above published ring throughput. An all-reduce's latencies:
# those that torch._inductor.comm_analysis has for NCCL. The host: PCIe 5.0 of 16 lanes at 80 %, from pinned memory.
# The kernels: forward and backward as measured or published for 8K keys (`lowering/attention/kernels_cuda.py`), without
# what block_keys takes off, over FlashAttention-3; nothing is known of -4 on this device. fused_efficiency:
# FlexAttention at 0.9 of FlashAttention-2 as published. dense_efficiency: 50 bytes read and written for each score of
# heads of 128.
_DEFAULTS = {
    "flops": (5e10, 650e12),
    "block_keys": (100, 340),
    "cudnn_efficiency": (1.0, 0.95),
    "flash_efficiency": (1.0, 0.52),
    "flash3_efficiency": (1.0, 1.0),
    "flash4_efficiency": (1.0, 1.0),
    "efficient_efficiency": (1.0, 0.25),
    "fused_efficiency": (1.0, 0.47),
    "dense_efficiency": (0.23, 0.045),
    "ring_efficiency": (1.0, 0.888),
    "overlap": (0.0, 1.0),
    "call": (1e-4, 1e-5),
    "all_to_all_bandwidth": (6e8, 296e9),
    "all_to_all_latency": (3e-4, 1e-5),
    "all_gather_bandwidth": (5e8, 370e9),
    "all_gather_latency": (3e-4, 1e-5),
    "hop_bandwidth": (6e8, 370e9),
    "hop_latency": (3e-4, 1e-5),
    "all_reduce_bandwidth": (4e8, 370e9),
    "all_reduce_latency": (2e-4, 7e-6),
    "step_latency": (5e-4, 6e-7),
    "inter_node_step_latency": (5e-4, 3e-6),
    "inter_node_bandwidth": (1e9, 45e9),
    "ranks_per_node": (math.inf, 8),
    "memory_bandwidth": (2e10, 2.85e12),
    "host_bandwidth": (1e10, 50e9),
    "memory": (math.inf, 80e9),
}
CPU, GPU = (Machine(**{name: pair[i] for name, pair in _DEFAULTS.items()}) for i in range(2))
