"""Examine a model lowered with certain options, and estimate memory and seconds of other options from it.

The memory of a rank is that of `explain` (`StepMemory`, with all layers). For another attention, the moments at its
lines change by the difference in the cost model. Seconds are products at `flops`, other kernels at `memory_bandwidth`,
attention and exchanges by the cost model, and one pass of the optimizer over its state. If a variant does not fit, the
least sufficient share of saved values goes to the host; copies overlap with all other work.
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
from sp_compile.passes.capture.user_program import CapturedGraphs
from sp_compile.passes.context import NoteKind
from sp_compile.passes.cost.attention_cost import (
    AttentionShape,
    Candidate,
    all_candidates,
    attention_strategies,
    candidates_in_order,
    choose_attention,
)
from sp_compile.passes.cost.exchange_cost import exchange_collectives
from sp_compile.passes.cost.few_layers import checkpoint_layers
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.offload_cost import copy_seconds
from sp_compile.passes.cost.step_memory import StepMemory
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.sizes import assume_large

from .dry_run import DryRunResult
from .explain import explain_configs, find_attentions, similar_layers

SHARDED_STATE, REPLICATED_STATE = STATES = ("sharded", "on every rank")
OFFLOAD_SHARES = tuple(i / 20 for i in range(1, 21))
"""Shares of saved values that may go to the host."""
SAMPLE_SHARE = 2
"""Number of ranks of the dry run that finds the attentions of a model."""
AUTO = "auto", "auto"
GC_THRESHOLD = 50_000
"""New objects after which the garbage collector runs."""


@dataclass(frozen=True)
class PlanConfig:
    """Options with which a model is lowered."""

    ranks: int  # number of ranks
    attention: str
    layout: str
    checkpoint: bool  # True if each layer is recomputed in the backward
    tiles: int | str
    state: str
    offload: float = 0.0  # the share of saved values on the host

    @property
    def key(self) -> tuple[str, str]:
        """Return the key of its attention."""
        return self.attention, self.layout

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the backend."""
        requested = {"attention": self.attention, "layout": self.layout, "tiles": self.tiles}
        requested |= (
            {"state": "sharded", "param_grads": "partial"} if self.state == SHARDED_STATE else {"param_grads": "reduce"}
        )
        return requested | ({"offload": self.offload} if self.offload else {})


@dataclass(frozen=True)
class AttentionChoice:
    """One strategy and layout for all attentions of a model."""

    key: tuple[str, str]  # the strategy and the layout
    found: Sequence[tuple[Candidate, float]] = ()  # each candidate and the number of attentions

    @property
    def seconds(self) -> float:
        """Return the seconds of all attentions, forward and backward."""
        return sum(c.seconds * count for c, count in self.found)

    @property
    def forward(self) -> float:
        """Return the seconds of the forward."""
        return sum(c.forward * count for c, count in self.found)

    @property
    def memory(self) -> float:
        """Return the bytes of the largest attention."""
        return max((c.memory for c, _ in self.found), default=0.0)


LargestMoments: TypeAlias = tuple[float, str]
"""Bytes of a moment, and its phase."""


