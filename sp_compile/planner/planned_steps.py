"""Examine a model lowered with certain options, and estimate memory and seconds of others from it.

`StepPlanner.plan_steps` lowers the model in several configurations (`PlanConfig`), which returns a `PlannedStep` for
each. `StepPlanner.plan_rows` returns the rows of a plan that follow from such a step: exact ones, and estimates for
other attention, other placement of the state, or another share of saved values on the host.

The memory of a rank is that of `explain` (`StepMemory`, with all layers). For another attention, the moments at its
lines change by the difference in the cost model. Seconds are products at `flops`, other kernels at `memory_bandwidth`,
attention and exchanges by the cost model, and one pass of the optimizer over its state. If a variant does not fit, the
least sufficient share of saved values goes to the host; copies overlap with all other work. A moment is the run of one
kernel. The state is parameters, gradients and optimizer state. A choice is one strategy and layout for all attentions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import nn

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import CONTIGUOUS, LAYOUTS
from sp_compile.lowering.base.garbage import reduce_collections
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
from sp_compile.passes.cost.machine import Machine, copy_seconds
from sp_compile.passes.cost.step_memory import StepMemory
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.sizes import assume_large

from .dry_run import DryRun, DryRunConfigs, DryRunResult
from .explain import DRY_RUN_OPTIONS, run_few_layers, run_layers, similar_layers
from .step_peaks import REPLICATED_STATE, SHARDED_STATE, STATES, StepPeaks
from .variants import PlanConfig, Variant, merge_options

OFFLOAD_SHARES = tuple(i / 20 for i in range(1, 21))  # shares of saved values that may go to the host
SAMPLE_RANKS = 2  # number of ranks of the dry run that finds the attentions of a model
AUTO = "auto", "auto"  # key of the attention of a model without attention, or on one rank
GC_THRESHOLD = 50_000  # new objects after which the garbage collector runs


@dataclass(frozen=True)
class AttentionChoice:
    """One strategy and layout for all attentions of a model."""

    key: tuple[str, str]  # the strategy and the layout
    candidates: Sequence[tuple[Candidate, float]] = ()  # for each shape the candidate, and the number of attentions

    @property
    def seconds(self) -> float:
        """Return the seconds of all attentions, forward and backward."""
        return sum(c.seconds * count for c, count in self.candidates)

    @property
    def forward(self) -> float:
        """Return the seconds of all attentions in the forward, which a checkpoint adds to the backward."""
        return sum(c.forward * count for c, count in self.candidates)

    @property
    def memory(self) -> float:
        """Return the bytes of the largest attention of the choice."""
        return max((c.memory for c, _ in self.candidates), default=0.0)


@dataclass
class PlannedStep:
    """Result of examining a configuration: a step from which those of similar configurations are predicted."""

    config: PlanConfig  # the configuration
    dry_run: DryRunResult  # its report and step
    # True if a few layers represent all: then `dry_run.steps` give the exact step for any share on the host
    exact: bool
    _peaks: dict[float, StepPeaks] = field(default_factory=dict)  # share on the host -> peaks

    @property
    def step(self) -> StepMemory:
        """Return the memory of the step with the share on the host of `config`."""
        assert self.dry_run.report.step is not None
        return self.dry_run.report.step

    @property
    def saved_bytes(self) -> float:
        """Return the bytes that the forward saves for the backward, on the device and the host."""
        return self.step.saved + (self.step.offloaded.nbytes if self.step.offloaded is not None else 0)

    @property
    def max_tiles(self) -> int:
        """Return the largest number of tiles of a region."""
        return max((region.tiles for region in self.dry_run.report.tiled), default=0)

    @property
    def is_attention_recomputed(self) -> bool:
        """Return True if the backward recomputes attention."""
        return bool(self.dry_run.report.find_notes(NoteKind.RECOMPUTED))

    @property
    def attention(self) -> AttentionChoice:
        """Return the attention of the dry run."""
        return AttentionChoice(self.config.key, [(d.chosen, d.nodes) for d in self.dry_run.report.attention])

    def actual_attention(self, choice: AttentionChoice) -> AttentionChoice:
        """Return the choice with the candidates of the dry run if it ran with this choice, else the choice itself."""
        return self.attention if self.attention.candidates and choice.key == self.config.key else choice

    def peak_memory(self, share: float) -> StepPeaks:
        """Return the peaks with this share on the host."""
        if share not in self._peaks:
            self._peaks[share] = self._compute_peaks(share)
        return self._peaks[share]

    def _compute_peaks(self, share: float) -> StepPeaks:
        """Return the peaks with this share on the host.

        They are exact for every share if a few layers represent all (`exact`), else for 1 and the share of the dry run,
        and interpolated between 0 and 1 for others.
        """
        unrolls, n = self.dry_run.steps or [], self.config.ranks  # for each graph, the steps for any share
        if share == self.config.offload:
            return StepPeaks.of(self.step, n)
        if self.exact:
            # `unroll.share` selects saved values of at most this share of all saved bytes, `step` offloads them.
            graphs = [unroll.step(unroll.share(share)) for unroll in unrolls]
        elif share == 1.0:  # `hosted` is the step with all values on the host; None if there are none
            graphs = [unroll.graph.hosted or unroll.graph for unroll in unrolls]
        else:
            # A step of which other shares are requested ran with the share 0.0, so that the first branch returns it.
            assert self.config.offload == 0.0
            return self.peak_memory(0.0).with_offload(self.peak_memory(1.0), share)
        return StepPeaks.of(replace(self.step, graphs=graphs), n)

    @property
    def is_for_any_share(self) -> bool:
        """Return True if this dry run is sufficient for every share on the host.

        It is not if the step recomputes attention: a step that may offload values saves the results of attention
        instead.
        """
        return self.exact and not self.is_attention_recomputed

    def is_exact(self, choice: AttentionChoice, state: str, share: float) -> bool:
        """Return True if a dry run with these options would return the same numbers."""
        has_options = choice.key == self.config.key and state == self.config.state
        return has_options and (share == self.config.offload or self.is_for_any_share)

    def seconds(self, choice: AttentionChoice, machine: Machine) -> float:
        """Return the seconds of a step; `plan_row` adds exchanges of weights and gradients, optimizer and offload."""
        flops, traffic = self._work  # FLOPs of products, bytes that all other kernels but attention move
        attention = choice.seconds + (choice.forward if self.is_attention_recomputed else 0.0)
        return attention + flops / machine.flops + machine.copy(traffic) + self._exchange_seconds(machine)

    @cached_property
    def _work(self) -> tuple[int, int]:
        """Return the FLOPs of products, and the bytes that other kernels read and write."""
        walks = [walk for graph in self.step.graphs for walk in (graph.forward, graph.backward) if walk is not None]
        return sum(walk.flops for walk in walks), sum(walk.traffic for walk in walks)

    def _exchange_seconds(self, machine: Machine) -> float:
        """Return the seconds of all exchanges but those of attention and gradients."""
        seconds = 0.0
        for exchange in self.dry_run.report.exchanges:
            if exchange.of_attention or exchange.op == "reduce_grad":
                continue
            sent = assume_large(exchange.forward), assume_large(exchange.backward)  # bytes
            for collective, nbytes in zip(exchange_collectives(exchange), sent):
                if nbytes:  # `line` is the time of the collective as a linear function of the bytes
                    seconds += machine.line(collective, self.config.ranks).seconds(nbytes)
        return seconds


@dataclass
class StepPlanner:
    """A model, and the steps that were examined for a plan of it."""

    model: nn.Module  # may be on the meta device
    args: Sequence[Any]  # positional arguments of the model
    kwargs: Mapping[str, Any]  # keyword arguments of the model
    machine: Machine  # constants of a device; its memory is the limit
    options: Mapping[str, Any]  # options of all variants
    shares: Sequence[float]  # the shares of saved values that may go to the host, in ascending order
    per_weight: float  # bytes of optimizer state for a byte of parameters
    tokens: int  # tokens of a step
    blocks: Sequence[nn.Module]  # modules to checkpoint
    offload: float = 0.0  # the fixed share on the host, if one is passed
    host: float = math.inf  # bytes of the host for a rank
    _steps: dict[PlanConfig, PlannedStep] = field(default_factory=dict)  # all examined steps
    _choices: dict[int, list[AttentionChoice]] = field(default_factory=dict)  # by number of ranks
    _problems: dict[int, str] = field(default_factory=dict)  # number of ranks -> reason why lowering failed
    # checkpoint -> traced graphs of the model
    _captured: dict[bool, CapturedGraphs] = field(default_factory=lambda: defaultdict(CapturedGraphs))

    @cached_property
    def weights(self) -> ModelBytes:
        """Return the bytes of the model."""
        return ModelBytes.of(self.model)

    def states(self, n: int) -> Sequence[str]:
        """Return the placements of the state (`STATES`) that the options allow; the model is lowered with the first."""
        if n == 1:
            return (REPLICATED_STATE,)
        if "state" in self.options:
            return (SHARDED_STATE if self.options["state"] == "sharded" else REPLICATED_STATE,)
        return STATES

    def plan_steps(self, configs: Sequence[PlanConfig]) -> list[PlannedStep]:
        """Examine configurations, and return the steps of those that are possible.

        The model is traced once with checkpoints and once without. The reason why a configuration is not possible is
        stored in `_problems`.

        Raises:
            SpError: The first call fails to lower the model, and all its configurations have checkpoints, or none.
        """
        new = [config for config in dict.fromkeys(configs) if config not in self._steps]
        layers = similar_layers(self.model)
        for checkpoint in (False, True):
            requested = [config for config in new if config.checkpoint == checkpoint]
            if not requested:
                continue
            configs_to_run = [(config.ranks, self._dry_run_options(**config.options)) for config in requested]
            try:
                with checkpoint_layers(self.blocks if checkpoint else []), reduce_collections(GC_THRESHOLD):
                    dry_runs = run_layers(self._dry_run(configs_to_run, checkpoint, self.per_weight), layers)
            except SpError as error:  # none of `requested` is possible
                is_first_call = not self._steps and requested == list(configs)
                if is_first_call:  # nothing is left to plan, so the error is that of the plan
                    raise
                self._problems |= {config.ranks: str(error) for config in requested}
                continue
            for config, dry_run in zip(requested, dry_runs, strict=True):
                if dry_run.problem is None:
                    self._steps[config] = PlannedStep(config, dry_run, exact=layers is not None)
                else:
                    self._problems[config.ranks] = str(dry_run.problem)
        return [self._steps[config] for config in configs if config in self._steps]

    def _dry_run(self, configs: DryRunConfigs, checkpoint: bool, per_weight: float | None) -> DryRun:
        """Return a dry run of the model in these configurations, which predicts memory unless `per_weight` is None.

        The graphs of earlier dry runs with or without checkpoints are not traced again.
        """
        captured, predicts = self._captured[checkpoint], per_weight is not None
        return DryRun(
            "plan",
            self.model,
            self.args,
            configs,
            refused=DRY_RUN_OPTIONS,
            per_weight=per_weight,
            keeps_steps=predicts,
            captured=captured,
        )

    def _dry_run_options(self, **options: Any) -> dict[str, Any]:
        """Return the options and keyword arguments of a dry run: the user's, with `options` added or replaced."""
        return {**merge_options(self.options, options), "kwargs": dict(self.kwargs)}

    @cached_property
    def _shapes(self) -> list[tuple[AttentionShape, float]]:
        """Return each shape of attention in the model and the number of attentions of this shape.

        They are read from the report of a dry run, with a strategy that supports every attention.
        """
        strategy = next(strategy.name for strategy in attention_strategies() if strategy.always)
        cost = {**self.options["cost"], "memory": 1e18}  # so much that every attention fits
        config = SAMPLE_RANKS, self._dry_run_options(attention=strategy, layout="auto", cost=cost)
        with reduce_collections(GC_THRESHOLD):
            run = self._dry_run([config], checkpoint=False, per_weight=None)
            (result,) = run_few_layers(run, similar_layers(self.model))
        count: dict[AttentionShape, float] = {}
        for decision in result.report.attention:
            shape = decision.shape
            # The plan chooses the layout, so shapes that differ in it only are one. A balanced order is no choice: the
            # program permutes its rows itself.
            if not shape.order.is_balanced:
                shape = replace(shape, order=CONTIGUOUS)
            count[shape] = count.get(shape, 0.0) + decision.nodes  # the attentions in all layers
        return list(count.items())

    def attention_choices(self, n: int) -> list[AttentionChoice]:
        """Return the strategies and layouts that the options allow for all attentions, fastest first."""
        if n not in self._choices:
            self._choices[n] = self._find_attention_choices(n)
        return self._choices[n]

    def _find_attention_choices(self, n: int) -> list[AttentionChoice]:
        """Return a choice for each strategy and layout, and choices that mix several, for `attention_choices`."""
        if not self._shapes or n == 1:
            return [self._attention_choice(n, AUTO, order=CONTIGUOUS.name)]
        user_strategy, user_layout = (self.options.get(name, "auto") for name in PLAN_OPTIONS)
        is_balanced = any(shape.order.is_balanced for shape, _ in self._shapes)
        layouts = [order.name for order in LAYOUTS.values() if order.is_balanced == is_balanced]
        layouts = [name for name in layouts if user_layout in ("auto", name)]
        strategies = [s.name for s in attention_strategies() if user_strategy in ("auto", s.name)]
        choices = []
        for strategy, layout in product(strategies, layouts):
            choice = self._attention_choice(n, (strategy, layout), order=layout)
            has_layout = any(candidate.layout == layout for candidate, _ in choice.candidates)
            if has_layout:  # else all attentions permute their rows to another layout
                choices.append(choice)
        # Attentions of different shapes, such as local and global ones, may be fastest with different layouts, or, with
        # the strategy "auto", with different strategies. `by_order` has a choice for each layout of the program outside
        # of attention, from which each attention may permute its rows.
        for strategy in dict.fromkeys([*strategies, user_strategy]):
            by_order = [self._attention_choice(n, (strategy, user_layout), order=order) for order in layouts]
            mixed = min((choice for choice in by_order if choice.candidates), key=lambda c: c.seconds, default=None)
            if mixed is not None and all(choice.candidates != mixed.candidates for choice in choices):
                choices.append(mixed)
        # Those that exceed the memory are last.
        return sorted(choices, key=lambda choice: (choice.memory > self.machine.memory, choice.seconds))

    def _attention_choice(self, n: int, key: tuple[str, str], order: str) -> AttentionChoice:
        """Return the candidates that the backend would choose for all attentions; none if one of these is not possible.

        Args:
            n: Number of ranks.
            key: The options `attention` and `layout`.
            order: The layout in which the program stores its sequence outside of attention.
        """
        candidates: list[tuple[Candidate, float]] = []
        for shape, count in self._shapes:
            best = _best_candidate(replace(shape, n=n, order=LAYOUTS[order]), *key, self.machine)
            if best is None:
                return AttentionChoice(key)
            candidates.append((best, count))
        return AttentionChoice(key, candidates)

    def refusal_reason(self, n: int) -> str:
        """Return the reason why nothing is possible on a number of ranks, as a line of the plan.

        It is the error of a dry run. Without one, no strategy supports the options that the user has passed.
        """
        if n in self._problems:
            return self._problems[n]
        requested = {name: self.options[name] for name in PLAN_OPTIONS if self.options.get(name, "auto") != "auto"}
        candidates = [c for shape, _ in self._shapes for c in all_candidates(replace(shape, n=n), self.machine)]
        kind = requested.get("attention")
        # `refusal` is the reason why a candidate is not possible, or None if it is.
        reasons = {f"{c.kind}: {c.refusal}" for c in candidates if c.refusal and kind in (None, c.kind)}
        requested_text = " and ".join(f"{name}={value!r}" for name, value in requested.items())
        reason_text = "; ".join(sorted(reasons)) or "no candidate"
        return f"{requested_text} is not possible ({reason_text}); omit it"

    def plan_rows(self, step: PlannedStep, choice: AttentionChoice) -> Iterator[Variant]:
        """Yield the variants of a choice, with each placement of the state.

        If a variant does not fit, also yield that with the least sufficient share on the host.
        """
        for state in self.states(step.config.ranks):
            row = self.plan_row(step, choice, state, self.offload)
            yield row
            if not row.fits and step.dry_run.steps:  # kept by the dry run only to compute other shares
                with_least_share = self.min_offload(step, choice, state)
                if with_least_share is not None:
                    yield with_least_share

    def min_offload(self, step: PlannedStep, choice: AttentionChoice, state: str) -> Variant | None:
        """Return the variant with the least share on the host that fits.

        If none fits, return that with the largest share for which the host has memory; None if it has too little.
        """
        # Host memory increases with the share, and device memory decreases, so both limits are found by bisection.
        # `num_shares` is the number of shares for which the host has memory.
        num_shares = bisect_right(self.shares, self.host, key=lambda share: step.peak_memory(share).host)
        if num_shares == 0:
            return None
        shares = self.shares[: num_shares - 1]  # the last one is returned if none of these fits
        first = bisect_left(shares, True, key=lambda share: self.plan_row(step, choice, state, share).fits)
        return self.plan_row(step, choice, state, self.shares[first])

    def plan_row(self, step: PlannedStep, choice: AttentionChoice, state: str, share: float) -> Variant:
        """Return the variant with these options, predicted from a step with similar ones.

        Args:
            step: A step on the same number of ranks, with the same checkpoints and tiles.
            choice: The attention.
            state: The placement of the state, one of `STATES`.
            share: The share of saved values on the host.
        """
        peaks, n, machine, weights = step.peak_memory(share), step.config.ranks, self.machine, self.weights
        has_choice = choice.key == step.config.key
        added_bytes = 0.0 if has_choice else choice.memory - step.attention.memory
        memory, phase = peaks.memory(state, n, attention_bytes=added_bytes)
        seconds = step.seconds(step.actual_attention(choice), machine)
        shards = n if state == SHARDED_STATE else 1
        if shards > 1:  # FSDP gathers weights in forward and backward, and overlaps its exchanges with the step
            exchanges = machine.seconds("all_gather", weights.parameters / n, n) * 2
            exchanges += machine.seconds("reduce_scatter", weights.trainable / n, n)
            seconds = machine.together(seconds, exchanges)
        else:
            seconds += machine.seconds("all_reduce", weights.trainable, n)
        # The optimizer reads and writes parameters, gradients and its state.
        optimizer_bytes = weights.parameters + weights.trainable + self.per_weight * weights.trainable
        seconds += machine.copy(2 * optimizer_bytes / shards)
        config = replace(step.config, attention=choice.key[0], layout=choice.key[1], state=state, offload=share)
        return Variant(
            **vars(config),
            host=peaks.host,
            memory=memory,
            phase=phase,
            kept=step.saved_bytes,
            seconds=machine.together(seconds, 2 * copy_seconds(peaks.host, machine)),  # to the host and back
            tokens=self.tokens,
            fits=memory <= machine.memory and peaks.host <= self.host,
            is_measured=step.is_exact(choice, state, share),
            most_tiles=step.max_tiles,
            user_options=self.options,
        )

    def largest_value_line(self, config: PlanConfig) -> str:
        """Return the user's line of the largest value at the peak, from the most similar examined step."""

        def num_equal_options(step: PlannedStep) -> int:
            """Return the number of options that the step has in common with `config`."""
            return sum(a == b for a, b in zip(astuple(step.config), astuple(config)))

        examined = [step for step in self._steps.values() if step.config.ranks == config.ranks]
        step = max(examined, key=num_equal_options).step
        peak = max(step.points(), key=lambda point: point.nbytes)
        (largest, *_) = step.summary(peak, limit=1)
        return largest.where

    def constant(self, n: int) -> float:
        """Return the least bytes of a rank: buffers and sharded state. If they do not fit, nothing is lowered."""
        return sum(self.weights.sharded_bytes(n, self.per_weight)) + self.weights.buffers


PLAN_OPTIONS = "attention", "layout"  # options that a plan varies for each number of ranks


def _best_candidate(shape: AttentionShape, kind: str, layout: str, machine: Machine) -> Candidate | None:
    """Return the best candidate for an attention; None if none is possible.

    If all exceed the memory of a device, return the one with the least memory, so that the plan shows what it needs.

    Args:
        shape: The attention.
        kind: The strategy; "auto" for all.
        layout: "auto" to permit candidates that permute the rows from the order of `shape` to another layout.
        machine: The constants of a device.
    """
    candidates = [c for c in candidates_in_order(shape, machine) if kind in ("auto", c.kind)]
    if layout != "auto":
        candidates = [c for c in candidates if not c.relayout]
    possible = [c for c in candidates if c.refusal is None]  # `refusal` is the reason why it is not possible, or None
    if possible:
        return choose_attention(possible)
    # A candidate that only exceeds the memory is returned as if it were possible.
    smallest = min((c for c in candidates if not c.fits), key=lambda c: (c.memory, c.seconds), default=None)
    return None if smallest is None else replace(smallest, refusal=None, fits=True)
