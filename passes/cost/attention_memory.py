"""Memory of a rank besides attention, and the remaining memory for attention.

A pass predicts a `RankMemory` before it chooses attention strategies. `available` limits the memory of candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .weight_memory import ModelBytes

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank in bytes.

    Optimizer state is not visible in a program: if FSDP shards the weights, it is included for AdamW.
    """

    device: float  # device memory
    weights: int  # parameters and buffers
    gradients: int  # gradients of parameters
    saved: int  # activations saved for the backward
    tiled: int = 0  # part of `saved` that losses in tiles of rows would not save; 0 unless the option `tiles` is "auto"
    state: ModelBytes | None = None  # unsharded state of the model

    @property
    def used(self) -> int:
        """Return the bytes in use besides attention, if no loss is computed in tiles of rows."""
        return self.weights + self.gradients + self.saved

    @property
    def used_with_tiles(self) -> int:
        """Return the bytes in use besides attention; losses are tiled if the device is too small otherwise."""
        return self.used if self.used < self.device else self.used - self.tiled

    @property
    def available(self) -> float:
        """Return the bytes of the device that one attention may use in addition to its shards.

        This is the full device if the other memory does not fit: then code outside of the program shards, offloads or
        recomputes values, and the choice of attention would not help.
        """
        return self.device - self.used_with_tiles if self.used_with_tiles < self.device else self.device

    def __str__(self) -> str:
        """Return the bytes in use and those available for an attention, as a line of a report."""
        parts = (("weights", self.weights), ("gradients", self.gradients), ("saved for the backward", self.saved))
        text = ", ".join(f"{name} {nbytes / GIB:.1f} GiB" for name, nbytes in parts)
        if math.isinf(self.device):
            return text
        device = f"{self.device / GIB:.1f} GiB"
        if self.used_with_tiles < self.used:
            text += f", {self.tiled / GIB:.1f} GiB less if losses are tiled"
        if self.used_with_tiles < self.device:
            return f"{text}; {self.available / GIB:.1f} of {device} are available for an attention"
        return (
            f"{text}; more than {device}, so the memory of an attention is not limited: checkpoint layers, shard the "
            "state, or use more ranks"
        )
