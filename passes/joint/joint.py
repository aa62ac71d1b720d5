"""Run the passes over AOTAutograd's joint graph of forward and backward.

Passes that rewrite only collectives run here: the all_reduces of gradients and of DTensor are in the graph, autograd is
complete, and the partitioner selects the saved values from the result.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from sp_compile import passes
from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import node_line
from sp_compile.lowering.base.library import sources_digest
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes import collectives
from sp_compile.passes.base import (
    CAPTURED_PROPERTIES,
    CollectivePass,
    Pass,
    Passes,
    check_pass_order,
    import_submodules,
    iterate_passes,
    registered_passes,
)
from sp_compile.passes.collectives.merge.find_chains import check_reductions
from sp_compile.passes.context import Note, NoteKind, PassContext
from sp_compile.passes.cost.group_names import is_collective, named_groups
from sp_compile.passes.graph.call import graph_tangents, is_tensor
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.graph.inline import lower_exchanges
from sp_compile.passes.graph.node_info import clear_node_info, set_node_info
from sp_compile.passes.report import Report
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear

from .backward_sources import AnnotateBackwardSources
from .joint_context import JointContext
from .joint_facts import map_facts
from .save_attention import SaveAttentionInCheckpoints
from .view_results import SeparateResultStorage

import_submodules("sp_compile.passes.collectives", collectives.__path__)


class ScatterLayers(Passes):
    """Pass that scatters the layers over the job's group."""

    requires = frozenset({"captured"})
    provides = frozenset({"scattered layers"})
    steps = (SequenceParallelLinear,)

    def apply(self, gm: GraphModule, job: JointContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        ranks, session, scatter = job.ranks, job.session, job.options.sequence_parallel_linear != "never"
        local = copy_graph(gm)
        facts = map_facts(local, session.facts[ranks.group], job.shapes)
        why = REGROUPED_WHY if facts is None else "" if scatter else NEVER_RUNS
        one: SequenceParallelLinear | None = None
        sources = {} if facts is None else {name: _result_sources(nodes) for name, nodes in facts.tangents.items()}
        if facts is not None and not why:
            one = SequenceParallelLinear(ranks, facts)
            one.run(local, PassContext(ranks, runs=job.runs))
            local = one.gm if one.changes else gm
        assumed, backward = one.assumed if one is not None else [], [n.name for n in graph_tangents(gm.graph)]
        tangents = {name: sources.get(name) or "of this program" for name in assumed if name in backward}
        refusal = Note(NoteKind.DECLINED, SequenceParallelLinear.name, why, where=f"group {ranks.group}")
        self.notes = [refusal] if one is None else one.notes
        job.notes += self.notes
        if one is None:
            return 0
        job.layers += one.layers
        if local is gm:
            return 0
        replace_nodes(gm, local)
        tensors = [node.name for node in gm.graph.find_nodes(op="placeholder") if is_tensor(node)]
        primals = {f"input_{tensors.index(name)}" for name in assumed if name in tensors and name not in backward}
        job.common_inputs[ranks.group] = job.common_inputs.get(ranks.group, frozenset()) | primals
        job.shared.append((ranks, tangents))
        return one.changes


class LowerExchanges(Pass):
    """Pass that replaces the sp:: exchanges by the functional collectives and ATen ops of their bodies."""

    requires = frozenset({"scattered layers"})
    provides = frozenset({"lowered collectives"})

    def apply(self, gm: GraphModule, job: JointContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        return lower_exchanges(gm, torch_compat.inductor_decompositions() if job.options.uses_inductor else None)


class ScatterEachGroup(Passes):
    """Passes that scatter layers over each of the program's groups in turn."""

    steps = (ScatterLayers, LowerExchanges)

    def apply(self, gm: GraphModule, job: JointContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        job.shared, alone, changes = [], job.ranks, 0
        for ranks in job.session.groups:
            job.ranks = ranks
            changes += super().apply(gm, job)
        job.ranks = alone
        return changes


class MergeExchanges(Passes):
    """Passes that fuse permutes into all-to-alls and merge reductions over several axes."""

    requires = frozenset({"lowered collectives"})
    provides = frozenset({"final collectives"})

    @classmethod
    def parts(cls) -> Sequence[type[Pass]]:
        """Return the registered passes over collectives."""
        return registered_passes(CollectivePass)


class AddGradientChecks(Pass):
    """Pass that starts each backward with a check that shared gradients are equal on all ranks."""

    requires = frozenset({"final collectives"})

    def apply(self, gm: GraphModule, job: JointContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        shared = [(ranks, names) for ranks, names in job.shared if job.session.compares_gradients(ranks)]
        return sum(self._compare(ranks, names) for ranks, names in shared)

    def _compare(self, ranks: Ranks, tangents: Mapping[str, str]) -> int:
        found = [node for node in self.graph.find_nodes(op="placeholder") if node.name in tangents and node.users]
        if not found:
            return 0
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
            args = (found, [tangents[node.name] for node in found], ranks.n, ranks.group)
            both = self.compute(torch.ops.sp.shared.default, args, found[0])
            for i, node in enumerate(found):
                self.insert_between(node, self.emit(operator.getitem, (both, i), both.meta["val"][i], node))
        return len(found)


class OptimizeUserExchanges(Passes):
    """Passes that optimize the collectives of a program and of its backward.

    They are not changed if the ranks have different programs, since each rank might rewrite others.
    """

    steps = (ScatterEachGroup, MergeExchanges, AddGradientChecks)

    @classmethod
    def of(cls, job: JointContext) -> Pass | None:
        """Create the pass for a job, or return None if it does not apply."""
        return cls() if job.session.groups else None

    def apply(self, gm: GraphModule, job: JointContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        check_reductions(gm.graph)
        same, changes = job.session.has_same_programs(gm), 0
        if same:
            changes = super().apply(gm, job)
        else:
            job.notes.append(Note(NoteKind.DECLINED, SequenceParallelLinear.name, OTHER_PROGRAMS))
        backward = reachable_set(graph_tangents(gm.graph), lambda node: node.users)
        job.backward.update(*(named_groups(node) for node in backward if is_collective(node)))
        return changes


JOINT_PROPERTIES = CAPTURED_PROPERTIES | {"canonical", "chosen attention", "checked"}
"""Properties that rewrites require of graphs with a sequence, and that every joint graph has."""


class JointPasses(Passes):
    """All passes over a joint graph, in place. An SpError is raised on all ranks of a group."""

    name = "joint"
    steps = (AnnotateBackwardSources, SaveAttentionInCheckpoints, OptimizeUserExchanges, SeparateResultStorage)
    job: JointContext

    def __init__(self, job: JointContext | None = None) -> None:
        check_pass_order(iterate_passes(JointPasses), JOINT_PROPERTIES)
        super().__init__(job or JointContext())

    def apply(self, gm: GraphModule, job: JointContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        for node in gm.graph.find_nodes(op="placeholder"):
            set_node_info(node, requires_grad=False)  # the graph contains the gradients: no detach stops them
        return super().apply(gm, job)

    @property
    def report(self) -> Report:
        """Return the report of the passes."""
        job = self.job
        parallel = sorted({ranks.n for ranks in job.session.groups})
        report = Report(1, passes=job.runs, layers=job.layers, parallel=parallel)
        report.add(job.notes)
        return report

    def key(self) -> str | None:
        """Return the key for caches of compiled code, or None if the passes exchange messages between ranks."""
        job, version = self.job, sources_digest(*passes.__path__, str(Path(__file__).parents[2]))
        return None if job.session.groups else f"sp_compile joint {version}"


NEVER_RUNS = "the option sequence_parallel_linear is 'never'"
REGROUPED_WHY = "AOTAutograd has regrouped the inputs, so it is not known which of them are equal on all ranks"
OTHER_PROGRAMS = "the programs of the ranks differ or their groups are not a grid, so the collectives are not changed"


def _result_sources(results: Sequence[Node]) -> str:
    return " or ".join(dict.fromkeys(f"created at {node_line(result)}" for result in results))


def replace_nodes(gm: GraphModule, local: GraphModule) -> None:
    """Replace the nodes of `gm` by those of another graph over the same inputs; its Graph object stays."""
    inputs = gm.graph.find_nodes(op="placeholder")
    placeholders = local.graph.find_nodes(op="placeholder")
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "placeholder":
            gm.graph.erase_node(node)
    sources: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
    for node in local.graph.nodes:
        if node.op != "placeholder":
            sources[node] = gm.graph.node_copy(node, sources.__getitem__)
        else:
            sources[node].meta.update(node.meta)
    for node in gm.graph.nodes:
        clear_node_info(node)
    gm.graph.lint()
    gm.recompile()
