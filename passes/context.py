"""Define the context of passes over one graph: their options, analysis and results.

Notes are lines of the report. A refusal ends the passes, so that the caller changes the inputs and runs them again. The
analysis is the names of the graph's axes and the placements of its values; it is cached until the graph changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import BALANCED, LAYOUTS
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.cost.attention_memory import RankMemory
from sp_compile.passes.cost.decision import Decision
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import is_tensor, node_tensors
from sp_compile.passes.sharding.axes import Axes, name_axes
from sp_compile.passes.sharding.find_sequences import find_sequences
from sp_compile.passes.sharding.placement import Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import cache_lookups
from sp_compile.passes.sharding.sharded_work import SequenceCandidate, ShardedWork
from sp_compile.passes.sharding.window_starts import align_window_starts

from .propagation.choose_rows import choose_rows
from .propagation.propagate import propagate


class NoteKind(Enum):
    """The kinds of lines of the report, which shows the values. `Note.label` adds the subject."""

    # A pass changed the node. Subject: the pass, or the change where a pass has several ("packed", "cancelled").
    REWRITTEN = "rewritten"
    # A pass, a layout or an option was considered and not applied. Subject: that pass, layout or option.
    DECLINED = "declined"
    GATHERED = "gather"  # An operand of the node is gathered, since no pass runs the node on shards. Subject: the pass.
    # Every rank runs the graph, or the node, on all rows. Subject: the pass, or "capture" of a graph as written.
    REPLICATED = "replicated"
    # As REPLICATED, of a graph that eager code gave gathered inputs only; the backend warns. Subject: the pass.
    SEQUENCE_LOST = "sequence lost"
    KEPT_SHARDED = "in shards"  # An input stays sharded, as an earlier graph returned it. Subject: the input.
    # A sharded input or result is gathered at the edge of a graph. Subject: the input or the result.
    UNSHARDED = "unsharded"
    SAVED = "saved"  # Results in checkpointed regions are saved for the backward. Subject: "attention".
    # Results in checkpointed regions are computed again in the backward. Subject: "attention".
    RECOMPUTED = "recomputed"
    # A large part of the FLOPs that every rank computes. Subject: the pass.
    REPLICATED_WORK = "on every rank"
    GRAPH_BREAK = "graph break"  # The graph ends where Dynamo continues in Python. Subject: "capture".
    EXTRAPOLATED = "extrapolated"  # A few layers were examined for all of their kind. Subject: the list of layers.


# kinds of notes on work that every rank does on all rows
FALLBACKS = (NoteKind.GATHERED, NoteKind.REPLICATED, NoteKind.SEQUENCE_LOST)


@dataclass(frozen=True)
class Note:
    """One line of the report on a node of the user's program, or on the graph."""

    kind: NoteKind  # the kind of decision or event
    subject: str  # the pass, option, input or result that the line is about, as the kind defines it
    text: str = ""  # the explanation, for people alone: no code depends on it
    node: str = "graph"  # name of the node; "graph" for all of them
    where: str = "the graph"  # the user's source line
    layer: str = field(default="", compare=False)  # path of the node's layer in the model

    @property
    def label(self) -> str:
        """Return the first column of the report: "scan", "not scan" if a pass does not apply, or the kind."""
        if self.kind is NoteKind.REWRITTEN:
            return self.subject
        return f"not {self.subject}" if self.kind is NoteKind.DECLINED else self.kind.value


class RefusalKind(Enum):
    """The reasons for which a graph cannot be split with its inputs."""

    # A complete model in which no sequence is found. Other lengths, as constants, may show one.
    NO_SEQUENCE = "no sequence"
    # The rows of the inputs are in an order in which the graph cannot run. It may run on gathered inputs.
    ROW_ORDER = "row order"


@dataclass(frozen=True)
class Refusal:
    """A pass's decision that the graph cannot be split with its inputs."""

    kind: RefusalKind  # determines what the caller changes before it lowers the graph again
    code: str  # code of the error, raised if the caller cannot change anything
    subject: str  # the option that the error is about
    text: str  # the reason, without the option and the fix
    fix: str | None = None  # the fix; None for that of the code

    def error(self) -> SpError:
        """Return the refusal as an error, for callers that cannot change the inputs and run the passes again."""
        return SpError(self.code, f"{self.subject}: {self.text}.", self.fix)


