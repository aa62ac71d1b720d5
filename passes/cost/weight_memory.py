"""What a model's parameters and their optimizer take: whole on every rank, or as FSDP shares them by layers."""

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
"""Bytes of its state for a byte of a parameter."""
SMALL_PARAMETER = 256
"""Rows and columns of a matrix beside which a number for each of them is next to nothing."""
OPTIMIZER_HELP = "foreach", "fused", "capturable"
"""Settings that say how a step runs, on devices that may not be here, and nothing of the state."""


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model on every rank. learned: of parameters that want a gradient.

    unit: of the largest layer, which FSDP gathers at once: an entry of a list of modules. rest: of what is in none.
    """

    parameters: int
    trainable: int
    buffers: int
    unit: int
    rest: int = 0

    @staticmethod
    def of(model: Any) -> ModelBytes:
        """Of a module; nothing of a function."""
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
        """A rank's shards of parameters and of the optimizer's state, of n."""
        return -(-(self.parameters + round(per_weight * self.trainable)) // n)

    def sharded_bytes(self, n: int, per_weight: float = ADAMW_STATE) -> tuple[int, int]:
        """(parameters with the optimizer's state, gradients) of a rank where FSDP shares them over n by layers.

        At most: with all that is ever whole.
        """
        return self.shard_bytes(n, per_weight) + self.unsharded_bytes(True, True), self.gradients(self.trainable, n)

    def unsharded_bytes(self, in_layer: bool, arriving: bool) -> int:
        """Of weights that FSDP has whole, inside of a layer or outside, and where others arrive, or have arrived."""
        if not self.unit:  # what arrived stays until the forward has ended
            return (1 + arriving) * self.rest
        return self.rest + (in_layer + arriving) * self.unit

    def gradients(self, made: int, n: int, whole: int | None = None) -> int:
        """Of so many bytes of gradients that are made: those that are whole, and a rank's shards of all, of n.

        whole: at most what is in no layer, and two layers; as many if it is not known.
        """
        return min(made if whole is None else whole, self.rest + 2 * self.unit) + -(-made // n)


def _local_bytes(x: torch.Tensor) -> int:
    x = x.to_local() if hasattr(x, "to_local") else x
    return x.numel() * x.element_size()


def state_per_weight(optimizer: Any = None) -> float:
    """Bytes of state that an optimizer keeps for a byte of a parameter; None: 2, as AdamW does.

    optimizer: one that was made, or a function of parameters (a class, a partial); one like it makes a step on a small
    matrix. Raises SpError: that fails.
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
        state = [x for held in one.state.values() for x in held.values() if isinstance(x, torch.Tensor)]
    except Exception as error:
        given = f"{' '.join(repr(optimizer).split()):.80}"
        raise SpError("SP704", f"optimizer: {given} makes no step on a small matrix ({error}).") from error
    return sum(_local_bytes(x) for x in state if x.numel() > 1) / _local_bytes(small)


def _recreate_optimizer(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """One of the same kind and settings, those of its first parameters."""
    settings, takes = {**optimizer.defaults, **optimizer.param_groups[0]}, inspect.signature(type(optimizer)).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    left_out = {"params", *OPTIMIZER_HELP}  # AdamW has a default that it does not take
    known = {k: v for k, v in settings.items() if (takes_any or k in takes) and k not in left_out}
    return type(optimizer)([parameter], **{k: v for k, v in known.items() if not isinstance(v, torch.Tensor)})
