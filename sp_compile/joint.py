"""Passes over what AOTAutograd makes of a program: forward and backward in one graph, the collectives in sight.

A pass of collectives alone belongs there: gradients' all_reduces exist, and those of DTensor, autograd is behind, and
what the partitioner keeps for the backward is decided on the result.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.graph.call import is_tensor
from sp_compile.graph.edit import copied
from sp_compile.graph.inline import lower_exchanges
from sp_compile.graph.record import erase
from sp_compile.graph.sizes import same, sizes
from sp_compile.lowering.library import digest
from sp_compile.passes.collectives.merge.chains import check_reductions
from sp_compile.passes.collectives.merge.merge import merge_reductions
from sp_compile.passes.collectives.permute.permute import permute_all_to_all
from sp_compile.passes.rewrite import Note
from sp_compile.passes.tensor_parallel.own_rows import mark_own_rows
from sp_compile.passes.tensor_parallel.scatter import Layer, SequenceParallelLinear
from sp_compile.spmd.check_compile import Lockstep, connected, cut_exchanges, exchanges
from sp_compile.spmd.declare import declared
from sp_compile.spmd.fingerprint import text_of, unlike
from sp_compile.spmd.grid import grids
from sp_compile.spmd.inputs import Facts

from . import _compat, passes
from .config import Ranks, SPConfig
from .errors import at
from .explain import Report

log = logging.getLogger(__name__)


QUESTIONS = ("rows", "text", "exchanges")


@dataclass
class JointPasses:
    """What is done to the joint graph, and what came of it.

    groups: the tensor-parallel groups of the program, in the order of their appearance. facts: of each, by its name;
    inputs are called input_0, input_1, ..., the function's tensor arguments in order. shapes: theirs, on this rank.
    apart: the groups whose ranks have different programs, or may, and ask each other (`talk`) while they compile.
    sequence: the group that shares the program's sequence, if it is another one; it is asked what all are asked.
    scatter: may layers run scattered? shared: the gradients of results that a group's ranks must have alike, by name,
    and where the result is made. merge, cost: the policy of `merge_reductions`, and its constants.
    """

    groups: Sequence[Ranks] = ()
    facts: Mapping[str, Facts] = field(default_factory=dict)
    shapes: Sequence[tuple[Any, ...]] = ()
    talk: Lockstep = field(default_factory=lambda: Lockstep([]))
    apart: frozenset[str] = frozenset()
    sequence: Sequence[Ranks] = ()
    decompose: bool = False
    scatter: bool = True
    merge: str = "never"
    cost: Mapping[str, Any] | None = None
    report: Report = field(default_factory=lambda: Report(1))
    scattered: set[str] = field(default_factory=set)
    shared: list[tuple[Ranks, Mapping[str, str]]] = field(default_factory=list)
    unlike: bool = False

    def configure(self, config: SPConfig) -> None:
        """Do what the options say."""
        self.decompose, self.merge = config.compiler == "inductor", config.merge_reductions
        self.cost = config.cost
        self.scatter = config.sequence_parallel_linear != "never"

    def place(self, sequence: Sequence[Ranks]) -> frozenset[str]:
        """Find out how the groups lie to each other and to a sequence's ranks; all of these ask.

        Returns the groups whose ranks all hold the same rows of the sequence.
        """
        of_sequence = Lockstep([(ranks, "place") for ranks in sequence])

        def ask(ranks: Ranks, mine: tuple[int, ...]) -> list[Any]:
            return (of_sequence if ranks in sequence else self.talk).ask(ranks, "place", mine)

        found = grids([*self.groups, *sequence], ask)
        self.facts = {name: replace(facts, grid=found[name]) for name, facts in self.facts.items()}
        self.sequence = [ranks for ranks in sequence if ranks not in self.groups]
        names = {ranks.group for ranks in sequence}
        return frozenset(name for name in self.facts if names <= found[name].level)

    def key(self) -> str | None:
        """The same for what does the same, for caches of compiled code; None where ranks ask each other meanwhile."""
        version = digest(*passes.__path__, str(Path(__file__).parent))
        return None if self.groups else f"sp_compile joint {version} {self.merge} {self.cost} {declared()}"

    def __call__(self, gm: GraphModule) -> None:
        """Change the graph in place. Raises SpError as the passes do, on all ranks of a group that talk."""
        self.report.parallel = sorted({ranks.n for ranks in self.groups})
        check_reductions(gm.graph)
        for ranks in self.groups:
            if ranks.group in self.apart:
                mark_own_rows(gm, ranks, partial(self._everyones_rows, ranks))
            self._scatter(gm, ranks)
            lower_exchanges(gm, _compat.inductor_decompositions() if self.decompose else None)
        self._join_exchanges(gm)
        for ranks, tangents in self.shared:
            if ranks.process_group is None or exchanges(ranks.process_group):
                compare_gradients(gm, ranks, tangents)

    def _scatter(self, gm: GraphModule, ranks: Ranks) -> None:
        """Layers over one group, if every rank of it would exchange the same."""
        local, numbers = copied(gm), self._numbers(gm, ranks)
        self.unlike |= numbers is None or bool(numbers)
        facts = joint_facts(local, self.facts[ranks.group], self.shapes)
        why = OTHER_OPS if numbers is None else REGROUPED if facts is None else "" if self.scatter else NEVER
        one: SequenceParallelLinear | None = None
        made = {} if facts is None else {name: _sources(nodes) for name, nodes in facts.tangents.items()}
        if facts is not None and numbers is not None and not why:
            one = SequenceParallelLinear(ranks, replace(facts, numbers=numbers))
            result = one(local)
            local = result.graph_module if result.modified else gm
        assumed = one.assumed if one is not None else []
        tangents = {
            name: made.get(name) or "of this program" for name in assumed if name.startswith("tangents")
        }
        if not self._alike(local, ranks, list(tangents)):
            one, local, why = None, gm, OTHER_EXCHANGES
        if (
            not self._alike_around(gm, local, ranks, one.layers if one is not None else [])
            and local is not gm
        ):
            one, why = None, OTHER_LAYERS
        if one is None:
            self.report.add([Note("not sequence_parallel_linear", "graph", f"group {ranks.group}", why)])
            return
        self.report.layers += one.layers
        self.report.add(one.notes)
        if local is not gm:
            adopt(gm, local)
            self.scattered.add(ranks.group)
            self.shared.append((ranks, tangents))

    def _join_exchanges(self, gm: GraphModule) -> None:
        """Permutes into all-to-alls, and reductions over several axes into one; not where ranks could do otherwise.

        What a rank's neighbour over one group sees, its neighbours over others have to know as well: hence the rounds.
        """
        everyone = [*self.groups, *self.sequence]
        self.unlike |= not connected(self.talk, everyone, "unlike", [str(self.unlike)] * len(everyone))
        if self.unlike:
            why = "the ranks' programs differ, so they might not all rewrite the same exchanges"
            self.report.add(
                [Note("not permute_all_to_all, merge_reductions", "graph", "the whole graph", why)]
            )
            return
        if self.groups:
            self.report.add(permute_all_to_all(gm, decomposed=True))
        if self.merge != "never" and declared().members:
            self.report.add(merge_reductions(gm, self.merge, cost=self.cost))
        gm.recompile()

    def _alike_around(
        self, gm: GraphModule, local: GraphModule, ranks: Ranks, layers: Sequence[Layer]
    ) -> bool:
        """Would the neighbours over the program's other groups scatter the same layers over theirs?"""
        everyone = [*self.groups, *self.sequence]
        said = str((text_of(local).exchanges, ranks.n, [(layer.mode, layer.dim) for layer in layers]))
        cut = ["" if one == ranks else cut_exchanges(gm, local, one.group) for one in everyone]
        return connected(
            self.talk, everyone, f"layers {self.groups.index(ranks)}", [said + one for one in cut]
        )

    def _everyones_rows(self, ranks: Ranks, starts: list[int]) -> list[list[int]]:
        return [answer or [] for answer in self.talk.ask(ranks, "rows", starts)]

    def _numbers(self, gm: GraphModule, ranks: Ranks) -> frozenset[str] | None:
        """The nodes that other ranks have with other numbers; None if their graphs differ in more than that."""
        if ranks.group not in self.apart:
            return frozenset()
        everyone = self.talk.ask(ranks, "text", text_of(gm))
        return None if None in everyone else unlike(gm, everyone)

    def _alike(self, local: GraphModule, ranks: Ranks, tangents: list[str]) -> bool:
        """Would every rank exchange the same with the others, and compare the same gradients?"""
        if ranks.group not in self.apart:
            return True
        mine = (text_of(local).exchanges, tangents)
        return all(theirs == mine for theirs in self.talk.ask(ranks, "exchanges", mine))


