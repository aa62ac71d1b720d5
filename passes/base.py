"""Define the base classes, the registry and the order of passes.

    class DoubleSum(CanonicalPass):                         # one file in passes/canonical per pass
        # x + x -> 2 * x

        requires = frozenset({"normalized"})

        def apply(self, gm, context):                       # gm: a torch.fx graph; context: its PassContext
            ...
            return number_of_changes

    register_pass(DoubleSum)                                # or @register_pass above the class

Passes run on a graph in a context: options, analysis and results. A pass either edits the graph in place or sets `gm`
to a new one. Run a pass directly, `DoubleSum()(graph_module)`, or in the pipeline. Properties order the passes: all
that provide a property run before all that require it. Each pipeline starts with the property "captured".
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from sp_compile.lowering.base.errors import SpError, node_line
from sp_compile.lowering.base.layers import node_layer
from sp_compile.lowering.base.progress import set_step
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.base.registry import Table
from sp_compile.lowering.torch_compat import is_tracing_enabled, log_graph_text
from sp_compile.passes.graph.edit import GraphEditor

from .context import Note, NoteKind, PassContext, PassRun

log = logging.getLogger(__name__)

CAPTURED_PROPERTIES = frozenset({"captured"})  # properties of a graph before the first pass


class Pass(PassBase, GraphEditor):
    """A rewrite of a graph.

    The name is the class's name in snake case, unless the class defines another one.

    Args:
        ranks: The ranks, their number, or the context of the pass.
        **given: Fields of the context, and options by name, as in `PassContext.of`.

    Attributes:
        context: The context of the last run.
        gm: The rewritten graph, after a run. Most passes edit in place.
        notes: The notes of the run.
        changes: The number of changes of the run.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = CAPTURED_PROPERTIES  # properties that other passes provide before
    provides: ClassVar[frozenset[str]] = frozenset()  # properties of the graph after the run
    gm: GraphModule

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()  # DoubleSum -> double_sum

    def __init__(self, ranks: Ranks | int | PassContext = 1, **given: Any) -> None:
        super().__init__()
        self._make_context = partial(PassContext.of, ranks, **given)  # a new context for each direct run, see `call`
        self.context: PassContext = self._make_context()
        self.notes: list[Note] = []
        self.changes = 0

    @classmethod
    def of(cls, context: Any) -> Pass | None:
        """Create the pass for a run by `Passes`, a sequence of passes.

        Subclasses override it to skip graphs to which they do not apply.

        Args:
            context: The context in which the pass would run, of the class that the pass expects.

        Returns:
            The pass, or None to skip it; by default the pass runs on every context.
        """
        return cls()

    def apply(self, gm: GraphModule, context: Any) -> int:
        """Rewrite the graph; each subclass implements it.

        Args:
            gm: The graph.
            context: The context of the run, of the class that the pass expects.

        Returns:
            The number of changes; 0 if the graph is unchanged.
        """
        raise NotImplementedError

    def run(self, gm: GraphModule, context: PassContext) -> list[Note]:
        """Apply the pass to a graph, and record the run in the context.

        Args:
            gm: The graph.
            context: The context; its `runs` and `notes` are extended.

        Returns:
            The notes of the run. `self.gm` is the rewritten graph.
        """
        set_step(f"pass {self.name}")  # shown by the progress line
        self.gm, self.context, self.notes = gm, context, []
        self.edit(gm.graph)  # binds the methods of GraphEditor to this graph
        text_before = gm.print_readable(print_output=False) if is_tracing_enabled() else ""
        nodes_before, start = len(gm.graph.nodes), time.perf_counter()
        self.changes = self.apply(gm, context)
        if self.changes:
            self.gm.graph.lint()
            self.gm.recompile()
            context.invalidate()  # the cached analysis is of the old graph
        seconds, added_nodes = time.perf_counter() - start, len(self.gm.graph.nodes) - nodes_before
        context.runs.append(PassRun(self.name, self.requires, self.provides, self.changes, added_nodes, seconds))
        context.notes += [
            note for note in dict.fromkeys(self.notes) if note not in context.notes
        ]  # each text once, in order
        log.debug("after %s: %d changes, %d nodes", self.name, self.changes, len(self.gm.graph.nodes))
        if self.changes and text_before:
            log_graph_text(f"sp_before_{self.name}", text_before)
            log_graph_text(f"sp_after_{self.name}", self.gm.print_readable(print_output=False))
        return self.notes

    def __call__(self, graph_module: GraphModule) -> PassResult:
        """Run the pass on a graph outside of a pipeline, as torch.fx runs passes; `requires` is not checked."""
        return self.call(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        """Run the pass in the context that the arguments of its constructor describe.

        That is a new context for each call, or the constructor's `ranks` if that is a context.

        Args:
            graph_module: The graph.

        Returns:
            The rewritten graph, and whether it has changed.

        Raises:
            SpError: The pass refuses the graph.
        """
        context = self._make_context()
        self.run(graph_module, context)
        if context.refusal is not None:
            raise context.refusal.error()
        return PassResult(self.gm, self.changes > 0)

    def note(self, node: Node, text: str, subject: str = "", kind: NoteKind = NoteKind.REWRITTEN) -> None:
        """Add a note, a line of the report, on a node.

        Args:
            node: The node.
            text: The explanation.
            subject: The `Note.subject`; by default the name of the pass.
            kind: The kind of the note.
        """
        self.notes.append(Note(kind, subject or self.name, text, node.name, node_line(node), node_layer(node)))

    def note_refusal(self, node: Node, text: str, subject: str = "") -> None:
        """Add a line to the report that states why the pass does not apply to the node.

        Args:
            node: The node.
            text: The reason.
            subject: The `Note.subject`; by default the name of the pass.
        """
        self.note(node, text, subject, NoteKind.DECLINED)


class Passes(Pass):
    """A sequence of passes as one pass; each has its own run."""

    steps: ClassVar[Sequence[type[Pass]]] = ()  # the passes, in order, unless `parts` is overridden

    @classmethod
    def parts(cls) -> Sequence[type[Pass]]:
        """Return the passes, in order; subclasses override it for passes that are registered at run time."""
        return cls.steps

    def apply(self, gm: GraphModule, context: Any) -> int:
        """Run the parts that apply to the context, and return the sum of their changes.

        A part that cannot split the graph sets `context.refusal`; no part runs after it.
        """
        changes = 0
        for part in self.parts():
            step = part.of(context)
            if step is not None and context.refusal is None:
                self.notes += step.run(self.gm, context)
                self.gm = step.gm
                changes += step.changes
        return changes

    def run(self, gm: GraphModule, context: PassContext) -> list[Note]:
        """Run the passes on a graph and return their notes.

        It replaces `Pass.run`, which would also record the sequence itself in `context.runs`, and count its parts
        twice.
        """
        self.gm, self.context, self.notes = gm, context, []
        self.changes = self.apply(gm, context)
        return self.notes


def iterate_passes(root: type[Pass]) -> tuple[type[Pass], ...]:
    """Return all passes that a pass contains, recursively and in order, and then the pass itself.

    `check_pass_order` checks the result. A pass follows its parts because what it provides holds after them.
    """
    parts = root.parts() if issubclass(root, Passes) else ()
    return (*(contained for part in parts for contained in iterate_passes(part)), root)


class CanonicalPass(Pass):
    """A pass of canonicalize: it rewrites one form of an operation to the form that later passes match."""

    provides = frozenset({"canonical"})


class CollectivePass(Pass):
    """A pass over the collectives of a joint graph, for graphs that all ranks rewrite equally.

    The context is a `CollectiveContext` of `passes.collectives.collective_context`. A subclass defines `of(context)`,
    which returns the pass, or None if it does not apply, such as for a program without process groups of its own.

    Example: the maximum of a maximum over the same ranks is that maximum.

        from sp_compile.passes.graph.mutation import can_replace_copy, is_mutation

        c10d = torch.ops._c10d_functional

        @register_pass
        class DropRepeatedMax(CollectivePass):
            @classmethod
            def of(cls, context):                       # called for each joint graph of a program
                return cls() if context.session.groups else None

            def apply(self, gm, context):
                if any(map(is_mutation, gm.graph.nodes)):
                    return 0
                changes = 0
                for node in gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
                    (x, *_), (wait,) = node.args, node.users           # node.args: x, "max", group
                    first = x.args[0] if x.target is wait.target else x
                    is_equal = first.target is node.target and first.args[1:] == node.args[1:]
                    if is_equal and "max" in node.args and can_replace_copy(wait, x):  # callers may write to a result
                        self.replace(wait, x)           # of GraphEditor; readers of the wait read x
                        changes += 1
                return changes

    `DropRepeatedMax()(graph_module)` runs it directly.
    """


P = TypeVar("P", bound=Pass)
# Canonical and collective passes, by name; `with PASSES.register(...)` registers one for a block
PASSES: Table[type[Pass]] = Table("passes")


def register_pass(pass_class: type[P]) -> type[P]:
    """Register a CanonicalPass or a CollectivePass, so that the pipeline runs it.

    Its `requires` and `provides` determine its position.

    Args:
        pass_class: The class of the pass.

    Returns:
        The class, so that the function can be a decorator.

    Raises:
        SpError: Another pass has the same name.
    """
    PASSES.register(pass_class.name, pass_class)
    return pass_class


def registered_passes(kind: type[P]) -> list[type[P]]:
    """Return all registered passes of a kind in the order in which they run: by properties, then by name.

    The kind is a base class, CanonicalPass or CollectivePass.
    """
    return list(order_passes(tuple(pass_class for pass_class in PASSES.values() if issubclass(pass_class, kind))))


def import_submodules(package: str, folder: Iterable[str]) -> list[ModuleType]:
    """Import every module of a package, so that the passes, rules or ops that they define are registered.

    Args:
        package: The name of the package.
        folder: The package's `__path__`.

    Returns:
        The modules.
    """
    return [import_module(module.name) for module in walk_packages(folder, f"{package}.")]


@cache
def order_passes(passes: tuple[type[P], ...]) -> tuple[type[P], ...]:
    """Order the passes so that all that provide a property precede all that require it.

    Args:
        passes: The classes of the passes.

    Returns:
        The classes in order; independent ones by name.

    Raises:
        SpError: Some passes require each other.
    """
    by_name = {pass_class.name: pass_class for pass_class in sorted(passes, key=lambda pass_class: pass_class.name)}
    # The name of each pass -> the names of all passes that provide one of its required properties
    predecessors = {
        name: [provider.name for provider in by_name.values() if provider.provides & pass_class.requires]
        for name, pass_class in by_name.items()
    }
    try:
        return tuple(by_name[name] for name in TopologicalSorter(predecessors).static_order())
    except CycleError as error:
        cycle = error.args[1]  # names, the first one repeated at the end
        raise SpError("SP909", f"these passes require each other: {' -> '.join(cycle)}.") from error


@cache
def check_pass_order(passes: tuple[type[Pass], ...], initial: frozenset[str] = CAPTURED_PROPERTIES) -> None:
    """Check that every pass runs after all passes that provide the properties that it requires.

    Args:
        passes: The classes of the passes, in order.
        initial: The properties of the graph before the first pass.

    Raises:
        SpError: A required property is not provided before, or is provided again later.
    """
    provided = set(initial)
    for i, pass_class in enumerate(passes):
        missing = pass_class.requires - provided
        if missing:
            cause = f"{pass_class.name} requires {_quote_names(missing)}, which no earlier pass provides."
            raise SpError("SP909", cause)
        for later in passes[i + 1 :]:
            late = pass_class.requires & later.provides
            if late:
                cause = f"{pass_class.name} requires {_quote_names(late)}, and {later.name} provides it later."
                raise SpError("SP909", cause)
        provided |= pass_class.provides


def _quote_names(names: Iterable[str]) -> str:
    """Return the names of properties as text for errors: "'a' and 'b'"."""
    return " and ".join(map(repr, sorted(names)))
