"""What other packages keep to themselves and integrations need, and nothing else.

Tried on accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DynamoBackend

NAME = "SP"


@contextmanager
def register_backend_name() -> Iterator[None]:
    """Let accelerate's list of backends have "sp" meanwhile, so that `TorchDynamoPlugin(backend="sp")` can be made.

    The list is an Enum, which has no public way to grow.
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
    """The part of a Trainer that counts the items of a step, by which its loss is divided."""

    args: Any
    get_tp_size: Any

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The Trainer divides by the ranks with the same batch, over which `gather` does not sum: undo that."""
        items = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        return items if items is None else items * self.get_tp_size()
