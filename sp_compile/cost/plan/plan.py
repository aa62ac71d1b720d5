"""`plan`: how a model could be trained on so many ranks: what fits, how long a step takes, and which options to give.

    sp_compile.plan(model, (ids,), kwargs={"labels": ids}, memory="80GB", ranks=[8, 16, 64]).best.options

A model is traced with one and two of its layers (`cost/layers.py`), as it is written and with each layer checkpointed,
then in tiles if something does not fit, for two numbers of ranks; what it takes grows with the layers, and as
`a + b / ranks`.
How much less a further layer takes on more ranks is found once, of the model as it is written.
Attention is computed for each number of ranks by the cost model. Seconds are products at `flops`, other kernels at
`memory_bandwidth`, attention and exchanges as the cost model has them, and one pass of the optimizer over its state.
Where that does not fit, the least share of what is kept goes to the host with which it does; copies hide behind all.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from sp_compile.config import OFFLOAD, STRATEGIES, SPConfig
from sp_compile.cost.attention import Candidate, Shape, attention_strategies, candidates
from sp_compile.cost.decision import Decision
from sp_compile.cost.exchanges import collectives_of
from sp_compile.cost.layers import Depth, checkpointed
from sp_compile.cost.machine import Machine
from sp_compile.cost.offload import copy_seconds
from sp_compile.cost.step import PHASES, ModelBytes, StepMemory, state_per_weight, written
from sp_compile.errors import SpError
from sp_compile.graph.sizes import typical
from sp_compile.lowering.frames import CONTIGUOUS
from sp_compile.passes.report import Report
from sp_compile.verify import explain_each

from .sizes import bytes_of_text

SAMPLES = 2, 4
"""Numbers of ranks that are looked at, with every attention split in the same way."""
ONE = SAMPLES[:1]
LEAST_FALL = SAMPLES[0] / SAMPLES[1] / 2
"""Of what a layer takes on the second number of ranks for the first: half of what shards do."""
ROOMY, TIGHT = 1e18, 1.0
"""Bytes that are left for an attention, where it may take its fastest form, or the one that holds least."""
TILES = 16
"""That work on rows is done in, where tiles are tried."""
SHARES = tuple(i / 20 for i in range(1, 21))
"""Of what is kept, to the host."""
MOST_ROWS = 8
"""Of a table, for each number of ranks."""
STATES = ("sharded", "on every rank")


@dataclass(frozen=True)
class Variant:
    """One way to train. ranks: that share the sequence. memory: bytes of a rank at the peak; phase: when.

    checkpoint: is each layer computed again in the backward? tiles: in how many; "never" for none. offload: the share
    of what is kept that waits on the host, and host: its bytes. state: "sharded" over the ranks by FSDP, or "on every
    rank". kept: bytes that the forward leaves for the backward, wherever. seconds: of a step. tokens: of the sequence.
    """

    ranks: int
    attention: str
    layout: str
    checkpoint: bool
    tiles: int | str
    offload: float
    host: float
    state: str
    memory: float
    phase: str
    kept: float
    seconds: float
    tokens: int
    fits: bool

    @property
    def options(self) -> dict[str, Any]:
        """What `torch.compile(model, backend="sp", options=...)` is given. FSDP and checkpoints are the program's."""
        grads = "partial" if self.state == "sharded" and self.ranks > 1 else "reduce"
        ways = {"attention": self.attention, "layout": self.layout, "param_grads": grads, "tiles": self.tiles}
        shards = {"state": self.state} if grads == "partial" else {}
        return ways | shards | ({"offload": self.offload} if self.offload else {})

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class StepPlan:
    """What was found; `str(plan)` is a table. memory: of a device. rows: of each number of ranks, the fastest first.

    changes: what would have to change, for numbers of ranks on which nothing fits.
    """

    memory: float
    weights: ModelBytes
    rows: list[Variant] = field(default_factory=list)
    changes: dict[int, str] = field(default_factory=dict)

    @property
    def best(self) -> Variant:
        """The fastest of those that fit. Raises SpError: nothing does; it says what would have to change."""
        fitting = [row for row in self.rows if row.fits]
        if not fitting:
            raise SpError("plan: nothing fits: " + "; ".join(self.changes.values()))
        return min(fitting, key=lambda row: row.seconds)

    def of(self, ranks: int) -> Variant | None:
        """The fastest on so many ranks; None if nothing fits."""
        return min((r for r in self.rows if r.ranks == ranks and r.fits), key=lambda r: r.seconds, default=None)

    def fits_on_device(self, ranks: int) -> bool:
        """Does anything fit on so many ranks with nothing on the host?"""
        return any(row.fits and not row.offload for row in self.rows if row.ranks == ranks)

    def __str__(self) -> str:
        rows = [
            [*(show(r) for show in COLUMNS.values()), "best" if r == self.of(r.ranks) else "fits" if r.fits else ""]
            for n in dict.fromkeys(r.ranks for r in self.rows)
            for r in [r for r in self.rows if r.ranks == n][:MOST_ROWS]
        ]
        table = tabulate(rows, headers=[*COLUMNS, ""], disable_numparse=True)
        head = f"{written(self.memory)} a rank; parameters {written(self.weights.parameters)}"
        return "\n".join([head, table, *self.changes.values()])


