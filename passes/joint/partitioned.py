"""Run the passes over the partitions of a joint graph: overlap collectives, then offload saved values.

The partitions are the forward and the backward into which AOTAutograd's partitioner splits the graph. Saved values are
outputs of the forward that the backward reads.
"""

from __future__ import annotations

from torch.fx import GraphModule

from sp_compile import passes
from sp_compile.lowering.base.library import sources_digest
from sp_compile.lowering.base.ranks import SINGLE_RANK
from sp_compile.lowering.torch_compat import RECOMPUTES_DRAWS, FakeTensor
from sp_compile.passes.base import Passes, check_pass_order, iterate_passes
from sp_compile.passes.graph.fakes import infer_value

from .joint_context import PartitionContext
from .offload_values import OffloadValues
from .overlap import OverlapCollectives


class PartitionPasses(Passes):
    """Passes over the forward, then over the backward if there is one."""

    provides = frozenset({"overlapped collectives"})
    steps = (OverlapCollectives,)

    def apply(self, gm: GraphModule, context: PartitionContext) -> int:
        """Run `steps` on the forward, then on the backward in the context if any; return the number of changes."""
        changes = super().apply(gm, context)
        if context.backward is not None:
            self.gm = context.backward  # the graph that the steps edit
            changes += super().apply(context.backward, context)
            self.gm = gm
        return changes


class PartitionedPasses(Passes):
    """All passes over a forward and its backward, if there is one, in place.

    The compiler of a program calls `run_training` or `run_inference` after partitioning, before it compiles the graphs.
    """

    steps = (PartitionPasses, OffloadValues)
    context: PartitionContext

    def __init__(self, context: PartitionContext | None = None) -> None:
        """Check that earlier passes provide what each pass requires. The default context is that of one rank."""
        check_pass_order(iterate_passes(PartitionedPasses))
        super().__init__(context or PartitionContext(SINGLE_RANK))

    @property
    def key(self) -> str:
        """Return the passes' part of the key under which torch caches compiled code.

        It contains all that the result of the passes depends on, except the graph.
        """
        context, options = self.context, self.context.options
        # The memory determines how much "auto" offloads.
        memory = f"{options.state} {context.memory} {context.input_bytes}" if options.offload == "auto" else ""
        return f"{sources_digest(*passes.__path__)} {options.offload} {options.cost} {memory}"

    def run_training(self, forward: GraphModule, backward: GraphModule, results: int) -> None:
        """Run the passes on both graphs, in place, before they are compiled.

        Args:
            forward: The forward graph.
            backward: The backward graph.
            results: The number of the forward's outputs that are returned to its caller.
        """
        self.context.backward, self.context.results = backward, results
        _mark_recomputed_draws(backward)
        self.run(forward, self.context)

    def run_inference(self, forward: GraphModule) -> None:
        """Run the passes on a forward without a backward."""
        self.context.backward = None
        self.run(forward, self.context)


def _mark_recomputed_draws(gm: GraphModule) -> None:
    """Set meta["val"] of the random ops that the backward of a checkpoint runs again.

    The partitioner inserts these ops, which draw the random numbers of the forward again, without a value. The passes
    read the value of every node.
    """
    # infer_value uses the fake mode of this node.
    node_with_fake = next((n for n in gm.graph.nodes if isinstance(n.meta.get("val"), FakeTensor)), None)
    for target in RECOMPUTES_DRAWS:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            node.meta.setdefault("val", infer_value(target, node.args, node.kwargs, like=node_with_fake))
