"""Measure the constants of the cost model once, with equal results on all ranks, cached on disk.

A `Measurement` times calls of several sizes; a line is fitted to the times (see `collective_time.fit_line`).

All paths from `machine` and `measure_reductions` issue the same collectives on every rank for any state of the caches.
Operations that may fail on one rank are followed by a `MeetFunction`, which raises on all ranks. A round is one timed
call of each measurement.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sp_compile.lowering.attention.kernel_args import Kernel, KernelKey
from sp_compile.lowering.attention.kernels import expected_kernel
from sp_compile.lowering.attention.op_args import LocalArgs
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.masks.blocks import Kind
from sp_compile.lowering.masks.spans import full_span
from sp_compile.lowering.torch_compat import process_group

from .collective_time import LatencyBandwidth, collective_bytes, fit_line
from .known_groups import Partition
from .machine import Machine

FILE_VERSION = 3  # version of the format of cache files
CPU_SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 21, 1 << 22)
GPU_SIZES = (1 << 12, 1 << 18, 1 << 22, 1 << 24, 1 << 26)  # bytes of the measured messages
HOPPER = 9  # first GPU generation on which cuDNN attention runs in place of FlashAttention-2
MACHINE_REPEATS, REDUCTION_REPEATS = 8, 40  # timed rounds of each size
COLLECTIVE_CALLS = 4  # back-to-back calls of a collective in a round; the first one has the skew of the ranks

# Device memory that a plan may not use, in addition to what is in use when the ranks have started.
COMMUNICATOR_BYTES = 1 << 30  # NCCL's buffers, 0.3 to 1.5 GB, which it allocates at the first collectives
FRAGMENTED_SHARE = 0.04  # of torch's memory that no tensor can use

# Exchange of all ranks: it returns the value of every rank, in order, or [] if all pass None. If any rank passes an
# exception, it raises the same SpError on every rank.
MeetFunction: TypeAlias = Callable[[Exception | None, Any], list[Any]]

# process group -> {device type: Machine, key of a Measurement: LatencyBandwidth}
_measured: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def machine(ranks: Ranks, device: torch.device, meet: MeetFunction) -> Machine:
    """Return the constants of these ranks, equal on all of them.

    All-to-all, all-gather and attention are measured, see `measure_lines`; this takes about a second on CPU. All ranks
    must call it together, outside of tracing. A single rank and simulated ranks use the defaults.

    Args:
        ranks: Ranks of the sequence.
        device: Device of the model.
        meet: Exchange of these ranks: meet(error, value) returns the values of all ranks, or raises on all.
    """
    group = ranks.process_group
    if not ranks.has_other_processes:
        return Machine.of(device.type)
    cache = _measured.setdefault(group, {})
    if device.type not in cache:
        message_device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        partition = (tuple(range(ranks.n)),)  # one group of all ranks
        measurements = [
            _time_collective(kind, ranks.group, partition, message_device) for kind in ("all_to_all", "all_gather")
        ]
        lines = measure_lines([*measurements, _measure_attention(device)], group, device, MACHINE_REPEATS, meet)
        ranks_per_node = min(Counter(meet(None, platform.node())).values())
        base, kernel = _base_constants(device, meet), _measured_kernel(device).rate
        cache[device.type] = fit_constants(lines, ranks.n, ranks_per_node, base, kernel)
    return cache[device.type]


def fit_constants(
    lines: Sequence[LatencyBandwidth], n: int, ranks_per_node: int, base: Machine, kernel: str = "named"
) -> Machine:
    """Return `base` with the constants fitted to measured lines.

    Between nodes the all-to-all is limited by their links, and the links inside are those of `base`.

    Args:
        lines: Lines of all-to-all, all-gather and attention: latency + x / bandwidth. For attention, x is 1 / keys and
            the line is seconds per FLOP, so that `latency` is that with infinitely many keys.
        n: Number of ranks.
        ranks_per_node: Ranks per node.
        base: Default constants.
        kernel: Kernel of the measured attention.
    """
    exchange, gather, attention = lines
    constants: dict[str, float] = {"all_to_all_latency": exchange.latency, "hop_latency": exchange.latency}
    constants |= {"all_gather_latency": gather.latency, "ranks_per_node": ranks_per_node}
    if n <= ranks_per_node:
        constants |= {"all_to_all_bandwidth": exchange.bandwidth, "hop_bandwidth": exchange.bandwidth}
        constants |= {"all_gather_bandwidth": gather.bandwidth}
    else:
        # A rank sends equal blocks to n - 1 ranks, of which n - ranks_per_node are on other nodes. If these blocks take
        # all of the time, the links between nodes have this share of the measured bandwidth.
        constants |= {"inter_node_bandwidth": exchange.bandwidth * (n - ranks_per_node) / (n - 1)}
    seconds_per_flop = attention.latency
    if seconds_per_flop:  # 0 is noise
        constants |= {"flops": 1 / seconds_per_flop / base.efficiency(kernel)}
        # The number of keys at which a FLOP takes twice as long: slope / latency of the line.
        constants |= {"block_keys": 1 / seconds_per_flop / attention.bandwidth}
    return replace(base, **constants)


def measure_reductions(
    groups: Sequence[tuple[str | None, Partition]], device: torch.device, meet: MeetFunction
) -> dict[str, LatencyBandwidth]:
    """Measure all_reduces over this rank's communicators; equal on all ranks.

    All ranks of the program must call it together.

    Args:
        groups: Group names of this rank (None if it is in no group of several ranks), each with its partition.
        device: Device of the reduced tensors.
        meet: Exchange of these ranks; its exceptions propagate.

    Returns:
        The line of each group of this rank.
    """
    measurements = [_time_collective("all_reduce", name, partition, device) for name, partition in groups]
    lines = measure_lines(measurements, dist.group.WORLD, device, REDUCTION_REPEATS, meet)
    return {name: line for (name, _), line in zip(groups, lines) if name is not None}


@dataclass(frozen=True)
class Measurement:
    """Calls to time, and the line to fit to their times."""

    key: Hashable  # cache key of the line
    device: torch.device  # device that runs the calls
    sizes: Sequence[int]  # sizes to time: bytes of a message, or length of a sequence
    call: Callable[[int], Callable[[], object] | None]  # size -> function to time; None if this rank does not take part
    point: Callable[[int, float], tuple[float, float]]  # (size, seconds) -> point (x, y) on the line
    calls: int = 1  # in a round; of several, the first one is not timed


def _time_collective(kind: str, name: str | None, partition: Partition, device: torch.device) -> Measurement:
    """Return the measurement of a collective over the groups of a partition, all at the same time.

    Sizes are bytes per rank (all_gather: in total).

    Args:
        kind: Name of the collective, a method of a `Communicator`.
        name: Group of this rank; None if it is in no group of several ranks.
        partition: All groups.
        device: Device of the tensors.
    """
    n = max(map(len, partition))

    def shape(size: int) -> tuple[int, int]:
        """Return the shape of a float32 operand for a size in bytes; an all_gather has one row, the others n."""
        return 1 if kind == "all_gather" else n, max(1, size // n // 4)

    def call(size: int) -> Callable[[], object] | None:
        """Return a call of the collective over the group; None if this rank has no group of several ranks."""
        group_size = 1 if name is None else dist.get_world_size(process_group(name))
        if group_size == 1:
            return None
        x = torch.ones(shape(size), device=device)
        return lambda: getattr(current_communicator(), kind)(x, group_size, name)

    def point(size: int, seconds: float) -> tuple[float, float]:
        """Return the bytes that a rank sends and the measured seconds."""
        return collective_bytes(kind, 4 * math.prod(shape(size)), n), seconds

    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    return Measurement((kind, device.type, partition), device, sizes, call, point, COLLECTIVE_CALLS)


def _attention_sizes(device: torch.device) -> tuple[int, int, torch.dtype]:
    """Return (heads, head dim, dtype) of the attention that is measured on a device."""
    return (4, 64, torch.float32) if device.type == "cpu" else (16, 128, torch.bfloat16)


def _measured_kernel(device: torch.device) -> Kernel:
    """Return the kernel that runs the measured attention, whose rate the constants are divided by."""
    _, dim, dtype = _attention_sizes(device)
    return expected_kernel(KernelKey(device, dtype, Kind.CAUSAL, dim, 1024))


def _causal_args(scale: float, span: list[Any]) -> LocalArgs:
    """Return the arguments of causal attention on one rank, without a score function or dropout.

    `span` describes the positions of the queries, which are also those of the keys (`full_span`).
    """
    causal: dict[str, Any] = {"mask": None, "predicate": "k <= q", "rows": [], "cols": [], "pieces": [], "sizes": []}
    unmodified: dict[str, Any] = {"score": "", "heads": [], "tables": [], "seed": None, "dropout_p": 0.0}
    return LocalArgs(scale=scale, q_span=span, k_span=span, split_heads=1, group="", **causal, **unmodified)


def _measure_attention(device: torch.device) -> Measurement:
    """Return the measurement of attention on a rank, whose two constants follow from a line through its points.

    The mask is causal and the operands are random, as in a program: with constant operands a GPU draws less power and
    is faster. With k keys, a FLOP takes (1 + block_keys / k) / flops seconds: a line in 1 / k, whose value at 0 is
    1 / flops and whose slope is block_keys / flops. With `block_keys` keys, attention has half of its rate.
    """
    is_cpu, (heads, dim, dtype) = device.type == "cpu", _attention_sizes(device)

    def call(length: int) -> Callable[[], object]:
        """Return a call of causal attention over a sequence of this length."""
        generator = torch.Generator(device).manual_seed(0)  # the program's random numbers stay as they are
        shape, rows = (3, 1, heads, length, dim), full_span(length)
        q, k, v = torch.randn(shape, device=device, generator=generator).to(dtype)
        args = _causal_args(dim**-0.5, rows)
        return lambda: args.attend(q, k, v, rows)

    def point(length: int, seconds: float) -> tuple[float, float]:
        """Return 1 / length, and the seconds per FLOP of the causal half of the products q @ k.T and p @ v."""
        return 1 / length, seconds / (2 * heads * dim * length**2)

    key = ("attention", device.type, *([] if is_cpu else [_measured_kernel(device).name]))
    return Measurement(key, device, (256, 1024) if is_cpu else (1024, 8192), call, point)


def measure_lines(
    measurements: Sequence[Measurement], group: Any, device: torch.device, repeats: int, meet: MeetFunction
) -> list[LatencyBandwidth]:
    """Return the lines of the measurements, equal on all ranks of the group, which must call it together.

    A line is taken from this process, else from the cache file of rank 0, else measured by all ranks.

    Args:
        measurements: Measurements.
        group: Process group.
        device: Device of the model.
        repeats: Timed calls of each size.
        meet: Exchange of the group.
    """
    lines = _measured.setdefault(group, {})
    unknown = list({m.key: m for m in measurements if m.key not in lines}.values())
    if unknown:
        is_first, cached = dist.get_rank(group) == 0, {}
        with _raised_on_all(meet):  # a failure on one rank must not leave the others waiting
            path = _cache_path(group, device)
            cached = _read_cache(path) if is_first else {}
        lines_of_first = meet(None, [cached.get(repr(m.key)) for m in unknown])[0]
        lines.update((m.key, line) for m, line in zip(unknown, lines_of_first) if line is not None)
        missing = [m for m in unknown if m.key not in lines]
        if missing:
            lines.update(zip([m.key for m in missing], _measure_and_fit(missing, repeats, meet)))
        if missing and is_first:
            _write_cache(path, cached | {repr(m.key): lines[m.key] for m in missing})
    return [lines[m.key] for m in measurements]


def _measure_and_fit(measurements: Sequence[Measurement], repeats: int, meet: MeetFunction) -> list[LatencyBandwidth]:
    """Time all sizes of the measurements and fit their lines; the slowest rank of a round counts.

    The first round warms up. Measurements alternate, so that disturbances affect all of them. Sizes do not alternate,
    because a small message after a large one would find other cache contents than in a program with small messages.
    """
    # (x, y) on the line of each measurement
    points: dict[Hashable, list[tuple[float, float]]] = {m.key: [] for m in measurements}
    for k in range(max(len(m.sizes) for m in measurements)):
        timed = [m for m in measurements if k < len(m.sizes)]
        with torch.no_grad():
            with _raised_on_all(meet):
                calls = [(m.call(m.sizes[k]), m) for m in timed]
            rounds = [[_time_calls(call, m, meet) for call, m in calls] for _ in range(repeats + 1)]
        by_rank = torch.tensor(meet(None, rounds[1:]), dtype=torch.float64)  # (ranks, rounds, measurements), seconds
        for m, seconds in zip(timed, mean_of_middle(by_rank.amax(0)).tolist()):
            points[m.key].append(m.point(m.sizes[k], seconds))
    return [fit_line(*zip(*points[m.key])) for m in measurements]


def _time_calls(call: Callable[[], object] | None, measurement: Measurement, meet: MeetFunction) -> float:
    """Return the seconds of a call of a measurement between two barriers; 0 for a rank that does not take part.

    The barrier at the end is the exchange by which an exception of these calls is raised on all ranks; the one at the
    start is that of the previous calls, or of the setup. The ranks leave a barrier at different times. The first call
    of a collective waits for the last rank, so it is not timed (unless it is the only one), and the others run back to
    back.
    """
    seconds, timed = 0.0, max(1, measurement.calls - 1)
    with _raised_on_all(meet):
        if call is not None:
            for _ in range(measurement.calls - timed):
                call()
            synchronize(measurement.device)
            start = time.perf_counter()
            for _ in range(timed):
                call()
            synchronize(measurement.device)
            seconds = (time.perf_counter() - start) / timed
    return seconds


@contextmanager
def _raised_on_all(meet: MeetFunction) -> Iterator[None]:
    """Run the body of the context, then exchange its exception or None; `meet` raises an exception on every rank."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    meet(problem, None)


