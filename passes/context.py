"""One graph on its way through the passes: the settings, what is known of the graph, and what its passes did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import BALANCED, LAYOUTS
from sp_compile.lowering.base.options import IOOptions, SPConfig
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.cost.attention_memory import RankMemory
from sp_compile.passes.cost.decision import Decision
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import is_tensor, node_tensors
from sp_compile.passes.sharding.axes import Axes, find_sequences, name_axes
from sp_compile.passes.sharding.placement import Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import cache_lookups
from sp_compile.passes.sharding.window_starts import align_window_starts

from .propagate import propagate


@dataclass
class PassSettings:
    """What is to be known of the job; the same on every rank."""

    ranks: Ranks
    user_io: IOOptions = field(default_factory=IOOptions)
    seq_dims: Mapping[str, int] | None = None
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    outputs: str | Sequence[str] = "gather"  # the option, or what it says of each result
    attention: str = "auto"
    layout: str = "auto"
    machine: Machine | None = None  # of the cost model, as it was measured; the device's defaults if None
    cost: Mapping[str, Any] | None = None  # constants in place of that, which replace the device's defaults
    folds: int = 1  # chunks of the sequence that a rank holds: as `RowOrder` has them
    state: str = "replicated"
    fallback: str = "gather"
    tiles: str | int = "auto"
    ulysses_chunks: str | int = "auto"
    aligned: frozenset[str] | None = None  # groups of the program whose ranks hold the same rows; None: all
    sequence_parallel_linear: str = "auto"
    merge_reductions: str = "auto"
    offload: str | float = "never"
    param_grads: str = "reduce"
    activation_memory_budget: float | None = None
    check_every: int = SPConfig.check_every
    compiler: str | Callable[..., Any] = "inductor"
    has_place: bool = True  # the compiler, for passes on collectives
    fused: bool = False  # Inductor compiles what becomes of it
    repeats: FewLayers | None = None  # a program of a few layers stands for one of many

    @staticmethod
    def of(config: SPConfig, ranks: Ranks, **found: Any) -> PassSettings:
        """What the user's options say: the one place where they become settings.

        found: what graph and ranks say. seq_dims: those of the options by the names of the graph. machine: as it was
        measured on these ranks. Raises SpError: `cost` has a constant that there is none of, or one out of range.
        """
        Machine.of("cpu", config.cost)
        own = {name: getattr(config, name) for name in PASS_OPTIONS}
        place = {"has_place": config.has_place, "fused": config.compiler == "inductor"}
        return PassSettings(ranks, config.io_options, **{**own, **place, **found})

    def times(self, node: Node) -> int:
        """How many nodes the node stands for."""
        return 1 if self.repeats is None else self.repeats.of(node)

    @property
    def is_balanced(self) -> bool:
        """Do ranks hold rows as a table deals them, or are they to?"""
        given = any(isinstance(p, Shard) and p.frame.order.is_balanced for p in self.inputs.values())
        order = LAYOUTS.get(self.layout)
        return given or self.folds == BALANCED.folds or (order is not None and order.is_balanced)

    def machine_of(self, node: Node) -> Machine:
        """The cost model's, for the device of the node."""
        return Machine.of(node_tensors(node)[0].device.type, self.cost, self.machine)

    def machine_of_nodes(self, nodes: Iterable[Node]) -> Machine:
        """The cost model's, for the device of the first of the nodes that is a tensor; of a CPU if none is."""
        return next((self.machine_of(node) for node in nodes if is_tensor(node)), Machine.of("cpu", self.cost))


PASS_OPTIONS = {f.name for f in fields(SPConfig)} & {f.name for f in fields(PassSettings)} - set(
    IOOptions.__dataclass_fields__
)
"""Of the user, that are settings as they are; what is `IOOptions` becomes what is found of a graph."""


def make_settings(ranks: Ranks | int | PassSettings, **options: Any) -> PassSettings:
    """Settings from a number of ranks (then no process group is named), from Ranks, or from others."""
    if isinstance(ranks, PassSettings):
        return replace(ranks, **options) if options else ranks
    return PassSettings(Ranks(ranks, "") if isinstance(ranks, int) else ranks, **options)