COLUMNS: dict[str, Callable[[Variant], Any]] = {
    "ranks": lambda r: r.ranks,
    "attention": lambda r: r.attention,
    "layout": lambda r: r.layout,
    "checkpoints": lambda r: "each layer" if r.checkpoint else "as written",
    "tiles": lambda r: r.tiles,
    "offload": lambda r: f"{r.offload:.0%}" if r.offload else "never",
    "state": lambda r: r.state,
    "memory": lambda r: written(r.memory),
    "peak of": lambda r: r.phase,
    "s/step": lambda r: f"{r.seconds:.3g}",
    "tokens/s": lambda r: f"{r.tokens_per_second:,.0f}",
}
"""Of a plan's table."""


def plan(
    model: nn.Module,
    inputs: Sequence[Any] | torch.Tensor = (),
    *,
    memory: str | float = "80GB",
    ranks: Sequence[int] = (8, 16, 64),
    optimizer: Any = None,
    cost: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **config: Any,
) -> StepPlan:
    """What fits on so many ranks of so much memory, and how fast it is. Nothing runs: the model may be on "meta".

    inputs, kwargs: of the model, whole; a single tensor may stand alone. memory: of a device, in bytes or as "80GB",
    "75GiB". ranks: numbers of ranks that share the sequence and, by FSDP, parameters, gradients and the optimizer's
    state. optimizer: as for `explain`. cost: constants of the cost model, of an H100 but for those given (a CPU where
    the model is on one). config: other fields of SPConfig. Raises SpError as `explain` does, and for a memory or ranks
    that are none.
    """
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    device, wanted = bytes_of_text(memory), sorted({*ranks})
    if not wanted or not all(isinstance(n, int) and n > 0 for n in wanted):
        raise SpError(f"ranks={ranks!r}: expected numbers of ranks, 1 or more")
    where = next((x.device.type for x in model.parameters()), "cpu")
    machine = Machine.of(where, {**(cost or {}), "memory": device})
    asked = config.pop("attention", "auto")
    sent = config.pop("offload", "auto")
    shares = {"auto": SHARES, "never": ()}[sent] if isinstance(sent, str) and sent in OFFLOAD else (sent,)
    SPConfig(offload=sent)
    sampled = next(strategy.name for strategy in attention_strategies() if strategy.always)
    given = {**config, "attention": sampled, "cost": {**(cost or {}), "memory": 1e18}, "kwargs": dict(kwargs or {})}
    tokens = _tokens([*inputs, *(kwargs or {}).values()])
    found = StepPlan(device, ModelBytes.of(model))
    depth = Depth.of(model)
    layers = list(depth.layers) if depth is not None else []
    per_weight = state_per_weight(optimizer)
    largest: dict[tuple[bool, int | str], str] = {}
    falls: dict[str, float] = {}
    ways: list[tuple[bool, int | str]] = [(False, "never"), (bool(layers), "never"), (bool(layers), TILES)]
    if "tiles" in config:
        ways = [(again, config["tiles"]) for again, _ in ways]
    for way in dict.fromkeys(ways):
        if way[1] == TILES and "tiles" not in config and all(map(found.fits_on_device, wanted)):
            continue  # tiles make nothing faster
        kind = _PlanLook(*way, tokens, asked, shares)
        given["tiles"] = kind.tiles
        measured = 1 if falls else 2
        looked = [
            _look(model, inputs, depth, variant, kind.again, per_weight, given, SAMPLES if i < measured else ONE)
            for i, variant in enumerate(depth.variants if depth is not None else [()])
        ]
        if kind.tiles not in ("auto", "never") and not looked[0][0].tiled:
            continue
        whole = _AllLayers(looked, depth, found.weights, per_weight, falls)
        falls = whole.falls
        step = _step(looked[0][-1])
        largest[way] = step.summary(max(step.points(), key=lambda point: point.nbytes), most=1)[0][1]
        found.rows += [row for n in wanted for row in _rows(whole, n, machine, kind)]
    found.rows = _telling(sorted(found.rows, key=lambda row: (row.ranks, not row.fits, row.seconds)))
    for n in wanted:
        if found.of(n) is None:
            found.changes[n] = _change([row for row in found.rows if row.ranks == n], found, largest)
    return found


