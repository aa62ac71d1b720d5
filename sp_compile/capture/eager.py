"""What torch.compile was given with backend="sp" and left to Python: said once, with Dynamo's reason and what to do.

The results are right, but such a block reads what comes in shards, on every rank, and keeps all of it for its backward.
Where only some ranks run it so, the others wait for them: a rank says that it does where they look.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from sp_compile._compat import on_recompile_limit

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

RUNS_OTHERWISE = "it runs {} otherwise than compiled with backend='sp' ({})"

_told: set[tuple[str, CodeType]] = set()

_told_of_parts: set[str] = set()

_limits: deque[str] = deque(maxlen=1)
"""What torch has said of the last piece of code that it compiles no more: what differed, too."""

on_recompile_limit(_limits.append)


def tell_of_eager(say: Callable[..., Any], what: Any, code: CodeType, reason: str, compiled: bool) -> None:
    """Tell the other ranks, and the user on rank 0, once for each piece of code.

    say: as `spmd.control.wire.stop` is. what: a module, or the name of a function. reason: Dynamo's. compiled: was this
    code compiled before? Then others, who know it compiled, wait for this rank in vain.
    """
    if "no tensor" in reason:
        return
    name, own = named(what), code
    if isinstance(what, torch.nn.Module):
        own = getattr(inspect.unwrap(what.forward), "__code__", code)
    limited = "recompile limit" in reason  # be it of a decorator around the module's own code
    disabled = own is not code and not limited
    in_full = _limits.pop() if _limits and limited else reason
    tell_of_other_call(say, what, DISABLED_REASON if disabled else in_full, goes_on=not compiled)
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


def tell_of_other_call(say: Callable[..., Any], what: Any, reason: str, goes_on: bool = True) -> None:
    """Tell the other ranks that this one runs a model otherwise than compiled. It may do so beside what all do.

    If it then trains the model, before it comes to them again, it does so in place of that: they need not wait for it.
    say: as `spmd.control.wire.stop` is, which gives back what it has said. what: a module, or the name of a function.
    """
    words = RUNS_OTHERWISE.format(named(what), reason)
    said = say(words, goes_on=goes_on)
    if said is not None and goes_on and isinstance(what, torch.nn.Module) and torch.is_grad_enabled():
        _watch_steps()
        _alone[:] = [({id(p) for p in what.parameters() if p.requires_grad}, partial(say, words, of=said.talks))]


@cache
def _watch_steps() -> None:
    """Only of a process that needs it: whoever compiles an optimizer has its hooks in the graph."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    """Behind a step of any optimizer."""
    if _alone and any(id(p) in _alone[0][0] for group in optimizer.param_groups for p in group["params"]):
        _alone.pop()[1]()


_alone: list[tuple[set[int], Callable[[], Any]]] = []
"""The last such call, until a step trains what it ran: the identities of its weights, and what says so."""


def named(what: Any) -> str:
    """A module's class; the name of a function as it is."""
    return type(what).__name__ if isinstance(what, torch.nn.Module) else str(what)
