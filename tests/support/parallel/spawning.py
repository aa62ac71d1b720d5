"""Start separate ranks for tests that need more of them than the pool has."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.ranks import forkserver


def _spawned(rank: int, world: int, store: str, fn: Callable[[], Any], folder: str, timeout: timedelta) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init = {"init_method": f"file://{store}", "timeout": timeout}
    dist.init_process_group("gloo", rank=rank, world_size=world, **init)
    torch.save(fn(), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def spawned(world: int, fn: Callable[[], Any], timeout: timedelta = timedelta(seconds=60)) -> list[Any]:
    """Return the results of a function on `world` new ranks. timeout: of an exchange."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        forkserver()
        mp.start_processes(_spawned, (world, f"{folder}/store", fn, folder, timeout), world, start_method="forkserver")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]