def _tokens(values: Iterable[Any]) -> int:
    """Positions of the program's largest input of integers, or of its first dims."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.ndim]
    ids = [x.numel() for x in tensors if not x.is_floating_point()]
    return max(ids or [x.shape[:2].numel() for x in tensors], default=0)


def _look(
    model: nn.Module, inputs: Any, depth: Depth | None, positions: tuple[int, ...], again: bool,
    per_weight: float, given: dict[str, Any], ranks: Sequence[int] = SAMPLES,
) -> list[Report]:  # fmt: skip
    """The reports for each of these numbers of ranks, of a model with these layers."""
    chosen = [depth.layers[i] for i in positions] if depth is not None else []
    only = depth.only(positions) if depth is not None else nullcontext()
    with only, checkpointed(chosen if again else []), _few_collections():
        return explain_each(model, list(inputs), ranks, per_weight, dict(given))


@contextmanager
def _few_collections() -> Iterator[None]:
    """The garbage collector passes over what was there before: all of torch, a fifth of a look's time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _AllLayers:
    """What all layers take on any number of ranks, from reports of a few layers on two numbers.

    falls: of each part, what a further layer takes on the second number of ranks for what it takes on the first. Found
    here if it is empty; where a report of the second number is missing, it is made of that.
    """

    def __init__(
        self,
        looked: list[list[Report]],
        depth: Depth | None,
        weights: ModelBytes,
        per_weight: float,
        falls: Mapping[str, float] | None = None,
    ) -> None:
        self.looked, self.depth = looked, depth
        self.weights, self.per_weight = weights, per_weight
        self.inputs = max(_step(report).inputs for one in looked for report in one)
        self.parts = [[_parts(report) for report in one] for one in looked]
        self.falls = dict(falls or self._falls())
        self.parts = [self._completed(one) for one in self.parts]

    def _falls(self) -> Iterator[tuple[str, float]]:
        if len(self.parts) < 2:
            return
        one, two = self.parts[:2]
        for name in two[0]:
            first, second = (b.get(name, 0.0) - a.get(name, 0.0) for a, b in zip(one, two, strict=True))
            if first and LEAST_FALL <= second / first <= 1:  # a peak that is elsewhere with one layer more says nothing
                yield name, second / first

    def _completed(self, parts: list[dict[str, float]]) -> list[dict[str, float]]:
        if len(parts) == len(SAMPLES):
            return parts
        (first, second), (found,) = self.parts[0], parts
        likely = SAMPLES[0] / SAMPLES[1]  # of what lies in shards
        made = {
            name: second.get(name, 0.0) + (value - first.get(name, 0.0)) * self.falls.get(name, likely)
            for name, value in found.items()
        }
        return [found, made]

    def __call__(self, name: str, n: int) -> float:
        """A part of what a rank of n takes."""
        falls, stays = self._line(name)
        return falls / n + stays

    def beside_attention(self, phase: str, n: int) -> float:
        """The peak of a phase at an attention, without what that takes itself.

        Its keys and their gradients are whole in the samples, whatever is said to be in memory of them: what does not
        fall with the ranks is that of moments elsewhere.
        """
        _, stays = self._line(phase)
        return self._line(f"{phase} attention")[0] / n + stays

    def _line(self, name: str) -> tuple[float, float]:
        """What falls with the ranks, of one rank; and what does not."""
        x, y = (self._of_layers([one[i].get(name, 0.0) for one in self.parts]) for i in range(len(SAMPLES)))
        a, b = SAMPLES
        falls = (x - y) / (1 / a - 1 / b)
        return falls, x - falls / a

    def _of_layers(self, values: Sequence[float]) -> float:
        return self.depth.combine(values) if self.depth is not None else values[0]

    def names(self, beginning: str) -> list[str]:
        return sorted({name for one in self.parts for part in one for name in part if name.startswith(beginning)})

    def attention(self) -> list[tuple[Decision, float]]:
        """Each shape of attention, and how many there are."""
        first: dict[Any, Decision] = {}
        for one in self.looked:
            for decision in one[0].attention:
                first.setdefault(_unmoved(decision.shape), decision)
        counts = [{_unmoved(d.shape): float(d.nodes) for d in one[0].attention} for one in self.looked]
        return [(d, self._of_layers([count.get(shape, 0.0) for count in counts])) for shape, d in first.items()]


