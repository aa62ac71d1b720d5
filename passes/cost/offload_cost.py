"""What goes to the host's memory between forward and backward, and what its copies take."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from sp_compile.lowering.tiles.tile_flops import node_flops

from .machine import Machine

MIN_OFFLOAD_BYTES = 1e-3
"""Of the bytes that are kept: smaller values stay, a copy of each would cost more than it frees."""


@dataclass(frozen=True)
class HostValues:
    """Of one graph. values: how many; nbytes: of these; kept: bytes that the device keeps for the backward.

    seconds: of the copies, each way; waits: of those that no other work hides, both ways together.
    """

    values: int = 0
    nbytes: int = 0
    kept: int = 0
    seconds: float = 0.0
    waits: float = 0.0


def hiding_seconds(node: Node, machine: Machine) -> float:
    """Of what hides a copy: products and attention. What a compiler fuses is not counted: it is not known yet."""
    return node_flops(node) / machine.flops


def copy_seconds(nbytes: float, machine: Machine) -> float:
    """Seconds of a copy to the host, or back."""
    return nbytes / machine.host_bandwidth