@dataclass(frozen=True)
class _PeakMemory:
    """Peaks of a step with a share on the host: at the lines of attention, and elsewhere.

    Each is stored for state that FSDP shards over the ranks, and for replicated state. host: bytes on the host.
    """

    step: StepMemory
    near_attention: tuple[LargestMoments, LargestMoments]
    away: tuple[LargestMoments, LargestMoments]
    host: float

    @staticmethod
    def of(step: StepMemory, n: int) -> _PeakMemory:
        """Return the largest moments of a step, at lines with attention and elsewhere."""
        points = list(step.points())
        lines = {point.moment.where for point in points if point.moment.attends} - {""}
        most: dict[tuple[bool, bool], LargestMoments] = {}
        for point in points:
            for unsharded in (False, True):
                key = point.moment.where in lines, unsharded
                found = point.nbytes if unsharded else step.sharded_bytes(point, n), point.phase
                most[key] = max(most.get(key, found), found)
        nothing = 0.0, "forward"
        near, away = ((most.get((at, False), nothing), most.get((at, True), nothing)) for at in (True, False))
        return _PeakMemory(step, near, away, step.offloaded.nbytes if step.offloaded is not None else 0.0)

    def with_offload(self, other: _PeakMemory, share: float) -> _PeakMemory:
        """Return the peaks with this share of the other step's values on the host."""
        near, away = (
            tuple((x[0] + share * (y[0] - x[0]), (x if share < 0.5 else y)[1]) for x, y in zip(ours, others))
            for ours, others in ((self.near_attention, other.near_attention), (self.away, other.away))
        )
        return _PeakMemory(self.step, near, away, share * other.host)  # type: ignore[arg-type]

    def memory(self, state: str, n: int, more: float = 0.0) -> LargestMoments:
        """Return the peak of a rank and its phase, where attention needs `more` bytes."""
        unsharded = state != SHARDED_STATE
        (near, phase), away = self.near_attention[unsharded], self.away[unsharded]
        values, phase = max((near + more, phase), away)
        if not unsharded:
            return self.step.sharded_peak(int(values), n), phase
        return self.step.state + max(values, self.step.weights.trainable), phase


@dataclass
class PlannedStep:
    """Result of examining a configuration."""

    config: PlanConfig
    dry_run: DryRunResult
    exact: bool  # True if a few layers represent all, so any share on the host is a number of layers
    _known: dict[float, _PeakMemory] = field(default_factory=dict)

    @property
    def step(self) -> StepMemory:
        """Return the step with the requested share."""
        assert self.dry_run.report.step is not None
        return self.dry_run.report.step

    @property
    def saved_bytes(self) -> float:
        """Return the bytes that the forward saves for the backward, on the device and the host."""
        return self.step.saved + (self.step.offloaded.nbytes if self.step.offloaded is not None else 0)

    @property
    def max_tiles(self) -> int:
        """Return the largest number of tiles of a region."""
        return max((one.tiles for one in self.dry_run.report.tiled), default=0)

    @property
    def recomputes_attention(self) -> bool:
        """Return True if the backward recomputes attention."""
        return bool(self.dry_run.report.find_notes(NoteKind.RECOMPUTED))

    def actual_attention(self, attend: AttentionChoice) -> AttentionChoice:
        """Return the attentions of the step, if they are of this choice.

        On one rank there is no choice.
        """
        found = [(d.chosen, d.nodes) for d in self.dry_run.report.attention]
        return AttentionChoice(self.config.key, found) if found and attend.key == self.config.key else attend

    @property
    def attention(self) -> float:
        """Return the bytes of the largest attention."""
        return max((d.chosen.memory for d in self.dry_run.report.attention), default=0.0)

    def peak_memory(self, share: float) -> _PeakMemory:
        """Return the peaks with this share on the host."""
        if share not in self._known:
            self._known[share] = self._peak_memory(share)
        return self._known[share]

    def _peak_memory(self, share: float) -> _PeakMemory:
        steps = self.dry_run.steps or []
        if share == self.config.offload:
            return _PeakMemory.of(self.step, self.config.ranks)
        if self.exact:
            return _PeakMemory.of(
                replace(self.step, graphs=[one.step(one.share(share)) for one in steps]), self.config.ranks
            )
        if share == 1.0:
            return _PeakMemory.of(
                replace(self.step, graphs=[one.graph.hosted or one.graph for one in steps]), self.config.ranks
            )
        return self.peak_memory(0.0).with_offload(self.peak_memory(1.0), share)

    @property
    def covers_any_share(self) -> bool:
        """Return True if the step is exact for any share on the host."""
        return self.exact and not self.recomputes_attention

    def is_exact(self, attend: AttentionChoice, state: str, share: float) -> bool:
        """Return True if a dry run with these options would return the same numbers."""
        same = attend.key == self.config.key and state == self.config.state
        return same and (share == self.config.offload or self.covers_any_share)

    def seconds(self, attend: AttentionChoice, machine: Machine) -> float:
        """Return the seconds of a step without exchanges of weights and gradients, optimizer and copies."""
        flops, traffic = self._work
        found = attend.seconds + (attend.forward if self.recomputes_attention else 0.0)
        return found + flops / machine.flops + machine.copy(traffic) + self._exchange_seconds(machine)

    @cached_property
    def _work(self) -> tuple[int, int]:
        """Return the FLOPs of products, and the bytes that other kernels read and write."""
        walks = [walk for graph in self.step.graphs for walk in (graph.forward, graph.backward) if walk is not None]
        return sum(walk.flops for walk in walks), sum(walk.traffic for walk in walks)

    def _exchange_seconds(self, machine: Machine) -> float:
        """Return the seconds of all exchanges but those of attention and gradients."""
        found = 0.0
        for exchange in self.dry_run.report.exchanges:
            if exchange.of_attention or exchange.op == "reduce_grad":
                continue
            for kind, sent in zip(
                exchange_collectives(exchange), map(assume_large, (exchange.forward, exchange.backward))
            ):
                found += machine.line(kind, self.config.ranks).seconds(sent) if sent else 0.0
        return found


