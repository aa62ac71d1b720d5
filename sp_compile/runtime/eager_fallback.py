"""Warn once about code compiled with backend="sp" that runs eagerly, with Dynamo's reason.

Results stay correct, but such code gathers its sharded inputs on every rank and saves them for its backward. If only
some ranks run it eagerly, the others wait for them until the group's timeout. Dynamo runs code eagerly at the recompile
limit, under torch.compiler.disable, in torch's own files, and if a graph break is inside of a loop, try or with.

With FSDP (`fully_shard`) on submodules, hooks in Python end the graph at each of them.
"""

from __future__ import annotations

import inspect
import logging
import sys
from types import CodeType
from typing import Any

import torch

from sp_compile.lowering.base.ranks import process_rank

log = logging.getLogger(__name__)

EAGER_WARNING = (
    "%s runs eagerly, whole on every rank, though it was compiled with backend='sp': torch.compile left its code "
    "(%s:%d) to Python: %s. %s"
)
TORCH_SKIP_FIX = "Call it in the forward of a module of yours and compile that one, or take torch.compile(module)"
DISABLED_REASON = "it is under torch.compiler.disable"
DISABLED_FIX = "Take that away, or do not compile it"
RECOMPILE_LIMIT_FIX = (
    "TORCH_LOGS=recompiles says what differs from call to call: pass equal shapes and types, compile with "
    "dynamic=True, or raise torch._dynamo.config.recompile_limit; the cache of transformers, of which each layer "
    "sees another state, is no part of training: use_cache=False"
)
GRAPH_BREAK_FIX = (
    "TORCH_LOGS=graph_breaks says where: take what it names out of loops, try and with, or out of the block; "
    "fullgraph=True makes it an error"
)

FSDP_WARNING = (
    "%s is compiled with backend='sp' as a whole, but fully_shard has %d of its parts, %s the first. FSDP gathers and "
    "frees their weights in Python, which ends a graph at each: they are compiled one by one at most, and what is "
    "between them, as an embedding, a norm, a head with its loss, may run whole on every rank. %s"
)
FSDP_FIX = (
    "Compile each part by itself, the last one with the loss (docs/recipes/blocks.md), or call fully_shard on the "
    "whole model only"
)

_warned: set[tuple[str, CodeType]] = set()  # names and code that were warned about
_warned_fsdp: set[str] = set()  # classes of models that were warned about


def warn_eager_fallback(target: Any, code: CodeType, reason: str) -> None:
    """Warn on rank 0, once for each code object, with the reason and a fix. Dynamo's hook calls it.

    Args:
        target: The module that runs eagerly, or the name of a function.
        code: The code that Dynamo skipped. For a module it may be that of a decorator around `forward`.
        reason: Dynamo's reason. Code without tensors is not reported.
    """
    if "no tensor" in reason:
        return
    name, user_code = name_of_callable(target), code
    if isinstance(target, torch.nn.Module):
        user_code = getattr(inspect.unwrap(target.forward), "__code__", code)
    if process_rank() > 0 or (name, user_code) in _warned:
        return
    _warned.add((name, user_code))
    is_recompile_limit = "recompile limit" in reason  # also of a decorator
    if user_code is not code and not is_recompile_limit:  # a decorator: torch.compiler.disable
        reason, fix = DISABLED_REASON, DISABLED_FIX
    elif "skipfiles" in reason:
        reason, fix = "it is torch's own", TORCH_SKIP_FIX
    elif is_recompile_limit:
        fix = RECOMPILE_LIMIT_FIX
    elif isinstance(target, torch.nn.Module) and find_fsdp_submodules(target):
        fix = FSDP_FIX
        _warned_fsdp.add(name)
    else:
        fix = GRAPH_BREAK_FIX
    log.warning(EAGER_WARNING, name, user_code.co_filename, user_code.co_firstlineno, reason, fix)


def find_fsdp_submodules(model: torch.nn.Module) -> list[str]:
    """Return the names of the submodules of a model to which `fully_shard` was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for users without FSDP
    if fsdp is None:
        return []
    return [name for name, module in model.named_modules() if name and isinstance(module, fsdp.FSDPModule)]


def warn_fsdp_submodules(model: torch.nn.Module) -> None:
    """Warn on rank 0, once for each class, that FSDP hooks split the graph of the model."""
    name = name_of_callable(model)
    if process_rank() > 0 or name in _warned_fsdp:
        return
    submodules = find_fsdp_submodules(model)
    if submodules:
        _warned_fsdp.add(name)
        log.warning(FSDP_WARNING, name, len(submodules), submodules[0], FSDP_FIX)


def name_of_callable(target: Any) -> str:
    """Return the name of a target for warnings: the class of a module, or the name of a function."""
    return type(target).__name__ if isinstance(target, torch.nn.Module) else str(target)
