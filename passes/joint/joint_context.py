"""Provide the contexts of passes over a joint graph and over its partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import SINGLE_RANK, Ranks
from sp_compile.passes.collectives.collective_context import CollectiveContext
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.step_memory import HostValues
from sp_compile.passes.tensor_parallel.scatter_layers import LinearLayer


@dataclass
class JointContext(CollectiveContext):
    """The context of passes over one joint graph, and their results for later passes and the runtime."""

    ranks: Ranks = SINGLE_RANK  # the group over which `ScatterLayers` scatters
    shapes: Sequence[tuple[Any, ...]] = ()  # of the function's tensor arguments, on this rank
    layers: list[LinearLayer] = field(default_factory=list)  # scattered layers of all groups
    # For each group with scattered layers, by name, the tensor arguments that must be equal on its ranks, named as in
    # `InputFacts`.
    common_inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    # Each of these groups, and the output gradients that must be equal on its ranks: the source line by name.
    equal_tangents: list[tuple[Ranks, Mapping[str, str]]] = field(default_factory=list)
    backward: set[str] = field(default_factory=set)  # names of the groups of the backward's collectives


@dataclass
class PartitionContext(PassContext):
    """The context of passes over the partitions of one joint graph. Passes receive the forward graph."""

    input_bytes: int = 0  # bytes of a rank's inputs, without the parameters and buffers of the model
    backward: GraphModule | None = None  # None for inference
    results: int = 0  # number of the forward's outputs that are returned to its caller
    on_host: list[HostValues] = field(default_factory=list)  # offloaded values of each graph