@dataclass
class PassRun:
    """One run of a pass over one graph: a row of `explain(passes=True)`."""

    name: str  # the pass
    requires: frozenset[str]  # its `Pass.requires`
    provides: frozenset[str]  # its `Pass.provides`
    changes: int = 0  # number of rewrites
    nodes: int = 0  # nodes after minus nodes before
    seconds: float = 0.0  # duration


@dataclass(frozen=True)
class TiledRegion:
    """The sizes of a region that runs in tiles."""

    node: str  # name of the first product
    where: str  # the user's line of the first product
    tiles: int  # number of tiles
    rows: int  # rows per rank
    inside: int  # bytes that its products compute from all rows
    tile: int  # bytes that its products compute from the rows of a tile
    layer: str = ""  # path of the layer in the model
    ends: str = ""  # the user's line of the last node, which is the source of the op
    recomputed: bool = False  # the backward computes it again
    repeated: bool = False  # some of its nodes run again, for results with other readers


def runs_by_pass(runs: Iterable[PassRun]) -> list[PassRun]:
    """Add up the runs of each pass: return one run per pass, in the order in which the passes ran first."""
    totals: dict[str, PassRun] = {}  # by name of the pass
    for run in runs:
        total = totals.setdefault(run.name, PassRun(run.name, run.requires, run.provides))
        total.changes += run.changes
        total.nodes += run.nodes
        total.seconds += run.seconds
    return list(totals.values())


