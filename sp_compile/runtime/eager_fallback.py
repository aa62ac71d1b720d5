"""Warn once of code that was given to torch.compile with backend="sp" and runs eagerly, with Dynamo's reason.

The results are right, but such a block gathers its sharded inputs on every rank and saves them for its backward. Where
only some ranks run it eagerly, the others wait for them until the timeout of the group.
"""

from __future__ import annotations

import inspect
import logging
import sys
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

RUNS_EAGERLY = (
    "%s runs eagerly, whole on every rank, though it was compiled with backend='sp': torch.compile left its code "
    "(%s:%d) to Python: %s. %s"
)
CURE_OF_TORCHS_OWN = "Call it in the forward of a module of yours and compile that one, or take torch.compile(module)"
DISABLED_REASON = "it is under torch.compiler.disable"
CURE_OF_DISABLED = "Take that away, or do not compile it"
CURE_OF_LIMIT = (
    "TORCH_LOGS=recompiles says what differs from call to call: pass equal shapes and types, compile with "
    "dynamic=True, or raise torch._dynamo.config.recompile_limit; the cache of transformers, of which each layer "
    "sees another state, is no part of training: use_cache=False"
)
CURE_OF_BREAK = (
    "TORCH_LOGS=graph_breaks says where: take what it names out of loops, try and with, or out of the block; "
    "fullgraph=True makes it an error"
)

SHARDED_PARTS = (
    "%s is compiled with backend='sp' as a whole, but fully_shard has %d of its parts, %s the first. FSDP gathers and "
    "frees their weights in Python, which ends a graph at each: they are compiled one by one at most, and what is "
    "between them, as an embedding, a norm, a head with its loss, may run whole on every rank. %s"
)
CURE_OF_SHARDED_PARTS = (
    "Compile each part by itself, the last one with the loss (docs/recipes/blocks.md), or call fully_shard on the "
    "whole model only"
)

_told: set[tuple[str, CodeType]] = set()

_told_of_parts: set[str] = set()


def tell_of_eager(what: Any, code: CodeType, reason: str) -> None:
    """Warn on rank 0, once for each piece of code.

    Args:
        what: A module, or the name of a function.
        code: Its code.
        reason: Dynamo's reason.
    """
    if "no tensor" in reason:
        return
    name, own = named(what), code
    if isinstance(what, torch.nn.Module):
        own = getattr(inspect.unwrap(what.forward), "__code__", code)
    limited = "recompile limit" in reason  # be it of a decorator around the module's own code
    disabled = own is not code and not limited
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank > 0 or (name, own) in _told:
        return
    _told.add((name, own))
    if disabled:
        reason, advice = DISABLED_REASON, CURE_OF_DISABLED
    elif "skipfiles" in reason:
        reason, advice = "it is torch's own", CURE_OF_TORCHS_OWN
    elif limited:
        advice = CURE_OF_LIMIT
    elif isinstance(what, torch.nn.Module) and sharded_parts(what):
        advice = CURE_OF_SHARDED_PARTS
        _told_of_parts.add(name)
    else:
        advice = CURE_OF_BREAK
    log.warning(RUNS_EAGERLY, name, own.co_filename, own.co_firstlineno, reason, advice)


def sharded_parts(model: torch.nn.Module) -> list[str]:
    """The names of the modules inside of a model that `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which it is part of; not imported for those who do not shard
    if fsdp is None:
        return []
    return [name for name, part in model.named_modules() if name and isinstance(part, fsdp.FSDPModule)]


def tell_of_sharded_parts(model: torch.nn.Module) -> None:
    """Tell the user on rank 0, once for each class, that FSDP's hooks cut what was to be compiled as a whole."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank > 0 or named(model) in _told_of_parts:
        return
    parts = sharded_parts(model)
    if parts:
        _told_of_parts.add(named(model))
        log.warning(SHARDED_PARTS, named(model), len(parts), parts[0], CURE_OF_SHARDED_PARTS)


def named(what: Any) -> str:
    """A module's class; the name of a function as it is."""
    return type(what).__name__ if isinstance(what, torch.nn.Module) else str(what)