def mean_of_middle(rounds: Tensor) -> Tensor:
    """Average the middle half of the rounds: (rounds, ...) -> (...).

    This excludes outliers and is more stable than a median.
    """
    quarter = len(rounds) // 4
    return rounds.sort(0).values[quarter : len(rounds) - quarter].mean(0)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device, so that a clock measures it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _base_constants(device: torch.device, meet: MeetFunction) -> Machine:
    """Return default constants with the smallest usable memory and the oldest generation of the ranks' devices.

    CPU memory is unlimited, because it is shared.
    """
    limits = [math.inf, math.inf]  # memory in bytes, generation
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # creates the context, whose memory is not free
        memory = usable_memory(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))
        limits = [memory, torch.cuda.get_device_capability(device)[0]]
    memory, generation = map(min, zip(*meet(None, limits)))  # `meet` returns the limits of every rank
    base = replace(Machine.of(device.type), memory=memory)
    # Before Hopper, attention runs by FlashAttention-2 at best: cuDNN's rate is that of Hopper.
    return base if generation >= HOPPER else replace(base, cudnn_efficiency=base.flash_efficiency)


def usable_memory(free: float, reserved: float) -> float:
    """Return the bytes of a device that a plan may use, after this process has started on it.

    Args:
        free: Bytes that no process uses: all bytes without the contexts and what other processes have allocated.
        reserved: Bytes that torch has allocated in this process, which the tensors of the plan may use.
    """
    return max(0.0, (1 - FRAGMENTED_SHARE) * (free + reserved - COMMUNICATOR_BYTES))


