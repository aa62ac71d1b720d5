"""What a plan looks at: a model lowered with certain options, and what other ways would hold and take beside that.

What a rank holds is what `explain` says (`StepMemory`, of layers that are unrolled). With another attention, moments at
its lines hold as much more or less as the cost model says of that. Seconds are products at `flops`, other kernels at
`memory_bandwidth`, attention and exchanges as the cost model has them, and one pass of the optimizer over its state.
Where a way does not fit, the least share of what is kept goes to the host with which it does; copies hide behind all.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from torch import nn

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import CONTIGUOUS, LAYOUTS
from sp_compile.passes.capture.is_traced import Traced
from sp_compile.passes.context import NoteKind
from sp_compile.passes.cost.attention_cost import (
    Candidate,
    Shape,
    attention_strategies,
    candidates,
    candidates_in_order,
    choose,
)
from sp_compile.passes.cost.exchange_cost import collectives_of
from sp_compile.passes.cost.few_layers import checkpointed
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.offload_cost import copy_seconds
from sp_compile.passes.cost.step_memory import StepMemory
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.sizes import typical
from sp_compile.verify import Look, alike, attentions_of, explain_each

SHARDED, WHOLE = STATES = ("sharded", "on every rank")
SHARES = tuple(i / 20 for i in range(1, 21))
"""Of what is kept, to the host."""
SAMPLE = 2
"""Ranks on which the model's attentions are looked for."""
AUTO = "auto", "auto"
SELDOM = 50_000
"""Objects that come before the garbage collector does."""


@dataclass(frozen=True)
class PlanWay:
    """How a model is lowered. again: is each of its layers computed again in the backward?"""

    ranks: int
    attention: str
    layout: str
    again: bool
    tiles: int | str
    state: str
    offload: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Of its attention."""
        return self.attention, self.layout

    @property
    def options(self) -> dict[str, Any]:
        """Of the backend."""
        asked = {"attention": self.attention, "layout": self.layout, "tiles": self.tiles}
        asked |= {"state": "sharded", "param_grads": "partial"} if self.state == SHARDED else {"param_grads": "reduce"}
        return asked | ({"offload": self.offload} if self.offload else {})


@dataclass(frozen=True)
class Attend:
    """One strategy and layout for all attentions of a model: what each becomes, and how many there are."""

    key: tuple[str, str]
    found: Sequence[tuple[Candidate, float]] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward, of all."""
        return sum(c.seconds * count for c, count in self.found)

    @property
    def forward(self) -> float:
        """Seconds of the forward alone."""
        return sum(c.forward * count for c, count in self.found)

    @property
    def memory(self) -> float:
        """Bytes of the one that holds most."""
        return max((c.memory for c, _ in self.found), default=0.0)


Largest: TypeAlias = tuple[float, str]
"""Bytes of a moment, and its phase."""


@dataclass(frozen=True)
class _Held:
    """Of a step with a share on the host: the largest moments at attention's lines, and elsewhere; host: bytes there.

    Each where FSDP shares the state over the way's ranks, and where it does not.
    """

    step: StepMemory
    near: tuple[Largest, Largest]
    away: tuple[Largest, Largest]
    host: float

    @staticmethod
    def of(step: StepMemory, n: int) -> _Held:
        points = list(step.points())
        lines = {point.moment.where for point in points if point.moment.attends} - {""}
        most: dict[tuple[bool, bool], Largest] = {}
        for point in points:
            for whole in (False, True):
                key = point.moment.where in lines, whole
                found = point.nbytes if whole else step.held_in_shards(point, n), point.phase
                most[key] = max(most.get(key, found), found)
        nothing = 0.0, "forward"
        near, away = ((most.get((at, False), nothing), most.get((at, True), nothing)) for at in (True, False))
        return _Held(step, near, away, step.offloaded.nbytes if step.offloaded is not None else 0.0)

    def towards(self, other: _Held, share: float) -> _Held:
        """With so much of what the other one has on the host."""
        near, away = (
            tuple((x[0] + share * (y[0] - x[0]), (x if share < 0.5 else y)[1]) for x, y in zip(mine, others))
            for mine, others in ((self.near, other.near), (self.away, other.away))
        )
        return _Held(self.step, near, away, share * other.host)  # type: ignore[arg-type]

    def memory(self, state: str, n: int, more: float = 0.0) -> Largest:
        """The peak of a rank and its phase, where an attention holds so much more."""
        whole = state != SHARDED
        (near, phase), away = self.near[whole], self.away[whole]
        values, phase = max((near + more, phase), away)
        if not whole:
            return self.step.peak_in_shards(int(values), n), phase
        return self.step.state + max(values, self.step.weights.learned), phase


