"""The form of every pass: a name, what it requires and provides, and a run over a graph that tells what it did.

    class Doubled(Spelling):                                # one file in passes/canonical is all that a spelling takes
        \"\"\"x + x -> 2 * x.\"\"\"

        requires = frozenset({"explicit"})

        def apply(self, gm, job):
            ...
            return how_many

    register(Doubled)                                       # or @register above the class

A pass is run by hand, `Doubled()(graph_module)`, or by the pipeline. Words order the passes: all that provide a word
come before all that require it. "captured" is what every pipeline begins with.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from sp_compile.lowering.base.errors import node_line
from sp_compile.lowering.base.layers import node_layer
from sp_compile.lowering.base.progress import set_step
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.base.registry import Table
from sp_compile.lowering.torch_compat import is_tracing_enabled, trace_graph
from sp_compile.passes.graph.edit import GraphEditor

from .context import Note, NoteKind, PassContext, PassRun, PassSettings, make_settings

log = logging.getLogger(__name__)

CAPTURED_WORD = frozenset({"captured"})
SINGLE_RANK_SETTINGS = PassSettings(Ranks(1, ""))
"""What a pass by hand is told that asks for no ranks."""


class Pass(PassBase, GraphEditor):
    """One rewrite of a graph. After a run: `gm`, the graph that it made (most edit in place), `notes` and `changes`.

    name: that of the class, `a_pass` of APass, unless it says another.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = CAPTURED_WORD
    provides: ClassVar[frozenset[str]] = frozenset()
    gm: GraphModule

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, ranks: Ranks | int | PassSettings = SINGLE_RANK_SETTINGS, **options: Any) -> None:
        super().__init__()
        self.given = make_settings(ranks, **options)
        self.job: PassSettings = self.given
        self.notes: list[Note] = []
        self.changes = 0

    @classmethod
    def of(cls, job: Any) -> Pass | None:
        """The pass as a part of others, for one job; None where there is nothing for it."""
        return cls()

    def apply(self, gm: GraphModule, job: Any) -> int:
        """Rewrite the graph, for a Job of the kind that the pass asks for. How many changes; 0: it is as it was."""
        raise NotImplementedError

    def run(self, gm: GraphModule, job: PassContext) -> list[Note]:
        """Apply the pass as one lap of the job: what it did and would not do, node by node."""
        set_step(f"pass {self.name}")
        self.gm, self.job, self.notes = gm, job, []
        self.edit(gm.graph)
        before = _join_lines(gm) if is_tracing_enabled() else ""
        nodes, start = len(gm.graph.nodes), time.perf_counter()
        self.changes = self.apply(gm, job)
        if self.changes:
            self.gm.graph.lint()
            self.gm.recompile()
            job.invalidate()
        seconds, more = time.perf_counter() - start, len(self.gm.graph.nodes) - nodes
        job.runs.append(PassRun(self.name, self.requires, self.provides, self.changes, more, seconds))
        job.notes += [note for note in dict.fromkeys(self.notes) if note not in job.notes]
        log.debug("after %s: %d changes, %d nodes", self.name, self.changes, len(self.gm.graph.nodes))
        if self.changes and before:
            trace_graph(f"sp_before_{self.name}", before)
            trace_graph(f"sp_after_{self.name}", _join_lines(self.gm))
        return self.notes

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """By hand, as torch.fx calls a pass, but that `requires` is no check here."""
        return self.call(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        """Run with the settings that the pass was made with. Raises SpError where it refuses the graph."""
        job = PassContext.start(self.given)
        self.run(graph_module, job)
        if job.refusal is not None:
            raise job.refusal.error()
        return PassResult(self.gm, self.changes > 0)

    def note(self, node: Node, text: str, subject: str = "", kind: NoteKind = NoteKind.REWRITTEN) -> None:
        """Add a line on the node to the report; the subject is the pass by default."""
        self.notes.append(Note(kind, subject or self.name, text, node.name, node_line(node), node_layer(node)))

    def note_refusal(self, node: Node, text: str, subject: str = "") -> None:
        """Add a line to the report that states why the pass does not apply to the node."""
        self.note(node, text, subject, NoteKind.DECLINED)


class Passes(Pass):
    """Several passes as one: each is a lap of its own. steps: they, in order, where `parts` does not find them."""

    steps: ClassVar[Sequence[type[Pass]]] = ()

    @classmethod
    def parts(cls) -> Sequence[type[Pass]]:
        """The passes, in order."""
        return cls.steps

    def apply(self, gm: GraphModule, job: Any) -> int:
        changes = 0
        for part in self.parts():
            one = part.of(job)
            if one is not None and job.refusal is None:
                self.notes += one.run(self.gm, job)
                self.gm, changes = one.gm, changes + one.changes
        return changes

    def run(self, gm: GraphModule, job: PassContext) -> list[Note]:
        self.gm, self.job, self.notes = gm, job, []
        self.changes = self.apply(gm, job)
        return self.notes


def iterate_passes(one: type[Pass]) -> tuple[type[Pass], ...]:
    """All the passes that a pass is made of, in order, each in front of what it is part of."""
    parts = [part for each in one.parts() for part in iterate_passes(each)] if issubclass(one, Passes) else []
    return (*parts, one)


class CanonicalPass(Pass):
    """A pass of canonicalize: one of the ways to write something becomes the one that later passes read."""

    provides = frozenset({"canonical"})


class CollectivePass(Pass):
    """A pass over the collectives of a joint graph, called where all ranks would rewrite alike.

    The job is a `passes.collectives.job.CollectiveJob`.
    """


P = TypeVar("P", bound=Pass)
PASSES: Table[type[Pass]] = Table("passes")
"""Spellings and collective passes, by name; `with PASSES.register(...)` for a block."""


def register_pass(one: type[P]) -> type[P]:
    """Let a Spelling or a CollectivePass run, at the place that what it requires and provides gives it.

    Raises SpError: another one has its name.
    """
    PASSES.register(one.name, one)
    return one


def registered_passes(kind: type[P]) -> list[type[P]]:
    """All registered passes of a kind, in an order that their words allow; where these leave a choice, by name."""
    return list(order_passes(tuple(one for one in PASSES.values() if issubclass(one, kind))))


def import_submodules(package: str, folder: Iterable[str]) -> list[ModuleType]:
    """Import every module below a folder, so that what is in them registers itself."""
    return [import_module(module.name) for module in walk_packages(folder, f"{package}.")]


@cache
def order_passes(passes: tuple[type[P], ...]) -> tuple[type[P], ...]:
    """The passes so that all that provide a word come before all that require it. ValueError if nothing does so."""
    left = {one.name: one for one in sorted(passes, key=lambda one: one.name)}
    before = {
        name: [other.name for other in left.values() if other.provides & one.requires] for name, one in left.items()
    }
    try:
        return tuple(left[name] for name in TopologicalSorter(before).static_order())
    except CycleError as error:
        raise ValueError(f"these passes require each other: {' -> '.join(error.args[1])}") from error


@cache
def check_pass_order(passes: tuple[type[Pass], ...], given: frozenset[str] = CAPTURED_WORD) -> None:
    """Raises ValueError if a pass requires what none before it provides, or what one behind it still provides."""
    provided = set(given)
    for i, one in enumerate(passes):
        missing = one.requires - provided
        if missing:
            raise ValueError(f"{one.name} requires {_as_words(missing)}, which no pass before it provides")
        for later in passes[i:]:
            late = one.requires & later.provides
            if late:
                raise ValueError(f"{one.name} requires {_as_words(late)}, and {later.name} provides it only later")
        provided |= one.provides


def _as_words(words: Iterable[str]) -> str:
    return " and ".join(map(repr, sorted(words)))


def _join_lines(gm: GraphModule) -> str:
    return gm.print_readable(print_output=False)
