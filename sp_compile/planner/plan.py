"""Plan the training of a model on several numbers of ranks: what fits, seconds of a step, and options.

    sp_compile.plan(model, (ids,), labels=ids, memory="80GB", ranks=[8, 16, 64]).best.options

Each number of ranks is examined as `explain(memory=True)` does it, with the fastest attention of the cost model. The
model is lowered as it is written first. If that does not fit, or copies to the host dominate the step, its layers are
checkpointed; if that is not enough, it runs in more tiles. The memory of other attentions, and of replicated state, is
estimated from these dry runs. If an estimated variant, or one with a share on the host, seems to be the best, it is
examined, too, until the best one is not an estimate (`planned_steps.py`). So its numbers are those of `explain`.
To examine is to lower the model with exactly these options (a dry run). The share on the host is that of saved values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from tabulate import tabulate
from torch import nn

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import PlanOptions, SPConfig
from sp_compile.passes.context import NoteKind
from sp_compile.passes.cost.few_layers import checkpoint_blocks
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.weight_memory import ModelBytes, state_per_weight

from .byte_sizes import SizeUnit, parse_bytes, parse_unit
from .dry_run import split_kwargs
from .planned_steps import OFFLOAD_SHARES, PlannedStep, StepPlanner
from .ranges import Ranges, format_byte_range, format_range
from .variants import PlanConfig, Variant

# number of tiles of token-wise work that is tried if "auto", the number that the memory requires, is not enough
TILE_COUNTS = 16
MAX_PLAN_ROUNDS = 4  # maximum number of rounds of dry runs of the best variants
NEAR_RATIO = 1.1  # multiple of the memory; estimates up to it are examined if nothing faster fits
EQUAL_RATIO = 1.01  # ratio of seconds up to which two variants count as equally fast
MAX_PLAN_ROWS = 8  # maximum rows of the table for each number of ranks
# options that `plan` rejects, and the reasons
REFUSED_PROGRAM = dict.fromkeys(("mesh", "mesh_dim"), "compares numbers of ranks and does not support a mesh")


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
    hardware: str = ""  # the hardware that the predictions assume
    ranges: Ranges = Ranges()  # the uncertainty of the predictions  # noqa: RUF009

    @property
    def best(self) -> Variant:
        """Return the fastest variant that fits, with the least memory on the host.

        Returns:
            The variant, on any number of ranks.

        Raises:
            SpError: Nothing fits (SP723); the error contains the required changes.
        """
        fitting = [row for row in self.rows if row.fits]
        if not fitting:
            reasons = "; ".join([*self.changes.values(), *self.notes]).rstrip(".")
            raise SpError("SP723", f"plan: nothing fits: {reasons}.")
        return min(fitting, key=_time_key)

    def of(self, ranks: int) -> Variant | None:
        """Return the fastest variant on a number of ranks.

        Args:
            ranks: The number of ranks.

        Returns:
            The variant; None if nothing fits.
        """
        return min((r for r in self.rows if r.ranks == ranks and r.fits), key=_time_key, default=None)

    def can_fit_on_device(self, ranks: int) -> bool:
        """Return True if a variant fits with nothing on the host.

        Args:
            ranks: The number of ranks.

        Returns:
            True if such a variant exists.
        """
        return any(row.fits and not row.offload for row in self.rows if row.ranks == ranks)

    def __str__(self) -> str:
        """Return a table of the variants, and the required changes."""
        shown: list[Variant] = []
        for n in dict.fromkeys(row.ranks for row in self.rows):
            shown += [row for row in self.rows if row.ranks == n][:MAX_PLAN_ROWS]
        host = f", {self.unit(self.host_memory)} of its host" if self.host_memory is not None else ""
        lines = [f"{self.unit(self.memory)} a rank{host}; parameters {self.unit(self.weights.parameters)}"]
        lines += [self.hardware] if self.hardware else []
        headers = [*COLUMNS, "memory", "host", *MORE_COLUMNS, ""]
        lines.append(tabulate(map(self._table_row, shown), headers=headers, disable_numparse=True))
        lines += [ESTIMATED] if not all(row.is_measured for row in shown) else []
        if any(row.fits for row in self.rows):
            best = self.best
            change = f"; change the program: {best.required_changes}" if best.required_changes else ""
            lines.append(f"the fastest, on {best.ranks} ranks: options={best.options}{change}")
        return "\n".join([*lines, *self.changes.values(), *self.notes])

    def _table_row(self, row: Variant) -> list[Any]:
        """Return the columns of a variant in the table of `str(plan)`."""
        columns = [show(row) for show in COLUMNS.values()]
        memory = format_byte_range(self.ranges.memory(row.memory, row.is_measured), self.unit)
        estimate_mark = "" if row.is_measured else "~"
        columns += [f"{estimate_mark}{memory}", self.unit(row.host) if row.host else "", row.phase]
        bounds = self.ranges.seconds(row.seconds), self.ranges.tokens_per_second(row.tokens_per_second)
        columns += map(format_range, bounds)
        mark = "fits" if row.fits else ""
        if row == self.of(row.ranks):
            mark = "best"
        return [*columns, mark]


def _time_key(row: Variant) -> tuple[float, float]:
    """Return the key by which the best variant is chosen: seconds, then bytes on the host."""
    return row.seconds, row.host


ESTIMATED = "~: estimated from the program with another attention or other shards of the state"
# columns of the table of a plan before the memory: heading -> text of the cell of a `Variant`, or of one from JSON
COLUMNS: dict[str, Callable[[Any], Any]] = {
    "ranks": lambda r: r.ranks,
    "attention": lambda r: r.attention,
    "layout": lambda r: r.layout,
    "checkpoints": lambda r: "each layer" if r.checkpoint else "as written",
    "tiles": lambda r: f"auto: {r.most_tiles or 'none'}" if r.tiles == "auto" else r.tiles,
    "offload": lambda r: f"{r.offload:.0%}" if r.offload else "never",
    "state": lambda r: r.state,
}
MORE_COLUMNS = "peak of", "s/step", "tokens/s"


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
    **options: Unpack[PlanOptions],
) -> StepPlan:
    """Find the configurations of a training step that fit into memory, and predict their seconds.

    The model may be on the "meta" device; nothing of it runs then. Attention, layout, tiles, offload and state are
    varied unless they are passed as options.

    Args:
        model: The model.
        inputs: Its global inputs: a tensor, a sequence, or a dict of keyword arguments.
        memory: Memory of a device, as "80GB" or "75GiB", or in bytes from 1e9.
        ranks: Numbers of ranks that share the sequence and, by FSDP, parameters, gradients and optimizer state.
        host_memory: Memory of the host for each rank, for offloaded values; None for no limit.
        optimizer: The optimizer or its class, as for `explain`.
        cost: Constants that replace those of the cost model, an H100 (a CPU if the model is on one).
        kwargs: Keyword arguments of the model.
        **options: See `SPConfig`; all variants contain them (`attention="ring"`). There is no mesh. Keyword arguments
            of the model may also be passed as for `explain`.

    Returns:
        The plan.

    Raises:
        SpError: The model is not a module (SP721), a number of ranks is invalid (SP711), a size is invalid (SP722), or
            `explain` would raise.
    """
    if not isinstance(model, nn.Module):
        raise SpError("SP721", f"model: expected an nn.Module, got {model!r:.80}.")
    host = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    result = StepPlan(parse_bytes(memory), ModelBytes.of(model), unit=parse_unit(memory), host_memory=host)
    all_ranks = sorted({ranks} if isinstance(ranks, int) else {*ranks})
    if not all_ranks or not all(type(n) is int and n > 0 for n in all_ranks):
        raise SpError("SP711", f"ranks: expected an int or ints of 1 or more, got {ranks!r}.")
    args: list[Any] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    named: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        args, named = [], dict(inputs)
    fixed, model_kwargs = split_kwargs("plan", model, {**options, "kwargs": {**named, **(kwargs or {})}})
    SPConfig.of(fixed).refuse("plan", **REFUSED_PROGRAM)
    cost = {**(cost or {}), "memory": result.memory}
    planner = _make_planner(model, args, model_kwargs, {**fixed, "cost": cost}, optimizer)
    planner.host = math.inf if host is None else host
    result.hardware = planner.machine.describe(_device_type(model))
    result.ranges = Ranges.of(planner.machine.replaced_names(_device_type(model)))
    _plan_first(planner, result, all_ranks, fixed.get("tiles"))
    _refine_best(planner, result, all_ranks)
    result.rows.sort(key=lambda row: (row.ranks, not row.fits, *_time_key(row)))  # those that fit first, by seconds
    result.changes = {n: _required_change(planner, result, n) for n in all_ranks if result.of(n) is None}
    return result


def _make_planner(
    model: nn.Module, args: list[Any], kwargs: dict[str, Any], options: dict[str, Any], optimizer: Any
) -> StepPlanner:
    """Return the planner of a model with these arguments and options, which all variants have.

    The option `offload` is removed: a number or "never" fixes the share on the host; otherwise several are tried.
    """
    offload = options.pop("offload", "auto")
    return StepPlanner(
        model,
        args,
        kwargs,
        machine=Machine.of(_device_type(model), options["cost"]),
        options=options,
        shares=OFFLOAD_SHARES if offload == "auto" else (),
        per_weight=state_per_weight(optimizer),
        tokens=_count_tokens([*args, *kwargs.values()]),
        blocks=checkpoint_blocks(model),
        offload=0.0 if isinstance(offload, str) else float(offload),
    )


def _device_type(model: nn.Module) -> str:
    """Return the type of the device of a model, from its parameters."""
    return next((x.device.type for x in model.parameters()), "cpu")


def _is_settled(result: StepPlan, n: int) -> bool:
    """Return True if neither checkpoints nor more tiles can give a faster variant on n ranks that fits.

    They only make a step slower, so nothing is gained if a variant fits with nothing on the host. The same is true if
    the best variant has a share on the host, but takes no longer than the fastest variant without checkpoints, whether
    that one fits or not: the copies to the host then cost no time.
    """
    best = result.of(n)
    if best is None:
        return False
    as_written = min((row.seconds for row in result.rows if row.ranks == n and not row.checkpoint), default=0.0)
    return result.can_fit_on_device(n) or best.seconds <= EQUAL_RATIO * as_written


def _count_tokens(values: Iterable[Any]) -> int:
    """Return the tokens of a step: the elements of the largest input of token ids, integers (batch, sequence).

    Without one, it is the largest batch * sequence, the first two dims, of the other inputs; 0 without tensors. Masks
    are not counted: bool tensors, and matrices if there are inputs of more dims.
    """
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.ndim and x.dtype != torch.bool]
    id_counts = [x.numel() for x in tensors if x.ndim == 2 and not x.is_floating_point()]
    others = [x for x in tensors if x.ndim != 2] if any(x.ndim > 2 for x in tensors) else tensors
    return max(id_counts or [x.shape[:2].numel() for x in others], default=0)


def _plan_first(planner: StepPlanner, result: StepPlan, all_ranks: Sequence[int], user_tiles: int | str | None) -> None:
    """Examine each number of ranks with the fastest attention, until slower variants cannot be better (`_is_settled`).

    The model is lowered as it is written, then with checkpoints, then in more tiles as well, unless the user has passed
    the option `tiles`. Rows and notes are added to `result`.
    """
    # The attentions on each number of ranks on which the state alone fits, the fastest first.
    choices = {n: planner.attention_choices(n) for n in all_ranks if planner.constant(n) < result.memory}
    num_tiles: dict[int, int] = {}  # number of ranks -> tiles of its last step
    more_tiles = TILE_COUNTS if user_tiles is None else None  # the number of tiles of the last attempt, if any

    def examine(checkpoint: bool, tiles: int | str) -> list[PlannedStep]:
        """Return the examined step on each number of ranks that is not settled; its rows are added to `result`."""
        unsettled = [n for n, attentions in choices.items() if attentions and not _is_settled(result, n)]
        if tiles == more_tiles:
            # Skip those n whose last step had this number of tiles already: tiles="auto" may have chosen them.
            unsettled = [n for n in unsettled if num_tiles.get(n, 0) < TILE_COUNTS]
        configs = []
        for n in unsettled:
            attention, layout = choices[n][0].key  # of the fastest choice
            state = planner.states(n)[0]  # the rows of other states are estimated from this one
            configs.append(PlanConfig(n, attention, layout, checkpoint, tiles, state, planner.offload))
        steps = planner.plan_steps(configs) if configs else []
        for step in steps:
            if tiles == more_tiles and not step.max_tiles:
                continue  # no part of the model can be tiled, so the step is that of the attempt before
            num_tiles[step.config.ranks] = step.max_tiles
            result.notes += [note for note in _graph_breaks(step) if note not in result.notes]
            for choice in choices[step.config.ranks]:
                result.rows += planner.plan_rows(step, choice)
        # A number of ranks may be settled by an estimate, which may be wrong: examine it before the next attempt.
        _refine_best(planner, result, [n for n in unsettled if _is_settled(result, n)], near=False)
        return steps

    tiles = "auto" if user_tiles is None else user_tiles
    steps = examine(checkpoint=False, tiles=tiles)
    if not result.rows:
        return
    has_own_checkpoints = any(step.dry_run.checkpoints for step in steps)
    checkpoint = bool(planner.blocks) and not has_own_checkpoints
    if not checkpoint and not all(map(result.can_fit_on_device, all_ranks)):
        result.notes.append(OWN_CHECKPOINTS if has_own_checkpoints else NO_BLOCKS)
    attempts = [tiles] if checkpoint else []  # numbers of tiles: first with checkpoints alone, then with more tiles
    if more_tiles is not None:
        attempts.append(more_tiles)
    for next_tiles in attempts:
        steps = examine(checkpoint, next_tiles)
        if checkpoint and steps and not any(step.dry_run.checkpoints for step in steps):
            checkpoint = False  # torch.utils.checkpoint had no effect, so that these rows are wrong
            result.rows = [row for row in result.rows if not row.checkpoint]
            result.notes.append(NOT_CALLED)


def _graph_breaks(step: PlannedStep) -> list[str]:
    """Return a note for each place where Dynamo splits the program into graphs."""
    notes = step.dry_run.report.find_notes(NoteKind.GRAPH_BREAK)
    return [f"{note.where}: {note.text}; {SEVERAL_GRAPHS}" for note in notes]


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


def _refine_best(planner: StepPlanner, result: StepPlan, all_ranks: Sequence[int], near: bool = True) -> None:
    """Examine the best variant on each number of ranks, until it is no estimate; update `result.rows`.

    An examined variant may need more memory or time than estimated, so that another one is the best then. With `near`,
    a faster estimate that almost fits is examined, too, once for each number of ranks.
    """
    tried_near: set[int] = set()  # numbers of ranks for which an estimate that almost fits was examined
    for rounds_left in reversed(range(MAX_PLAN_ROUNDS)):
        rows = [row for n in all_ranks for row in _rows_to_examine(result, n, near and n not in tried_near)]
        if not rows:
            break
        tried_near |= {row.ranks for row in rows if not row.fits}
        # The last round adds no estimates, since no round is left to examine them.
        _update_rows(planner, result, rows, adds_estimates=rounds_left > 0)


def _rows_to_examine(result: StepPlan, n: int, near: bool = True) -> list[Variant]:
    """Return the best variant on n ranks if it is an estimate; [] if it was examined.

    With `near`, add the smallest of the estimates that are faster and almost fit.
    """
    best = result.of(n)
    candidates = [best]
    if near:
        almost = [r for r in result.rows if r.ranks == n and not r.fits and r.memory <= NEAR_RATIO * result.memory]
        faster = [row for row in almost if best is None or EQUAL_RATIO * row.seconds < best.seconds]
        candidates.append(min(faster, key=lambda row: row.memory, default=None))
    return [row for row in candidates if row is not None and not row.is_measured]


def _update_rows(planner: StepPlanner, result: StepPlan, rows: Sequence[Variant], adds_estimates: bool) -> None:
    """Examine these variants and replace them in `result.rows`; remove those that are not possible.

    A variant that moves a share of the saved values to the host may move more than it must. Another one, with the
    smallest share with which it fits, is then added. Its numbers are exact if one dry run is sufficient for all shares
    (`is_for_any_share`). Otherwise they are an estimate, which is added only with `adds_estimates`.
    """
    steps = {step.config: step for step in planner.plan_steps([row.config for row in rows])}
    for row in rows:
        result.rows.remove(row)
        step = steps.get(row.config)
        if step is None:  # the configuration is not possible
            continue
        attention = next(choice for choice in planner.attention_choices(row.ranks) if choice.key == row.config.key)
        variant = planner.plan_row(step, attention, row.state, row.offload)
        result.rows.append(variant)
        if not row.offload or not planner.shares:  # nothing is on the host, or the user has fixed the share
            continue
        if step.is_for_any_share:
            with_least_share = planner.min_offload(step, attention, row.state)
            if with_least_share and with_least_share.config != row.config:
                result.rows.append(with_least_share)
        elif adds_estimates:
            estimate = _estimate_share(planner, result, variant)
            result.rows += [] if estimate is None else [estimate]


def _estimate_share(planner: StepPlanner, result: StepPlan, variant: Variant) -> Variant | None:
    """Return an estimate of the variant with the least share on the host with which it fits, from two examined shares.

    The memory is assumed to be linear in the share. The two shares are 0 (nothing on the host) and that of `variant`.
    The result is None if there is no variant with share 0, that variant needs no more memory than `variant`, no share
    is sufficient, `result` has the variant with the least sufficient share already, or the host has too little memory.
    """
    without_share = replace(variant.config, offload=0.0)
    by_share = {row.offload: row for row in result.rows if replace(row.config, offload=0.0) == without_share}
    at_none = by_share.get(0.0)
    if at_none is None or at_none.memory <= variant.memory:
        return None
    # The share at which the line through both points is at the memory of the device.
    required = variant.offload * (at_none.memory - result.memory) / (at_none.memory - variant.memory)
    share = next((share for share in planner.shares if share >= required), None)
    if share is None or share in by_share:
        return None
    host = variant.host * share / variant.offload
    if host > planner.host:
        return None
    # It is assumed to need exactly the memory of the device.
    return replace(variant, offload=share, host=host, is_measured=False, memory=result.memory, fits=True)


def _required_change(planner: StepPlanner, result: StepPlan, n: int) -> str:
    """Return a line of the plan: the reason why nothing fits on n ranks, and the required change."""
    rows = [row for row in result.rows if row.ranks == n]
    more_ranks = [row.ranks for row in result.rows if row.fits and row.ranks > n]
    elsewhere = f"it fits on {min(more_ranks)}" if more_ranks else ""
    state = planner.constant(n)  # bytes of the least state of a rank
    if state >= result.memory:
        reason = f"{n} ranks: sharded parameters, gradients and optimizer state alone need {result.unit(state)}"
        return "; ".join(filter(None, [reason, elsewhere, "use more ranks, or an optimizer with less state"]))
    if not rows:  # no configuration is possible
        return f"{n} ranks: {'; '.join(filter(None, [planner.refusal_reason(n), elsewhere]))}"
    smallest = min(rows, key=lambda row: row.memory)
    layers = "each layer checkpointed" if smallest.checkpoint else "as written"
    config = f"{smallest.attention}, {layers}, state {smallest.state}"
    config += f", tiles {smallest.tiles}, {smallest.offload:.0%} of the saved values on the host"
    reasons = [f"{n} ranks: the smallest plan needs {result.unit(smallest.memory)} ({config})"]
    excess = smallest.memory - result.memory
    if excess > 0:
        reasons[0] += f", {result.unit(excess)} too much, in its {smallest.phase}"
        reasons.append(f"the largest value there: {planner.largest_value_line(smallest.config)}")
    if result.host_memory is not None:
        host, limit = result.unit(smallest.host), result.unit(result.host_memory)
        reasons.append(f"{host} are offloaded; the host has {limit} a rank")
    reasons.append(elsewhere)
    reasons.append("use more ranks or smaller batches, and return only the loss from the model")
    return "; ".join(filter(None, reasons))
