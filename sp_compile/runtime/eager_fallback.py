"""Warn once about code compiled with backend="sp" that runs eagerly, with Dynamo's reason.

Results stay correct, but such code gathers its sharded inputs on every rank and saves them for its backward. If only
some ranks run it eagerly, the others wait for them until the group's timeout. Dynamo runs code eagerly at the recompile
limit, under torch.compiler.disable, in torch's own files, and if a graph break is inside of a loop, try or with.

With FSDP (`fully_shard`) on submodules, hooks in Python end the graph at each of them.

Code between two graphs that reads a sharded value and is differentiated, large parts of a step that run unsharded on
every rank, and large values that other eager code reads, are warned about, too.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from sp_compile.lowering.base.errors import user_line
from sp_compile.lowering.base.warn import warn_once
from sp_compile.lowering.torch_compat import EagerFallback, EagerReason
from sp_compile.passes.sharding.output_rules import LARGE_OUTPUT
from sp_compile.passes.sharding.sharded_work import ShardedWork

log = logging.getLogger(__name__)

EAGER_WARNING = (
    "%s falls back to eager on gathered inputs although it was compiled with backend='sp'. torch.compile skipped its "
    "code (%s:%d): %s. %s"
)
# causes in place of Dynamo's messages
EAGER_CAUSES = {
    EagerReason.TORCH_CODE: "it is defined in a file of torch",
    EagerReason.DISABLED: "torch.compiler.disable was applied to it",
}
EAGER_FIXES = {
    EagerReason.RECOMPILE_LIMIT: "Run with TORCH_LOGS=recompiles to see which guards fail. Pass inputs of equal shapes "
    "and types, compile with dynamic=True, or increase torch._dynamo.config.recompile_limit. For training with a model "
    "of transformers, pass use_cache=False, since the cache has a different state in each layer.",
    EagerReason.TORCH_CODE: "Call it in the forward of your own module and compile that module, or use "
    "torch.compile(module) instead of module.compile().",
    EagerReason.DISABLED: "Remove torch.compiler.disable, or do not compile this module.",
    EagerReason.GRAPH_BREAK: "Run with TORCH_LOGS=graph_breaks to find the unsupported code, and move it out of loops, "
    "try and with blocks, or out of the compiled module. With fullgraph=True, torch.compile raises an error instead.",
}

FSDP_WARNING = (
    "%s was compiled with backend='sp', but fully_shard was applied to %d of its submodules, such as %s. FSDP gathers "
    "and frees their weights in hooks, each of which causes a graph break. Each submodule is compiled separately at "
    "most. Code between them, such as an embedding, a norm or a head with its loss, may run eagerly on gathered "
    "inputs. %s"
)
FSDP_FIX = (
    "Compile each submodule separately, the last one together with the loss (docs/recipes/blocks.md), or apply "
    "fully_shard to the root module only."
)

READ_WARNING = (
    "eager code at %s reads %s, and is differentiated: the value is gathered, and every rank computes all rows from "
    "there to the next compiled graph, such as a head with its loss. The result is right. If the code is your own, "
    "compile it with backend='sp', too; beside a loop over layers with fully_shard, move the loop into a method of its "
    "own. TORCH_LOGS=graph_breaks shows why torch.compile has ended the graph before it"
)
UNSHARDED_WARNING = "in a step with backend='sp', %s. sp_compile.explain(model, ...) lists the reasons"

_warned_fsdp: set[str] = set()  # classes of models with a warning about graph breaks by FSDP
_muted_fsdp: set[str] = set()  # classes of modules without such a warning: `compile_under_fsdp` prepared them


def warn_eager_fallback(fallback: EagerFallback) -> None:
    """Warn on rank 0, once for each code object, with the reason and a fix. Dynamo's hook calls it."""
    target, code, reason, text = fallback  # module or name of a function, its code, kind of cause, Dynamo's message
    name = name_of_callable(target)
    is_graph_break = reason is EagerReason.GRAPH_BREAK
    if is_graph_break and name in _muted_fsdp:  # FSDP's hooks are expected to end its graphs
        return
    fix = EAGER_FIXES[reason]
    if is_graph_break and isinstance(target, torch.nn.Module) and find_fsdp_submodules(target):
        fix = FSDP_FIX
        _warned_fsdp.add(name)  # so that `warn_fsdp_submodules` does not repeat it
    cause = EAGER_CAUSES.get(reason, text)
    warn_once(log, EAGER_WARNING, name, code.co_filename, code.co_firstlineno, cause, fix, key=(name, code))


