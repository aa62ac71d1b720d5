"""Run the passes over AOTAutograd's joint graph of forward and backward.

Passes that rewrite only collectives run here: the all_reduces of gradients and of DTensor are in the graph, autograd is
complete, and the partitioner selects the saved values from the result. The inputs of a joint graph are the primals (the
inputs of the forward) and the tangents (the gradients of its results).

An exchange is a collective that a pass inserts, such as sp::all_gather. Facts (`InputFacts`) state which inputs are
equal on all ranks of a group. A rewrite that is exact only for equal values assumes them: the runtime compares the
assumed inputs, and the graph itself the assumed tangents.
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
from sp_compile.passes.cost.group_names import named_groups
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
    """Pass that scatters the rows of linear layers over one group whose ranks all compute the same rows."""

    requires = frozenset({"captured"})
    provides = frozenset({"scattered layers"})
    steps = (SequenceParallelLinear,)

    def apply(self, gm: GraphModule, context: JointContext) -> int:
        """Scatter the layers over `context.ranks` in place, and return the number of changes.

        The rewrite runs on a copy, which replaces the graph if a layer was scattered. It assumes that some primals
        (inputs of the forward) and tangents (gradients of its results) are equal on all ranks of the group. Adds these
        to the context, for checks at run time, and the scattered layers, for the report.
        """
        ranks, copied = context.ranks, copy_graph(gm)
        # The inputs that are equal on all ranks, by the names of placeholders; None if they cannot be matched.
        facts = map_facts(copied, context.session.facts[ranks.group], context.shapes)
        if facts is None or context.options.sequence_parallel_linear == "never":
            reason = REGROUPED_REASON if facts is None else NEVER_RUNS
            self.notes = [Note(NoteKind.DECLINED, SequenceParallelLinear.name, reason, where=f"group {ranks.group}")]
            context.notes += self.notes
            return 0
        # tangent -> lines of the results whose gradient it may be
        result_lines = {name: _result_lines(results) for name, results in facts.tangents.items()}
        linear_pass = SequenceParallelLinear(ranks, facts)
        self.notes = linear_pass.run(copied, PassContext(ranks, runs=context.runs))
        context.notes += self.notes
        context.layers += linear_pass.layers
        if not linear_pass.changes:
            return 0
        replace_nodes(gm, linear_pass.gm)
        assumed = linear_pass.assumed  # names of the placeholders that must be equal on all ranks
        tangents = {node.name for node in graph_tangents(gm.graph)}
        # tangent -> text that follows "the result" in an error, such as "created at <line>"
        equal_tangents = {name: result_lines.get(name) or "of this program" for name in assumed if name in tangents}
        tensors = [node.name for node in gm.graph.find_nodes(op="placeholder") if is_tensor(node)]
        equal_primals = [name for name in assumed if name in tensors and name not in tangents]
        group_inputs = context.common_inputs.get(ranks.group, frozenset())
        # The runtime names the i-th tensor argument of the function input_i.
        context.common_inputs[ranks.group] = group_inputs | {f"input_{tensors.index(name)}" for name in equal_primals}
        context.equal_tangents.append((ranks, equal_tangents))
        return linear_pass.changes


class LowerExchanges(Pass):
    """Pass that replaces the sp:: exchanges by the functional collectives and ATen ops of their bodies.

    `MergeExchanges` and the compiler expect this form. AOTAutograd creates it only for ops before the joint graph.
    """

    requires = frozenset({"scattered layers"})
    provides = frozenset({"lowered collectives"})

    def apply(self, gm: GraphModule, context: JointContext) -> int:
        """Replace every exchange, an sp:: op, by functional collectives and ATen ops, in place; return their number."""
        return lower_exchanges(gm, torch_compat.inductor_decompositions() if context.options.is_inductor else None)


class ScatterEachGroup(Passes):
    """Passes that scatter layers over each of the program's groups in turn, as for each axis of a mesh."""

    steps = (ScatterLayers, LowerExchanges)

    def apply(self, gm: GraphModule, context: JointContext) -> int:
        """Run `steps` in place for each group of the program, as `context.ranks`; return the number of changes."""
        context.equal_tangents, ranks_before, changes = [], context.ranks, 0
        for ranks in context.session.groups:  # one group for each axis of a mesh, for example
            context.ranks = ranks
            changes += super().apply(gm, context)
        context.ranks = ranks_before
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
    """Pass that starts the backward with a check of the tangents that `ScatterLayers` assumes to be equal.

    Readers of a tangent t then read check[0] of `check = sp.shared([t], [line], n, group)`. This op compares t between
    the ranks at run time. If the values differ, it raises an error with the source line.
    """

    requires = frozenset({"final collectives"})

    def apply(self, gm: GraphModule, context: JointContext) -> int:
        """Insert one check for each group whose ranks can compare gradients; return the number of checked tangents."""
        num_checked = 0
        for ranks, lines in context.equal_tangents:  # source lines by tangent
            if context.session.can_compare_gradients(ranks):  # False in a dry run, which has no other ranks
                num_checked += self._add_check(ranks, lines)
        return num_checked

    def _add_check(self, ranks: Ranks, lines: Mapping[str, str]) -> int:
        """Make all readers of the tangents read the results of one check, which compares them between the ranks.

        Args:
            ranks: Ranks that compare the tangents.
            lines: Source line for the error message, by the name of a tangent (the gradient of a result).

        Returns:
            The number of checked tangents, without those that nothing reads.
        """
        tangents = [node for node in self.graph.find_nodes(op="placeholder") if node.name in lines and node.users]
        if not tangents:
            return 0
        first_call = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first_call):
            args = (tangents, [lines[node.name] for node in tangents], ranks.n, ranks.group)
            check = self.compute(torch.ops.sp.shared.default, args, tangents[0])
            for i, tangent in enumerate(tangents):
                checked = self.emit(operator.getitem, (check, i), check.meta["val"][i], tangent)
                self.insert_between(tangent, checked)
        return len(tangents)


