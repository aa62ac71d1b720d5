"""Define the program that torch.compile passes to the backend, and a store of captured programs.

A Dynamo graph is the program as Dynamo has traced it; the captured graph is the package's IR of it (`capture.py`). A
dry run (the planner, `explain`) examines the program of a model for several options without running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from sp_compile.lowering import torch_compat
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.capture.capture import capture
from sp_compile.passes.cost.group_names import has_dtensors, has_user_exchanges
from sp_compile.passes.sharding.axes import name_axes
from sp_compile.passes.sharding.find_sequences import find_sequences


@dataclass(frozen=True)
class UserProgram:
    """A Dynamo graph and its example inputs."""

    graph: GraphModule  # as Dynamo traced it, not captured
    inputs: Sequence[Any]  # one for each placeholder: fake or real tensors, SymInts

    @classmethod
    def from_dynamo(cls, gm: GraphModule, example_inputs: Sequence[Any]) -> UserProgram:
        """Return the program that Dynamo passes to a backend."""
        return cls(gm, tuple(example_inputs))

    @property
    def device(self) -> torch.device:
        """The device of the first tensor input; the CPU without one."""
        return next((x.device for x in self.inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))

    @property
    def has_dtensors(self) -> bool:
        """True if an input or a value of the graph is a DTensor."""
        return has_dtensors(self.graph, self.inputs)

    @property
    def has_balanced_inputs(self) -> bool:
        """True if an input is a `Sharded` whose rows are in a load-balanced order, computed at run time."""
        return any(isinstance(x, Sharded) and x.sharding.is_balanced for x in self.inputs)

    def has_only_user_exchanges(self) -> bool:
        """Return True if the user's program has collectives and no sequence that the package can shard.

        The backend then optimizes these collectives instead of splitting the program. Ranks do not communicate to
        decide this: all ranks with the same program have the same result.
        """
        if not has_user_exchanges(self.graph):
            return False
        try:
            graph = capture(self.graph, self.inputs)
            Canonicalize()(graph)
            axes = name_axes(graph)
            find_sequences(graph, axes)
        except torch_compat.RestartAnalysis:
            raise
        except Exception:  # the caller lowers the program next, which raises it again
            return False
        return not axes.sequences


@dataclass
class CapturedGraphs:
    """Graphs that Dynamo traced for a model, so that later dry runs need not trace it again."""

    # (Dynamo graph, inputs, tracing context) of the complete model; None for several graphs or symbolic lengths
    graph: tuple[GraphModule, Sequence[Any], torch_compat.TracingContext] | None = None
    graphs: int = 0  # number of graphs added so far
    captured: dict[GraphModule, GraphModule] = field(default_factory=dict)  # captured graph by Dynamo graph

    def add(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Add a graph that Dynamo compiles now: set `graph` if it is the complete model, else set it to None.

        Dynamo passes inputs that are no tensors, such as SymInts, for symbolic lengths.
        """
        self.graphs += 1
        context = torch_compat.TracingContext.try_get()
        has_static_sizes = all(isinstance(x, torch.Tensor) for x in inputs)
        is_complete = self.graphs == 1 and not torch_compat.is_fragment(gm)
        self.graph = (gm, inputs, context) if is_complete and has_static_sizes and context is not None else None
