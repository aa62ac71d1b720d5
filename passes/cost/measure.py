"""Measure the constants of the cost model once, with equal results on all ranks, cached on disk.

All paths from `machine` and `measure_reductions` issue the same collectives on every rank for any state of the caches.
Operations that may fail on one rank are followed by a `MeetFunction`, which raises on all ranks.
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

FILE_VERSION = 2  # of the cache files
CPU_SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 21, 1 << 22)
GPU_SIZES = (1 << 12, 1 << 18, 1 << 22, 1 << 24, 1 << 26)
HOPPER = 9
"""First GPU generation on which cuDNN attention runs in place of FlashAttention-2."""
MACHINE_REPEATS, REDUCTION_REPEATS = 8, 40

MeetFunction: TypeAlias = Callable[[Exception | None, Any], list[Any]]
"""Exchange of all ranks: it returns the value of every rank, in order, or [] if all pass None. If any rank passes an
exception, it raises the same SpError on every rank."""

_measured: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def machine(ranks: Ranks, device: torch.device, meet: MeetFunction) -> Machine:
    """Return the constants of these ranks, equal on all of them.

    All-to-all, all-gather and attention are measured, see `measure_lines`; this takes about a second on CPU. All ranks
    must call it together, outside of tracing. A single rank and simulated ranks use the defaults.

    Args:
        ranks: Ranks of the sequence.
        device: Device of the model.
        meet: Exchange of these ranks; its exceptions propagate.
    """
    group = ranks.process_group
    if not ranks.has_other_processes:
        return Machine.of(device.type)
    known = _measured.setdefault(group, {})
    if device.type not in known:
        where = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        everyone = (tuple(range(ranks.n)),)
        jobs = [_time_collective(kind, ranks.group, everyone, where) for kind in ("all_to_all", "all_gather")]
        lines = measure_lines([*jobs, _measure_attention(device)], group, device, MACHINE_REPEATS, meet)
        node, base = min(Counter(meet(None, platform.node())).values()), _base_constants(device, meet)
        known[device.type] = fit_constants(lines, ranks.n, node, base, _measured_kernel(device).rate)
    return known[device.type]


def fit_constants(
    lines: Sequence[LatencyBandwidth], n: int, node: int, base: Machine, kernel: str = "named"
) -> Machine:
    """Return `base` with the constants fitted to measured lines.

    Between nodes the all-to-all is limited by their links, and the links inside are those of `base`.

    Args:
        lines: Lines of all-to-all, all-gather and attention.
        n: Number of ranks.
        node: Ranks per node.
        base: Default constants.
        kernel: Kernel of the measured attention.
    """
    exchange, gather, attention = lines
    there, per_flop = exchange.bandwidth, attention.latency
    links: dict[str, float] = {"inter_node_bandwidth": there * (n - node) / (n - 1)}
    if n <= node:
        links = {"all_to_all_bandwidth": there, "hop_bandwidth": there, "all_gather_bandwidth": gather.bandwidth}
    return replace(
        base,
        **links,
        flops=1 / per_flop / base.efficiency(kernel) if per_flop else base.flops,  # 0: noise
        block_keys=1 / per_flop / attention.bandwidth if per_flop else base.block_keys,
        all_to_all_latency=exchange.latency,
        all_gather_latency=gather.latency,
        hop_latency=exchange.latency,
        ranks_per_node=node,
    )


def measure_reductions(
    groups: Sequence[tuple[str | None, Partition]], where: torch.device, meet: MeetFunction
) -> dict[str, LatencyBandwidth]:
    """Measure all_reduces over this rank's communicators; equal on all ranks.

    All ranks of the program must call it together.

    Args:
        groups: Communicator of this rank (None if it has none), and the ranks of all communicators of that kind.
        where: Device of the reduced tensors.
        meet: Exchange of these ranks; its exceptions propagate.

    Returns:
        The line of each communicator of this rank.
    """
    jobs = [_time_collective("all_reduce", *group, where) for group in groups]
    lines = measure_lines(jobs, dist.group.WORLD, where, REDUCTION_REPEATS, meet)
    return {name: line for (name, _), line in zip(groups, lines) if name is not None}


@dataclass(frozen=True)
class Measurement:
    """Timing job."""

    key: Hashable  # cache key of the line
    device: torch.device  # device that runs the calls
    sizes: Sequence[int]  # sizes to time
    call: Callable[
        [int], Callable[[], object] | None
    ]  # size -> function to time; None on a rank that does not take part
    point: Callable[
        [int, float], tuple[float, float]
    ]  # (size, seconds) -> point on the line, by bytes that one rank sends


def _time_collective(kind: str, name: str | None, groups: Partition, where: torch.device) -> Measurement:
    """Return the job of a collective over one of the groups, with `size` bytes per rank (all_gather: total)."""
    n = max(map(len, groups))

    def shape(size: int) -> tuple[int, int]:
        """Return the shape of a float32 operand for a size in bytes."""
        return 1 if kind == "all_gather" else n, max(1, size // n // 4)

    def call(size: int) -> Callable[[], object] | None:
        """Return a call of the collective over the group; None if this rank has no group of several ranks."""
        own = 1 if name is None else dist.get_world_size(process_group(name))
        if own == 1:
            return None
        x = torch.ones(shape(size), device=where)
        return lambda: getattr(current_communicator(), kind)(x, own, name)

    def point(size: int, seconds: float) -> tuple[float, float]:
        """Return the bytes that a rank sends and the measured seconds."""
        return collective_bytes(kind, 4 * math.prod(shape(size)), n), seconds

    sizes = CPU_SIZES if where.type == "cpu" else GPU_SIZES
    return Measurement((kind, where.type, groups), where, sizes, call, point)


def _attention_sizes(device: torch.device) -> tuple[int, int, torch.dtype]:
    """Return heads, head dim and dtype of the measured attention."""
    return (4, 64, torch.float32) if device.type == "cpu" else (16, 128, torch.bfloat16)


def _measured_kernel(device: torch.device) -> Kernel:
    """Return the kernel of `_measure_attention`."""
    _, dim, dtype = _attention_sizes(device)
    return expected_kernel(KernelKey(device, dtype, Kind.FULL, dim, 1024))


def _measure_attention(device: torch.device) -> Measurement:
    """Return the job of attention on one rank: seconds per FLOP are (1 + block_keys / keys) / flops."""
    cpu, (heads, dim, dtype) = device.type == "cpu", _attention_sizes(device)

    def call(length: int) -> Callable[[], object]:
        """Return a call of attention over a sequence of this length."""
        q, rows = torch.ones(1, heads, length, dim, device=device, dtype=dtype), full_span(length)
        args = LocalArgs(None, [], [], [], [], "", None, 0.0, dim**-0.5, "", [], [], rows, rows, 1, "")
        return lambda: args.attend(q, q, q, rows)

    def point(length: int, seconds: float) -> tuple[float, float]:
        """Return 1 / length, and the seconds per floating-point operation."""
        return 1 / length, seconds / (4 * heads * dim * length**2)

    key = ("attention", device.type, *([] if cpu else [_measured_kernel(device).name]))
    return Measurement(key, device, (256, 1024) if cpu else (1024, 8192), call, point)


def measure_lines(
    jobs: Sequence[Measurement], group: Any, device: torch.device, repeats: int, meet: MeetFunction
) -> list[LatencyBandwidth]:
    """Return the lines of the jobs, equal on all ranks of the group, which must call it together.

    Lines that this process does not have are read from the cache of rank 0; the rest are measured by all ranks, and the
    slowest rank counts.

    Args:
        jobs: Timing jobs.
        group: Process group.
        device: Device of the model.
        repeats: Measured rounds.
        meet: Exchange of the group.
    """
    known = _measured.setdefault(group, {})
    new = list({job.key: job for job in jobs if job.key not in known}.values())
    if new:
        first, cached = dist.get_rank(group) == 0, {}
        with _raised_on_all(meet):
            path = _cache_path(group, device)
            cached = _read_cache(path) if first else {}
        found = meet(None, [cached.get(repr(job.key)) for job in new])[0]
        missing = [job for job, line in zip(new, found) if line is None]
        known.update((job.key, line) for job, line in zip(new, found) if line is not None)
        if missing:
            known.update(zip([job.key for job in missing], _measure_and_fit(missing, repeats, meet)))
        if missing and first:
            _write_cache(path, cached | {repr(job.key): known[job.key] for job in missing})
    return [known[job.key] for job in jobs]


def _measure_and_fit(jobs: Sequence[Measurement], repeats: int, meet: MeetFunction) -> list[LatencyBandwidth]:
    """Measure the jobs and fit lines; the slowest rank of a round counts, because others wait for it.

    Jobs alternate, so that disturbances affect all of them. Sizes do not, because a small message after a large one
    would find other cache contents than in a program with small messages.
    """
    points: dict[Hashable, list[tuple[float, float]]] = {job.key: [] for job in jobs}
    for k in range(max(len(job.sizes) for job in jobs)):
        turn = [job for job in jobs if k < len(job.sizes)]
        with torch.no_grad():
            with _raised_on_all(meet):
                calls = [(job.call(job.sizes[k]), job.device) for job in turn]
            rounds = [[_time_call(call, device, meet) for call, device in calls] for _ in range(repeats + 1)]
        slowest = torch.tensor(meet(None, rounds[1:]), dtype=torch.float64).amax(0)
        for job, seconds in zip(turn, mean_of_middle(slowest).tolist()):
            points[job.key].append(job.point(job.sizes[k], seconds))
    return [fit_line(*zip(*points[job.key])) for job in jobs]


def _time_call(call: Callable[[], object] | None, device: torch.device, meet: MeetFunction) -> float:
    """Return the seconds of a call between two barriers; 0 for a rank that does not take part.

    Without barriers no rank would have to wake up, which dominates the time of small messages.
    """
    seconds = 0.0
    with _raised_on_all(meet):
        if call is not None:
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            seconds = time.perf_counter() - start
    return seconds


@contextmanager
def _raised_on_all(meet: MeetFunction) -> Iterator[None]:
    """Run a block, then raise its exception on every rank."""
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
    """Wait for all work on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _base_constants(device: torch.device, meet: MeetFunction) -> Machine:
    """Return the defaults for the smallest memory and the oldest generation of the ranks' devices.

    CPU memory is unlimited, because it is shared.
    """
    own = [math.inf, math.inf]
    if device.type == "cuda":
        own = [torch.cuda.get_device_properties(device).total_memory, torch.cuda.get_device_capability(device)[0]]
    memory, generation = map(min, zip(*meet(None, own)))
    base = replace(Machine.of(device.type), memory=memory)
    return base if generation >= HOPPER else replace(base, cudnn_efficiency=base.flash_efficiency)


def _cache_path(group: Any, device: torch.device) -> Path:
    """Return the cache file, by host, device, ranks, backend and versions."""
    folder = os.path.expanduser(os.environ.get("SP_COMPILE_CACHE_DIR") or "~/.cache/sp_compile")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    members = dist.get_process_group_ranks(group)
    key = (
        FILE_VERSION,
        platform.node(),
        f"{device.type} {gpu}",
        [rank - members[0] for rank in members],
        os.environ.get("LOCAL_WORLD_SIZE", ""),
        dist.get_backend(group),
        torch.__version__,
        torch.get_num_threads(),
    )
    return Path(folder) / f"measured-{_hash(repr(key))[:16]}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_cache(path: Path) -> dict[str, LatencyBandwidth]:
    """Read the lines of a file; empty if it does not exist or is invalid."""
    try:
        found = json.loads(path.read_text())
        lines = {key: LatencyBandwidth(*map(float, line)) for key, line in found.items()}
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
