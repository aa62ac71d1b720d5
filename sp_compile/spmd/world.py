"""A program is compiled for the processes that there are: when these are others, it is compiled again.

A model may be compiled and called before `init_process_group`, or live on when that is called anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sp_compile.errors import SpError

log = logging.getLogger(__name__)

CHANGED = "the process group is not the one that this model was compiled for, so every rank compiles it again"


def world() -> dist.ProcessGroup | None:
    """All processes, if they are connected."""
    return dist.group.WORLD if dist.is_available() else None


@dataclass(eq=False)
class OfWorld:
    """Calls `run` as long as the processes are the same; once they are not, the program as it was written.

    whole: does it take what the model takes? Then this one call is right on every rank, and the next one is compiled.
    Raises SpError where the program takes a rank's part of it.
    """

    run: Callable[..., Any]
    written: Callable[..., Any]
    whole: bool
    world: dist.ProcessGroup | None = field(default_factory=world)

    def __call__(self, *args: Any) -> Any:
        if world() is self.world:
            return self.run(*args)
        torch.compiler.reset()
        if not self.whole:
            raise SpError(f"{CHANGED}: call it again")
        log.warning("%s at its next call; this one runs whole on every rank", CHANGED)
        return self.written(*args)