@dataclass
class StepPlanner:
    """A model, and the variants to examine."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    machine: Machine
    options: Mapping[str, Any]  # options of all variants
    shares: Sequence[float]  # the shares of saved values that may go to the host, from 0
    per_weight: float  # bytes of optimizer state for a byte of parameters
    tokens: int  # tokens of a step
    blocks: Sequence[nn.Module]  # modules to checkpoint
    offload: float = 0.0  # the fixed share on the host, if one is passed
    host: float = math.inf  # bytes of the host for a rank
    _steps: dict[PlanConfig, PlannedStep] = field(default_factory=dict)
    _choices: dict[int, list[AttentionChoice]] = field(default_factory=dict)
    _problems: dict[int, str] = field(default_factory=dict)
    _captured: dict[bool, CapturedGraphs] = field(
        default_factory=lambda: {again: CapturedGraphs() for again in (False, True)}
    )

    @cached_property
    def weights(self) -> ModelBytes:
        """Return the bytes of the model."""
        return ModelBytes.of(self.model)

    def states(self, n: int) -> Sequence[str]:
        """Return the possible placements of the state, the best known one first."""
        if n == 1:
            return (REPLICATED_STATE,)
        if "state" in self.options:
            return (SHARDED_STATE if self.options["state"] == "sharded" else REPLICATED_STATE,)
        return STATES

    def plan_steps(self, configs: Sequence[PlanConfig]) -> list[PlannedStep]:
        """Examine the possible configurations; those with equal checkpoints are traced once."""
        new = [config for config in dict.fromkeys(configs) if config not in self._steps]
        depth = similar_layers(self.model)
        for again in (False, True):
            requested = [config for config in new if config.checkpoint == again]
            if not requested:
                continue
            dry_run_configs = [(config.ranks, self._make_dry_run(**config.options)) for config in requested]
            try:
                with checkpoint_layers(self.blocks if again else []), _reduce_gc():
                    dry_runs = explain_configs(
                        self.model, self.args, dry_run_configs, self.per_weight, depth, self._captured[again]
                    )
            except SpError as error:
                if requested != list(configs) or self._steps:
                    self._problems |= {config.ranks: str(error) for config in requested}
                    continue
                raise
            for config, dry_run in zip(requested, dry_runs, strict=True):
                if dry_run.problem is None:
                    self._steps[config] = PlannedStep(config, dry_run, depth is not None)
                else:
                    self._problems[config.ranks] = str(dry_run.problem)
        return [self._steps[config] for config in configs if config in self._steps]

    def _make_dry_run(self, **options: Any) -> dict[str, Any]:
        return {**merge_options(self.options, options), "kwargs": dict(self.kwargs)}

    @cached_property
    def _shapes(self) -> list[tuple[AttentionShape, float]]:
        """Return each shape of attention and its count, from a strategy that splits all of them."""
        sampled = next(strategy.name for strategy in attention_strategies() if strategy.always)
        sample_config = self._make_dry_run(
            attention=sampled, layout="auto", cost={**self.options["cost"], "memory": 1e18}
        )
        with _reduce_gc():
            found = find_attentions(
                self.model, self.args, (SAMPLE_SHARE, sample_config), similar_layers(self.model), self._captured[False]
            )
        count: dict[AttentionShape, float] = {}
        for decision in found:
            shape = _with_program_order(decision.shape)
            count[shape] = count.get(shape, 0.0) + decision.nodes
        return list(count.items())

    def attention_choices(self, n: int) -> list[AttentionChoice]:
        """Return the strategies and layouts that the options allow for all attentions, fastest first."""
        if n not in self._choices:
            self._choices[n] = self._find_attention_choices(n)
        return self._choices[n]

    def _find_attention_choices(self, n: int) -> list[AttentionChoice]:
        if not self._shapes or n == 1:
            return [self._attention_choice(n, AUTO, CONTIGUOUS.name)]
        kind, layout = (self.options.get(name, "auto") for name in PLAN_OPTIONS)
        balanced = any(shape.order.is_balanced for shape, _ in self._shapes)
        layouts = [
            order.name for order in LAYOUTS.values() if order.is_balanced == balanced and layout in ("auto", order.name)
        ]
        kinds = [one.name for one in attention_strategies() if kind in ("auto", one.name)]
        candidates = [self._attention_choice(n, key, key[1]) for key in product(kinds, layouts)]
        found = [one for one in candidates if any(c.layout == one.key[1] for c, _ in one.found)]
        for key in product(
            dict.fromkeys([*kinds, kind]), [layout]
        ):  # such as local attention in addition to global attention
            each = [one for order in layouts if (one := self._attention_choice(n, key, order)).found]
            mixed = min(each, key=lambda one: one.seconds, default=None)
            found += [mixed] if mixed is not None and all(one.found != mixed.found for one in found) else []
        return sorted(found, key=lambda one: (one.memory > self.machine.memory, one.seconds))

    def _attention_choice(self, n: int, key: tuple[str, str], order: str) -> AttentionChoice:
        """Return the choice of `explain` if the program stores its sequence in this order.

        Return None if that is not possible.
        """
        shapes = [(replace(shape, n=n, order=LAYOUTS[order]), count) for shape, count in self._shapes]
        found = [(c, count) for shape, count in shapes if (c := _best_candidate(shape, *key, self.machine)) is not None]
        return AttentionChoice(key, found if len(found) == len(shapes) else [])

    def refusal_reason(self, n: int) -> str:
        """Return the reason why nothing is possible on a number of ranks."""
        if n in self._problems:
            return self._problems[n]
        requested = {name: self.options[name] for name in PLAN_OPTIONS if self.options.get(name, "auto") != "auto"}
        legal = {
            f"{c.kind}: {c.legal}"
            for shape, _ in self._shapes
            for c in all_candidates(replace(shape, n=n), self.machine)
            if c.legal and c.kind == requested.get("attention", c.kind)
        }
        requested_text = " and ".join(f"{name}={value!r}" for name, value in requested.items())
        return f"{requested_text} is not possible ({'; '.join(sorted(legal)) or 'no candidate'}); omit it"

    def plan_rows(self, step: PlannedStep, attend: AttentionChoice) -> Iterator[dict[str, Any]]:
        """Return variants of an attention: with nothing on the host, and with the least share that fits."""
        n = step.config.ranks
        for state in self.states(n):
            here = self.plan_row(step, attend, state, self.offload)
            yield here
            if not here["fits"] and step.dry_run.steps and (least := self.min_offload(step, attend, state)) is not None:
                yield least

    def min_offload(self, step: PlannedStep, attend: AttentionChoice, state: str) -> dict[str, Any] | None:
        """Return the variant with the least share on the host that fits.

        If none fits, return that with the largest share for which the host has memory.
        """
        shares = self.shares[: bisect_right(self.shares, self.host, key=lambda share: step.peak_memory(share).host)]
        if not shares:
            return None
        first = bisect_left(shares[:-1], True, key=lambda share: self.plan_row(step, attend, state, share)["fits"])
        return self.plan_row(step, attend, state, shares[first])

    def plan_row(self, step: PlannedStep, attend: AttentionChoice, state: str, share: float) -> dict[str, Any]:
        """Return the variant of these options."""
        live, n, machine, weights = step.peak_memory(share), step.config.ranks, self.machine, self.weights
        other = attend.key != step.config.key
        memory, phase = live.memory(state, n, attend.memory - step.attention if other else 0.0)
        seconds = step.seconds(step.actual_attention(attend), machine)
        shards = n if state == SHARDED_STATE else 1
        if shards > 1:
            moved = machine.seconds("all_gather", weights.parameters / n, n) * 2
            moved += machine.seconds("reduce_scatter", weights.trainable / n, n)
            seconds = machine.together(seconds, moved)
        else:
            seconds += machine.seconds("all_reduce", weights.trainable, n)
        trained = weights.parameters + weights.trainable + self.per_weight * weights.trainable
        seconds += machine.copy(2 * trained / shards)
        return {
            "config": replace(step.config, attention=attend.key[0], layout=attend.key[1], state=state, offload=share),
            "host": live.host,
            "memory": memory,
            "phase": phase,
            "kept": step.saved_bytes,
            "seconds": machine.together(seconds, 2 * copy_seconds(live.host, machine)),
            "fits": memory <= machine.memory and live.host <= self.host,
            "is_measured": step.is_exact(attend, state, share),
            "most_tiles": step.max_tiles,
        }

    def largest_value(self, config: PlanConfig) -> str:
        """Return the line of the largest value at the peak of the most similar examined step."""
        candidates = [one for one in self._steps.values() if one.config.ranks == config.ranks]
        nearest = max(
            candidates,
            key=lambda one: sum(a == b for a, b in zip(asdict(one.config).values(), asdict(config).values())),
        )
        step = nearest.step
        return step.summary(max(step.points(), key=lambda point: point.nbytes), limit=1)[0][1]

    def constant(self, n: int) -> float:
        """Return the constant bytes of a rank; state is sharded if there are several ranks."""
        return sum(self.weights.sharded_bytes(n, self.per_weight)) + self.weights.buffers


PLAN_OPTIONS = "attention", "layout"


def merge_options(user_options: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a variant, merged with those passed to the plan.

    An option for gradients that the program defines is preserved.
    """
    return {
        **user_options,
        **options,
        **{name: user_options[name] for name in ("param_grads",) if name in user_options},
    }


@contextmanager
def _reduce_gc() -> Iterator[None]:
    """Make the garbage collector ignore existing objects and run rarely: it takes a fifth of a dry run."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _best_candidate(shape: AttentionShape, kind: str, layout: str, machine: Machine) -> Candidate | None:
    """Return the best candidate of a strategy and a layout, or of "auto".

    If none fits a device, return the one with the least memory.
    """
    found = [c for c in candidates_in_order(shape, machine) if kind in ("auto", c.kind)]
    if layout != "auto":
        found = [c for c in found if not c.relayout]
    if legal := [c for c in found if c.legal is None]:
        return choose_attention(legal)
    large = min((c for c in found if not c.fits), key=lambda c: (c.memory, c.seconds), default=None)
    return None if large is None else replace(large, legal=None, fits=True)


def _with_program_order(shape: AttentionShape) -> AttentionShape:
    """Return the shape in a program that preserves its order; a balanced one stays balanced."""
    return shape if shape.order.is_balanced else replace(shape, order=CONTIGUOUS)
