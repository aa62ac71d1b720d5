"""Tensor-parallel linear + all_reduce -> reduce_scatter, token-wise work on shards, all_gather where rows are needed.

    add(x, wait(all_reduce(y, "sum", g))) -> norm -> mm(w)      becomes
    add(shard(x), reduce_scatter(y, tokens)) -> norm on rows / n -> all_gather -> mm(w)

The propagation of the sequence passes, on the axis of a tensor-parallel group: what may run on shards is what the rules
say, so no norm is known by name. It works on graphs from torch.export and, where training is meant, on AOTAutograd's
joint graph, whose backward has its own all_reduces. Bytes: those of the all_reduces, (n - 1) / n twice a tensor.
Sources: Korthikanti et al. 2022 (arXiv 2205.05198) by hand; SGLang's scattered layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, node_line
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import known_process_group, process_group
from sp_compile.passes.base import Pass, Passes
from sp_compile.passes.context import Note, NoteKind, PassContext
from sp_compile.passes.graph.call import node_shape
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.graph.sizes import SizeBuilder
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.memory_order import KeepDimOrder
from sp_compile.passes.localize.validate_shapes import ValidateShapes
from sp_compile.passes.sharding.input_facts import InputFacts
from sp_compile.passes.sharding.placement import Shard
from sp_compile.passes.strategies.discharge import RepeatPasses
from sp_compile.passes.strategies.reduce_demands import DecomposeMeans, ReducePartials

from .bucket_collectives import BucketReductions
from .choose_layers import choose_scatter_dims, common_inputs, count_row_nodes
from .gather_scattered import GatherScattered
from .tidy_layers import DrawFullTensors, DropOverwrites
from .varying import LinearLayer, MarkVarying, ScatterContext, find_reductions, wait_of

sp = torch.ops.sp
IDLE_REASON = "all its rows are needed at once"


class ScatterReductions(Pass):
    """All_reduces of linears become reduce_scatters, along the dims that `choose_scatter_dims` finds best."""

    requires = frozenset({"differences are known", "draws are whole"})
    provides = frozenset({"sums are scattered"})

    def apply(self, gm: GraphModule, job: ScatterContext) -> int:
        chosen = choose_scatter_dims(gm, job)
        found = {node: _make_layer(node, chosen) for node in job.summed}
        cut = {self._scatter(node, shard): found.pop(node) for node, shard in chosen.items() if shard}
        job.layers = {**found, **cut}
        return len(cut)

    def _scatter(self, node: Node, shard: Shard) -> Node:
        wait, frame = wait_of(node), SizeBuilder(self.graph).list(shard.frame_arg())
        assert wait is not None
        args = (node.args[0], shard.dim, frame, self.job.ranks.n, self.job.ranks.group)
        return self.replace_call(wait, sp.reduce_scatter.default, args, node)


def _make_layer(node: Node, chosen: Mapping[Node, Shard | None]) -> LinearLayer:
    shape, shard = node_shape(node), chosen.get(node)
    if shard is not None:
        return LinearLayer(node.name, node_line(node), "scattered", shape, shard.dim, 0)
    why = "its rows have no axis to be cut along" if node in chosen else "no linear's result is summed"
    return LinearLayer(node.name, node_line(node), "full", shape, None, 0, why)


class RevertIdleScatters(Pass):
    """An all_reduce stays one where no work would be done on its rows: it would only be gathered again."""

    requires = frozenset({"sums are scattered"})
    provides = frozenset({"layers are chosen"})

    def apply(self, gm: GraphModule, job: ScatterContext) -> int:
        left = 0
        while True:
            plan = job.plan(gm)
            ops = {node: count_row_nodes(plan, node) for node in job.find_scattered}
            for node, count in ops.items():
                job.layers[node] = replace(job.layers[node], ops=count)
            idle = [node for node, count in ops.items() if not count]
            if not idle:
                return left
            for node in idle:
                job.layers[node] = replace(job.layers[node], mode="full", dim=None, why=IDLE_REASON)
                node.target, node.args = sp.all_reduce.default, (node.args[0], *node.args[3:])
            left += len(idle)
            job.invalidate()


class DischargeDemands(RepeatPasses):
    """What is needed whole is gathered, and what is summed over rows is reduced."""

    requires = frozenset({"layers are chosen"})
    steps = (DecomposeMeans, ReducePartials, GatherScattered)


class LocalizeLayers(Passes):
    """The graph of one rank, where anything of it would run on shards."""

    requires = frozenset({"layers are chosen"})
    steps = (DischargeDemands, Localize, BucketReductions, ValidateShapes, KeepDimOrder)

    @classmethod
    def of(cls, job: ScatterContext) -> Pass | None:
        return cls() if job.find_scattered else None


class SequenceParallelLinear(Passes):
    """All of it, by hand: `SequenceParallelLinear(Ranks(n, group))(graph_module)`.

    facts: what is known of the inputs (see `InputFacts`); by default, that nobody looked.
    The result is not for autograd: an exported program is scattered for inference, a joint graph has its gradients.
    After the call: `layers`, a Layer for every all_reduce over the group; `notes`; `assumed`, the inputs that have to
    be equal on every rank of the group for the result to be right.
    What cannot be proved to be right is left as it was, and `notes` say why. The given graph is not changed, unless
    `facts` name nodes of it. Raises SpError if the group has another number of ranks.
    """

    provides = frozenset({"layers are scattered"})
    steps = (DropOverwrites, MarkVarying, DrawFullTensors, ScatterReductions, RevertIdleScatters, LocalizeLayers)

    def __init__(self, ranks: Ranks, facts: InputFacts | None = None) -> None:
        super().__init__(ranks)
        self.facts = facts or InputFacts()
        self.layers: list[LinearLayer] = []
        self.assumed: list[str] = []

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        self._check_ranks(job.ranks)
        named = self.facts.gradients or self.facts.tangents  # which are nodes of this very graph
        local = gm if named else copy_graph(gm)
        summed = find_reductions(local, job.ranks.group)
        if job.ranks.n == 1 or not summed:
            return 0
        work = ScatterContext(job.ranks, runs=job.runs, facts=self.facts, summed=summed)
        self.gm = local
        try:
            super().apply(local, work)
            self.layers, self.notes = [*work.layers.values()], work.notes
        except SpError as error:  # what cannot be scattered stays as it is
            work.input_placements = None
            layers, why = work.layers.values(), error.cause
            self.layers = [replace(layer, mode="full", dim=None, ops=0, why=why) for layer in layers]
            self.notes = [Note(NoteKind.DECLINED, self.name, why, where=f"group {job.ranks.group}")]
        job.notes += self.notes
        if work.input_placements is None:
            self.gm = gm
            return 0
        self.assumed = sorted(common_inputs(work.input_placements))
        return max(1, len(work.find_scattered))

    def _check_ranks(self, ranks: Ranks) -> None:
        group = ranks.group
        if dist.is_initialized() and known_process_group(group) and process_group(group).size() != ranks.n:
            found = process_group(group).size()
            raise SpError("SP907", f"ranks: expected {found} ranks, the size of group {group!r}, got {ranks.n}.")