NEVER = "the option sequence_parallel_linear is 'never'"
REGROUPED = "AOTAutograd has regrouped the inputs, so nothing says which of them are equal on all ranks"
OTHER_OPS = "the ranks run different ops, so nothing says which values are equal on all of them"
OTHER_EXCHANGES = "parts of different sizes: the ranks would not exchange the same"
OTHER_LAYERS = (
    "ranks of another group would scatter other layers over theirs (other values are equal there), and the program "
    "exchanges over both"
)


def joint_facts(gm: GraphModule, facts: Facts, shapes: Sequence[tuple[Any, ...]]) -> Facts | None:
    """Facts about the function's arguments as facts about a joint graph's inputs, with their gradients.

    A joint graph has the primals, then the tangents; its results end with a gradient (or None) for each primal. A
    DTensor is its local tensor there, and its mesh. None if the inputs are not recognised.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    primals = [n for n in inputs if not n.name.startswith("tangents")]
    tensors = [n for n in primals if is_tensor(n)]
    if len(tensors) != len(shapes) or not all(map(_alike, tensors, shapes)):
        return None
    symbols = [n for n in primals if isinstance(n.meta.get("val"), torch.SymInt)]
    names = {
        **{f"input_{i}": node.name for i, node in enumerate(tensors)},
        **{f"size_{i}": node.name for i, node in enumerate(symbols)},
    }
    if not facts.differ <= names.keys():
        return None
    results = gm.graph.output_node().args[0]
    gradients: dict[str, Node] = {}
    tangents: dict[str, list[Node]] = {}
    if len(primals) < len(inputs) and isinstance(results, Sequence) and len(results) > len(primals):
        made, ends = results[: -len(primals)], results[-len(primals) :]
        gradients = {p.name: g for p, g in zip(primals, ends, strict=True) if isinstance(g, Node)}
        for tangent in inputs[len(primals) :]:
            tangents[tangent.name] = [r for r in made if is_tensor(r) and _same_kind(r, tangent)]
    differ = frozenset(names[name] for name in facts.differ)
    blank = frozenset(names[name] for name in facts.blank)
    equal = None if facts.equal is None else frozenset(names[name] for name in facts.equal)
    return replace(facts, differ=differ, equal=equal, blank=blank, gradients=gradients, tangents=tangents)


def _sources(results: Sequence[Node]) -> str:
    return " or ".join(dict.fromkeys(f"made at {at(result)}" for result in results))


def compare_gradients(gm: GraphModule, ranks: Ranks, tangents: Mapping[str, str]) -> None:
    """Let every backward begin with a look whether the ranks were given these gradients alike."""
    found = [node for node in gm.graph.find_nodes(op="placeholder") if node.name in tangents and node.users]
    if not found:
        return
    readers = {node: list(node.users) for node in found}
    mode = _compat.detect_fake_mode([node.meta["val"] for node in found])
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        args = (found, [tangents[node.name] for node in found], ranks.n, ranks.group)
        both = gm.graph.call_function(torch.ops.sp.shared.default, args)
        with mode:
            both.meta["val"] = [torch.empty_like(node.meta["val"]) for node in found]
        for i, node in enumerate(found):
            one = gm.graph.call_function(operator.getitem, (both, i))
            one.meta["val"] = both.meta["val"][i]
            for reader in readers[node]:
                reader.replace_input_with(node, one)
    gm.recompile()


def _same_kind(result: Node, tangent: Node) -> bool:
    """Could this be the gradient of that? AOTAutograd does not say of which result it is."""
    a, b = result.meta["val"], tangent.meta.get("val")
    return isinstance(b, torch.Tensor) and a.ndim == b.ndim and all(map(same, sizes(a.shape), sizes(b.shape)))


def _alike(node: Node, shape: tuple[Any, ...]) -> bool:
    """Sizes that are symbols here were numbers when the program was called."""
    found = node.meta["val"].shape
    pairs = [(a, b) for a, b in zip(found, shape) if isinstance(a, int)]
    return len(found) == len(shape) and all(a == b for a, b in pairs)


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