@dataclass
class LookedStep:
    """A look at a way. exact: do a few layers stand for all, so that any share on the host is a number of layers?"""

    way: PlanWay
    look: Look
    exact: bool
    _known: dict[float, _Held] = field(default_factory=dict)

    @property
    def step(self) -> StepMemory:
        """As it was asked for."""
        assert self.look.report.step is not None
        return self.look.report.step

    @property
    def kept(self) -> float:
        """Bytes that the forward leaves for the backward, wherever."""
        return self.step.saved + (self.step.offloaded.nbytes if self.step.offloaded is not None else 0)

    @property
    def most_tiles(self) -> int:
        return max((one.tiles for one in self.look.report.tiled), default=0)

    @property
    def attends_again(self) -> bool:
        """Is attention computed again in the backward?"""
        return bool(self.look.report.find_notes(NoteKind.RECOMPUTED))

    def as_it_is(self, attend: Attend) -> Attend:
        """What the attentions are in fact, if it is theirs. On one rank nothing is decided."""
        found = [(d.chosen, d.nodes) for d in self.look.report.attention]
        return Attend(self.way.key, found) if found and attend.key == self.way.key else attend

    @property
    def attention(self) -> float:
        """Bytes of the attention that holds most."""
        return max((d.chosen.memory for d in self.look.report.attention), default=0.0)

    def held(self, share: float) -> _Held:
        """With this share on the host."""
        if share not in self._known:
            self._known[share] = self._held(share)
        return self._known[share]

    def _held(self, share: float) -> _Held:
        steps = self.look.steps or []
        if share == self.way.offload:
            return _Held.of(self.step, self.way.ranks)
        if self.exact:
            return _Held.of(replace(self.step, graphs=[one.step(one.share(share)) for one in steps]), self.way.ranks)
        if share == 1.0:
            return _Held.of(replace(self.step, graphs=[one.graph.hosted or one.graph for one in steps]), self.way.ranks)
        return self.held(0.0).towards(self.held(1.0), share)

    @property
    def knows_shares(self) -> bool:
        """Would a look with any other share on the host say the same as this one does of that?"""
        return self.exact and not self.attends_again

    def is_exact(self, attend: Attend, state: str, share: float) -> bool:
        """Would a look with these options say the same?"""
        same = attend.key == self.way.key and state == self.way.state
        return same and (share == self.way.offload or self.knows_shares)

    def seconds(self, attend: Attend, machine: Machine) -> float:
        """Of a step, but for exchanges of weights and gradients, the optimizer and copies to the host."""
        flops, traffic = self._work
        found = attend.seconds + (attend.forward if self.attends_again else 0.0)
        return found + flops / machine.flops + machine.copy(traffic) + self._exchanged(machine)

    @cached_property
    def _work(self) -> tuple[int, int]:
        """FLOPs of products, and bytes that other kernels read and write."""
        walks = [walk for graph in self.step.graphs for walk in (graph.forward, graph.backward) if walk is not None]
        return sum(walk.flops for walk in walks), sum(walk.traffic for walk in walks)

    def _exchanged(self, machine: Machine) -> float:
        """Seconds of the exchanges besides attention's and gradients'."""
        found = 0.0
        for exchange in self.look.report.exchanges:
            if exchange.of_attention or exchange.op == "reduce_grad":
                continue
            for kind, sent in zip(collectives_of(exchange), map(typical, (exchange.forward, exchange.backward))):
                found += machine.line(kind, self.way.ranks).seconds(sent) if sent else 0.0
        return found