def _step(report: Report) -> StepMemory:
    assert report.step is not None
    return report.step


def _parts(report: Report) -> dict[str, float]:
    """What a rank takes, in parts that grow with the layers: bytes by phase, traffic, flops, exchanges."""
    step = _step(report)
    attention = max((d.chosen.memory for d in report.attention), default=0.0)
    found = _peaks(step, attention, "peak") | _peaks(step.hosted, attention, "hosted peak")
    found["kept"] = step.saved
    found["host"] = step.hosted.offloaded.nbytes if step.hosted.offloaded is not None else 0
    walks = [walk for graph in step.graphs for walk in (graph.forward, graph.backward) if walk is not None]
    found["flops"], found["traffic"] = sum(walk.flops for walk in walks), sum(walk.traffic for walk in walks)
    for exchange in report.exchanges:
        if exchange.op in STRATEGIES or exchange.op.endswith("_attention") or exchange.op == "reduce_grad":
            continue
        for kind, sent in zip(collectives_of(exchange), map(typical, (exchange.forward, exchange.backward))):
            if sent:
                found[f"sent {kind}"] = found.get(f"sent {kind}", 0.0) + sent
                found[f"calls {kind}"] = found.get(f"calls {kind}", 0.0) + 1
    return found


def _is_attention(name: str) -> bool:
    return "attend" in name or "attention" in name


def _peaks(step: StepMemory, attention: float, name: str) -> dict[str, float]:
    """The largest moment of each phase, apart from what an attention itself takes, at whose line keys are whole."""
    found: dict[str, float] = {}
    points = list(step.points())
    lines = {point.moment.where for point in points if _is_attention(point.moment.name)} - {""}
    for point in points:
        values = point.nbytes - point.gradients - point.moment.idle  # which fills up to the peak, however large that is
        near = point.moment.where in lines
        key = f"{name} {point.phase}{' attention' if near else ''}"
        found[key] = max(found.get(key, -math.inf), values - (attention if near else 0.0))
    return found


@dataclass(frozen=True)
class _PlanLook:
    """What rows have in common that come of one look."""

    again: bool
    tiles: int | str
    tokens: int
    asked: str
    shares: tuple[float, ...]


def _rows(whole: _AllLayers, n: int, machine: Machine, of: _PlanLook) -> list[Variant]:
    ways = [(way, found) for way, found in _ways(whole, n, machine) if of.asked in ("auto", way[0])]
    weights, learned = whole.weights, whole.weights.learned
    optimizer = whole.per_weight * learned
    resident = weights.buffers + whole.inputs
    out = []
    for (kind, layout), found in ways:
        largest = max((c.memory for c, _ in found), default=0.0)
        here, there = (
            {
                phase: max(whole(f"{name} {phase}", n), whole.beside_attention(f"{name} {phase}", n) + largest)
                for phase in PHASES
            }
            for name in ("peak", "hosted peak")
        )
        seconds = sum((c.seconds + (c.forward if of.again else 0.0)) * count for c, count in found)
        seconds += whole("flops", n) / machine.flops + machine.copy(whole("traffic", n)) + _exchanged(whole, n, machine)
        for state in STATES if n > 1 else STATES[1:]:
            shards = n if state == "sharded" else 1
            held = (weights.parameters + learned + optimizer) / shards + resident
            if shards > 1:
                held += min(2 * weights.unit, weights.parameters) + min(weights.unit, learned)
                moved = machine.seconds("all_gather", weights.parameters / n, n) * 2
                moved += machine.seconds("reduce_scatter", learned / n, n)
                took = machine.together(seconds, moved)
            else:
                took = seconds + machine.seconds("all_reduce", learned, n)
            took += machine.copy(2 * (weights.parameters + learned + optimizer) / shards)
            for share in (0.0, *of.shares):
                values, phase = max((here[one] + share * (there[one] - here[one]), one) for one in PHASES)
                fits, host = held + values <= machine.memory, share * whole("host", n)
                if fits or share in (0.0, 1.0):
                    waits = machine.together(took, 2 * copy_seconds(host, machine))
                    row = Variant(
                        n, kind, layout, of.again, of.tiles, share, host, state, held + values, phase,
                        whole("kept", n), waits, of.tokens, fits,
                    )  # fmt: skip
                    out.append(row)
                if fits:
                    break
    return out