@cache_lookups()
def analyze(gm: GraphModule, job: PassSettings) -> tuple[Axes, PlacementPlan]:
    """Name the axes, find the sequence, propagate. Raises SpError when `seq_dims` names no input."""
    axes = name_axes(gm)
    axes.folds = job.folds
    nodes = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
    missing = sorted(set(job.seq_dims or ()) - set(nodes))
    if missing:
        raise SpError("SP236", f"seq_dims: expected names of inputs out of {sorted(nodes)}, got {missing}.")
    named = None if job.seq_dims is None else {nodes[name]: dim for name, dim in job.seq_dims.items()}
    find_sequences(gm, axes, named, picks=not job.is_balanced)
    inputs = {nodes[name]: placement for name, placement in job.inputs.items()}
    for node, placement in inputs.items():  # whatever the graph does with it: a piece of a model may only pass it on
        if isinstance(placement, Shard):
            axes.sequences.update(axes.find(atom.name) for atom in axes.dims[node, 0][placement.dim])
    return axes, align_window_starts(
        lambda begins: propagate(gm, axes, job.ranks.n, inputs, job.outputs, begins=begins)
    )


class NoteKind(Enum):
    """The kinds of lines of the report. Values are what the report and its JSON show; `Note.label` adds the subject."""

    REWRITTEN = "rewritten"
    """A pass changed the node. Subject: the pass, or the change where a pass has several ("packed", "cancelled")."""
    DECLINED = "declined"
    """A pass, a layout or an option was considered and not applied. Subject: that pass, layout or option."""
    GATHERED = "gather"
    """An operand of the node is gathered, since no pass runs the node on shards. Subject: the pass."""
    REPLICATED = "replicated"
    """Every rank runs the graph, or the node, on all rows. Subject: the pass, or "capture" of a graph as written."""
    SEQUENCE_LOST = "sequence lost"
    """As REPLICATED, of a graph that eager code gave gathered inputs only; the backend warns. Subject: the pass."""
    KEPT_SHARDED = "in shards"
    """An input stays as an earlier graph left it. Subject: the input."""
    UNSHARDED = "unsharded"
    """A sharded input or result is gathered at the edge of a graph. Subject: the input or the result."""
    SAVED = "saved"
    """Results in checkpointed regions are saved for the backward. Subject: "attention"."""
    RECOMPUTED = "recomputed"
    """Results in checkpointed regions are computed again in the backward. Subject: "attention"."""
    GRAPH_BREAK = "graph break"
    """The graph ends where Dynamo continues in Python. Subject: "capture"."""
    EXTRAPOLATED = "extrapolated"
    """A few layers were examined for all of their kind. Subject: the list of layers."""


FALLBACKS = (NoteKind.GATHERED, NoteKind.REPLICATED, NoteKind.SEQUENCE_LOST)
"""Kinds of notes on work that every rank does on all rows."""


@dataclass(frozen=True)
class Note:
    """One line of the report on a node of the user's program, or on the graph.

    Args:
        kind: What happened.
        subject: The pass, option, input or result that the line is about, as the kind defines it.
        text: The explanation, for people alone: no code depends on it.
        node: The name of the node; "graph" for all of them.
        where: The user's source line.
        layer: The path of the node's layer in the model.
    """

    kind: NoteKind
    subject: str
    text: str = ""
    node: str = "graph"
    where: str = "the graph"
    layer: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """Return the words for the kind and the subject, as the report shows them."""
        if self.kind is NoteKind.REWRITTEN:
            return self.subject
        return f"not {self.subject}" if self.kind is NoteKind.DECLINED else self.kind.value


class RefusalKind(Enum):
    """The reasons for which a graph cannot be split as its inputs are given."""

    NO_SEQUENCE = "no sequence"
    """A complete model in which no sequence is found. Other lengths, as constants, may show one."""
    ROW_ORDER = "row order"
    """The rows of the inputs are in an order in which the graph cannot run. It may run on gathered inputs."""


