"""Cost of offloading activations to host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from sp_compile.lowering.tiles.tile_flops import node_flops

from .machine import Machine

MIN_OFFLOAD_BYTES = 1e-3
"""Minimum fraction of the saved bytes: copies of smaller values cost more than they free."""


@dataclass(frozen=True)
class HostValues:
    """Offloaded values of one graph."""

    values: int = 0  # number of values
    nbytes: int = 0  # bytes of these
    kept: int = 0  # bytes that remain on the device
    seconds: float = 0.0  # seconds of copies, each way
    waits: float = 0.0  # seconds of copies that no compute hides, both ways


def hiding_seconds(node: Node, machine: Machine) -> float:
    """Return the seconds of products and attention at a node, which hide copies; fusible ops are ignored."""
    return node_flops(node) / machine.flops


def copy_seconds(nbytes: float, machine: Machine) -> float:
    """Return the seconds of a copy to or from the host."""
    return nbytes / machine.host_bandwidth
