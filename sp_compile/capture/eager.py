"""What torch.compile was given with backend="sp" and left to Python: said once, with Dynamo's reason and what to do.

The results are right, but such a block reads what comes in shards, on every rank, and keeps all of it for its backward.
"""

from __future__ import annotations

import inspect
import logging
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

EAGER = (
    "%s runs eagerly, whole on every rank, though it was compiled with backend='sp': torch.compile left its code "
    "(%s:%d) to Python: %s. %s"
)
OF_TORCH = "Call it in the forward of a module of yours and compile that one, or take torch.compile(module)"
DISABLED = "it is under torch.compiler.disable"
OF_DISABLED = "Take that away, or do not compile it"
OF_LIMIT = (
    "TORCH_LOGS=recompiles says what differs from call to call: pass equal shapes and types, compile with "
    "dynamic=True, or raise torch._dynamo.config.recompile_limit"
)
OF_BREAK = (
    "TORCH_LOGS=graph_breaks says where: take what it names out of loops, try and with, or out of the block; "
    "fullgraph=True makes it an error"
)

_told: set[tuple[str, CodeType]] = set()


def told_of_eager(what: Any, code: CodeType, reason: str) -> None:
    """Warn on rank 0, once for each piece of code. what: a module, or the name of a function. reason: Dynamo's."""
    name, own = what, code
    if isinstance(what, torch.nn.Module):
        name, own = type(what).__name__, getattr(inspect.unwrap(what.forward), "__code__", code)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank > 0 or (name, own) in _told or "no tensor" in reason:
        return
    _told.add((name, own))
    if own is not code:
        reason, advice = DISABLED, OF_DISABLED
    elif "skipfiles" in reason:
        reason, advice = "it is torch's own", OF_TORCH
    elif "recompile limit" in reason:
        advice = OF_LIMIT
    else:
        advice = OF_BREAK
    log.warning(EAGER, name, own.co_filename, own.co_firstlineno, reason, advice)
