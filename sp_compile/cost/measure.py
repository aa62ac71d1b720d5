"""The constants of the cost model on these ranks: measured once, the same on every rank, kept on disk.

Every path from `machine` issues the same collectives on every rank, whatever the ranks find on their disks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sp_compile.config import Ranks
from sp_compile.lowering.communicator import current

from .machine import Machine

REPEATS = 7
FIELDS = tuple(f.name for f in fields(Machine))

_known: weakref.WeakKeyDictionary[Any, dict[str, Machine]] = weakref.WeakKeyDictionary()


def machine(ranks: Ranks, device: torch.device, override: Mapping[str, Any] | None = None) -> Machine:
    """The constants of these ranks, equal on all of them.

    `override`: the defaults of the device with these constants replaced, nothing is measured. Otherwise the constants
    measured earlier: by this process, or those that rank 0 finds on its disk; otherwise `fit`. All ranks have to ask
    together, outside of any tracing. One rank, or ranks without processes (a simulation), have the defaults.
    Raises SpError: an override that is not known.
    """
    group = ranks.process_group
    if override is not None or ranks.n == 1 or group is None or dist.get_backend(group) == "fake":
        return Machine.of(device.type, override)
    known = _known.setdefault(group, {})
    if device.type not in known:
        path = _path(ranks, device)
        found = _shared(_read(path) if dist.get_rank(group) == 0 else None, ranks, device)
        if found is None:
            found = fit(ranks, device)
            if dist.get_rank(group) == 0:
                _write(path, found)
        known[device.type] = found
    return known[device.type]


def fit(ranks: Ranks, device: torch.device) -> Machine:
    """Measure all-to-all, all-gather and attention, each at two sizes; under half a second on CPU.

    The slowest rank counts: the times are combined by a maximum, so every rank computes the same constants from them.
    """
    where = _where(ranks, device)
    plan = GPU_PLAN if device.type != "cpu" else CPU_PLAN
    with torch.no_grad():
        times = [_all_to_all(size, ranks, where) for size in plan.sizes]
        times += [_all_gather(size, ranks, where) for size in plan.sizes]
        times += [_attention(plan, length, device) for length in plan.lengths]
    slowest = torch.tensor(times, dtype=torch.float64, device=where)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=ranks.process_group)
    node = _ranks_per_node(ranks, where)
    return constants(slowest.tolist(), plan, ranks.n, node, Machine.of(device.type))


@dataclass(frozen=True)
class Plan:
    """What is measured: exchanges of so many bytes in all, attention over so many positions."""

    sizes: tuple[int, int]
    lengths: tuple[int, int]
    heads: int
    dim: int
    dtype: torch.dtype

    def flops(self, length: int) -> int:
        """FLOPs of the attention over so many positions."""
        return 4 * self.heads * self.dim * length**2


CPU_PLAN = Plan((1 << 16, 1 << 22), (256, 1024), 4, 64, torch.float32)
GPU_PLAN = Plan((1 << 20, 1 << 26), (1024, 8192), 16, 128, torch.bfloat16)


def constants(times: Sequence[float], plan: Plan, n: int, node: int, base: Machine) -> Machine:
    """`base` with what the six times tell: two all-to-alls, two all-gathers, two attentions, small and large.

    Over several nodes the all-to-all is bound by the links between them, and `base` is kept for those inside.
    """
    inside, outside = ((n - 1) / n, max(n - node, 0) / n)
    exchange = _line(plan.sizes, times[0:2])
    gather = _line(plan.sizes, times[2:4])
    flops, block_keys = _rate(plan, times[4:6])
    fitted = replace(
        base,
        flops=flops,
        block_keys=block_keys,
        all_to_all_latency=exchange[1],
        all_gather_latency=gather[1],
        hop_latency=exchange[1],
        ranks_per_node=node,
    )
    if outside:
        return replace(fitted, inter_node_bandwidth=exchange[0] * outside)
    there, gathered = exchange[0] * inside, gather[0] * inside
    return replace(fitted, all_to_all_bandwidth=there, hop_bandwidth=there, all_gather_bandwidth=gathered)


def _line(sizes: tuple[int, int], times: Sequence[float]) -> tuple[float, float]:
    """(bytes per second, seconds per call) through two measurements; noise may have made the large one the faster."""
    if times[1] <= times[0]:
        return sizes[1] / times[1], 0.0
    bandwidth = (sizes[1] - sizes[0]) / (times[1] - times[0])
    return bandwidth, max(0.0, times[0] - sizes[0] / bandwidth)


def _rate(plan: Plan, times: Sequence[float]) -> tuple[float, float]:
    """(FLOP/s of long sequences, keys at half of that): seconds per FLOP are (1 + block_keys / keys) / flops."""
    small, large = (t / plan.flops(length) for t, length in zip(times, plan.lengths))
    slope = (small - large) / (1 / plan.lengths[0] - 1 / plan.lengths[1])
    slowest = large - slope / plan.lengths[1]
    return (1 / slowest, slope / slowest) if slope > 0 and slowest > 0 else (1 / large, 0.0)


def _all_to_all(nbytes: int, ranks: Ranks, where: torch.device) -> float:
    x = torch.ones(ranks.n, nbytes // ranks.n // 4, device=where)
    return _median(lambda: current().all_to_all(x, ranks.n, ranks.group), where)


def _all_gather(nbytes: int, ranks: Ranks, where: torch.device) -> float:
    x = torch.ones(nbytes // ranks.n // 4, device=where)
    return _median(lambda: current().all_gather(x, ranks.n, ranks.group), where)


def _attention(plan: Plan, length: int, device: torch.device) -> float:
    q = torch.ones(1, plan.heads, length, plan.dim, device=device, dtype=plan.dtype)
    return _median(lambda: F.scaled_dot_product_attention(q, q, q), device)


def _median(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, the first not counted."""
    call()
    times = []
    for _ in range(REPEATS):
        finish(device)
        start = time.perf_counter()
        call()
        finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def finish(device: torch.device) -> None:
    """Wait for what runs on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _where(ranks: Ranks, device: torch.device) -> torch.device:
    """Where the group's collectives take their tensors."""
    return torch.device("cpu") if dist.get_backend(ranks.process_group) == "gloo" else device


