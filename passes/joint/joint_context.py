"""What passes over a joint graph, and over its halves, are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import SINGLE_RANK, Ranks
from sp_compile.passes.collectives.collective_context import CollectiveJob
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.offload_cost import HostValues
from sp_compile.passes.tensor_parallel.scatter_layers import LinearLayer


@dataclass
class JointContext(CollectiveJob):
    """What the passes over one joint graph are told, and what they leave for later ones.

    ranks: the group that is looked at. shapes: of the function's tensor arguments, on this rank.
    layers: of all groups. common: the groups over which layers are scattered, and of the function's tensor arguments
    those that have to be equal on their ranks, as `InputFacts` call them. shared: those of this graph, and the
    gradients of
    results that they have to have alike then, by name, with where each result is made. backward: the groups that a
    backward exchanges over.
    """

    ranks: Ranks = SINGLE_RANK
    shapes: Sequence[tuple[Any, ...]] = ()
    layers: list[LinearLayer] = field(default_factory=list)
    common_inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    shared: list[tuple[Ranks, Mapping[str, str]]] = field(default_factory=list)
    backward: set[str] = field(default_factory=set)


@dataclass
class PartitionContext(PassContext):
    """The halves of one joint graph: passes are given the forward.

    given_bytes: of what a rank's program is given, besides what is the model's own. backward: None of an inference.
    results: how many of the forward's are its caller's. hosted: what waits on the host between the two, of each graph.
    """

    given_bytes: int = 0
    backward: GraphModule | None = None
    results: int = 0
    on_host: list[HostValues] = field(default_factory=list)
