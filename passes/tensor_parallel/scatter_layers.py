"""Scatter tensor-parallel layers: reduce_scatter, token-wise ops on shards, all_gather.

    add(x, wait(all_reduce(y, "sum", g))) -> norm -> mm(w)      becomes
    add(shard(x), reduce_scatter(y, tokens)) -> norm on rows / n -> all_gather -> mm(w)

This is the propagation of the sequence passes on the axis of a tensor-parallel group. The sharding rules determine
which ops may run on shards, so no norm is matched by name. It works on graphs from torch.export and, for training, on
AOTAutograd's joint graph, whose backward has its own all_reduces. The bytes are those of the all_reduces: (n - 1) / n
of each tensor, twice. A layer is one all_reduce of the program, scattered or full; its scatter is idle if no op runs on
its rows. Sources: Korthikanti et al. 2022 (arXiv 2205.05198), without compiler; SGLang's scattered layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, node_line
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import is_known_process_group, process_group
from sp_compile.passes.base import Pass, Passes
from sp_compile.passes.context import Note, NoteKind, PassContext
from sp_compile.passes.cost.input_facts import InputFacts
from sp_compile.passes.graph.call import node_shape
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.graph.sizes import SizeBuilder
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.memory_order import KeepDimOrder
from sp_compile.passes.localize.validate_shapes import ValidateShapes
from sp_compile.passes.sharding.placement import Shard
from sp_compile.passes.strategies.discharge import RepeatPasses
from sp_compile.passes.strategies.reduce_demands import DecomposeMeans, ReducePartials

from .bucket_collectives import BucketReductions
from .choose_layers import choose_scatter_dims, common_inputs, count_row_nodes
from .gather_scattered import GatherScattered
from .tidy_layers import DrawFullTensors, DropOverwrites
from .varying import LinearLayer, MarkVarying, ScatterContext, find_reductions, find_wait

sp = torch.ops.sp
IDLE_REASON = "all its rows are needed at once"


class ScatterReductions(Pass):
    """Pass that replaces all_reduces of linears by reduce_scatters along the chosen dims."""

    requires = frozenset({"known differences", "replicated draws"})
    provides = frozenset({"scattered sums"})

    def apply(self, gm: GraphModule, context: ScatterContext) -> int:
        """Replace the chosen all_reduces by reduce_scatters; return their number.

        `context.layers` gets a row of the report for each all_reduce, by the node that now computes it.
        """
        chosen = choose_scatter_dims(gm, context)
        layers = {node: _make_layer(node, chosen) for node in context.summed}
        scattered: dict[Node, LinearLayer] = {}  # by reduce_scatter
        for node, shard in chosen.items():
            if shard is not None:
                layer = layers.pop(node)
                scattered[self._scatter(node, shard)] = layer
        context.layers = {**layers, **scattered}
        return len(scattered)

    def _scatter(self, node: Node, shard: Shard) -> Node:
        """Replace an all_reduce and its wait by a reduce_scatter to the placement `shard`, and return its node."""
        wait, frame = find_wait(node), SizeBuilder(self.graph).list(shard.frame_arg())
        assert wait is not None
        args = (node.args[0], shard.dim, frame, self.context.ranks.n, self.context.ranks.group)
        return self.replace_call(wait, sp.reduce_scatter.default, args, node)


def _make_layer(node: Node, chosen: Mapping[Node, Shard | None]) -> LinearLayer:
    """Return the row of the report for an all_reduce: scattered along a dim, or full with the reason.

    `ops`, the number of ops that run on its rows, is counted later.

    Args:
        node: The all_reduce.
        chosen: The shards of the all_reduces of linears; None for those that cannot be scattered.
    """
    shape, shard = node_shape(node), chosen.get(node)
    if shard is not None:
        return LinearLayer(node.name, node_line(node), mode="scattered", shape=shape, dim=shard.dim, ops=0)
    why = "its rows have no axis to scatter along" if node in chosen else "no linear's result is summed"
    return LinearLayer(node.name, node_line(node), mode="full", shape=shape, dim=None, ops=0, why=why)


class RevertIdleScatters(Pass):
    """Pass that restores an all_reduce if no op runs on its rows before they are gathered again."""

    requires = frozenset({"scattered sums"})
    provides = frozenset({"chosen layers"})

    def apply(self, gm: GraphModule, context: ScatterContext) -> int:
        """Revert idle scatters until none remains, and return their number.

        A scatter is idle if no op runs on its shards of rows. Without it, another one may become idle.
        """
        num_reverted = 0
        while True:
            plan = context.plan(gm)
            counts = {node: count_row_nodes(plan, node) for node in context.scattered_nodes}
            for node, count in counts.items():
                context.layers[node] = replace(context.layers[node], ops=count)  # for the report
            idle = [node for node, count in counts.items() if not count]
            if not idle:
                return num_reverted
            for node in idle:
                context.layers[node] = replace(context.layers[node], mode="full", dim=None, why=IDLE_REASON)
                x, _, _, *ranks_and_group = node.args  # without the dim and the frame of the reduce_scatter
                node.target, node.args = sp.all_reduce.default, (x, *ranks_and_group)
            num_reverted += len(idle)
            context.invalidate()


class DischargeDemands(RepeatPasses):
    """Passes that gather values of which all rows are needed, and reduce sums over rows."""

    requires = frozenset({"chosen layers"})
    steps = (DecomposeMeans, ReducePartials, GatherScattered)


class LocalizeLayers(Passes):
    """Passes that create the graph of one rank, if any op runs on shards."""

    requires = frozenset({"chosen layers"})
    steps = (DischargeDemands, Localize, BucketReductions, ValidateShapes, KeepDimOrder)

    @classmethod
    def of(cls, context: ScatterContext) -> Pass | None:
        """Create the passes, or return None if no layer is scattered."""
        return cls() if context.scattered_nodes else None


class SequenceParallelLinear(Passes):
    """All passes of scattered layers: `SequenceParallelLinear(Ranks(n, group))(graph_module)`.

    The result does not support autograd: an exported program is scattered for inference, and a joint graph contains its
    gradients. Layers that cannot be proved correct are not changed, and `notes` contains the reason. The input graph is
    not changed, unless `facts` refers to its nodes.

    Args:
        ranks: The number of ranks and the name of their group.
        facts: The facts about the inputs (see `InputFacts`); by default none.

    Attributes:
        layers: A LinearLayer for each all_reduce over the group, after a call.
        notes: The notes of the pass, after a call.
        assumed: The inputs that must be equal on all ranks of the group, after a call.

    Raises:
        SpError: The group has another number of ranks.
    """

    provides = frozenset({"scattered layers"})
    steps = (DropOverwrites, MarkVarying, DrawFullTensors, ScatterReductions, RevertIdleScatters, LocalizeLayers)

    def __init__(self, ranks: Ranks, facts: InputFacts | None = None) -> None:
        super().__init__(ranks)
        self.facts = facts or InputFacts()
        self.layers: list[LinearLayer] = []
        self.assumed: list[str] = []

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Scatter layers, set `self.gm` to the graph of one rank, and return the number of scattered layers.

        If the graph is not changed, return 0 and set `self.gm` to the input. This also happens if a pass raises
        SpError: its cause becomes the reason of all layers in the report. Else return at least 1.
        """
        self._check_ranks(context.ranks)
        # `facts` may have nodes of the graph. The caller then passes a copy, and discards it if the result is 0.
        refers_to_nodes = self.facts.gradients or self.facts.tangents
        local = gm if refers_to_nodes else copy_graph(gm)
        summed = find_reductions(local, context.ranks.group)
        if context.ranks.n == 1 or not summed:
            return 0
        scatter = ScatterContext(context.ranks, runs=context.runs, facts=self.facts, summed=summed)
        self.gm = local
        try:
            super().apply(local, scatter)
            self.layers, self.notes = [*scatter.layers.values()], scatter.notes
        except SpError as error:
            scatter.input_placements = None
            layers, why = scatter.layers.values(), error.cause
            self.layers = [replace(layer, mode="full", dim=None, ops=0, why=why) for layer in layers]
            self.notes = [Note(NoteKind.DECLINED, self.name, why, where=f"group {context.ranks.group}")]
        context.notes += self.notes
        if scatter.input_placements is None:  # not localized: no layer is scattered, or a pass raised
            self.gm = gm
            return 0
        self.assumed = sorted(common_inputs(scatter.input_placements))
        return max(1, len(scatter.scattered_nodes))  # not 0, which would mean that the graph is unchanged

    def _check_ranks(self, ranks: Ranks) -> None:
        """Raise SpError if the group exists in this process with another number of ranks."""
        group = ranks.group
        if not dist.is_initialized() or not is_known_process_group(group):
            return
        size = process_group(group).size()
        if size != ranks.n:
            raise SpError("SP907", f"ranks: expected {size} ranks, the size of group {group!r}, got {ranks.n}.")
