"""Start the ranks of the self-test, and show their results as a table."""

from __future__ import annotations

import os
import platform
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from tabulate import tabulate

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.cost.step_memory import format_bytes

from .model import ModelSize
from .rank import Settings, run_rank

TIMEOUT = timedelta(minutes=10)
MOST_RANKS = 8


def selftest(ranks: int | None = None, device: str | None = None, compiler: str | None = None) -> dict[str, Any]:
    """Compare sequence-parallel training on processes of this machine with a single device.

    Each attention strategy trains a small decoder with a recurrent layer. Values and gradients are compared with
    float64 on a single device, for a length that the ranks do not divide; steps are timed on a longer sequence.

    Args:
        ranks: Number of processes, 2 to 8; by default the number of GPUs, or 2 on a CPU.
        device: "cuda", which uses NCCL, or "cpu", which uses Gloo; by default "cuda" with two GPUs or more.
        compiler: Value of the option `compiler`; by default "inductor" on GPUs and "aot_eager" on a CPU.

    Returns:
        The machine, the measured links, and a row for the single device and for each strategy, as JSON data.

    Raises:
        SpError: The number of ranks or the device is not available.
    """
    gpus = torch.cuda.device_count()
    device = device or ("cuda" if gpus > 1 else "cpu")
    max_ranks = min(gpus, MOST_RANKS) if device == "cuda" else MOST_RANKS
    if ranks is None:
        ranks = max_ranks if device == "cuda" else 2
    if device not in ("cuda", "cpu"):
        raise SpError("SP741", f"selftest: device: expected 'cuda' or 'cpu', got {device!r}.")
    if max_ranks < 2:
        raise SpError("SP741", f"selftest: device: expected two GPUs or more for 'cuda', got {gpus}.")
    if not 2 <= ranks <= max_ranks:
        raise SpError("SP741", f"selftest: ranks: expected 2 to {max_ranks} on {device!r}, got {ranks}.")
    settings = _choose_sizes(ranks, device, compiler)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_process, (settings, folder), ranks)
        found = torch.load(Path(folder) / "result.pt", weights_only=True)
    return {"format": "sp_compile.selftest", "version": 1, **_describe_machine(settings), **found}


def _choose_sizes(ranks: int, device: str, compiler: str | None) -> Settings:
    """Return the settings; the sizes are those that a device of the kind runs in seconds."""
    # ModelSize: width, heads, layers, tokens. The tokens of `values` are prime, so that the last rank has padding.
    if device == "cuda":
        values, times = ModelSize(512, 16, 2, 4093), ModelSize(2048, 16, 4, 32768)
        return Settings(ranks, device, compiler or "inductor", values, times, torch.bfloat16)
    values, times = ModelSize(64, 8, 1, 509), ModelSize(128, 8, 2, 2048)
    return Settings(ranks, device, compiler or "aot_eager", values, times, torch.float32)


def _run_process(rank: int, settings: Settings, folder: str) -> None:
    """Join the group of the self-test, run this rank, and save the result of rank 0 in the folder."""
    backend = "gloo"
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", settings.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=settings.ranks, timeout=TIMEOUT)
    found = run_rank(settings)
    if rank == 0:
        torch.save(found, Path(folder) / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


def _describe_machine(settings: Settings) -> dict[str, Any]:
    """Return the hardware, the versions and the sizes of a self-test as JSON data."""
    is_cuda = settings.device == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
        "ranks": settings.ranks,
        "compiler": settings.compiler,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "tokens_of_values": settings.values.tokens,
        "tokens_of_times": settings.times.tokens,
    }


def selftest_table(found: dict[str, Any]) -> str:
    """Return the results of `selftest` as text.

    Args:
        found: The results.
    """
    head = (
        f"{found['ranks']} ranks on {found['device']}, torch {found['torch']}, compiler {found['compiler']}, "
        f"{found['dtype']}\n"
        f"errors at {found['tokens_of_values']} tokens against float64, steps at {found['tokens_of_times']} tokens\n"
    )
    for kind in ("all_to_all", "all_gather"):
        bandwidth, latency = found[f"{kind}_bandwidth"], found[f"{kind}_latency"]
        head += f"{kind}: {bandwidth / 1e9:.3g} GB/s, {latency * 1e6:.3g} us\n"
    single = found["results"][0]["milliseconds"]
    rows = []
    for row in found["results"]:
        peak = "" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])
        times = f"{row['milliseconds']:.1f}", f"{single / row['milliseconds']:.2f}"
        status = "ok" if row["is_right"] else f"WRONG, at most {row['allowed']:.1e}"
        rows.append((row["attention"], f"{row['error']:.1e}", status, *times, format_bytes(row["sent_bytes"]), peak))
    columns = ["attention", "error", "", "ms a step", "speedup", "bytes sent", "peak memory"]
    return head + tabulate(rows, columns, disable_numparse=True)
