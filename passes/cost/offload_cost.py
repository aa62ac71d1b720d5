"""Cost of offloading activations to host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine

# minimum size of an offloaded value as a fraction of all saved bytes: smaller copies cost more than they free
MIN_OFFLOAD_BYTES = 1e-3


@dataclass(frozen=True)
class HostValues:
    """Values of a graph or a step that are copied to the host in the forward and back in the backward."""

    values: int = 0  # number of values
    nbytes: int = 0  # bytes of these
    kept: int = 0  # bytes that remain on the device
    seconds: float = 0.0  # seconds of copies, each way
    waits: float = 0.0  # seconds that compute waits for copies, both ways


def copy_seconds(nbytes: float, machine: Machine) -> float:
    """Return the seconds of a copy of `nbytes` to or from the host, without other work."""
    return nbytes / machine.host_bandwidth