@dataclass
class PassContext:
    """The options, the analysis and the results of passes over one graph, equal on every rank."""

    ranks: Ranks  # the ranks that shard the sequence
    options: SPConfig = field(default_factory=SPConfig)  # as the user passed them
    # The options of the same names, resolved for the graph. They are fields in addition to `options`, since those have
    # names of the user's arguments, "auto" or "local", while passes need inputs of this graph, their placements, and a
    # decision for each output.
    seq_dims: Mapping[str, int] | None = None  # by the names of the graph's inputs; None if the user names none
    inputs: Mapping[str, Placement] = field(default_factory=dict)  # the placements of sharded inputs
    outputs: str | Sequence[str] = "gather"  # for all outputs, or one for each
    # Facts about the graph and the ranks.
    machine: Machine | None = None  # measured constants of the cost model; None for the device's defaults
    folds: int = 1  # chunks of the sequence per rank, 2 in zigzag order; 0: the balanced order (`RowOrder.folds`)
    aligned: frozenset[str] | None = None  # groups of the program whose ranks have the same rows; None for all
    repeats: FewLayers | None = None  # a program of a few layers that represents one of many
    fragment: bool = False  # a piece of a model (graph break), which need not contain a sequence
    has_sharded_peer: bool = False  # another program of these ranks has sharded outputs: need not contain a sequence
    # Results of passes, for later passes and for the report.
    input_placements: PlacementPlan | None = None  # the plan of the local graph; its nodes are of the global graph
    refusal: Refusal | None = None  # why the graph cannot be split with its inputs; no pass runs after it
    notes: list[Note] = field(default_factory=list)  # lines of the report
    runs: list[PassRun] = field(default_factory=list)  # the passes that ran, in order
    open_nodes: frozenset[Node] | None = None  # whose demands may be gathered in this round; None for all
    sequence_inputs: dict[str, list[int]] = field(default_factory=dict)  # input -> its dims along the sequence
    candidates: list[SequenceCandidate] = field(default_factory=list)  # dims that may be sequences
    constraints: list[str] = field(default_factory=list)  # numbers that the ranks must divide, and padding
    work: ShardedWork = field(default_factory=ShardedWork)  # work of the graph, and its share on shards
    decisions: list[Decision] = field(default_factory=list)  # the choice for each kind of attention
    memory: list[RankMemory] = field(default_factory=list)  # estimates; the last one is current
    tiled_regions: list[TiledRegion] = field(default_factory=list)  # parts that run in tiles of rows
    _analyzed: tuple[Axes, PlacementPlan] | None = None  # the cached result of `analyze`

    def __post_init__(self) -> None:
        Machine.of("cpu", self.options.cost)  # raises if the option `cost` has an unknown constant or a wrong value

    @staticmethod
    def of(ranks: Ranks | int | PassContext, **given: Any) -> PassContext:
        """Create the context of a pass that runs directly, outside of a pipeline.

        Args:
            ranks: A number of ranks (without a process group), Ranks, or a context.
            **given: Fields of the context, and options by name. A name that is both, such as `seq_dims`, is the field.

        Returns:
            The context. If `ranks` is a context, it is returned with the given fields replaced.

        Raises:
            SpError: An option is unknown or has an invalid value.
        """
        if isinstance(ranks, PassContext):
            return replace(ranks, **given) if given else ranks
        context_fields = {f.name: given.pop(f.name) for f in fields(PassContext) if f.name in given}
        ranks = Ranks(ranks, "") if isinstance(ranks, int) else ranks
        return PassContext(ranks, SPConfig.of(given), **context_fields)  # all other names are options

    @property
    def is_balanced(self) -> bool:
        """Return True if the sequence has the layout "balanced": an order of rows that is computed at run time.

        An input has it, the user selects it by option, or a pass has chosen it (`folds`).
        """
        if any(isinstance(p, Shard) and p.frame.order.is_balanced for p in self.inputs.values()):
            return True
        order = LAYOUTS.get(self.options.layout)  # None for "auto"
        return self.folds == BALANCED.folds or (order is not None and order.is_balanced)  # BALANCED.folds is 0

    def times(self, node: Node) -> int:
        """Return the number of nodes that the node represents, by which its costs are multiplied.

        It is 1 unless the graph is a model reduced to few layers of each kind, to predict costs quickly (`repeats`).

        Args:
            node: A node of the graph.
        """
        return 1 if self.repeats is None else self.repeats.of(node)

    def machine_of(self, node: Node) -> Machine:
        """Return the cost model's machine for the device of the node."""
        return Machine.of(node_tensors(node)[0].device.type, self.options.cost, self.machine)

    def machine_of_nodes(self, nodes: Iterable[Node]) -> Machine:
        """Return the cost model's machine for the device of the first tensor, or a CPU if there is none."""
        return next((self.machine_of(node) for node in nodes if is_tensor(node)), Machine.of("cpu", self.options.cost))

    def axes(self, gm: GraphModule) -> Axes:
        """Return the axes of the graph: which dims of different values correspond, and which are the sequence.

        The result is cached until the graph changes.
        """
        return self._analysis(gm)[0]

    def plan(self, gm: GraphModule) -> PlacementPlan:
        """Return the placement of every value of the graph, and the demands; cached until the graph changes."""
        return self._analysis(gm)[1]

    @cache_lookups()
    def analyze(self, gm: GraphModule) -> tuple[Axes, PlacementPlan]:
        """Name the axes of a graph, find the sequence, and propagate placements; `axes` and `plan` cache the result.

        Args:
            gm: The graph.

        Returns:
            The axes and the plan.

        Raises:
            SpError: A name in `seq_dims` is not the name of an input.
        """
        axes = name_axes(gm)
        axes.folds, axes.n = self.folds, self.ranks.n
        nodes = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
        missing = sorted(set(self.seq_dims or ()) - set(nodes))
        if missing:
            message = f"seq_dims: expected names of the graph's placeholders out of {sorted(nodes)}, got {missing}."
            raise SpError("SP236", message, "Use names of this list.")
        user_dims = None if self.seq_dims is None else {nodes[name]: dim for name, dim in self.seq_dims.items()}
        inputs = {nodes[name]: placement for name, placement in self.inputs.items()}
        sharded_dims = {node: placement.dim for node, placement in inputs.items() if isinstance(placement, Shard)}
        # `picks`: rows selected from the sequence are a second sequence; the balanced layout supports only one.
        find_sequences(gm, axes, user_dims, picks=not self.is_balanced, sharded=sharded_dims)
        if user_dims is None and not sharded_dims and self.folds == 1:
            axes = choose_rows(gm, axes)  # of windows of an image, if a rank has less work with these as the sequence
        # A dim that is already sharded is a sequence, even if no op of this graph gives evidence for it.
        for node, dim in sharded_dims.items():
            dims_of_input = axes.dims[node, 0]  # of its only result
            axes.sequences.update(axes.find(atom.name) for atom in dims_of_input[dim])
        # Propagation may run again, so that an operand added to a window such as x[:, 1:] starts in the window's frame.
        return axes, align_window_starts(
            lambda window_starts: propagate(gm, axes, self.ranks.n, inputs, self.outputs, window_starts=window_starts)
        )

    def _analysis(self, gm: GraphModule) -> tuple[Axes, PlacementPlan]:
        """Return the result of `analyze`, cached until `invalidate` is called after a change of the graph."""
        if self._analyzed is None:
            self._analyzed = self.analyze(gm)
        return self._analyzed

    def invalidate(self) -> None:
        """Drop the analysis, after a change of the graph or of the context."""
        self._analyzed = None
