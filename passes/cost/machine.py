"""Constants of a rank and its links, and the times derived from them.

`Machine.of("cuda")` has the defaults of an H100, `Machine.of("cpu")` those of Gloo processes. `measure.py` replaces
some by measured ones, and the option `cost` any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sp_compile.lowering.base.errors import SpError, did_you_mean

from .collective_time import LatencyBandwidth, collective_bytes

BACKWARD_FLOPS = 2.5  # FLOPs of an attention's backward over those of its forward


def _constant(cpu: float, gpu: float) -> Any:
    """Declare a field of `Machine` without a default, with its values for a Gloo process on a CPU and for an H100."""
    return field(metadata={"cpu": cpu, "gpu": gpu})


# Sources of the defaults.
#
# Of a CPU: two to four Gloo processes of one thread each on a shared two-core virtual machine, float32. A transfer is
# copied by the same cores that compute, so nothing of it is hidden. dense_efficiency: measured with and without a
# soft-cap of the scores, for 4,096 keys of head dim 64.
#
# Of a GPU: one H100 of a node of eight, bfloat16. flops: causal FlashAttention-3 as published for context parallelism
# over 8 to 64 of them; block_keys: its published fall towards 1K keys. Links: NVLink at 370 GB/s, 80 % of it in an
# all-to-all; one 400 Gbit/s NIC per GPU at 90 %. Memory: 85 % of 3.35 TB/s. ring_efficiency: half blocks of 4K keys
# then run at 82 % of `flops`, which is still 8 to 18 % above published ring throughput. An all-reduce's latencies:
# those that torch._inductor.comm_analysis has for NCCL. The host: PCIe 5.0 of 16 lanes at 80 %, from pinned memory.
# The kernels: forward and backward as measured or published for 8K keys (`lowering/attention/kernels_cuda.py`), without
# what block_keys takes off, over FlashAttention-3; nothing is known of -4 on this device. cuDNN: 612 forward and 533
# backward for 64K causal keys, together 0.851 of `flops`. backward_efficiency: 0.87 there, and 0.84 as published for
# FlashAttention-3. fused_efficiency: FlexAttention at 0.9 of FlashAttention-2 as published. dense_efficiency:
# 50 bytes read and written for each score of heads of 128.
@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of one rank: seconds, bytes, bytes/s and FLOP/s, with defaults of a CPU process and of an H100.

    Bandwidths are those of one rank in one direction.

    Raises:
        SpError: If a value is not a number or is out of range.
    """

    flops: float = _constant(5e10, 650e12)  # attention on long sequences
    block_keys: float = _constant(100, 340)  # a call over k keys runs at flops / (1 + block_keys / k)
    cudnn_efficiency: float = _constant(1.0, 0.94)  # rate of cuDNN attention over `flops`
    flash_efficiency: float = _constant(1.0, 0.52)  # rate of FlashAttention-2
    flash3_efficiency: float = _constant(1.0, 1.0)  # rate of FlashAttention-3
    flash4_efficiency: float = _constant(1.0, 1.0)  # rate of FlashAttention-4
    efficient_efficiency: float = _constant(1.0, 0.25)  # rate of memory-efficient attention
    fused_efficiency: float = _constant(1.0, 0.47)  # rate of a kernel with text masks or scores
    dense_efficiency: float = _constant(0.23, 0.045)  # rate of arithmetic on all scores, without a kernel
    backward_efficiency: float = _constant(1.0, 0.87)  # rate of the backward of an attention over that of its forward
    ring_efficiency: float = _constant(1.0, 0.888)  # of a ring block over a single block: transfers use cores
    overlap: float = _constant(0.0, 1.0)  # part of a transfer that compute hides, 0 to 1
    call: float = _constant(1e-4, 1e-5)  # seconds per block or merge (launches, Python)
    all_to_all_bandwidth: float = _constant(6e8, 296e9)  # bytes that a rank sends per second
    all_to_all_latency: float = _constant(3e-4, 1e-5)  # seconds
    all_gather_bandwidth: float = _constant(5e8, 370e9)  # reduce-scatter, too
    all_gather_latency: float = _constant(3e-4, 1e-5)  # seconds
    hop_bandwidth: float = _constant(6e8, 370e9)  # shift around a ring
    hop_latency: float = _constant(3e-4, 1e-5)  # seconds
    all_reduce_bandwidth: float = _constant(4e8, 370e9)  # bytes that a rank sends per second
    all_reduce_latency: float = _constant(2e-4, 7e-6)  # seconds
    step_latency: float = _constant(5e-4, 6e-7)  # seconds of each of the 2 (n - 1) steps of an all-reduce
    inter_node_step_latency: float = _constant(5e-4, 3e-6)  # the same if the ranks are on several nodes
    inter_node_bandwidth: float = _constant(1e9, 45e9)  # between nodes
    ranks_per_node: float = _constant(math.inf, 8)  # neighboring ranks on one node
    memory_bandwidth: float = _constant(2e10, 2.85e12)  # reads plus writes
    host_bandwidth: float = _constant(1e10, 50e9)  # copies to or from host memory
    memory: float = _constant(math.inf, 80e9)  # bytes of the device

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            violated = _violated_range(name, value)
            if violated:
                raise SpError("SP702", f"cost: {name}: expected {violated}, got {value!r}.")

    @staticmethod
    def of(device_type: str, override: Mapping[str, Any] | None = None, measured: Machine | None = None) -> Machine:
        """Return measured constants, or the defaults of a device type ("cpu", else a GPU), with replacements.

        Args:
            device_type: Type of the device.
            override: Values of the option `cost`. They disable measured constants, unless only `memory` is set.
            measured: Measured constants.

        Raises:
            SpError: If a constant is unknown or a value is out of range.
        """
        if measured is not None and (override is None or set(override) == {"memory"}):
            return replace(measured, **(override or {}))
        for name in override or {}:
            if name not in vars(CPU):
                hint, names = did_you_mean(name, vars(CPU)), ", ".join(vars(CPU))
                raise SpError("SP703", f"cost: expected one of {names}, got {name!r}{hint}.")
        return replace(CPU if device_type == "cpu" else GPU, **(override or {}))

    def describe(self, device_type: str) -> str:
        """Describe the hardware that the constants assume, as a line of a plan.

        Args:
            device_type: Type of the device, as for `of`.
        """
        replaced = self.replaced_names(device_type)
        name = "Gloo processes of one CPU thread each" if device_type == "cpu" else "H100 GPUs"
        nodes = f", {self.inter_node_bandwidth / 1e9:g} GB/s between nodes of {self.ranks_per_node:g}"
        links = f"links {self.all_gather_bandwidth / 1e9:g} GB/s" + ("" if math.isinf(self.ranks_per_node) else nodes)
        rates = f"attention {self.flops / 1e12:g} TFLOP/s, memory {self.memory_bandwidth / 1e9:g} GB/s, {links}"
        source = f"cost sets {', '.join(replaced)}" if replaced else "cost={...} sets other constants"
        return f"assumes {name}: {rates}; {source}"

    def replaced_names(self, device_type: str) -> list[str]:
        """Return the names of the constants that differ from the defaults of a device type, without `memory`."""
        default = CPU if device_type == "cpu" else GPU
        return [name for name, value in vars(self).items() if name != "memory" and value != getattr(default, name)]

    def efficiency(self, kernel: str) -> float:
        """Return the FLOP/s of an attention kernel, divided by `flops`; 1 for "named"."""
        return 1.0 if kernel == "named" else float(getattr(self, f"{kernel}_efficiency"))

    def attention(self, flops: float, keys: float) -> float:
        """Return the seconds of attention kernels with `flops` FLOPs in total, in calls over `keys` keys each.

        Calls over few keys are slower: a call over `block_keys` keys runs at half of the rate.
        """
        return flops / self.flops * (1 + self.block_keys / max(keys, 1))

    def attention_backward(self, forward: float) -> float:
        """Return the seconds of the backward of attention kernels whose forward takes `forward` seconds."""
        return BACKWARD_FLOPS * forward / self.backward_efficiency

    def copy(self, nbytes: float) -> float:
        """Return the seconds of a kernel that reads and writes `nbytes` in total on the device."""
        return nbytes / self.memory_bandwidth

    def line(self, collective: str, ranks: int, stride: int = 1, inside: bool | None = None) -> LatencyBandwidth:
        """Return the time of a collective as a function of the bytes that one rank sends.

        Args:
            collective: Name of the collective, as in `collective_bytes`.
            ranks: Number of ranks.
            stride: Difference of the global ranks of neighbors in the group.
            inside: True if all ranks are on one node; by default derived from `ranks_per_node`.
        """
        group_ranks_per_node = max(1.0, self.ranks_per_node / stride)  # ranks of this group
        inside = ranks <= group_ranks_per_node if inside is None else inside
        kind = _CONSTANTS_OF.get(collective, collective)
        latency, bandwidth = getattr(self, f"{kind}_latency"), getattr(self, f"{kind}_bandwidth")
        if kind == "all_reduce":
            latency += 2 * (ranks - 1) * (self.step_latency if inside else self.inter_node_step_latency)
        if inside:
            return LatencyBandwidth(latency, bandwidth)
        # Shares of the bytes that a rank sends within the node and between nodes; the slower of both links counts.
        share_of_others = (ranks - group_ranks_per_node) / (ranks - 1)  # of the other ranks, those on other nodes
        within, across = {
            "all_to_all": (1 - share_of_others, share_of_others),
            # Of the ranks on another node, only one receives a rank's part, and sends it to the others there.
            "all_gather": (1, share_of_others / group_ranks_per_node),
            "all_reduce": (1, 1),  # all bytes, in a ring over the ranks, of which some links are between nodes
            "hop": (0, 1),  # the slowest hop of the ring is between nodes
        }[kind]
        return LatencyBandwidth(latency, 1 / max(within / bandwidth, across / self.inter_node_bandwidth))

    def seconds(self, collective: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of a collective on `nbytes` (see `collective_bytes`); 0 for one rank.

        `stride` is the difference of the global ranks of neighbors in the group.
        """
        if ranks == 1:
            return 0.0
        return self.line(collective, ranks, stride).seconds(collective_bytes(collective, nbytes, ranks))

    def together(self, compute: float, transfer: float) -> float:
        """Return the seconds of a transfer and independent compute, which hides a part of the transfer."""
        return compute + transfer - self.overlap * min(compute, transfer)


# collectives that have the latency and bandwidth of another one
_CONSTANTS_OF = {"reduce_scatter": "all_gather", "shift": "hop", "fold": "hop", "broadcast": "hop"}


def _violated_range(name: str, value: Any) -> str:
    """Return the valid range of a constant, as text for an error, if the value is outside of it; else ""."""
    is_share = name == "overlap" or name.endswith("efficiency")
    low = 1.0 if name == "ranks_per_node" else 0.0
    high = 1.0 if is_share else math.inf
    includes_low = name.endswith("latency") or name in ("block_keys", "overlap", "call", "ranks_per_node")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and (includes_low or value > low):
        return ""
    return f"a number {'from' if includes_low else 'above'} {low:g}" + (", at most 1" if is_share else "")


CPU, GPU = (Machine(**{f.name: f.metadata[kind] for f in fields(Machine)}) for kind in ("cpu", "gpu"))


def copy_seconds(nbytes: float, machine: Machine) -> float:
    """Return the seconds of a copy of `nbytes` to or from the host, without other work."""
    return nbytes / machine.host_bandwidth
