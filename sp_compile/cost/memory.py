"""What a rank's device holds beside an attention, and what is left for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank. device: of its device. weights: parameters and buffers. gradients: of parameters.

    kept: what a forward leaves for the backward. State of an optimizer is nothing that a program shows.
    """

    device: float
    weights: int
    gradients: int
    kept: int

    @property
    def taken(self) -> int:
        """All but attention's own."""
        return self.weights + self.gradients + self.kept

    @property
    def left(self) -> float:
        """What one attention may use on top of its shards.

        All of the device where the rest does not fit either: something shards, offloads or computes it again that the
        program does not show, and a choice of attention would not help.
        """
        return self.device - self.taken if self.taken < self.device else self.device

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("gradients", self.gradients), ("kept for the backward", self.kept))
        text = ", ".join(f"{name} {nbytes / GIB:.1f} GiB" for name, nbytes in parts)
        if math.isinf(self.device):
            return text
        device = f"{self.device / GIB:.1f} GiB"
        if self.taken < self.device:
            return f"{text}; {self.left / GIB:.1f} of {device} are left for an attention"
        return (
            f"{text}; more than {device}, so no attention is refused for what they leave: checkpoint layers, shard the "
            "state, or use more ranks"
        )
