"""Predict the training step of one graph, without running it.

The program of one rank is partitioned to a forward and a backward graph, as AOTAutograd does it. The result is a
`GraphStep`: the live bytes at each kernel of both graphs.
"""

from __future__ import annotations

from dataclasses import replace

from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.torch_compat import memory_budget, partition_joint_graph
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.passes.cost.step_memory import GraphStep, StepMemory
from sp_compile.passes.cost.weight_memory import ADAMW_STATE
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.graph.node_info import mark_shards
from sp_compile.passes.joint.offload_values import OffloadValues
from sp_compile.passes.joint.partitioned import PartitionedPasses
from sp_compile.passes.joint.save_attention import apply_checkpoint_policies
from sp_compile.rank_program import RankProgram

from .fused import fuse_on_meta
from .unroll import Unroll


def graph_step(lowered: RankProgram, options: SPConfig, with_hosted: bool) -> GraphStep:
    """Predict the live bytes of one graph over a training step, without running it.

    The notes and runs of the passes over the joint graph are added to the report of the program.

    Args:
        lowered: The program of one rank.
        options: The options with which it would be compiled.
        with_hosted: True to predict two steps, with nothing and with all offloadable values on the host, between which
            a plan chooses a share.

    Returns:
        The step as the options offload it. With `with_hosted`, the step with nothing on the host, and as its `hosted`
        that with all offloadable values there.
    """
    # `requested` has all passes over the two graphs, `passes` those that run in the partition. Both are None if there
    # is nothing to overlap or to offload. With `with_hosted`, only `requested` offloads values (all of them): the first
    # step is predicted after `passes`, then the values are offloaded below, and the second step is predicted.
    if with_hosted:
        requested = lowered.partitioned_passes(replace(options, offload=1.0))
        passes = requested and PartitionedPasses(replace(requested.context, options=replace(options, offload="never")))
    else:
        requested = passes = lowered.partitioned_passes(options)
    # Partition a copy into forward and backward, as the compiler of the program does.
    local = copy_graph(lowered.graph)
    mark_shards(local.graph)
    fuse_on_meta(local)  # attention as the kernels that a GPU runs
    joint = lowered.joint if lowered.options.has_joint_passes else None
    with memory_budget(lowered.options.activation_memory_budget), apply_checkpoint_policies(local):
        forward, backward = partition_joint_graph(local, lowered.inputs, joint, options.is_inductor, passes)
    lowered.report.merge(lowered.joint.report)

    def walk_graphs() -> GraphStep:
        """Return the memory of both graphs as they are: before or after offloading."""
        graphs = forward.graph, backward.graph if backward is not None else None
        return GraphStep.of(*graphs, options.is_inductor, lowered.input_bytes)

    step = walk_graphs()
    if requested is None or passes is None:
        return step
    if with_hosted and backward is not None:  # the partition has set `results`, the number of the forward's results
        OffloadValues().run(forward, replace(requested.context, backward=backward, results=passes.context.results))
        step = replace(step, hosted=walk_graphs())
    offloaded_step = step if step.hosted is None else step.hosted
    # `on_host` has one entry for each graph with offloaded values.
    offloaded_step.offloaded = next(iter(requested.context.on_host), None)
    lowered.report.passes += requested.context.runs
    return step


def unroll_step(
    step: GraphStep, lowered: RankProgram, repeats: FewLayers | None, unrolls: list[Unroll] | None
) -> GraphStep:
    """Return the step of the model with all layers, with the values on the host that the option `offload` requests.

    Args:
        step: The step of a graph that may have a few of the layers, from `graph_step`.
        lowered: The program of one rank.
        repeats: The layers that the graph represents; None if it has all layers.
        unrolls: A list to which the `Unroll` is appended, from which a plan computes the step for any share; or None.
    """
    options, n = lowered.options, lowered.ranks.n
    context = PassContext(lowered.ranks, options, machine=lowered.machine)  # only to select the machine
    machine = context.machine_of_nodes(lowered.graph.graph.find_nodes(op="placeholder"))
    unroll = Unroll.of(step, () if repeats is None else repeats.order, machine)
    if unrolls is not None:
        unrolls.append(unroll)
    if repeats is None:  # the graph has all layers
        return replace(step, hosted=None)
    if options.offload == "never" or step.hosted is None:
        return unroll.step()
    weights, is_sharded = repeats.weights, options.state == "sharded"

    def can_fit(candidate: GraphStep) -> bool:
        """Return True if the values of a step and the model's state fit in the memory of the device.

        As in `OffloadValues`, the state of the optimizer counts only if it is sharded; else it is unknown.
        """
        memory = StepMemory(weights, ADAMW_STATE if is_sharded else 0.0, [candidate])
        # `fsdp(n)` is the peak on each of n ranks that share the weights and the state of the optimizer.
        return (memory.fsdp(n) if is_sharded else memory.peak) <= machine.memory

    if options.offload == "auto":
        return unroll.step(unroll.min_offload(can_fit))
    return unroll.step(unroll.share(float(options.offload)))