class OptimizeUserExchanges(Passes):
    """Passes that optimize the collectives of a program and of its backward.

    They are not changed if the ranks have different programs, since each rank might rewrite others.
    """

    steps = (ScatterEachGroup, MergeExchanges, AddGradientChecks)

    @classmethod
    def of(cls, context: JointContext) -> Pass | None:
        """Create the pass if the program has collectives over groups, else return None."""
        return cls() if context.session.groups else None

    def apply(self, gm: GraphModule, context: JointContext) -> int:
        """Optimize the collectives in place, and return the number of changes.

        The graph is not changed if the ranks have different programs. Adds the names of the groups of the backward's
        collectives to `context.backward`: only for these groups the runtime checks that all ranks run the backward.
        """
        check_reductions(gm.graph)  # raises an SpError for a reduction that torch does not support
        changes = 0
        if context.session.has_same_programs(gm):
            changes = super().apply(gm, context)
        else:
            # The note has the name of the pass that `ScatterEachGroup` runs: users have an option of this name.
            context.notes.append(Note(NoteKind.DECLINED, SequenceParallelLinear.name, OTHER_PROGRAMS))
        # The backward consists of all nodes that depend on a tangent.
        backward = reachable_set(graph_tangents(gm.graph), lambda node: node.users)
        context.backward.update(*map(named_groups, backward))  # no groups for nodes that are no collectives
        return changes


# Properties that rewrites require of graphs with a sequence, and that every joint graph has.
JOINT_PROPERTIES = CAPTURED_PROPERTIES | {"canonical", "chosen attention", "checked"}


class JointPasses(Passes):
    """All passes over a joint graph, in place.

    The compiler of a program runs them before it partitions the graph. An SpError is raised on all ranks of a group.
    """

    name = "joint"
    steps = (AnnotateBackwardSources, SaveAttentionInCheckpoints, OptimizeUserExchanges, SeparateResultStorage)
    context: JointContext

    def __init__(self, context: JointContext | None = None) -> None:
        """Check that earlier passes provide what each pass requires. The default context is that of one rank."""
        check_pass_order(iterate_passes(JointPasses), JOINT_PROPERTIES)
        super().__init__(context or JointContext())

    def apply(self, gm: GraphModule, context: JointContext) -> int:
        """Run all passes on the joint graph in place, and return the number of changes."""
        for node in gm.graph.find_nodes(op="placeholder"):
            # Gradients are nodes of this graph, so that no pass has to preserve autograd through an input.
            set_node_info(node, requires_grad=False)
        return super().apply(gm, context)

    @property
    def report(self) -> Report:
        """Return the report of the passes that have run: their notes, and the scattered layers."""
        group_sizes = sorted({ranks.n for ranks in self.context.session.groups})
        report = Report(n=1, passes=self.context.runs, layers=self.context.layers, parallel=group_sizes)
        report.add(self.context.notes)
        return report

    def key(self) -> str | None:
        """Return the passes' part of the key under which torch caches compiled code; None if these must run each time.

        It is None if the program has process groups, since the passes then exchange messages between ranks. A rank
        that loads a program from AOTAutograd's cache would send none, and the others would wait. Inductor's cache, of
        graphs after the passes, is used.
        """
        if self.context.session.groups:
            return None
        # After a change of this package's sources, older results must not be loaded. The folders are `passes`, which is
        # a link in the repository, and the package `sp_compile`, which is two folders above this one.
        return f"sp_compile joint {sources_digest(*passes.__path__, str(Path(__file__).parents[2]))}"


# Reasons of the report.
NEVER_RUNS = "the option sequence_parallel_linear is 'never'"
REGROUPED_REASON = "AOTAutograd has regrouped the inputs, so it is not known which of them are equal on all ranks"
OTHER_PROGRAMS = "the programs of the ranks differ or their groups are not a grid, so the collectives are not changed"


def _result_lines(results: Sequence[Node]) -> str:
    """Return "created at <line> or created at <line>": the lines of the results whose gradient a tangent may be.

    Error messages about the tangent contain it. AOTAutograd does not record to which result a tangent belongs.
    """
    return " or ".join(dict.fromkeys(f"created at {node_line(result)}" for result in results))


def replace_nodes(gm: GraphModule, new_gm: GraphModule) -> None:
    """Replace the nodes of `gm`, except its inputs, by copies of those of a graph with the same inputs.

    `ScatterLayers` calls it after a pass over a copy of `gm`. The Graph object of `gm` remains, as AOTAutograd's caller
    refers to it.
    """
    new_inputs, inputs = (module.graph.find_nodes(op="placeholder") for module in (new_gm, gm))
    copies: dict[Node, Node] = dict(zip(new_inputs, inputs, strict=True))  # node of `new_gm` -> node of `gm`
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "placeholder":
            gm.graph.erase_node(node)
    for node in new_gm.graph.nodes:
        if node.op != "placeholder":
            copies[node] = gm.graph.node_copy(node, copies.__getitem__)
        else:
            copies[node].meta.update(node.meta)
    for node in gm.graph.nodes:  # the passes over the copy have set metadata that refers to nodes of other graphs
        clear_node_info(node)
    gm.graph.lint()
    gm.recompile()
