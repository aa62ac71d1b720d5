"""The base of passes that discharge demands. A strategy is one file: what it claims, and what it puts in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from sp_compile.config import Ranks
from sp_compile.cost.machine import Machine
from sp_compile.errors import SpError, at
from sp_compile.graph.edit import Editor
from sp_compile.graph.sizes import Size, sizes
from sp_compile.sharding.axes import Axes, find_sequences, name_axes
from sp_compile.sharding.placement import Demand, Placement, Plan, Shard

from .propagate import propagate

aten = torch.ops.aten


@dataclass(frozen=True)
class Note:
    """One line of the report: what a pass did, or would not do, to a node of the user's program."""

    done: str  # "ulysses", "gather", ...
    node: str
    where: str  # the user's source line
    why: str = ""


@dataclass(frozen=True)
class Settings:
    """What passes need to know of the job; the same on every rank."""

    ranks: Ranks
    seq_dims: Mapping[str, int] | None = None
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    gather_outputs: bool = True
    attention: str = "auto"
    layout: str = "auto"
    machine: Machine | None = None  # of the cost model; the device's defaults if None
    folds: int = 1  # chunks of the sequence that a rank holds: 2 for zigzag
    fallback: str = "gather"
    param_grads: str = "reduce"
    aligned: frozenset[str] | None = None  # groups of the program whose ranks hold the same rows; None: all


def settings(ranks: Ranks | int | Settings, **options: Any) -> Settings:
    """Settings from a number of ranks (then no process group is named), from Ranks, or as they are."""
    if isinstance(ranks, Settings):
        return ranks
    return Settings(Ranks(ranks, "") if isinstance(ranks, int) else ranks, **options)


def analyse(gm: GraphModule, job: Settings) -> tuple[Axes, Plan]:
    """Name the axes, find the sequence, propagate. Raises SpError when `seq_dims` names no input."""
    axes = name_axes(gm)
    axes.folds = job.folds
    find_sequences(gm, axes, _seq_nodes(gm, job.seq_dims))
    by_name = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
    inputs = {by_name[name]: placement for name, placement in job.inputs.items()}
    return axes, propagate(gm, axes, job.ranks.n, inputs, job.gather_outputs)


def _seq_nodes(gm: GraphModule, seq_dims: Mapping[str, int] | None) -> dict[Node, int] | None:
    if seq_dims is None:
        return None
    nodes = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
    missing = sorted(set(seq_dims) - set(nodes))
    if missing:
        raise SpError(f"seq_dims: no input is called {missing}; the graph's inputs are {sorted(nodes)}")
    return {nodes[name]: dim for name, dim in seq_dims.items()}


class Rewrite(PassBase, Editor):
    """Discharges the demands it claims by inserting exchanges that are identities in the global view.

    By hand: `Ulysses(2)(graph_module)`, where 2 is the number of ranks, or Ranks(n, group), or Settings.
    Every call analyses the graph anew, so that passes can be run in any order, and more than once.
    """

    name = "rewrite"
    kinds: frozenset[str] = frozenset()

    def __init__(self, ranks: Ranks | int | Settings, **options: Any) -> None:
        super().__init__()
        self.job = settings(ranks, **options)
        self.notes: list[Note] = []

    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(graph_module, self.discharge(graph_module, analyse(graph_module, self.job)[1]))

    def discharge(self, gm: GraphModule, plan: Plan) -> bool:
        """Claim and rewrite; True if the graph changed (the plan is then out of date)."""
        self.begin(gm, plan)
        by_node: dict[Node, list[Demand]] = {}
        for demand in plan.demands:
            if demand.kind in self.kinds:
                by_node.setdefault(demand.node, []).append(demand)
        changed = False
        for node, demands in by_node.items():
            refusal = self.refuses(node, demands)
            if refusal is None:
                self.rewrite(node, demands)
                changed = True
            elif refusal:
                self.note(node, refusal, done=f"not {self.name}")
        if changed:
            gm.graph.lint()
            gm.recompile()
        return changed

    def begin(self, gm: GraphModule, plan: Plan) -> None:
        """Bind the pass to a graph and its plan, and forget the notes of the last one."""
        self.gm, self.plan, self.notes = gm, plan, []
        self.edit(gm.graph)

    def refuses(self, node: Node, demands: list[Demand]) -> str | None:
        """None to claim the node's demands; else why not ("" if it is no business of this pass)."""
        raise NotImplementedError

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Meet the node's demands; the graph keeps its meaning in the global view."""
        raise NotImplementedError

    # What rewrites are written with.

    def frame(self, shard: Shard) -> list[int | Node]:
        """The shard's frame as sp:: ops take it: [outer, size, start, length] (and folds)."""
        return self.sizes.list((shard.outer, *shard.frame.spelt()))

    def is_at(self, position: int | Node, length: Size, dim: int, ndim: int, like: Node) -> Node:
        """arange(length) == position, shaped to broadcast along `dim` of `ndim`."""
        device = {"device": like.meta["val"].device}
        positions = self.compute(aten.arange.default, (self.sizes(length),), like, device)
        here = self.compute(aten.eq.Scalar, (positions, position), like)
        shape = [self.sizes(length) if d == dim else 1 for d in range(ndim)]
        return self.compute(aten.reshape.default, (here, shape), like)

    def repeat_each(self, x: Node, dim: int, times: Size, like: Node) -> Node:
        """repeat_interleave(x, times, dim), spelt (.., h, ..) -> (.., h, 1, ..) -> (.., h, r, ..) -> (.., h*r, ..)."""
        shape = sizes(x.meta["val"].shape)
        before, after = shape[:dim], shape[dim:][1:]
        behind = dim + 1 if dim >= 0 else dim
        each = self.compute(aten.unsqueeze.default, (x, behind), like)
        each = self.compute(
            aten.expand.default, (each, self.sizes.list((*before, shape[dim], times, *after))), like
        )
        whole = self.sizes.list((*before, shape[dim] * times, *after))
        return self.compute(aten.reshape.default, (each, whole), like)

    def note(self, node: Node, why: str, done: str | None = None) -> None:
        """Add a line to the report; `done` is the pass's name unless given."""
        self.notes.append(Note(done or self.name, node.name, at(node), why))

    def error(self, node: Node, why: str) -> SpError:
        """An SpError that names the node, its op and the user's line."""
        return SpError(f"{node.name} ({node.target}) at {at(node)}: {why}")