@dataclass
class StepPlanner:
    """A model, and what is tried with it. blocks: to be checkpointed.

    shares: of what is kept that may go to the host, from nothing on; or offload: the one that does. host: bytes that it
    has for a rank.
    options: that all ways have. per_weight: bytes of the optimizer's state for a byte of parameters. tokens: of a step.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    machine: Machine
    options: Mapping[str, Any]
    shares: Sequence[float]
    per_weight: float
    tokens: int
    blocks: Sequence[nn.Module]
    offload: float = 0.0
    host: float = math.inf
    _steps: dict[PlanWay, LookedStep] = field(default_factory=dict)
    _attends: dict[int, list[Attend]] = field(default_factory=dict)
    _problems: dict[int, str] = field(default_factory=dict)
    _traced: dict[bool, Traced] = field(default_factory=lambda: {again: Traced() for again in (False, True)})

    @cached_property
    def weights(self) -> ModelBytes:
        return ModelBytes.of(self.model)

    def states(self, n: int) -> Sequence[str]:
        """Where the state may be, the one first that most is known of."""
        if n == 1:
            return (WHOLE,)
        if "state" in self.options:
            return (SHARDED if self.options["state"] == "sharded" else WHOLE,)
        return STATES

    def look(self, ways: Sequence[PlanWay]) -> list[LookedStep]:
        """At each of these that can be; all with the same checkpoints are traced once."""
        new = [way for way in dict.fromkeys(ways) if way not in self._steps]
        depth = alike(self.model)
        for again in (False, True):
            asked = [way for way in new if way.again == again]
            if not asked:
                continue
            given = [(way.ranks, self._given(**way.options)) for way in asked]
            try:
                with checkpointed(self.blocks if again else []), _few_collections():
                    looks = explain_each(self.model, self.args, given, self.per_weight, depth, self._traced[again])
            except SpError as error:
                if asked != list(ways) or self._steps:
                    self._problems |= {way.ranks: str(error) for way in asked}
                    continue
                raise
            for way, look in zip(asked, looks, strict=True):
                if look.problem is None:
                    self._steps[way] = LookedStep(way, look, depth is not None)
                else:
                    self._problems[way.ranks] = str(look.problem)
        return [self._steps[way] for way in ways if way in self._steps]

    def _given(self, **options: Any) -> dict[str, Any]:
        return {**merged_options(self.options, options), "kwargs": dict(self.kwargs)}

    @cached_property
    def _shapes(self) -> list[tuple[Shape, float]]:
        """Each shape of attention, and how many there are. With one strategy that splits all of them."""
        sampled = next(strategy.name for strategy in attention_strategies() if strategy.always)
        given = self._given(attention=sampled, layout="auto", cost={**self.options["cost"], "memory": 1e18})
        with _few_collections():
            found = attentions_of(self.model, self.args, (SAMPLE, given), alike(self.model), self._traced[False])
        count: dict[Shape, float] = {}
        for decision in found:
            shape = _unmoved(decision.shape)
            count[shape] = count.get(shape, 0.0) + decision.nodes
        return list(count.items())

    def attends(self, n: int) -> list[Attend]:
        """Strategies and layouts that all attentions can have on so many ranks and the options allow, fastest first."""
        if n not in self._attends:
            self._attends[n] = self._found_attends(n)
        return self._attends[n]

    def _found_attends(self, n: int) -> list[Attend]:
        if not self._shapes or n == 1:
            return [self._attend(n, AUTO, CONTIGUOUS.name)]
        kind, layout = (self.options.get(name, "auto") for name in OPTIONS)
        dealt = any(shape.order.dealt for shape, _ in self._shapes)
        layouts = [order.name for order in LAYOUTS.values() if order.dealt == dealt and layout in ("auto", order.name)]
        kinds = [one.name for one in attention_strategies() if kind in ("auto", one.name)]
        alike = [self._attend(n, key, key[1]) for key in product(kinds, layouts)]
        found = [one for one in alike if any(c.layout == one.key[1] for c, _ in one.found)]
        for key in product(dict.fromkeys([*kinds, kind]), [layout]):  # as local attention beside global one
            each = [one for order in layouts if (one := self._attend(n, key, order)).found]
            mixed = min(each, key=lambda one: one.seconds, default=None)
            found += [mixed] if mixed is not None and all(one.found != mixed.found for one in found) else []
        return sorted(found, key=lambda one: (one.memory > self.machine.memory, one.seconds))

    def _attend(self, n: int, key: tuple[str, str], order: str) -> Attend:
        """What `explain` takes, if the program keeps its sequence in this order; of nothing, where that cannot be."""
        shapes = [(replace(shape, n=n, order=LAYOUTS[order]), count) for shape, count in self._shapes]
        found = [(c, count) for shape, count in shapes if (c := _taken(shape, *key, self.machine)) is not None]
        return Attend(key, found if len(found) == len(shapes) else [])

    def refusal(self, n: int) -> str:
        """Why nothing can be on so many ranks."""
        if n in self._problems:
            return self._problems[n]
        asked = {name: self.options[name] for name in OPTIONS if self.options.get(name, "auto") != "auto"}
        legal = {
            f"{c.kind}: {c.legal}"
            for shape, _ in self._shapes
            for c in candidates(replace(shape, n=n), self.machine)
            if c.legal and c.kind == asked.get("attention", c.kind)
        }
        words = " and ".join(f"{name}={value!r}" for name, value in asked.items())
        return f"{words} cannot be ({'; '.join(sorted(legal)) or 'no candidate'}); leave it out"

    def rows(self, looked: LookedStep, attend: Attend) -> Iterator[dict[str, Any]]:
        """What is known of an attention on these ranks: with nothing on the host, and with the least that fits."""
        n = looked.way.ranks
        for state in self.states(n):
            here = self.row(looked, attend, state, self.offload)
            yield here
            if not here["fits"] and looked.look.steps and (least := self.least(looked, attend, state)) is not None:
                yield least

    def least(self, looked: LookedStep, attend: Attend, state: str) -> dict[str, Any] | None:
        """With the least share on the host that fits; with the largest that the host has room for, where none does."""
        shares = self.shares[: bisect_right(self.shares, self.host, key=lambda share: looked.held(share).host)]
        if not shares:
            return None
        first = bisect_left(shares[:-1], True, key=lambda share: self.row(looked, attend, state, share)["fits"])
        return self.row(looked, attend, state, shares[first])

    def row(self, looked: LookedStep, attend: Attend, state: str, share: float) -> dict[str, Any]:
        """What is said of one way."""
        held, n, machine, weights = looked.held(share), looked.way.ranks, self.machine, self.weights
        other = attend.key != looked.way.key
        memory, phase = held.memory(state, n, attend.memory - looked.attention if other else 0.0)
        seconds = looked.seconds(looked.as_it_is(attend), machine)
        shards = n if state == SHARDED else 1
        if shards > 1:
            moved = machine.seconds("all_gather", weights.parameters / n, n) * 2
            moved += machine.seconds("reduce_scatter", weights.learned / n, n)
            seconds = machine.together(seconds, moved)
        else:
            seconds += machine.seconds("all_reduce", weights.learned, n)
        trained = weights.parameters + weights.learned + self.per_weight * weights.learned
        seconds += machine.copy(2 * trained / shards)
        return {
            "way": replace(looked.way, attention=attend.key[0], layout=attend.key[1], state=state, offload=share),
            "host": held.host,
            "memory": memory,
            "phase": phase,
            "kept": looked.kept,
            "seconds": machine.together(seconds, 2 * copy_seconds(held.host, machine)),
            "fits": memory <= machine.memory and held.host <= self.host,
            "looked": looked.is_exact(attend, state, share),
            "most_tiles": looked.most_tiles,
        }

    def largest(self, way: PlanWay) -> str:
        """The line of the largest value at the peak of what was looked at that is nearest to a way."""
        alike = [one for one in self._steps.values() if one.way.ranks == way.ranks]
        looked = max(alike, key=lambda one: sum(a == b for a, b in zip(asdict(one.way).values(), asdict(way).values())))
        step = looked.step
        return step.summary(max(step.points(), key=lambda point: point.nbytes), most=1)[0][1]

    def constant(self, n: int) -> float:
        """Bytes of a rank, values apart, with state in shards if there are several."""
        return sum(self.weights.sharded(n, self.per_weight)) + self.weights.buffers


OPTIONS = "attention", "layout"


def merged_options(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan was given, and what a way is; what becomes of gradients is the program's, where it says that."""
    return {**given, **options, **{name: given[name] for name in ("param_grads",) if name in given}}


@contextmanager
def _few_collections() -> Iterator[None]:
    """The garbage collector passes over what was there before, all of torch, and comes seldom: a fifth of a look."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _taken(shape: Shape, kind: str, layout: str, machine: Machine) -> Candidate | None:
    """The best of a strategy and a layout, or of "auto"; what needs least, where none fits a device."""
    found = [c for c in candidates_in_order(shape, machine) if kind in ("auto", c.kind)]
    if layout != "auto":
        found = [c for c in found if not c.relayout]
    if legal := [c for c in found if c.legal is None]:
        return choose(legal)
    large = min((c for c in found if not c.fits), key=lambda c: (c.memory, c.seconds), default=None)
    return None if large is None else replace(large, legal=None, fits=True)


def _unmoved(shape: Shape) -> Shape:
    """In a program that keeps its order; what is dealt stays so."""
    return shape if shape.order.dealt else replace(shape, order=CONTIGUOUS)
