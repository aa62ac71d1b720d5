"""What was made of a model once, so that it is looked at in more ways without being traced again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import TracingContext, is_fragment


@dataclass
class CapturedGraphs:
    """What Dynamo made of a model with certain layers: to look at it in more ways than it was traced for.

    graph: its only one, with inputs and the compilation's context; None: it has several, which take each other's
    results as a way leaves them, or lengths that are symbols. captured: each as the passes take it.
    """

    graph: tuple[GraphModule, Sequence[Any], TracingContext] | None = None
    graphs: int = 0
    captured: dict[GraphModule, GraphModule] = field(default_factory=dict)

    def add(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """One that is compiled now."""
        self.graphs += 1
        context, plain = TracingContext.try_get(), all(isinstance(x, Tensor) for x in inputs)
        alone = self.graphs == 1 and plain and context is not None and not is_fragment(gm)
        self.graph = (gm, inputs, context) if alone else None
