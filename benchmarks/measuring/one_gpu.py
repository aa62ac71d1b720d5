"""NCCL between ranks that share one GPU, for values: their traffic goes over sockets, so times mean nothing.

NCCL refuses two ranks on a shared device if both report the same host. `NCCL_HOSTID` gives each rank a host of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from .gloo_ranks import joined

ENVIRONMENT = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}


@contextmanager
def joined_nccl(rank: int, world: int, folder: str, timeout: timedelta = timedelta(minutes=5)) -> Iterator[dist.Store]:
    """Be rank `rank` of `world` NCCL ranks on GPU 0, which meet by a file in the folder. Return their store."""
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"rank{rank}")
    torch.cuda.set_device(0)
    with joined(rank, world, folder, timeout, "nccl") as store:
        yield store
