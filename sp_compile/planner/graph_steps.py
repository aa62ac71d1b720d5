"""Predict the training step of one graph, without running it.

The program of one rank is partitioned to a forward and a backward graph, as AOTAutograd does it. The result is a
`GraphStep`: the live bytes at each kernel of both graphs.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.torch_compat import memory_budget, partition_joint_graph
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.passes.cost.step_memory import GraphStep, StepMemory
from sp_compile.passes.cost.weight_memory import ADAMW_STATE
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.joint.offload_values import OffloadValues
from sp_compile.passes.joint.partitioned import PartitionedPasses
from sp_compile.passes.joint.save_attention import apply_checkpoint_policies
from sp_compile.rank_program import RankProgram

from .fused import fuse_on_meta
from .unroll import Unroll


def graph_step(lowered: RankProgram, options: SPConfig, offloads: bool) -> GraphStep:
    """Return the memory of one graph over a training step, without a run.

    The notes and runs of the passes over the joint graph are added to the report of the program.

    Args:
        lowered: The program of one rank.
        options: The options with which it would be compiled.
        offloads: True to add the step with all offloadable values on the host.
    """
    # With `offloads`, the graphs are walked twice: without offloading, and after `OffloadValues` of all values.
    all_passes = passes = lowered.partitioned_passes(replace(options, offload=1.0) if offloads else options)
    if all_passes is not None and offloads:
        passes = PartitionedPasses(replace(all_passes.job, options=replace(options, offload="never")))
    forward, backward = _partition_graph(lowered, options.uses_inductor, passes)

    def walk_graphs() -> GraphStep:
        """Return the memory of both graphs as they are: before or after offloading."""
        graphs = forward.graph, backward.graph if backward is not None else None
        return GraphStep.of(*graphs, options.uses_inductor, lowered.input_bytes)

    step = walk_graphs()
    if all_passes is None or passes is None:
        return step
    if offloads and backward is not None:
        OffloadValues().run(forward, replace(all_passes.job, backward=backward, results=passes.job.results))
        step = replace(step, hosted=walk_graphs())
    (step.hosted or step).offloaded = next(iter(all_passes.job.on_host), None)
    lowered.report.passes += all_passes.job.runs
    return step


def unroll_step(
    step: GraphStep, lowered: RankProgram, repeats: FewLayers | None, steps: list[Unroll] | None
) -> GraphStep:
    """Return the step of a graph with all layers, and with the option's share of saved values on the host.

    Args:
        step: The step of the graph with a few layers.
        lowered: The program of one rank.
        repeats: The layers that the program represents.
        steps: A list to which the `Unroll` is appended, from which the step for any share follows; or None.
    """
    options, n = lowered.options, lowered.ranks.n
    context = PassContext(lowered.ranks, options, machine=lowered.machine)
    machine = context.machine_of_nodes(lowered.graph.graph.find_nodes(op="placeholder"))
    full = Unroll.of(step, () if repeats is None else repeats.order, machine)
    if steps is not None:
        steps.append(full)
    if repeats is None or options.offload == "never" or step.hosted is None:
        return full.step() if repeats is not None else replace(step, hosted=None)
    weights, is_sharded = repeats.weights, options.state == "sharded"

    def fits(graph_step: GraphStep) -> bool:
        """Return True if a step of this graph fits the device with the program's state."""
        memory = StepMemory(weights, ADAMW_STATE if is_sharded else 0.0, [graph_step])
        return (memory.fsdp(n) if is_sharded else memory.peak) <= machine.memory

    return full.step(full.min_offload(fits) if options.offload == "auto" else full.share(float(options.offload)))


def _partition_graph(
    lowered: RankProgram, fused: bool, passes: PartitionedPasses | None
) -> tuple[GraphModule, GraphModule | None]:
    """Return forward and backward of a copy of the program after all passes, whose report is merged."""
    local, options = copy_graph(lowered.graph), lowered.options
    fuse_on_meta(local)
    joint = lowered.joint if options.has_joint_passes else None
    with memory_budget(options.activation_memory_budget), apply_checkpoint_policies(local):
        graphs = partition_joint_graph(local, lowered.inputs, joint, fused, passes)
    lowered.report.merge(lowered.joint.report)
    return graphs
