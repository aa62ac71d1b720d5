"""Access private parts of accelerate and transformers that the integrations of trainers require.

Tested with accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

NAME = "SP"  # member of accelerate's DynamoBackend


@contextmanager
def register_backend_name() -> Iterator[None]:
    """Add "sp" to accelerate's backends within a context, in which `TorchDynamoPlugin(backend="sp")` is valid.

    The backends are an Enum. It has no public method to add a member, so its private tables are changed.

    Returns:
        A context manager that yields None.
    """
    if NAME in DynamoBackend.__members__:
        yield
        return
    member = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    DynamoBackend._member_map_[NAME] = DynamoBackend._value2member_map_[NAME] = member
    DynamoBackend._member_names_.append(NAME)
    try:
        yield
    finally:
        del DynamoBackend._member_map_[NAME], DynamoBackend._value2member_map_[NAME]
        DynamoBackend._member_names_.remove(NAME)


class ItemCounter:
    """Base class that corrects a Trainer's number of items in a step, by which its loss is divided."""

    args: Any  # the TrainingArguments
    get_tp_size: Any  # method of the Trainer

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the Trainer's number of items, times the number of ranks with the same batch (`get_tp_size`).

        The Trainer has summed the items of all ranks with `gather`, and divided the sum by this number, as these ranks
        count the same items. But `SequenceParallelAccelerator.gather` does not sum over these ranks.

        Returns:
            The number of items; None if the Trainer does not count them.
        """
        items = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        return items if items is None else items * self.get_tp_size()


class WeightSaver:
    """Base class that saves the weights of a Trainer whose checkpoints are sharded by FSDP."""

    accelerator: Any  # the Accelerator
    args: Any  # the TrainingArguments
    model: Any  # the model, or the result of fully_shard
    _save: Any  # method of the Trainer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Run the Trainer's method; with FSDP, save full weights for any `state_dict_type`.

        The Trainer itself saves nothing for "SHARDED_STATE_DICT". Its checkpoints remain sharded.

        Args:
            output_dir: The folder; that of the arguments by default.
            _internal_call: True for the Trainer's own calls, for its checkpoints.

        Returns:
            None.
        """
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if not _internal_call and plugin is not None and plugin.state_dict_type.name == "SHARDED_STATE_DICT":
            weights = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=weights)


def use_fsdp(state: Any, plugin: FullyShardedDataParallelPlugin) -> None:
    """Set the fields of an AcceleratorState for FSDP; accelerate itself sets them on GPUs only.

    Args:
        state: The state of an Accelerator on several ranks.
        plugin: The settings of FSDP.

    Returns:
        None.
    """
    if state.distributed_type != DistributedType.FSDP:
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # which other states copy


@contextmanager
def choose_fsdp_units() -> Iterator[None]:
    """Make accelerate shard heads, and other leaf modules of `torch.nn`, as parts of their parents in the context.

    A unit is a module to which `fully_shard` is applied. FSDP's hooks end a graph at each unit, and torch.compile skips
    the code of `torch.nn`, so that a head that is a unit of its own would run eagerly on gathered rows. Only an input
    embedding next to sharded layers stays a unit, since `compile_under_fsdp` compiles it.

    accelerate visits the modules in the reverse of their breadth-first order: children before parents, and the layers
    before the embedding, the first module of a model.

    Returns:
        A context manager that yields None.
    """
    fully_shard, has_units = torch.distributed.fsdp.fully_shard, False

    def shard_unit(module: Any, **kwargs: Any) -> Any:
        """Run `fully_shard`, which accelerate calls for each unit, unless the module is to be a part of its parent."""
        nonlocal has_units
        if isinstance(module, (list, torch.nn.ModuleList, torch.nn.ModuleDict)):
            return module  # accelerate's list [last norm, head], or modules without a forward
        is_leaf = type(module).__module__.startswith("torch.nn.modules") and not [*module.children()]
        # Another unit with the same weight (tied) has sharded it, to a DTensor.
        is_sharded = any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
        # The only leaf that can be a unit is an embedding, after other modules (the layers) have become units.
        can_be_unit = has_units and isinstance(module, torch.nn.Embedding) and not is_sharded
        if is_leaf and not can_be_unit:
            return module
        has_units = True
        return fully_shard(module, **kwargs)

    with mock.patch.object(torch.distributed.fsdp, "fully_shard", shard_unit):
        yield


def is_prepared(model: torch.nn.Module) -> bool:
    """Return True if accelerate has prepared a model, which it does once.

    Args:
        model: The model.

    Returns:
        True after a call of `prepare_model` with the model.
    """
    return bool(getattr(model, "_is_accelerate_prepared", False))


def mark_unprepared(model: torch.nn.Module) -> None:
    """Make accelerate prepare a model again at the next call.

    Args:
        model: The model.

    Returns:
        None.
    """
    model._is_accelerate_prepared = False
