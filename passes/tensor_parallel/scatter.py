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
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile._compat import known_process_group, process_group
from sp_compile.config import Ranks
from sp_compile.errors import SpError, at
from sp_compile.graph.edit import copied
from sp_compile.graph.record import mark
from sp_compile.graph.sizes import Sizes, sizes
from sp_compile.passes.base import Pass
from sp_compile.passes.job import Job, Note
from sp_compile.passes.localize.localize import localize
from sp_compile.passes.localize.memory_order import keep_order
from sp_compile.passes.localize.prove import validate
from sp_compile.passes.propagate import propagate
from sp_compile.passes.strategies.reduce import Means, Reduce
from sp_compile.sharding.axes import name_axes
from sp_compile.sharding.placement import VARYING, Placement, Plan, Shard
from sp_compile.spmd.inputs import Facts

from .bucket import bucket_reductions
from .choose import choose_cuts, common_inputs, declined, work_on_rows
from .gather import GatherOnce
from .tidy import draw_whole, drop_overwrites
from .varying import differing, mark_collectives, mark_numbers, reductions, respell, varying_inputs, wait_of

sp = torch.ops.sp
MAX_ROUNDS = 8
# Ranks draw as they did before, and without autograd behind it a gathered value is gathered for any use.
IGNORED = ("draw", "invariant")


@dataclass(frozen=True)
class Layer:
    """How one all_reduce of the program runs now: a line of `explain`'s table.

    mode: "scattered" (rows / n up to the next gather) or "full". ops: how many nodes run on its rows.
    """

    node: str
    where: str
    mode: str
    shape: tuple[object, ...]
    dim: int | None
    ops: int
    why: str = ""


class SequenceParallelLinear(Pass):
    """The pass, by hand: `SequenceParallelLinear(Ranks(n, group))(graph_module)`.

    facts: what is known of the inputs (see `spmd.inputs.Facts`); by default, that nobody looked.
    The result is not for autograd: an exported program is scattered for inference, a joint graph has its gradients.
    After the call: `layers`, a Layer for every all_reduce over the group; `notes`; `assumed`, the inputs that have to
    be equal on every rank of the group for the result to be right.
    What cannot be proved to be right is left as it was, and `notes` say why. The given graph is not changed, unless
    `facts` name nodes of it. Raises SpError if the group has another number of ranks.
    """

    name = "sequence_parallel_linear"
    provides = frozenset({"layers are scattered"})

    def __init__(self, ranks: Ranks, facts: Facts | None = None) -> None:
        super().__init__(ranks)
        self.ranks, self.facts = ranks, facts or Facts()
        self.layers: list[Layer] = []
        self.assumed: list[str] = []

    def apply(self, gm: GraphModule, job: Job) -> int:
        self._check_ranks()
        named = self.facts.gradients or self.facts.tangents  # which are nodes of this very graph
        try:
            local = self.scatter(gm if named else copied(gm))
        except SpError as error:  # what cannot be scattered stays as it is
            local = None
            self.layers = [replace(layer, mode="full", dim=None, ops=0, why=str(error)) for layer in self.layers]
            self.notes = [Note(f"not {self.name}", "graph", f"group {self.ranks.group}", str(error))]
        if local is None:
            return 0
        self.gm = local
        return max(1, sum(layer.mode == "scattered" for layer in self.layers))

    def _check_ranks(self) -> None:
        group = self.ranks.group
        if dist.is_initialized() and known_process_group(group) and process_group(group).size() != self.ranks.n:
            found = process_group(group).size()
            raise SpError(f"{self.name}: group {group!r} has {found} ranks, and not {self.ranks.n}: {self.ranks}")

    def scatter(self, gm: GraphModule) -> GraphModule | None:
        """The graph that runs on shards between the linears; None if nothing of it would."""
        summed = reductions(gm, self.ranks.group)
        gathers = gm.graph.find_nodes(op="call_function", target=sp.all_rows.default)
        if self.ranks.n == 1 or not (summed or gathers):
            return None
        mark_collectives(gm, self.ranks.group, self.facts.grid)
        self.facts = self.facts.after(drop_overwrites(gm))
        mark_numbers(gm, self.facts)
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                mark(node, requires_grad=False)
        axes = name_axes(gm)
        varying = varying_inputs(gm, axes, summed, self.facts)
        draw_whole(gm, differing(gm, axes, varying))
        chosen = choose_cuts(name_axes(gm), gm, summed, varying, self.ranks.n)
        self.inputs: dict[Node, Placement] = dict.fromkeys(varying, VARYING)
        found = {node: self._layer(node, chosen) for node in summed}
        kept = {self._scattered(gm, node, shard): found.pop(node) for node, shard in chosen.items() if shard}
        self._prune(gm, kept)
        self.layers = [*found.values(), *kept.values()]
        if not gathers and not any(layer.mode == "scattered" for layer in self.layers):
            return None
        plan = self._discharge(gm)
        self.assumed = sorted(common_inputs(plan))
        local = localize(gm, plan, self.job)
        bucket_reductions(local, plan)
        validate(local, plan, self.ranks.n)
        keep_order(local)
        local.graph.lint()
        return local

    def _analyse(self, gm: GraphModule) -> Plan:
        """Where every value lies, given where the scattered ones do."""
        axes = name_axes(gm)
        return propagate(gm, axes, self.ranks.n, self.inputs, begin=False, declines=declined)

    def _layer(self, node: Node, chosen: Mapping[Node, Shard | None]) -> Layer:
        shape, shard = sizes(node.meta["val"].shape), chosen.get(node)
        if shard is not None:
            return Layer(node.name, at(node), "scattered", shape, shard.dim, 0)
        why = "its rows have no axis to be cut along" if node in chosen else "no linear's result is summed"
        return Layer(node.name, at(node), "full", shape, None, 0, why)

    def _scattered(self, gm: GraphModule, node: Node, shard: Shard) -> Node:
        wait, frame = wait_of(node), Sizes(gm.graph).list(shard.spelt())
        assert wait is not None
        args = (node.args[0], shard.dim, frame, self.ranks.n, self.ranks.group)
        return respell(gm, wait, sp.reduce_scatter.default, args, node)

    def _prune(self, gm: GraphModule, kept: dict[Node, Layer]) -> None:
        """Leave an all_reduce where no work would be done on its rows: it would only be gathered again."""
        while True:
            plan = self._analyse(gm)
            ops = {node: work_on_rows(plan, node) for node, layer in kept.items() if layer.mode == "scattered"}
            for node, count in ops.items():
                kept[node] = replace(kept[node], ops=count)
            idle = [node for node, count in ops.items() if not count]
            if not idle:
                return
            for node in idle:
                kept[node] = replace(kept[node], mode="full", dim=None, why="all its rows are needed at once")
                node.target, node.args = sp.all_reduce.default, (node.args[0], *node.args[3:])

    def _discharge(self, gm: GraphModule) -> Plan:
        gather = GatherOnce(self.job)
        for _ in range(MAX_ROUNDS):
            plan = self._analyse(gm)
            plan.demands = [d for d in plan.demands if d.kind not in IGNORED]
            if not plan.demands:
                return plan
            for one in (Means(self.job), Reduce(self.job), gather):
                if one.discharge(gm, plan):
                    plan = self._analyse(gm)
                self.notes += [note for note in one.notes if note not in self.notes]
        first = plan.demands[0]
        raise SpError(f"{first.node.name} at {at(first.node)} demands ({first.kind}) what no pass gives: {first.why}")
