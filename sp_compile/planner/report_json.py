"""Convert reports and plans to JSON; names and units are stable for "version" 1, fields may be added.

    {"format": "sp_compile.report", "version": 1, "ranks": 8, "inputs": {"ids": [1]}, "constraints": ["..."],
     "sequences":   [{"size", "evidence": "attention", "ops": 2, "is_input": true, "is_chosen": true,
                      "is_split": true, "share": 1.0, "why": ""}],
     "work":        {"flops", "sharded_flops", "rank_flops", "activation_bytes", "sharded_activation_bytes"},
     "rewrites":    [{"kind": "rewritten", "subject": "ulysses", "done": "ulysses", "node": "...",
                      "where": "FILE:12: y = f(x)", "why": "..."}],
     "collectives": [{"op": "all_to_all", "node", "where", "shape", "forward_bytes", "backward_bytes"}],
     "attention":   [{"attention": "batch 1, ...", "nodes": 32, "chosen": "ring", "layout": "zigzag", "seconds": 0.1,
                      "memory_bytes": 1}],
     "blocks":      [{"where", "kind": "gathered" | "exchanged" | "tiled" | "sharded", "kept_bytes", "sent_bytes",
                      "done": []}],
     "tiles":       [{"node", "where", "tiles", "rows", "inside_bytes", "tile_bytes"}],
     "memory":      null | {"parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes", "inputs_bytes",
                    "kept_bytes", "constant_bytes", "shards", "peak_bytes", "peak_with_fsdp_bytes",
                    "offload": null | {"values", "nbytes", "kept", "seconds", "waits"},
                    "peaks": [{"phase", "node", "where", "values_bytes", "alive": [{"origin", "where", "bytes"}]}],
                    "curve": [{"phase", "node", "where", "values_bytes"}]},
     "errors":      [{"name", "error": 1e-12 | null}]}

    {"format": "sp_compile.plan", "version": 1, "memory_bytes": 8e10, "host_memory_bytes": null | 1e12, "unit": "GB",
     "hardware": "assumes H100 GPUs: ...",
     "parameters_bytes": 1, "best": 0 | null,
     "ways": [{"ranks", "attention", "layout", "checkpoint", "tiles", "most_tiles", "offload", "host_bytes", "state",
               "memory_bytes", "phase", "kept_bytes", "seconds", "tokens_per_second", "fits", "measured", "options",
               "memory_bytes_range": [1, 2], "seconds_range", "tokens_per_second_range"}],
     "changes": {"8": "..."}, "notes": ["..."]}

A block is a line of the user's program. Bytes are of one rank; sizes that are symbols are taken as 2**20. constant:
bytes throughout the step: parameters and optimizer state in `shards` shards, buffers and inputs. values: all other
values, with gradients and gathered weights. unit: that of the requested memory. measured: true if predicted with
exactly these options, false if estimated from others. range: [the least, the most] that is expected. error: the largest
relative error; null if it is infinite. Options that are not JSON are stored as their text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sp_compile.lowering.base.errors import TANGENTS_LINE, UNKNOWN_LINE
from sp_compile.passes.cost.decision import describe_shape
from sp_compile.passes.cost.step_memory import StepMemory, StepMoment
from sp_compile.passes.graph.sizes import assume_large
from sp_compile.passes.report import Report

from .plan import StepPlan
from .variants import Variant

VERSION = 1
MAX_ALIVE_VALUES = 20


def report_json(report: Report) -> dict[str, Any]:
    """Return the JSON object of a report of `explain` or `verify`; the docstring of this file has its fields.

    In the lists of attributes below, "done=label" stores the attribute `label` under the key "done".

    Args:
        report: The report.

    Returns:
        The object, of dicts, lists, texts, numbers, bools and None.
    """
    return {
        "format": "sp_compile.report",
        "version": VERSION,
        "ranks": report.n,
        "inputs": {name: list(dims) for name, dims in report.inputs.items()},
        "constraints": list(report.constraints),
        "sequences": [
            {"size": assume_large(candidate.size)}
            | _select_fields(candidate, "evidence ops is_input is_chosen is_split share why")
            for candidate in report.candidates
        ],
        "work": _select_fields(
            report.work,
            "flops sharded_flops rank_flops activation_bytes=activations sharded_activation_bytes=sharded_activations",
        ),
        "rewrites": [
            {"kind": note.kind.name.lower(), **_select_fields(note, "subject done=label node where why=text")}
            for note in report.notes
        ],
        "collectives": [
            _select_fields(exchange, "op node where shape")
            | {"forward_bytes": assume_large(exchange.forward), "backward_bytes": assume_large(exchange.backward)}
            for exchange in report.exchanges
        ],
        "attention": [
            {"attention": describe_shape(decision.shape), "nodes": decision.nodes}
            | _select_fields(decision.chosen, "chosen=kind layout seconds memory_bytes=memory")
            for decision in report.attention
        ],
        "blocks": _line_blocks(report),
        "tiles": [
            _select_fields(region, "node where tiles rows inside_bytes=inside tile_bytes=tile")
            for region in report.tiled
        ],
        "memory": None if report.step is None else _memory_json(report.step, report.n),
        "errors": [{"name": name, "error": error if math.isfinite(error) else None} for name, error in report.errors],
    }


def plan_json(plan: StepPlan) -> dict[str, Any]:
    """Return the JSON object of a plan; the docstring of this file has its fields.

    In the list of attributes below, "kept_bytes=kept" stores the attribute `kept` under the key "kept_bytes".

    Args:
        plan: The plan.

    Returns:
        The object, of dicts, lists, texts, numbers, bools and None.
    """
    best = plan.best if any(row.fits for row in plan.rows) else None
    attributes = (
        "ranks attention layout checkpoint tiles most_tiles offload host_bytes=host state memory_bytes=memory phase "
        "kept_bytes=kept seconds tokens_per_second fits measured=is_measured"
    )
    return {
        "format": "sp_compile.plan",
        "version": VERSION,
        "memory_bytes": plan.memory,
        "host_memory_bytes": plan.host_memory,
        "hardware": plan.hardware,
        "unit": plan.unit.name,
        "parameters_bytes": plan.weights.parameters,
        "best": None if best is None else plan.rows.index(best),
        "ways": [
            _select_fields(row, attributes) | _ranges_json(plan, row) | {"options": _option_json(row.options)}
            for row in plan.rows
        ],
        "changes": {str(ranks): text for ranks, text in plan.changes.items()},
        "notes": plan.notes,
    }


def _ranges_json(plan: StepPlan, row: Variant) -> dict[str, Any]:
    """Return the [least, most] values that are expected of a variant, by key."""
    ranges = plan.ranges
    return {
        "memory_bytes_range": [*ranges.memory(row.memory, row.is_measured)],
        "seconds_range": [*ranges.seconds(row.seconds)],
        "tokens_per_second_range": [*ranges.tokens_per_second(row.tokens_per_second)],
    }


def _select_fields(source: Any, attributes: str) -> dict[str, Any]:
    """Return attributes of an object by key: {"node": source.node, "why": source.text} for "node why=text"."""
    pairs = [attribute.rpartition("=") for attribute in attributes.split()]  # (key or "", "=" or "", attribute)
    return {key or name: getattr(source, name) for key, _, name in pairs}


def _option_json(value: Any) -> Any:
    """Return options, or the value of one, as JSON: mappings recursively, the text of objects that JSON lacks."""
    if isinstance(value, Mapping):
        return {str(name): _option_json(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _line_blocks(report: Report) -> list[dict[str, Any]]:
    """Return the "blocks" of a report, one for each of the user's lines.

    If a step is predicted, they are in the order in which the lines run, otherwise in that of the exchanges.
    """
    saved: Counter[str] = Counter()  # line -> bytes of its values that are saved for the backward
    lines: dict[str, list[str]] = {}  # line -> labels of its rewrites
    region_starts = {region.ends: region.where for region in report.tiled}  # last line -> first line
    for graph in report.step.graphs if report.step is not None else []:
        for moment in graph.forward.moments:
            if moment.where in region_starts:  # a region in tiles runs as one op, at its last line
                lines.setdefault(region_starts[moment.where], [])
            lines.setdefault(moment.where, [])
        alive = graph.backward.alive(0) if graph.backward is not None else []  # before the first kernel
        for live in alive:
            if live.origin == "saved" and live.where != TANGENTS_LINE:  # tangents are of no line of the user
                saved[live.where] += live.nbytes
    sent: Counter[str] = Counter()  # line -> bytes that a rank sends
    for exchange in report.exchanges:
        lines.setdefault(exchange.where, [])
        sent[exchange.where] += assume_large(exchange.forward) + assume_large(exchange.backward)
    for note in report.notes:
        lines.setdefault(note.where, []).append(note.label)
    gathered, tiled = {note.where for note in report.fallbacks}, {region.where for region in report.tiled}
    blocks: list[dict[str, Any]] = []
    for line, rewrites in lines.items():
        if line == UNKNOWN_LINE and not saved[line]:  # only nodes of passes, such as those that keep exchanges in order
            continue
        if line in gathered:
            kind = "gathered"
        elif sent[line]:
            kind = "exchanged"
        else:
            kind = "tiled" if line in tiled else "sharded"
        nbytes = {"kept_bytes": saved[line], "sent_bytes": sent[line]}
        blocks.append({"where": line, "kind": kind, **nbytes, "done": list(dict.fromkeys(rewrites))})
    return blocks


def _memory_json(step: StepMemory, n: int) -> dict[str, Any]:
    """Return the "memory" of a report on n ranks: the predicted bytes of a training step."""

    def describe_point(point: StepMoment) -> dict[str, Any]:
        """Return the phase, node, source line and bytes of a moment of the step."""
        return {
            "phase": point.phase,
            "node": point.moment.name,
            "where": point.moment.where,
            "values_bytes": step.bytes_at(point),
        }

    def largest_values(point: StepMoment) -> list[dict[str, Any]]:
        """Return the largest values that are alive at a moment of the step."""
        largest = step.summary(point, MAX_ALIVE_VALUES)
        return [{"origin": live.origin, "where": live.where, "bytes": live.nbytes} for live in largest]

    return {
        "parameters_bytes": step.weights.parameters,
        "gradients_bytes": step.weights.trainable,
        "optimizer_bytes": step.optimizer,
        "buffers_bytes": step.weights.buffers,
        "inputs_bytes": step.inputs,
        "kept_bytes": step.saved,
        "constant_bytes": step.constant,
        "shards": step.shards,
        "offload": None if step.offloaded is None else asdict(step.offloaded),
        "peak_bytes": step.peak,
        # of FSDP over the ranks that shard the state already, else over all ranks
        "peak_with_fsdp_bytes": step.fsdp(step.shards if step.shards > 1 else n),
        "peaks": [{**describe_point(point), "alive": largest_values(point)} for point in step.peaks().values()],
        "curve": [describe_point(point) for point in step.points()],
    }
