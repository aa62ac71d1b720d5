"""Memory of parameters and optimizer state: unsharded, or sharded by layer as in FSDP.

FSDP (`fully_shard` of each layer and of the model) gathers the weights of one layer at a time, and reduces its
gradients to shards after its backward. A layer is an entry of a module list.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sp_compile.lowering.base.errors import SpError

ADAMW_STATE = 2.0  # bytes of AdamW state per byte of a parameter
SMALL_PARAMETER = 256  # rows and columns of a matrix for which per-row state is negligible
# settings of optimizers that select an implementation of the step and do not affect the state
IMPLEMENTATION_SETTINGS = "foreach", "fused", "capturable"


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model on every rank."""

    parameters: int  # all parameters
    trainable: int  # parameters that require gradients
    buffers: int  # all buffers
    unit: int  # parameters of the largest layer, which FSDP gathers at once
    outside_layers: int = 0  # parameters outside of layers

    @staticmethod
    def of(model: Any) -> ModelBytes:
        """Return the bytes of a module; 0 for a function."""
        if not isinstance(model, nn.Module):
            return ModelBytes(0, 0, 0, 0)
        by_layer: Counter[str] = Counter()
        trainable = 0
        for name, p in model.named_parameters():
            nbytes = _local_bytes(p)
            trainable += nbytes if p.requires_grad else 0
            layer = re.match(r"(.*?\.)?\d+(?=\.)", name)  # "layers.0" of "layers.0.mlp.weight"
            by_layer[layer[0] if layer else ""] += nbytes
        outside_layers = by_layer.pop("", 0)
        return ModelBytes(
            parameters=by_layer.total() + outside_layers,
            trainable=trainable,
            buffers=sum(map(_local_bytes, model.buffers())),
            unit=max(by_layer.values(), default=0),
            outside_layers=outside_layers,
        )

    def shard_bytes(self, n: int, per_weight: float = ADAMW_STATE) -> int:
        """Return the bytes of a rank's shards of parameters and optimizer state if n ranks shard them."""
        return -(-(self.parameters + round(per_weight * self.trainable)) // n)

    def sharded_bytes(self, n: int, per_weight: float = ADAMW_STATE) -> tuple[int, int]:
        """Return the maximum bytes of (parameters with optimizer state, gradients) on a rank with FSDP over n ranks.

        The weights of two layers are then gathered: of the one that runs, and of the next one.
        """
        unsharded = self.unsharded_bytes(in_layer=True, arriving=True)
        return self.shard_bytes(n, per_weight) + unsharded, self.gradients(self.trainable, n)

    def unsharded_bytes(self, in_layer: bool, arriving: bool) -> int:
        """Return the bytes of the weights that FSDP has gathered at a moment of the step.

        Args:
            in_layer: True if a layer runs.
            arriving: True if the weights of the next layer are being gathered.
        """
        # Without layers, all weights are one unit. FSDP gathers it for the forward, and again for the backward, which
        # may arrive (`arriving`) while the first copy still exists.
        if not self.unit:
            return (1 + arriving) * self.outside_layers
        return self.outside_layers + (in_layer + arriving) * self.unit

    def gradients(self, computed: int, n: int, unsharded: int | None = None) -> int:
        """Return the bytes of gradients on a rank: those that are not yet reduced to shards, and all shards.

        Args:
            computed: Bytes of all gradients computed so far, before they are sharded.
            n: Number of ranks.
            unsharded: Bytes of those that are not yet reduced; by default the maximum: the gradients outside of layers
                and those of two layers, one that is reduced and one that runs.
        """
        not_reduced = computed if unsharded is None else unsharded
        shards = -(-computed // n)
        return min(not_reduced, self.outside_layers + 2 * self.unit) + shards


def _local_bytes(x: torch.Tensor) -> int:
    """Return the bytes of a tensor; of a DTensor those of the local shard."""
    x = x.to_local() if hasattr(x, "to_local") else x
    return x.numel() * x.element_size()


def state_per_weight(optimizer: Any = None) -> float:
    """Return the bytes of optimizer state per byte of a parameter; 2 (AdamW) for None.

    Args:
        optimizer: Optimizer, or a function of parameters (class, partial). It, or a new one like it, takes a trial step
            on a small matrix, whose state is measured.

    Raises:
        SpError: If this step fails.
    """
    if optimizer is None:
        return ADAMW_STATE
    small = nn.Parameter(torch.zeros(SMALL_PARAMETER, SMALL_PARAMETER))
    small.grad = torch.ones_like(small)
    try:
        is_instance = isinstance(optimizer, torch.optim.Optimizer)
        trial = _recreate_optimizer(optimizer, small) if is_instance else optimizer([small])
        trial.step()
        state = [x for values in trial.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    except Exception as error:
        text = f"{' '.join(repr(optimizer).split()):.80}"
        raise SpError("SP704", f"optimizer: {text} failed in a trial step on a small matrix ({error}).") from error
    return sum(_local_bytes(x) for x in state if x.numel() > 1) / _local_bytes(small)  # without counters of steps


def _recreate_optimizer(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """Create an optimizer of `parameter` for a trial step, with type and settings of the passed optimizer.

    The settings are those of its first parameter group.
    """
    accepted = inspect.signature(type(optimizer)).parameters  # AdamW has a default that its constructor does not accept
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    settings: dict[str, Any] = {}
    for name, value in {**optimizer.defaults, **optimizer.param_groups[0]}.items():
        # A tensor, such as lr of a capturable optimizer, is omitted: the state does not depend on its value.
        is_used = name not in ("params", *IMPLEMENTATION_SETTINGS) and not isinstance(value, torch.Tensor)
        if is_used and (accepts_any or name in accepted):
            settings[name] = value
    return type(optimizer)([parameter], **settings)
