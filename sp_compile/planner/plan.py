"""Plan the training of a model on several numbers of ranks: what fits, seconds of a step, and options.

    sp_compile.plan(model, (ids,), labels=ids, memory="80GB", ranks=[8, 16, 64]).best.options

Each number of ranks is examined as `explain(memory=True)` does it, with the fastest attention of the cost model. The
model is lowered as it is written first. If that does not fit, or copies to the host dominate the step, its layers are
checkpointed; if that is not enough, it runs in tiles. The memory of other attentions, and of replicated state, is
estimated from these dry runs. If an estimated variant, or one with a share on the host, seems to be the best, it is
examined, too, until the best one is not an estimate (`planned_steps.py`). So its numbers are those of `explain`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig
from sp_compile.passes.context import NoteKind
from sp_compile.passes.cost.few_layers import checkpoint_blocks
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.weight_memory import ModelBytes, state_per_weight

from .byte_sizes import SizeUnit, parse_bytes, parse_unit
from .dry_run import split_kwargs
from .planned_steps import OFFLOAD_SHARES, PlanConfig, PlannedStep, StepPlanner, merge_options

TILE_COUNTS = 16
"""Number of tiles for work on rows, tried if the number that the memory requires is too small."""
MAX_PLAN_ROUNDS = 4
"""Maximum number of rounds of dry runs of the best variants."""
NEAR_RATIO = 1.1
"""Multiple of the memory; estimates up to it are examined if nothing faster fits."""
EQUAL_RATIO = 1.01
"""Ratio of seconds up to which two variants count as equally fast."""
MAX_PLAN_ROWS = 8
"""Maximum rows of the table for each number of ranks."""
REFUSED_PROGRAM = dict.fromkeys(("mesh", "mesh_dim"), "compares numbers of ranks and does not support a mesh")
"""Options that `plan` rejects, and the reasons."""


@dataclass(frozen=True)
class Variant:
    """One configuration of a training step."""

    ranks: int  # number of ranks that share the sequence
    attention: str  # the strategy of attention
    layout: str  # the layout of the sequence
    checkpoint: bool  # True if each layer is recomputed in the backward
    tiles: int | str  # number of tiles; "auto" for the number that the memory requires, "never" for none
    offload: float  # the share of saved values on the host
    host: float  # bytes of these values
    state: str  # "sharded" over the ranks by FSDP, or "on every rank"
    memory: float  # bytes of a rank at the peak
    phase: str  # the phase of the peak
    kept: float  # bytes that the forward saves for the backward, on the device and the host
    seconds: float  # seconds of a step
    tokens: int  # tokens of the sequence
    fits: bool  # True if the memory is sufficient
    is_measured: bool = True  # True if predicted with exactly these options; False if estimated from others
    most_tiles: int = 0  # the largest number of tiles of a region
    given: Mapping[str, Any] = field(default_factory=dict)  # the options passed to `plan`

    @property
    def config(self) -> PlanConfig:
        """Return the configuration of the dry run."""
        return PlanConfig(
            self.ranks, self.attention, self.layout, self.checkpoint, self.tiles, self.state, self.offload
        )

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `torch.compile(model, backend="sp", options=...)`.

        FSDP and checkpoints are not options: the program applies them.
        """
        return merge_options(self.given, self.config.options)

    @property
    def required_changes(self) -> str:
        """Return the changes that the program needs in addition to the options."""
        words = ["torch.utils.checkpoint around each layer"] if self.checkpoint else []
        words += [f"fully_shard over the {self.ranks} ranks"] if self.state == "sharded" else []
        return " and ".join(words)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all ranks together."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class StepPlan:
    """The result of `plan`; `str(plan)` is a table."""

    memory: float  # bytes of a device
    weights: ModelBytes  # bytes of the model
    rows: list[Variant] = field(default_factory=list)  # the variants of each number of ranks, the fastest first
    changes: dict[int, str] = field(default_factory=dict)  # the required change where nothing fits, by number of ranks
    notes: list[str] = field(default_factory=list)  # variants that were not tried, and the reasons
    unit: SizeUnit = SizeUnit("GB")  # of sizes in the table  # noqa: RUF009
    host_memory: float | None = None  # bytes of the host for each rank; None for no limit

    @property
    def best(self) -> Variant:
        """Return the fastest variant that fits, with the least memory on the host.

        Raises:
            SpError: Nothing fits (SP723); the error contains the required changes.
        """
        fitting = [row for row in self.rows if row.fits]
        if not fitting:
            raise SpError(
                "SP723", f"plan: nothing fits: {'; '.join([*self.changes.values(), *self.notes]).rstrip('.')}."
            )
        return min(fitting, key=_time_key)

    def of(self, ranks: int) -> Variant | None:
        """Return the fastest variant on a number of ranks.

        Args:
            ranks: The number of ranks.

        Returns:
            The variant; None if nothing fits.
        """
        return min((r for r in self.rows if r.ranks == ranks and r.fits), key=_time_key, default=None)

    def fits_on_device(self, ranks: int) -> bool:
        """Return True if a variant fits with nothing on the host.

        Args:
            ranks: The number of ranks.

        Returns:
            True if such a variant exists.
        """
        return any(row.fits and not row.offload for row in self.rows if row.ranks == ranks)

    def __str__(self) -> str:
        """Return a table of the variants, and the required changes."""
        shown = [
            row
            for n in dict.fromkeys(r.ranks for r in self.rows)
            for row in [r for r in self.rows if r.ranks == n][:MAX_PLAN_ROWS]
        ]
        rows = [
            [
                *(show(r) for show in COLUMNS.values()),
                f"{'' if r.is_measured else '~'}{self.unit(r.memory)}",
                self.unit(r.host) if r.host else "",
                *(show(r) for show in MORE_COLUMNS.values()),
                "best" if r == self.of(r.ranks) else "fits" if r.fits else "",
            ]
            for r in shown
        ]
        host = f", {self.unit(self.host_memory)} of its host" if self.host_memory is not None else ""
        lines = [f"{self.unit(self.memory)} a rank{host}; parameters {self.unit(self.weights.parameters)}"]
        lines.append(tabulate(rows, headers=[*COLUMNS, "memory", "host", *MORE_COLUMNS, ""], disable_numparse=True))
        lines += [ESTIMATED] if not all(row.is_measured for row in shown) else []
        if any(row.fits for row in self.rows):
            best = self.best
            change = f"; change the program: {best.required_changes}" if best.required_changes else ""
            lines.append(f"the fastest, on {best.ranks} ranks: options={best.options}{change}")
        return "\n".join([*lines, *self.changes.values(), *self.notes])