def _ways(whole: _AllLayers, n: int, machine: Machine) -> list[tuple[tuple[str, str], list[tuple[Candidate, float]]]]:
    """(strategy, layout), its candidate for each attention and their number; those that can all be so.

    Each as it is fastest, and as it is where memory is short: a ring holds the gradients of all keys, or hands them on.
    """
    shapes = whole.attention()
    if not shapes:
        return [(("auto", "auto"), [])]
    out: list[tuple[tuple[str, str], list[tuple[Candidate, float]]]] = []
    for room in (ROOMY, TIGHT):
        offered = [(_fastest(replace(_unmoved(d.shape), n=n), replace(machine, memory=room)), c) for d, c in shapes]
        for key in offered[0][0]:
            found = [(_same_or_contiguous(best, key), count) for best, count in offered]
            way = key, [(c, count) for c, count in found if c is not None]
            if len(way[1]) == len(found) and way not in out:
                out.append(way)
    return out


def _fastest(shape: Shape, machine: Machine) -> dict[tuple[str, str], Candidate]:
    """The fastest candidate of each strategy and layout, as it is on such a machine; whether it fits there or not."""
    best: dict[tuple[str, str], Candidate] = {}
    for c in candidates(shape, machine):
        key = (c.kind, c.layout)
        if (c.legal is None or not c.fits) and (key not in best or c.seconds < best[key].seconds):
            best[key] = replace(c, legal=None, fits=True)
    return best


def _unmoved(shape: Shape) -> Shape:
    """In a program that keeps its order; what is dealt stays so."""
    return shape if shape.order.dealt else replace(shape, order=CONTIGUOUS)


def _same_or_contiguous(best: Mapping[tuple[str, str], Candidate], key: tuple[str, str]) -> Candidate | None:
    """A window is never in zigzag order."""
    return best.get(key) or best.get((key[0], CONTIGUOUS.name))


def _exchanged(whole: _AllLayers, n: int, machine: Machine) -> float:
    """Seconds of the exchanges besides attention's and gradients'."""
    if n == 1:
        return 0.0
    lines = {name.removeprefix("sent "): name for name in whole.names("sent ")}
    out = 0.0
    for kind, name in lines.items():
        line = machine.line(kind, n)
        out += whole(f"calls {kind}", n) * line.latency + whole(name, n) / line.bandwidth
    return out


def _telling(rows: Iterable[Variant]) -> list[Variant]:
    """Without those that hold no less than a faster one that is asked for alike. rows: faster ones first."""
    least: dict[tuple[Any, ...], float] = {}
    out = []
    for row in rows:
        way = row.ranks, row.attention, row.layout, row.checkpoint, row.tiles, row.offload, row.state
        if row.memory < least.get(way, math.inf):
            least[way] = row.memory
            out.append(row)
    return out


def _change(rows: list[Variant], found: StepPlan, largest: Mapping[tuple[bool, int | str], str]) -> str:
    """What would have to change for one number of ranks. largest: what is, by checkpoints and tiles."""
    least = min(rows, key=lambda row: row.memory)
    more = [row.ranks for row in found.rows if row.fits and row.ranks > least.ranks]
    way = f"{least.attention}, {'each layer checkpointed' if least.checkpoint else 'as written'}, state {least.state}"
    way += f", tiles {least.tiles}, {least.offload:.0%} of what is kept on the host"
    excess = written(least.memory - found.memory)
    words = [
        f"{least.ranks} ranks: the least is {written(least.memory)} ({way}), {excess} too much, in its {least.phase}"
    ]
    words.append(f"the largest there: {largest[least.checkpoint, least.tiles]}")
    if more:
        words.append(f"it fits on {min(more)}")
    if not least.checkpoint and not any(row.checkpoint for row in rows):
        words.append("checkpoint its layers")
    words.append("take more ranks or smaller batches, and let the model return its loss alone")
    return "; ".join(words)