def find_fsdp_submodules(model: torch.nn.Module) -> list[str]:
    """Return the names of the submodules of a model to which `fully_shard` was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for users without FSDP
    if fsdp is None:
        return []
    return [name for name, module in model.named_modules() if name and isinstance(module, fsdp.FSDPModule)]


def class_before_fsdp(module: torch.nn.Module) -> type:
    """Return the class of a module that it had before `fully_shard`, which creates a class for it.

    Args:
        module: The module.

    Returns:
        A class that is not a subclass of `FSDPModule`.
    """
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def warn_fsdp_submodules(model: torch.nn.Module) -> None:
    """Warn on rank 0, once for each class, that FSDP hooks split the graph of the model."""
    name = name_of_callable(model)
    if name in _warned_fsdp | _muted_fsdp:
        return
    submodules = find_fsdp_submodules(model)
    if submodules:
        _warned_fsdp.add(name)
        warn_once(log, FSDP_WARNING, name, len(submodules), submodules[0], FSDP_FIX)


def mute_fsdp_warning(model: torch.nn.Module) -> None:
    """Turn off the warnings about graph breaks by FSDP in a model and its submodules.

    `compile_under_fsdp` calls it: there the results between the graphs stay sharded.
    """
    _muted_fsdp.update(name_of_callable(module) for module in model.modules() if find_fsdp_submodules(module))


def name_of_callable(target: Any) -> str:
    """Return the name of a target for warnings: the class of a module, or the name of a function."""
    return type(target).__name__ if isinstance(target, torch.nn.Module) else str(target)


MAX_STEP_CALLS = 10_000  # of programs in a step; a program that is not called again by then has no second step


@dataclass
class _FirstStep:
    """Work of all programs since the first call of a program, until its second one: of a step, or of a layer of it."""

    is_warned: bool  # the program has a large part that runs unsharded, or eager code in the step reads a value
    work: ShardedWork = field(default_factory=ShardedWork)  # of all programs since then
    calls: int = 0  # of other programs since then


_open_steps: WeakKeyDictionary[object, _FirstStep] = WeakKeyDictionary()  # by program
_examined_programs: WeakSet[object] = WeakSet()  # programs whose first step has ended


def count_eager_read(value: str, nbytes: int, is_trained: bool) -> None:
    """Count a read of a sharded value by eager code, in the first step of a program.

    Warn on rank 0, once for each line, if the code computes gradients of a large value. Another read adds a full tensor
    to the activations of the step. What the code computes from it is not known, and is not counted.

    Args:
        value: The description of the value.
        nbytes: Its size.
        is_trained: True if the code is differentiated.
    """
    if is_trained and nbytes >= LARGE_OUTPUT:
        line = user_line()
        warn_once(log, READ_WARNING, line, value, key=line)
    elif _open_steps:
        line = user_line()
        for step in _open_steps.values():
            step.is_warned = True
            step.work.add_replicated(line, 0.0, float(nbytes))


def count_step_call(program: object, work: ShardedWork, n: int) -> None:
    """Count a call of a program; warn on rank 0 if large parts of the step run unsharded on every rank.

    A step of a program lasts from one of its calls to the next one, and contains all calls of programs in between. Only
    the first step is examined. The warning is for programs of whose own work a large part runs unsharded on every rank,
    because it may be small in a step: a program may contain nothing but an embedding. It is also for programs in whose
    step eager code reads sharded values.

    Args:
        program: Any object that is different for each program.
        work: The work of the program.
        n: The number of ranks.
    """
    if n > 1 and program not in _examined_programs and program not in _open_steps:
        _open_steps[program] = _FirstStep(bool(work.large_replicated_parts()))
    elif program in _open_steps:
        _examined_programs.add(program)
        step = _open_steps.pop(program)
        if step.is_warned:
            _warn_unsharded(step.work)
    for other, step in [*_open_steps.items()]:
        step.work.merge(work)
        step.calls += 1
        if step.calls > MAX_STEP_CALLS:
            del _open_steps[other]
            _examined_programs.add(other)


def _warn_unsharded(step: ShardedWork) -> None:
    """Warn on rank 0, once for the same lines, of the large parts of a step that run unsharded."""
    parts = step.large_replicated_parts()
    if parts:
        # The key is without the shares, which differ a little between steps.
        key = tuple((part.is_flops, part.others, *(line for line, _ in part.lines)) for part in parts)
        warn_once(log, UNSHARDED_WARNING, "; ".join(part.describe() for part in parts), key=key)