def _ranks_per_node(ranks: Ranks, where: torch.device) -> int:
    """The fewest ranks of the group that share a host."""
    mine = torch.tensor([int(_hash(platform.node())[:15], 16)], device=where)
    hosts = current().all_gather(mine, ranks.n, ranks.group)
    return min(Counter(hosts.tolist()).values())


def _shared(found: Machine | None, ranks: Ranks, device: torch.device) -> Machine | None:
    """Rank 0's constants on every rank, or None on every rank: one broadcast."""
    values = [math.nan] * len(FIELDS) if found is None else [float(getattr(found, name)) for name in FIELDS]
    tensor = torch.tensor(values, dtype=torch.float64, device=_where(ranks, device))
    group = ranks.process_group
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    values = tensor.tolist()
    return None if math.isnan(values[0]) else Machine(**dict(zip(FIELDS, values)))


def _path(ranks: Ranks, device: torch.device) -> Path:
    """The file of these ranks."""
    members = dist.get_process_group_ranks(ranks.process_group)
    return cache_path("machine", device, ranks.process_group, [rank - members[0] for rank in members], FIELDS)


def cache_path(kind: str, device: torch.device, group: Any, members: Any, *more: Any) -> Path:
    """The file of what was measured: host, device, which ranks of the program, backend, versions, and `more`."""
    folder = os.path.expanduser(os.environ.get("SP_COMPILE_CACHE_DIR") or "~/.cache/sp_compile")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    key = (
        platform.node(),
        f"{device.type} {gpu}",
        members,
        os.environ.get("LOCAL_WORLD_SIZE", ""),
        dist.get_backend(group),
        torch.__version__,
        torch.get_num_threads(),
        *more,
    )
    return Path(folder) / f"{kind}-{_hash(repr(key))[:16]}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> Machine | None:
    """The constants in a file; None if there is no such file, or anything else in it."""
    found = load(path)
    try:
        return Machine(**{name: found[name] for name in FIELDS})
    except (ValueError, TypeError, KeyError):
        return None


def _write(path: Path, found: Machine) -> None:
    save(path, asdict(found))


def load(path: Path) -> Any:
    """What a file of JSON holds; None if there is no such file, or it holds something else."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def save(path: Path, found: Mapping[str, Any]) -> None:
    """Write the whole file or nothing; a disk that refuses costs only the next run's time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(found, file, indent=1)
        os.replace(file.name, path)
