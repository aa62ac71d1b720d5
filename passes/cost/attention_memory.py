"""What a rank's device holds beside an attention, and what is left for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .weight_memory import ModelBytes

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank. device: of its device. weights: parameters and buffers. gradients: of parameters.

    state: of the model, whole.
    kept: what a forward leaves for the backward; tiled: of that, what it would not with losses in tiles, if they may.
    State of an optimizer is nothing that a program shows: where FSDP has weights in shards, they count with an AdamW's.
    """

    device: float
    weights: int
    gradients: int
    saved: int
    tiled: int = 0
    state: ModelBytes | None = None

    @property
    def used(self) -> int:
        """All but attention's own."""
        return self.weights + self.gradients + self.saved

    @property
    def used_with_tiles(self) -> int:
        """The same, with losses in tiles if it does not fit otherwise."""
        return self.used if self.used < self.device else self.used - self.tiled

    @property
    def available(self) -> float:
        """What one attention may use on top of its shards.

        All of the device where the rest does not fit either: something shards, offloads or computes it again that the
        program does not show, and a choice of attention would not help.
        """
        return self.device - self.used_with_tiles if self.used_with_tiles < self.device else self.device

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("gradients", self.gradients), ("kept for the backward", self.saved))
        text = ", ".join(f"{name} {nbytes / GIB:.1f} GiB" for name, nbytes in parts)
        if math.isinf(self.device):
            return text
        device = f"{self.device / GIB:.1f} GiB"
        if self.used_with_tiles < self.used:
            text += f", {self.tiled / GIB:.1f} GiB of it not if losses go in tiles"
        if self.used_with_tiles < self.device:
            return f"{text}; {self.available / GIB:.1f} of {device} are left for an attention"
        return (
            f"{text}; more than {device}, so no attention is refused for what they leave: checkpoint layers, shard the "
            "state, or use more ranks"
        )
