"""Memory of parameters and optimizer state: unsharded, or sharded by layer as in FSDP."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sp_compile.lowering.base.errors import SpError

ADAMW_STATE = 2.0
"""Bytes of AdamW state per byte of a parameter."""
SMALL_PARAMETER = 256
"""Rows and columns of a matrix for which per-row state is negligible."""
OPTIMIZER_HELP = "foreach", "fused", "capturable"
"""Settings that select an implementation of a step and do not affect the state."""


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model on every rank."""

    parameters: int
    trainable: int  # parameters that require gradients
    buffers: int
    unit: int  # largest layer (entry of a module list), which FSDP gathers at once
    rest: int = 0  # parameters outside of layers

    @staticmethod
    def of(model: Any) -> ModelBytes:
        """Return the bytes of a module; 0 for a function."""
        if not isinstance(model, nn.Module):
            return ModelBytes(0, 0, 0, 0)
        units: Counter[str] = Counter()
        learned = 0
        for name, p in model.named_parameters():
            nbytes = _local_bytes(p)
            learned += nbytes if p.requires_grad else 0
            found = re.match(r"(.*?\.)?\d+(?=\.)", name)
            units[found[0] if found else ""] += nbytes
        buffers, rest = sum(map(_local_bytes, model.buffers())), units.pop("", 0)
        return ModelBytes(sum(units.values()) + rest, learned, buffers, max(units.values(), default=0), rest)

    def shard_bytes(self, n: int, per_weight: float = ADAMW_STATE) -> int:
        """Return the bytes of a rank's shards of parameters and optimizer state."""
        return -(-(self.parameters + round(per_weight * self.trainable)) // n)

    def sharded_bytes(self, n: int, per_weight: float = ADAMW_STATE) -> tuple[int, int]:
        """Return the maximum bytes of (parameters with optimizer state, gradients) with FSDP over n ranks."""
        return self.shard_bytes(n, per_weight) + self.unsharded_bytes(True, True), self.gradients(self.trainable, n)

    def unsharded_bytes(self, in_layer: bool, arriving: bool) -> int:
        """Return the bytes of weights that FSDP has gathered.

        Args:
            in_layer: Inside of a layer.
            arriving: The next layer is being gathered.
        """
        if not self.unit:  # gathered weights remain until the end of the forward
            return (1 + arriving) * self.rest
        return self.rest + (in_layer + arriving) * self.unit

    def gradients(self, unsharded: int, n: int, total: int | None = None) -> int:
        """Return the bytes of unsharded gradients and of a rank's shards.

        Args:
            unsharded: Bytes of all computed gradients.
            n: Number of ranks.
            total: Unsharded bytes; by default the maximum.
        """
        return min(unsharded if total is None else total, self.rest + 2 * self.unit) + -(-unsharded // n)


def _local_bytes(x: torch.Tensor) -> int:
    x = x.to_local() if hasattr(x, "to_local") else x
    return x.numel() * x.element_size()


def state_per_weight(optimizer: Any = None) -> float:
    """Return the bytes of optimizer state per byte of a parameter; 2 (AdamW) for None.

    Args:
        optimizer: Optimizer, or a function of parameters (class, partial). A copy takes a step on a small matrix.

    Raises:
        SpError: If this step fails.
    """
    if optimizer is None:
        return ADAMW_STATE
    small = nn.Parameter(torch.zeros(SMALL_PARAMETER, SMALL_PARAMETER))
    small.grad = torch.ones_like(small)
    try:
        one = (
            optimizer([small])
            if not isinstance(optimizer, torch.optim.Optimizer)
            else _recreate_optimizer(optimizer, small)
        )
        one.step()
        state = [x for stored in one.state.values() for x in stored.values() if isinstance(x, torch.Tensor)]
    except Exception as error:
        text = f"{' '.join(repr(optimizer).split()):.80}"
        raise SpError("SP704", f"optimizer: {text} failed in a trial step on a small matrix ({error}).") from error
    return sum(_local_bytes(x) for x in state if x.numel() > 1) / _local_bytes(small)


def _recreate_optimizer(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """Create an optimizer with the type of another one and the settings of its first parameters."""
    settings, takes = {**optimizer.defaults, **optimizer.param_groups[0]}, inspect.signature(type(optimizer)).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    left_out = {"params", *OPTIMIZER_HELP}  # AdamW has a default that its constructor does not accept
    known = {k: v for k, v in settings.items() if (takes_any or k in takes) and k not in left_out}
    return type(optimizer)([parameter], **{k: v for k, v in known.items() if not isinstance(v, torch.Tensor)})