@dataclass(frozen=True)
class Refusal:
    """A pass's decision that the graph cannot be split as its inputs are given.

    Args:
        kind: What a caller can change before it lowers the graph once more.
        code: The code of the error that it is where nothing can be changed.
        subject: The option that it is about, as in an error's cause.
        text: The reason, without the option and the fix.
        fix: The fix, where it depends on the case.
    """

    kind: RefusalKind
    code: str
    subject: str
    text: str
    fix: str | None = None

    def error(self) -> SpError:
        """Return the refusal as an error."""
        return SpError(self.code, f"{self.subject}: {self.text}.", self.fix)


@dataclass
class PassRun:
    """One pass over one graph: a line of `explain(passes=True)`. changes: rewrites; nodes: how many more there are."""

    name: str
    requires: frozenset[str]
    provides: frozenset[str]
    changes: int = 0
    nodes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TiledRegion:
    """What a region that runs in tiles holds. node: its first product; where: the user's line. rows: of a rank.

    inside: bytes of what its products make of all rows; tile: of those of a tile. layer: of the model, by its path.
    ends: the user's line of its last node, as which it runs. recomputed: whether the backward computes it again.
    repeated: whether some of its nodes run once more, for results that others read.
    """

    node: str
    where: str
    tiles: int
    rows: int
    inside: int
    tile: int
    layer: str = ""
    ends: str = ""
    recomputed: bool = False
    repeated: bool = False


def runs_by_pass(laps: Iterable[PassRun]) -> list[PassRun]:
    """One lap for each pass, with what all its runs took and changed, in the order of the first ones."""
    found: dict[str, PassRun] = {}
    for lap in laps:
        one = found.setdefault(lap.name, PassRun(lap.name, lap.requires, lap.provides))
        one.changes, one.nodes = one.changes + lap.changes, one.nodes + lap.nodes
        one.seconds += lap.seconds
    return list(found.values())


@dataclass
class PassContext(PassSettings):
    """The settings of one graph, its analysis, and what passes leave for later ones and for the report.

    fragment: the graph is a piece of a model (a graph break), so it need not contain a sequence. follows: nor need it
    where another program of these ranks has left results in shards.
    planned: the plan that a local graph was made from; its nodes are those of the global view.
    refusal: why the graph cannot be split as its inputs are given; no pass runs after it.
    """

    fragment: bool = False
    has_outer_job: bool = False
    input_placements: PlacementPlan | None = None
    refusal: Refusal | None = None
    notes: list[Note] = field(default_factory=list)
    runs: list[PassRun] = field(default_factory=list)
    sequence_inputs: dict[str, list[int]] = field(default_factory=dict)
    constraints: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    memory: list[RankMemory] = field(default_factory=list)
    tiled_regions: list[TiledRegion] = field(default_factory=list)
    _analyzed: tuple[Axes, PlacementPlan] | None = None

    @classmethod
    def start(cls, given: PassSettings) -> PassContext:
        """A job with these settings; a job stays the one that it is."""
        return given if isinstance(given, PassContext) else cls(**vars(given))

    def axes(self, gm: GraphModule) -> Axes:
        """The names of the graph's axes; found anew after a change."""
        return self._analysis(gm)[0]

    def plan(self, gm: GraphModule) -> PlacementPlan:
        """Where every value of the graph lies; found anew after a change."""
        return self._analysis(gm)[1]

    def analyze(self, gm: GraphModule) -> tuple[Axes, PlacementPlan]:
        """The axes and the plan, found anew."""
        return analyze(gm, self)

    def _analysis(self, gm: GraphModule) -> tuple[Axes, PlacementPlan]:
        if self._analyzed is None:
            self._analyzed = self.analyze(gm)
        return self._analyzed

    def invalidate(self) -> None:
        """The graph has changed, or what the analysis is told."""
        self._analyzed = None