def _time_key(row: Variant) -> tuple[float, float]:
    """Return the sort key: seconds, then bytes on the host."""
    return row.seconds, row.host


ESTIMATED = "~: estimated from the program with another attention or other shards of the state"
COLUMNS: dict[str, Callable[[Variant], Any]] = {
    "ranks": lambda r: r.ranks,
    "attention": lambda r: r.attention,
    "layout": lambda r: r.layout,
    "checkpoints": lambda r: "each layer" if r.checkpoint else "as written",
    "tiles": lambda r: f"auto: {r.most_tiles or 'none'}" if r.tiles == "auto" else r.tiles,
    "offload": lambda r: f"{r.offload:.0%}" if r.offload else "never",
    "state": lambda r: r.state,
}
MORE_COLUMNS: dict[str, Callable[[Variant], Any]] = {
    "peak of": lambda r: r.phase,
    "s/step": lambda r: f"{r.seconds:.3g}",
    "tokens/s": lambda r: f"{r.tokens_per_second:,.0f}",
}
"""Columns of the table of a plan, before and after the memory."""


def plan(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor = (),
    *,
    memory: str | float = "80GB",
    ranks: int | Sequence[int] = (8, 16, 64),
    host_memory: str | float | None = None,
    optimizer: Any = None,
    cost: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **config: Any,
) -> StepPlan:
    """Find the configurations of a training step that fit into memory, and predict their seconds.

    The model may be on the "meta" device; nothing of it runs then. Attention, layout, tiles, offload and state are
    varied unless they are passed as options.

    Args:
        model: The model.
        inputs: Its global inputs: a tensor, a sequence, or a dict of keyword arguments.
        memory: Memory of a device, in bytes or as "80GB" or "75GiB".
        ranks: Numbers of ranks that share the sequence and, by FSDP, parameters, gradients and optimizer state.
        host_memory: Memory of the host for each rank, for offloaded values; None for no limit.
        optimizer: The optimizer or its class, as for `explain`.
        cost: Constants that replace those of the cost model, an H100 (a CPU if the model is on one).
        kwargs: Keyword arguments of the model whose names are also arguments of this function or fields of `SPConfig`.
        **config: Other fields of `SPConfig`, which all variants contain, and keyword arguments of the model.

    Returns:
        The plan.

    Raises:
        SpError: The model is not a module (SP721), a number of ranks is invalid (SP711), a size is invalid (SP722), or
            `explain` would raise.
    """
    if not isinstance(model, nn.Module):
        raise SpError("SP721", f"model: expected an nn.Module, got {model!r:.80}.")
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    args: list[Any] = [] if named else [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    host = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    device, wanted = parse_bytes(memory), sorted({ranks} if isinstance(ranks, int) else {*ranks})
    if not wanted or not all(type(n) is int and n > 0 for n in wanted):
        raise SpError("SP711", f"ranks: expected numbers of ranks, 1 or more, got {ranks!r}.")
    options, found_kwargs = split_kwargs(model, {**config, "kwargs": {**named, **(kwargs or {})}})
    SPConfig.of(options).refuse("plan", **REFUSED_PROGRAM)
    where = next((x.device.type for x in model.parameters()), "cpu")
    limits = {**(cost or {}), "memory": device}
    sent = options.pop("offload", "auto")
    planner = StepPlanner(
        model,
        args,
        found_kwargs,
        Machine.of(where, limits),
        {**options, "cost": limits},
        OFFLOAD_SHARES if sent == "auto" else (),
        state_per_weight(optimizer),
        _tokens([*args, *found_kwargs.values()]),
        checkpoint_blocks(model),
        0.0 if isinstance(sent, str) else float(sent),
        math.inf if host is None else host,
    )
    found = StepPlan(device, ModelBytes.of(model), unit=parse_unit(memory), host_memory=host)
    _plan_first(planner, found, wanted, options.get("tiles"))
    _refine_best(planner, found, wanted)
    found.rows.sort(key=lambda row: (row.ranks, not row.fits, *_time_key(row)))
    for n in wanted:
        if found.of(n) is None:
            found.changes[n] = _required_change(planner, found, n)
    return found


def _is_settled(found: StepPlan, n: int) -> bool:
    """Return True if neither checkpoints nor smaller tiles can be faster.

    That is so if the variant fits, or if copies to the host take no longer than the rest. A step without changes takes
    no longer than one with recomputation or more tiles.
    """
    best = found.of(n)
    least = min((row.seconds for row in found.rows if row.ranks == n and not row.checkpoint), default=0.0)
    return best is not None and (found.fits_on_device(n) or best.seconds <= EQUAL_RATIO * least)


def _tokens(values: Iterable[Any]) -> int:
    """Return the number of elements of the largest integer input, or of the first dims of another one."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.ndim]
    ids = [x.numel() for x in tensors if not x.is_floating_point()]
    return max(ids or [x.shape[:2].numel() for x in tensors], default=0)


def _plan_first(planner: StepPlanner, found: StepPlan, wanted: Sequence[int], user_tiles: int | str | None) -> None:
    """Examine each number of ranks with the fastest attention, until it fits with nothing on the host."""
    tiles = "auto" if user_tiles is None else user_tiles
    attends = {n: planner.attention_choices(n) for n in wanted if planner.constant(n) < found.memory}
    tiled: dict[int, int] = {}
    configs: list[tuple[bool, int | str]] = [(False, tiles)]
    while configs:
        again, tiles = configs.pop(0)
        left = [n for n, known in attends.items() if known and not _is_settled(found, n)]
        if tiles == TILE_COUNTS and user_tiles is None:
            left = [n for n in left if tiled.get(n, 0) < TILE_COUNTS]
        state = {n: planner.states(n)[0] for n in left}
        ways_of = [PlanConfig(n, *attends[n][0].key, again, tiles, state[n], planner.offload) for n in left]
        steps = planner.plan_steps(ways_of) if left else []
        for step in steps:
            if tiles == TILE_COUNTS and user_tiles is None and not step.max_tiles:
                continue
            tiled[step.config.ranks] = step.max_tiles
            found.notes += [note for note in _graph_breaks(step) if note not in found.notes]
            for attend in attends[step.config.ranks]:
                found.rows += [_make_variant(planner, **row) for row in planner.plan_rows(step, attend)]
        # An estimate is not final: a variant that it predicts to fit may not fit.
        _refine_best(planner, found, [n for n in left if _is_settled(found, n)], near=False)
        if not again and tiles != TILE_COUNTS and not found.rows:
            return
        if not again and tiles != TILE_COUNTS:
            more = [TILE_COUNTS] if user_tiles is None else []
            own = any(step.dry_run.checkpoints for step in steps)
            again = bool(planner.blocks) and not own
            configs = [(again, "auto" if user_tiles is None else user_tiles)] if again else []
            configs += [(again, one) for one in more]
            if not all(map(found.fits_on_device, wanted)):
                found.notes += [OWN_CHECKPOINTS] if own else [NO_BLOCKS] if not again else []
        elif again and steps and not any(step.dry_run.checkpoints for step in steps):
            found.rows = [row for row in found.rows if not row.checkpoint]
            found.notes.append(NOT_CALLED)
            configs = [(False, one) for _, one in configs]


def _graph_breaks(step: PlannedStep) -> list[str]:
    """Return the places where the program is split into graphs."""
    return [
        f"{one.where}: {one.text}; {SEVERAL_GRAPHS}" for one in step.dry_run.report.find_notes(NoteKind.GRAPH_BREAK)
    ]


SEVERAL_GRAPHS = (
    "tiles do not cross it, so logits before the loss are stored in full: without it, less memory may be enough"
)
NO_BLOCKS = (
    "no checkpoints were tried: the model has no list of blocks (nn.ModuleList, nn.Sequential) to "
    "checkpoint; call torch.utils.checkpoint in the model and plan again: a model's own checkpoints do not change"
)
OWN_CHECKPOINTS = "the model's own checkpoints do not change, and no others were tried"
NOT_CALLED = (
    "no checkpoints were tried: the entries of the model's lists of blocks are not called as modules; call "
    "torch.utils.checkpoint in the model and plan again"
)


def _make_variant(planner: StepPlanner, config: PlanConfig, **found: Any) -> Variant:
    return Variant(
        config.ranks, config.attention, config.layout, config.checkpoint, config.tiles, config.offload,
        state=config.state, tokens=planner.tokens, given=planner.options, **found,
    )  # fmt: skip


def _refine_best(planner: StepPlanner, found: StepPlan, wanted: Sequence[int], near: bool = True) -> None:
    """Examine variants until the best one on each number of ranks is not an estimate.

    If near, variants that almost fit are examined once, too.
    """
    missed: set[int] = set()
    for left in reversed(range(MAX_PLAN_ROUNDS)):
        if not (open_ways := [row for n in wanted for row in _unplanned_best(found, n, near and n not in missed)]):
            break
        missed |= {row.ranks for row in open_ways if not row.fits}
        _update_rows(planner, found, open_ways, refines=left > 0)


def _unplanned_best(found: StepPlan, n: int, near: bool = True) -> list[Variant]:
    """Return the estimated variant that seems to be the best on a number of ranks.

    If near, this includes the smallest of the faster variants that almost fit.
    """
    best = found.of(n)
    rows = [row for row in found.rows if row.ranks == n and not row.fits and row.memory <= NEAR_RATIO * found.memory]
    faster = [row for row in rows if best is None or EQUAL_RATIO * row.seconds < best.seconds]
    nearest = min(faster, key=lambda row: row.memory, default=None) if near else None
    return [row for row in (best, nearest) if row is not None and not row.is_measured]


def _update_rows(planner: StepPlanner, found: StepPlan, rows: Sequence[Variant], refines: bool) -> None:
    """Examine these variants and replace their rows; try another share on the host if that is enough.

    If refines, another share is also tried for estimates.
    """
    seen = {step.config: step for step in planner.plan_steps([row.config for row in rows])}
    for row in rows:
        found.rows.remove(row)
        if (step := seen.get(row.config)) is None:
            continue
        attend = next(one for one in planner.attention_choices(row.ranks) if one.key == row.config.key)
        variant = _make_variant(planner, **planner.plan_row(step, attend, row.state, row.offload))
        found.rows.append(variant)
        if row.offload and planner.shares and step.covers_any_share:
            least = planner.min_offload(step, attend, row.state)
            found.rows += [_make_variant(planner, **least)] if least and least["config"] != row.config else []
        elif refines and row.offload:
            known = {
                other.config.offload: other
                for other in found.rows
                if replace(other.config, offload=0.0) == _without_offload(row)
            }
            if (share := _share_that_fits(planner, known, variant, found.memory)) is not None:
                host = variant.host * share / variant.offload
                guess = replace(variant, offload=share, host=host, is_measured=False, memory=found.memory)
                found.rows += [replace(guess, fits=True)] if host <= planner.host else []


def _without_offload(row: Variant) -> PlanConfig:
    """Return the variant with nothing on the host."""
    return replace(row.config, offload=0.0)


def _share_that_fits(
    planner: StepPlanner, known: Mapping[float, Variant], variant: Variant, memory: float
) -> float | None:
    """Return the least new share with which a variant fits; None if there is none.

    Memory is assumed to decrease linearly with the share.
    """
    if (here := known.get(0.0)) is None or here.memory <= variant.memory:
        return None
    wanted = variant.offload * (here.memory - memory) / (here.memory - variant.memory)
    share = next((one for one in planner.shares if one >= wanted), None)
    return None if share in known else share


def _required_change(planner: StepPlanner, found: StepPlan, n: int) -> str:
    """Return the change that is required for one number of ranks."""
    rows = [row for row in found.rows if row.ranks == n]
    more = [row.ranks for row in found.rows if row.fits and row.ranks > n]
    elsewhere = f"it fits on {min(more)}" if more else ""
    if (state := planner.constant(n)) >= found.memory:
        reasons = [f"{n} ranks: sharded parameters, gradients and optimizer state alone need {found.unit(state)}"]
        return "; ".join(filter(None, [*reasons, elsewhere, "use more ranks, or an optimizer with less state"]))
    if not rows:
        return f"{n} ranks: {'; '.join(filter(None, [planner.refusal_reason(n), elsewhere]))}"
    least = min(rows, key=lambda row: row.memory)
    config = (
        f"{least.attention}, {'each layer checkpointed' if least.checkpoint else 'as written'}, state {least.state}"
    )
    config += f", tiles {least.tiles}, {least.offload:.0%} of the saved values on the host"
    reasons = [f"{n} ranks: the smallest plan needs {found.unit(least.memory)} ({config})"]
    if (excess := least.memory - found.memory) > 0:
        reasons[0] += f", {found.unit(excess)} too much, in its {least.phase}"
        reasons.append(f"the largest value there: {planner.largest_value(least.config)}")
    if found.host_memory is not None:
        reasons.append(f"{found.unit(least.host)} are offloaded; the host has {found.unit(found.host_memory)} a rank")
    reasons.append(elsewhere)
    reasons.append("use more ranks or smaller batches, and return only the loss from the model")
    return "; ".join(filter(None, reasons))
