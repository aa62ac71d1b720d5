"""Warn once that a program is compiled for a single rank, although it was probably meant to be split."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from sp_compile.lowering.base.warn import warn_once

from .session import CompileSession

log = logging.getLogger(__name__)

NO_GROUP = (
    "torchrun started %d processes and this program has no process group: backend='sp' splits nothing, and every "
    "process computes alone. Call torch.distributed.init_process_group() before the first call of the compiled model."
)
ONE_RANK_OF_MESH = (
    "The axis of the mesh that splits the sequence has one rank, and the program has %d: backend='sp' splits nothing. "
    "Pass an axis of several ranks with options={'mesh': mesh, 'mesh_dim': '<axis>'}, such as that of size %d of "
    "init_device_mesh(device, (1, %d), mesh_dim_names=('dp', 'sp'))."
)
ONE_RANK = (
    "The process group has one rank: backend='sp' splits nothing. Start several ranks, such as with torchrun "
    "--nproc-per-node=2."
)


def warn_one_rank(session: CompileSession) -> None:
    """Warn on rank 0, once for each reason, if there is only one rank for the sequence although others exist.

    There is no warning for a program on a single device, without torchrun and without a process group, nor for one
    with its own collectives and without a mesh for a sequence.

    Args:
        session: The session of the compilation.
    """
    if not session.may_split or session.problem is not None or session.ranks.n > 1:
        return
    num_started = int(os.environ.get("WORLD_SIZE", "1"))  # processes that torchrun has started
    if not (dist.is_available() and dist.is_initialized()):
        if num_started > 1 and os.environ.get("RANK", "0") == "0":
            warn_once(log, NO_GROUP, num_started)
        return
    world_size = dist.get_world_size()
    if world_size > 1:
        warn_once(log, ONE_RANK_OF_MESH, world_size, world_size, world_size)
    else:
        warn_once(log, ONE_RANK)
