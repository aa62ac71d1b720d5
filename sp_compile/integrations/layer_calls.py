"""Compare calls of sharded layers over all ranks with shards of a model, before FSDP gathers their weights.

FSDP gathers the weights of a layer from ranks of other replicas, too. The programs of a model compare their calls over
the ranks of a sequence only, and after their weights were gathered. If one replica calls a layer that another one does
not call, as an encoder without images, or one rank alone calls `generate()`, the collectives of FSDP do not match: they
abort, wait until the timeout, or gather the weights of another layer.

A unit is a module to which `fully_shard` was applied. The ranks exchange a message at the call of the model, and at a
unit that does not follow the last one in its list: for L lists 1 + L exchanges in a forward. A message has the units
since the last one. Another one follows at the start of the backward, unless the ranks of a sequence are all ranks with
shards: then the programs compare it. FSDP does not gather weights by hooks in a recomputation, so nothing is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sp_compile.generation import is_generating
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.layers import MODULE_LISTS
from sp_compile.lowering.base.ranks import Ranks, ranks_of
from sp_compile.lowering.torch_compat import is_in_backward, pytree
from sp_compile.runtime.agreement import require_agreement
from sp_compile.runtime.control.message import UNIT_VERB, Message
from sp_compile.runtime.eager_fallback import class_before_fsdp
from sp_compile.runtime.sharded_values import has_traced_args

OTHER_LAYERS = SpError("SP620", "ranks with shards of the weights of one model have called different layers of it")
LAYERS_FIELD = "layers"  # name of the field of a message with the units since the last one

_num_models: Counter[str] = Counter()  # number of compared models by name of their first group
_compared_units: WeakSet[nn.Module] = WeakSet()


@dataclass(eq=False)
class LayerCalls:
    """Calls of the units of one model on this rank."""

    name: str  # class of the model
    suffix: str  # number of the model among those of its group, as text; "" for the first one
    groups: list[Ranks]  # axes of the mesh of the shards, or all of their ranks
    last: tuple[str, int] = ("", -1)  # list and position of the unit that was called last
    called: list[tuple[str, int, int]] = field(default_factory=list)  # lists and ranges of units since the last message

    def start_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare a call of the model; a hook before its forward.

        Args:
            module: The model.
            args: Positional arguments of the call.
            kwargs: Named arguments of the call.
        """
        if _is_executed(args, kwargs):
            self.last = "", -1
            self.compare(self.name, _mode_of(module))

    def start_unit(
        self, unit_list: str, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a call of a unit, and compare it if it does not follow the last one; a hook before its forward.

        Args:
            unit_list: The name of the list of the unit.
            index: The position of the unit in it.
            module: The unit.
            args: Positional arguments of the call.
            kwargs: Named arguments of the call.
        """
        if not _is_executed(args, kwargs):
            return
        last_list, last_index = self.last
        self.last = unit_list, index
        if unit_list != last_list or index <= last_index:
            self.compare(unit_list, _mode_of(module))
        if self.called and self.called[-1][0] == unit_list and self.called[-1][2] == index - 1:
            index_from = self.called.pop()[1]
        else:
            index_from = index
        self.called.append((unit_list, index_from, index))

    def end_model(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Compare the start of the backward of a call of the model; a hook after its forward.

        The hooks on the results run before those of FSDP, which are registered later.

        Args:
            _module: The model.
            _args: Positional arguments of the call.
            output: Its results.
        """
        if is_in_backward() or not torch.is_grad_enabled():
            return
        pending = [True]  # until the first gradient of a result is computed

        def start_backward(_grad: torch.Tensor) -> None:
            """Compare the backward, at the first gradient of a result."""
            if pending:
                pending.clear()
                self.compare(self.name, "for its backward")

        for x in pytree.tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(start_backward)

    def compare(self, name: str, mode: str) -> None:
        """Exchange messages with the other ranks with shards of the model.

        Args:
            name: The model or the list that is called.
            mode: The mode of the call as text.

        Raises:
            SpError: On every rank, if the ranks call different layers or in different modes (SP620), or if a rank does
                not arrive (SP621).
        """
        texts = [f"{name} {first}-{last}" if first < last else f"{name} {first}" for name, first, last in self.called]
        mine = Message(UNIT_VERB, f"{name}{self.suffix} {mode}", fields={LAYERS_FIELD: ", ".join(texts) or "none"})
        self.called.clear()
        error: SpError | None = None
        for ranks in self.groups:  # after an error in a group, the ranks of the later groups receive it
            try:
                require_agreement(ranks, replace(mine, error=error), OTHER_LAYERS)
            except SpError as problem:
                error = error or problem
        if error is not None:
            raise error


def compare_layer_calls(model: nn.Module, sequence: Ranks) -> None:
    """Register hooks on a model and its units that compare their calls over the ranks with shards.

    They run before those of FSDP, which gather weights. All ranks with shards call this function.

    Args:
        model: The model, a result of `fully_shard`, which was applied to its units before.
        sequence: The ranks that share a sequence.

    Returns:
        None.
    """
    groups = _groups_with_shards(model, sequence)
    if not groups:
        return
    _num_models[groups[0].group] += 1
    number = _num_models[groups[0].group]
    calls = LayerCalls(class_before_fsdp(model).__name__, f" of model {number}" if number > 1 else "", groups)
    hooks: dict[nn.Module, Any] = {model: calls.start_model}
    for unit, unit_list, index in _units_in_lists(model):
        hooks[unit] = partial(calls.start_unit, unit_list, index)
    for module, hook in hooks.items():
        if module not in _compared_units:  # a model may be a part of another one
            _compared_units.add(module)
            module.register_forward_pre_hook(torch.compiler.disable(hook), prepend=True, with_kwargs=True)
    if groups != [sequence]:
        model.register_forward_hook(torch.compiler.disable(calls.end_model), prepend=True)


def _groups_with_shards(model: nn.Module, sequence: Ranks) -> list[Ranks]:
    """Return the groups whose ranks together have all shards of a model, and replicas of them; [] for one process.

    Args:
        model: The model.
        sequence: The ranks that share a sequence; returned if they are the same ranks, since their programs exchange
            messages over this group.
    """
    meshes: set[DeviceMesh] = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if not meshes or not dist.is_initialized():
        return []
    mesh = max(meshes, key=lambda mesh: mesh.size())  # experts may be sharded over parts of it
    members = {*mesh.mesh.flatten().tolist()}
    if sequence.process_group is not None and members == {*dist.get_process_group_ranks(sequence.process_group)}:
        groups = [sequence]
    elif len(members) == dist.get_world_size():
        groups = [ranks_of(dist.group.WORLD)]
    else:
        groups = [ranks_of(group) for group in mesh.get_all_groups()]
    return [ranks for ranks in groups if ranks.has_other_processes]


def _units_in_lists(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield each unit inside of a model, with the name of its list and its position there.

    A list is a container, or modules of one class in attributes of one module; it may have one unit.
    """
    modules, positions = dict(model.named_modules()), Counter[str]()
    for name, unit in modules.items():
        if unit is model or not isinstance(unit, FSDPModule):
            continue
        parent = name.rpartition(".")[0]
        is_contained = isinstance(modules[parent], MODULE_LISTS)
        unit_list = parent if is_contained else f"{parent}.{class_before_fsdp(unit).__name__}".removeprefix(".")
        yield unit, unit_list, positions[unit_list]
        positions[unit_list] += 1


def _is_executed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a call for which FSDP may gather weights: no recomputation, and no call that is traced."""
    return not is_in_backward() and not has_traced_args([*args, *kwargs.values()])


def _mode_of(module: nn.Module) -> str:
    """Return the mode of a call as text, such as "in eval() without gradients"."""
    if is_generating():
        return "in generate()"
    mode = "in train()" if module.training else "in eval()"
    return mode if torch.is_grad_enabled() else f"{mode} without gradients"
