"""Convert reports and plans to JSON; names and units are stable while "version" is 1, fields may be added.

    {"format": "sp_compile.report", "version": 1, "ranks": 8, "inputs": {"ids": [1]}, "constraints": ["..."],
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
     "parameters_bytes": 1, "best": 0 | null,
     "ways": [{"ranks", "attention", "layout", "checkpoint", "tiles", "most_tiles", "offload", "host_bytes", "state",
               "memory_bytes", "phase", "kept_bytes", "seconds", "tokens_per_second", "fits", "measured", "options"}],
     "changes": {"8": "..."}, "notes": ["..."]}

A block is a line of the user's program. Bytes are of one rank; sizes that are symbols are taken as 2**20. constant:
bytes throughout the step: parameters and optimizer state in `shards` shards, buffers and inputs. values: all other
values, with gradients and gathered weights. unit: that of the requested memory. measured: true if predicted with
exactly these options, false if estimated from others. error: the largest relative error; null if it is infinite.
Options that are not JSON are stored as their text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sp_compile.lowering.base.errors import TANGENTS_LINE, UNKNOWN_LINE
from sp_compile.passes.cost.decision import describe_shape
from sp_compile.passes.cost.step_memory import StepMemory
from sp_compile.passes.graph.sizes import assume_large
from sp_compile.passes.report import Report

from .plan import StepPlan

VERSION = 1
MAX_ALIVE_VALUES = 20


def report_json(report: Report) -> dict[str, Any]:
    """Return the JSON of a report of `explain` or `verify`."""
    return {
        "format": "sp_compile.report",
        "version": VERSION,
        "ranks": report.n,
        "inputs": {name: list(dims) for name, dims in report.inputs.items()},
        "constraints": list(report.constraints),
        "rewrites": [
            {
                "kind": note.kind.name.lower(),
                "subject": note.subject,
                "done": note.label,
                "node": note.node,
                "where": note.where,
                "why": note.text,
            }
            for note in report.notes
        ],
        "collectives": [
            {
                "op": e.op,
                "node": e.node,
                "where": e.where,
                "shape": e.shape,
                "forward_bytes": assume_large(e.forward),
                "backward_bytes": assume_large(e.backward),
            }
            for e in report.exchanges
        ],
        "attention": [
            {
                "attention": describe_shape(d.shape),
                "nodes": d.nodes,
                "chosen": d.chosen.kind,
                "layout": d.chosen.layout,
                "seconds": d.chosen.seconds,
                "memory_bytes": d.chosen.memory,
            }
            for d in report.attention
        ],
        "blocks": _line_blocks(report),
        "tiles": [
            {
                "node": one.node,
                "where": one.where,
                "tiles": one.tiles,
                "rows": one.rows,
                "inside_bytes": one.inside,
                "tile_bytes": one.tile,
            }
            for one in report.tiled
        ],
        "memory": None if report.step is None else _memory_json(report.step, report.n),
        "errors": [{"name": name, "error": error if math.isfinite(error) else None} for name, error in report.errors],
    }


def plan_json(plan: StepPlan) -> dict[str, Any]:
    """Return the JSON of a plan."""
    best = plan.best if any(row.fits for row in plan.rows) else None
    return {
        "format": "sp_compile.plan",
        "version": VERSION,
        "memory_bytes": plan.memory,
        "host_memory_bytes": plan.host_memory,
        "unit": plan.unit.name,
        "parameters_bytes": plan.weights.parameters,
        "best": None if best is None else plan.rows.index(best),
        "ways": [
            {
                "ranks": row.ranks,
                "attention": row.attention,
                "layout": row.layout,
                "checkpoint": row.checkpoint,
                "tiles": row.tiles,
                "most_tiles": row.most_tiles,
                "offload": row.offload,
                "host_bytes": row.host,
                "state": row.state,
                "memory_bytes": row.memory,
                "phase": row.phase,
                "kept_bytes": row.kept,
                "seconds": row.seconds,
                "tokens_per_second": row.tokens_per_second,
                "fits": row.fits,
                "measured": row.is_measured,
                "options": {name: _option_json(value) for name, value in row.options.items()},
            }
            for row in plan.rows
        ],
        "changes": {str(ranks): text for ranks, text in plan.changes.items()},
        "notes": plan.notes,
    }


def _option_json(value: Any) -> Any:
    """Return an option as JSON: mappings with names as keys, and the text of other objects."""
    if isinstance(value, Mapping):
        return {str(name): _option_json(one) for name, one in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _line_blocks(report: Report) -> list[dict[str, Any]]:
    """Return the user's lines in the order in which they run, as far as it is known."""
    saved: Counter[str] = Counter()
    lines: dict[str, Any] = {}
    begins = {one.ends: one.where for one in report.tiled}
    for graph in report.step.graphs if report.step is not None else []:
        for moment in graph.forward.moments:
            if moment.where in begins:  # a region in tiles runs where it ends
                lines.setdefault(begins[moment.where])
            lines.setdefault(moment.where)
        for live in graph.backward.alive(0) if graph.backward is not None else []:
            saved[live.where] += live.nbytes if live.origin == "saved" and live.where != TANGENTS_LINE else 0
    lines |= dict.fromkeys([*(one.where for one in report.exchanges), *(one.where for one in report.notes)])
    sent: Counter[str] = Counter()
    for e in report.exchanges:
        sent[e.where] += assume_large(e.forward) + assume_large(e.backward)
    result: dict[str, list[str]] = {where: [] for where in lines}
    for note in report.notes:
        result[note.where].append(note.label)
    gathered, tiled = {note.where for note in report.fallbacks}, {one.where for one in report.tiled}

    def kind(where: str) -> str:
        """Return the kind of a source line: gathered, exchanged, tiled or sharded."""
        if where in gathered:
            return "gathered"
        return "exchanged" if sent[where] else "tiled" if where in tiled else "sharded"

    return [
        {
            "where": where,
            "kind": kind(where),
            "kept_bytes": saved[where],
            "sent_bytes": sent[where],
            "done": list(dict.fromkeys(result[where])),
        }
        for where in lines
        if where != UNKNOWN_LINE or saved[where]  # tokens that order exchanges belong to no line
    ]


def _memory_json(step: StepMemory, n: int) -> dict[str, Any]:
    def at_moment(point: Any) -> dict[str, Any]:
        """Return the phase, node, source line and bytes of a point of the step."""
        moment = point.moment
        return {"phase": point.phase, "node": moment.name, "where": moment.where, "values_bytes": step.peak_with(point)}

    def alive(point: Any) -> list[dict[str, Any]]:
        """Return the largest values that are alive at a point of the step."""
        found = step.summary(point, MAX_ALIVE_VALUES)
        return [{"origin": origin, "where": where, "bytes": nbytes} for origin, where, nbytes, _ in found]

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
        "peak_with_fsdp_bytes": step.fsdp(step.shards if step.shards > 1 else n),
        "peaks": [{**at_moment(point), "alive": alive(point)} for point in step.peaks().values()],
        "curve": [at_moment(point) for point in step.points()],
    }
