"""What becomes of the halves of a joint graph: exchanges are hidden, then what is kept goes to the host."""

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
    """The forward, then the backward if there is one."""

    provides = frozenset({"exchanges are hidden"})
    steps = (OverlapCollectives,)

    def apply(self, gm: GraphModule, job: PartitionContext) -> int:
        changes = super().apply(gm, job)
        if job.backward is not None:
            self.gm = job.backward
            changes += super().apply(job.backward, job)
            self.gm = gm
        return changes


class PartitionedPasses(Passes):
    """All that is done to a forward and its backward, in place, or to a forward that has none."""

    steps = (PartitionPasses, OffloadValues)
    given: PartitionContext

    def __init__(self, job: PartitionContext | None = None) -> None:
        check_pass_order(iterate_passes(PartitionedPasses))
        super().__init__(job or PartitionContext(SINGLE_RANK))

    @property
    def key(self) -> str:
        """For caches of compiled code."""
        job = self.given
        room = f"{job.state} {job.memory} {job.given_bytes}" if job.offload == "auto" else ""
        return f"{sources_digest(*passes.__path__)} {job.offload} {job.cost} {room}"

    def run_training(self, forward: GraphModule, backward: GraphModule, results: int) -> None:
        """results: how many of the forward's are its caller's."""
        self.given.backward, self.given.results = backward, results
        _mark_recomputed_draws(backward)
        self.run(forward, self.given)

    def run_inference(self, forward: GraphModule) -> None:
        """Of an inference."""
        self.given.backward = None
        self.run(forward, self.given)


def _mark_recomputed_draws(gm: GraphModule) -> None:
    """torch writes what draws again, in the backward of a checkpoint, without its value."""
    fake = next((n for n in gm.graph.nodes if isinstance(n.meta.get("val"), FakeTensor)), None)
    for target in RECOMPUTES_DRAWS:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            node.meta.setdefault("val", infer_value(target, node.args, node.kwargs, like=fake))