def _cache_path(group: Any, device: torch.device) -> Path:
    """Return the path of the cache file, which differs by host, device, ranks, backend and versions."""
    folder = os.path.expanduser(os.environ.get("SP_COMPILE_CACHE_DIR") or "~/.cache/sp_compile")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    members = dist.get_process_group_ranks(group)
    offsets = [rank - members[0] for rank in members]  # groups with equal distances of their ranks share a file
    key: tuple[Any, ...] = (FILE_VERSION, platform.node(), f"{device.type} {gpu}", offsets)
    key += (os.environ.get("LOCAL_WORLD_SIZE", ""), dist.get_backend(group), torch.__version__, torch.get_num_threads())
    return Path(folder) / f"measured-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"


def _read_cache(path: Path) -> dict[str, LatencyBandwidth]:
    """Return the lines in a cache file by key; none if it does not exist or is invalid."""
    try:
        lines = {key: LatencyBandwidth(*map(float, line)) for key, line in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
    return {key: line for key, line in lines.items() if line.latency >= 0 and line.bandwidth > 0}


def _write_cache(path: Path, lines: Mapping[str, LatencyBandwidth]) -> None:
    """Write the file atomically; a failure costs only the time of the next run."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # removes the file if it cannot be moved
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                json.dump({key: [line.latency, line.bandwidth] for key, line in lines.items()}, file, indent=1)
            os.replace(file.name, path)
