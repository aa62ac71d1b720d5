"""Gloo ranks on this machine, one thread each, for benchmarks that start them as processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def joined(
    rank: int, world: int, folder: str, timeout: timedelta = timedelta(minutes=5), backend: str = "gloo"
) -> Iterator[dist.Store]:
    """Be rank `rank` of `world`, which meet by a file in the folder; leave together. The store that they share."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    yield store
    dist.barrier()
    dist.destroy_process_group()
