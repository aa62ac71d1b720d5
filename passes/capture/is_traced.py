"""Store captured graphs, so that a plan of other options does not trace the model again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import TracingContext, is_fragment


@dataclass
class CapturedGraphs:
    """Graphs that Dynamo traced for a model with certain layers, for analyses with other options."""

    # the only graph, its inputs and context; None for several graphs or symbolic lengths
    graph: tuple[GraphModule, Sequence[Any], TracingContext] | None = None
    graphs: int = 0  # number of graphs
    captured: dict[GraphModule, GraphModule] = field(default_factory=dict)  # captured graph by Dynamo graph

    def add(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Add a graph that is being compiled, which sets `graph` if it is the only one and complete."""
        self.graphs += 1
        context, has_static_sizes = TracingContext.try_get(), all(isinstance(x, Tensor) for x in inputs)
        is_single_graph = self.graphs == 1 and has_static_sizes and context is not None and not is_fragment(gm)
        self.graph = (gm, inputs, context) if is_single_graph else None
