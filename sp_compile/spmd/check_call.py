"""Whether all ranks made the same eager call: what is wrong on one of them is raised on all, before the first exchange.

`check_run.py` does the same for compiled programs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from sp_compile.config import Ranks
from sp_compile.errors import SpError
from sp_compile.lowering.communicator import FunctionalCommunicator, current

TEXT = 1024  # bytes of a rank's words in an error message


def agree(name: str, problem: str | None, description: str, ranks: Ranks, alike: str) -> None:
    """Raise SpError on every rank if any has a problem, or if their descriptions differ.

    name: of the call; alike: what has to be the same on all ranks, in words. Sends 16 bytes a rank, and what the ranks
    have to say only if they must raise. Every rank of the group has to come here.
    """
    text = description if problem is None else problem
    everyone = numbers([problem is not None, hashed(text)], ranks)
    if not any(failed for failed, _ in everyone) and all(words == everyone[0] for words in everyone):
        return
    letters = list(text.encode()[:TEXT].ljust(TEXT))
    rows = numbers(letters, ranks, torch.uint8)
    told = [bytes(row).decode(errors="replace").rstrip() for row in rows]
    failed = [rank for rank in range(ranks.n) if everyone[rank][0]]
    if failed:
        raise SpError("\n".join(f"rank {rank}: {told[rank]}" for rank in failed))
    each = "\n".join(f"  rank {rank}: {words}" for rank, words in enumerate(told))
    raise SpError(f"{name}: the ranks' calls differ; {alike}\n{each}")


def hashed(text: str) -> int:
    """63 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's object, in the order of the group's ranks; None: the default group."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def numbers(mine: list[int], ranks: Ranks, dtype: torch.dtype = torch.int64) -> list[list[int]]:
    """Every rank's integers, as many from each."""
    sent = torch.tensor(mine, dtype=dtype, device=_place_of_words(ranks))
    return current().all_gather(sent, ranks.n, ranks.group).view(ranks.n, len(mine)).tolist()


def _place_of_words(ranks: Ranks) -> torch.device:
    """Where the ranks of a group tell each other, the same on all of them: not on the device of a tensor of one's own.

    The CPU if the group's backend is there too, so that no GPU is waited for.
    """
    group = ranks.process_group if isinstance(current(), FunctionalCommunicator) else None
    kinds = [] if group is None else [kind.partition(":")[0] for kind in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if not kinds or "cpu" in kinds else kinds[0])
