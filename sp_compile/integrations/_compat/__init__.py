"""Access private parts of accelerate and transformers that the integrations require.

Tested with accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DynamoBackend

NAME = "SP"  # member of accelerate's DynamoBackend


@contextmanager
def register_backend_name() -> Iterator[None]:
    """Add "sp" to accelerate's backends within a context.

    Inside it, `TorchDynamoPlugin(backend="sp")` is valid. The backends are an Enum, which has no public method to add a
    member.

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
        """Multiply the Trainer's number of items by the number of ranks with the same batch.

        The Trainer divides by it, but `SequenceParallelAccelerator.gather` does not sum over these ranks.

        Returns:
            The number of items; None if the Trainer does not count them.
        """
        items = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        return items if items is None else items * self.get_tp_size()
