"""Passes over what AOTAutograd makes of a program: forward and backward in one graph, the collectives in sight.

A pass of collectives alone belongs there: gradients' all_reduces exist, and those of DTensor, autograd is behind, and
what the partitioner keeps for the backward is decided on the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from sp_compile import _compat, passes
from sp_compile.config import Ranks, SPConfig
from sp_compile.errors import at
from sp_compile.graph.edit import copied
from sp_compile.graph.inline import lower_exchanges
from sp_compile.graph.record import erase
from sp_compile.lowering.library import sources_digest
from sp_compile.passes import collectives
from sp_compile.passes.base import CollectivePass, Pass, check_order, import_rooms, registered
from sp_compile.passes.collectives.merge.chains import check_reductions
from sp_compile.passes.job import Job, Note
from sp_compile.passes.report import Report
from sp_compile.passes.tensor_parallel.own_rows import mark_own_rows
from sp_compile.passes.tensor_parallel.scatter import SequenceParallelLinear
from sp_compile.spmd.declare import declared
from sp_compile.spmd.session import Session

from .facts import compare_gradients, joint_facts

import_rooms("sp_compile.passes.collectives", collectives.__path__)


@dataclass
class JointPasses:
    """What is done to the joint graph, and what came of it.

    session: whom the program connects, and what they know of its inputs, which are called input_0, input_1, ...: the
    function's tensor arguments in order. shapes: theirs, on this rank. scatter: may layers run scattered? merge, cost:
    the policy of `merge_reductions` and its constants. decompose: into what Inductor wants. scattered: the groups over
    which layers are.
    """

    session: Session = field(default_factory=Session)
    shapes: Sequence[tuple[Any, ...]] = ()
    scatter: bool = True
    merge: str = "never"
    cost: Mapping[str, Any] | None = None
    decompose: bool = False
    report: Report = field(default_factory=lambda: Report(1))
    scattered: set[str] = field(default_factory=set)

    @staticmethod
    def of(config: SPConfig, session: Session, shapes: Sequence[tuple[Any, ...]]) -> JointPasses:
        """The passes that the options ask for."""
        scatter = config.sequence_parallel_linear != "never"
        return JointPasses(
            session, shapes, scatter, config.merge_reductions, config.cost, config.compiler == "inductor"
        )

    def key(self) -> str | None:
        """The same for what does the same, for caches of compiled code; None where ranks ask each other meanwhile."""
        version = sources_digest(*passes.__path__, str(Path(__file__).parents[2]))
        return None if self.session.groups else f"sp_compile joint {version} {self.merge} {self.cost} {declared()}"

    def __call__(self, gm: GraphModule) -> None:
        """Change the graph in place. Raises SpError as the passes do, on all ranks of a group that talk."""
        groups = self.session.groups
        self.report.parallel = sorted({ranks.n for ranks in groups})
        check_reductions(gm.graph)
        shared: list[tuple[Ranks, Mapping[str, str]]] = []
        for ranks in groups:
            if ranks.group in self.session.apart:
                mark_own_rows(gm, ranks, partial(self.session.rows, ranks))
            tangents = self._scatter(gm, ranks)
            if tangents is not None:
                shared.append((ranks, tangents))
            lower_exchanges(gm, _compat.inductor_decompositions() if self.decompose else None)
        self._join_exchanges(gm)
        for ranks, tangents in shared:
            if self.session.compares_gradients(ranks):
                compare_gradients(gm, ranks, tangents)

    def _scatter(self, gm: GraphModule, ranks: Ranks) -> Mapping[str, str] | None:
        """Layers over one group, if every rank of it would exchange the same.

        The gradients of results that these have to have alike then, by name, and where each result is made.
        """
        local, numbers = copied(gm), self.session.numbers(gm, ranks)
        facts = joint_facts(local, self.session.facts[ranks.group], self.shapes)
        why = OTHER_OPS if numbers is None else REGROUPED if facts is None else "" if self.scatter else NEVER
        one: SequenceParallelLinear | None = None
        made = {} if facts is None else {name: _sources(nodes) for name, nodes in facts.tangents.items()}
        if facts is not None and numbers is not None and not why:
            one = SequenceParallelLinear(ranks, replace(facts, numbers=numbers))
            scattered = self._run(one, local)
            local = scattered if one.changes else gm
        assumed = one.assumed if one is not None else []
        tangents = {name: made.get(name) or "of this program" for name in assumed if name.startswith("tangents")}
        if not self.session.same_exchanges(local, ranks, list(tangents)):
            one, local, why = None, gm, OTHER_EXCHANGES
        layers = one.layers if one is not None else []
        if not self.session.same_layers(gm, local, ranks, layers) and local is not gm:
            one, why = None, OTHER_LAYERS
        if one is None:
            self.report.add([Note("not sequence_parallel_linear", "graph", f"group {ranks.group}", why)])
            return None
        self.report.layers += one.layers
        self.report.add(one.notes)
        if local is gm:
            return None
        adopt(gm, local)
        self.scattered.add(ranks.group)
        return tangents

    def _join_exchanges(self, gm: GraphModule) -> None:
        """Permutes into all-to-alls, and reductions over several axes into one; not where ranks could do otherwise.

        What a rank's neighbour over one group sees, its neighbours over others have to know as well.
        """
        kinds = registered(CollectivePass)
        check_order(kinds)
        if not self.session.all_alike():
            names = ", ".join(kind.name for kind in kinds)
            why = "the ranks' programs differ, so they might not all rewrite the same exchanges"
            self.report.add([Note(f"not {names}", "graph", "the whole graph", why)])
            return
        for one in filter(None, (kind.of(self) for kind in kinds)):
            self._run(one, gm)
            self.report.add(one.notes)
        gm.recompile()

    def _run(self, one: Pass, gm: GraphModule) -> GraphModule:
        """The graph that the pass makes; its lap is in the report."""
        job = Job.begin(one.given)
        one.run(gm, job)
        self.report.passes += job.laps
        return one.gm


NEVER = "the option sequence_parallel_linear is 'never'"
REGROUPED = "AOTAutograd has regrouped the inputs, so nothing says which of them are equal on all ranks"
OTHER_OPS = "the ranks run different ops, so nothing says which values are equal on all of them"
OTHER_EXCHANGES = "parts of different sizes: the ranks would not exchange the same"
OTHER_LAYERS = (
    "ranks of another group would scatter other layers over theirs (other values are equal there), and the program "
    "exchanges over both"
)


def _sources(results: Sequence[Node]) -> str:
    return " or ".join(dict.fromkeys(f"made at {at(result)}" for result in results))


def adopt(gm: GraphModule, local: GraphModule) -> None:
    """Give `gm` the nodes of another graph over the same inputs; its own Graph object stays."""
    inputs = gm.graph.find_nodes(op="placeholder")
    theirs = local.graph.find_nodes(op="placeholder")
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "placeholder":
            gm.graph.erase_node(node)
    made: dict[Node, Node] = dict(zip(theirs, inputs, strict=True))
    for node in local.graph.nodes:
        if node.op != "placeholder":
            made[node] = gm.graph.node_copy(node, made.__getitem__)
        else:
            made[node].meta.update(node.meta)
    for node in gm.graph.nodes:
        erase(node)
    gm.graph.lint()
    gm.recompile()
