"""Render the JSON of a report or plan (`report_json.py`) as an HTML page without external resources.

The template is `page.html`; this file computes what it shows: rows of tables, the points of the memory chart, and the
bars of the options that a plan compares.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2

from sp_compile.passes.cost.step_memory import format_bytes

from .byte_sizes import SizeUnit
from .plan import COLUMNS, MAX_PLAN_ROWS
from .ranges import format_byte_range, format_range

CHART_WIDTH, CHART_HEIGHT = 960, 220  # size of the memory chart in pixels
MAX_POINTS = 2000  # maximum number of points of the memory chart
LABEL_WIDTH = 80  # maximum number of characters of the label at the peak
BAR_ROW = 20  # height of an option in the picture of a plan, in pixels
BAR_WIDTH = 180  # width of the longest bar of each of its columns
BAR_COLUMNS = {"memory_bytes": 400, "seconds": 690}  # key of the JSON -> x of the column
OPTION_WIDTH = 68  # maximum number of characters of an option's name
# legend of the kinds of lines ("blocks")
EXCHANGE_KINDS = {
    "sharded": "each rank has its rows",
    "tiled": "rows of a rank, processed in tiles",
    "exchanged": "ranks send and receive",
    "gathered": "replicated on every rank",
}
# purposes of exchanges, if their names are not sufficient
PURPOSES = {
    "reduce_grad": "gradients of parameters, summed over the ranks",
    "all_to_all": "heads exchanged for positions, and back",
    "unshard": "rows of all ranks, concatenated on each",
    "all_gather": "rows of all ranks, concatenated on each",
    "ring_attention": "keys and values, from rank to rank",
    "hybrid_attention": "heads exchanged for positions, then keys and values from rank to rank",
    "gathered_attention": "keys and values, concatenated on every rank",
    "shift": "rows of a neighbor",
    "all_reduce": "partial sums of the ranks",
    "shard": "no communication: a rank slices its rows out of a replicated value",
}
COLORS = {"forward": "#8fb9dd", "loss": "#e0b05a", "backward": "#8cc4a2"}


def page(report: Mapping[str, Any]) -> str:
    """Return the HTML page that shows the JSON of a report or a plan, and contains it in a script element."""
    is_plan = report["format"] == "sp_compile.plan"
    values = _plan_values(report) if is_plan else _report_values(report)
    escaped = json.dumps(report).replace("<", "\\u003c")  # so that no string in it ends the script element
    data = jinja2.utils.markupsafe.Markup(escaped)
    title = "Plan" if is_plan else f"The program on {report['ranks']} ranks"
    return _template().render(found=report, plan=is_plan, title=title, data=data, **values)


@cache
def _template() -> jinja2.Template:
    """Return the compiled template `page.html`, which is read once."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"nbytes": format_bytes, "call": _call_of}
    return environment.from_string(Path(__file__).with_suffix(".html").read_text())


def _report_values(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the template shows of a report in addition to its JSON, by their name in the template."""
    gathered_lines = {block["where"] for block in report["blocks"] if block["kind"] == "gathered"}
    rewrites = [{**row, "gathered": row["where"] in gathered_lines} for row in report["rewrites"]]
    rewrites.sort(key=lambda row: not row["gathered"])  # gathered lines first
    totals: Counter[str] = Counter()  # op -> bytes that a rank sends
    for exchange in report["collectives"]:
        totals[exchange["op"]] += exchange["forward_bytes"] + exchange["backward_bytes"]
    memory = report["memory"]
    return {
        "memory": memory,
        "inputs": ", ".join(f"{name} dim {'/'.join(map(str, dims))}" for name, dims in report["inputs"].items()),
        "kinds": EXCHANGE_KINDS,
        # `most_kept` and `most_sent` are the bytes to which widths in the page are relative; 1 in place of 0
        "most_kept": max((block["kept_bytes"] for block in report["blocks"]), default=0) or 1,
        "tiles": _count_equal(report["tiles"], "tiles", "rows", "inside_bytes", "tile_bytes", "where"),
        "totals": totals.most_common(),
        "most_sent": max(totals.values(), default=0) or 1,
        "purposes": {op: PURPOSES.get(op, "") for op in totals},
        "collectives": _count_equal(report["collectives"], "op", "shape", "forward_bytes", "backward_bytes", "where"),
        "rewrites": _count_equal(rewrites, "done", "where", "why", "gathered"),
        "shares": [(name, format_bytes(nbytes)) for name, nbytes in _memory_rows(memory)] if memory else [],
        "area": _area_chart(memory) if memory else None,
        "width": CHART_WIDTH,
        "height": CHART_HEIGHT,
    }


def _plan_values(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the template shows of a plan: the cells of its table, and the CSS class of each row."""
    unit, variants = SizeUnit(plan["unit"]), plan["ways"]
    fastest: dict[int, int] = {}  # number of ranks -> index of the fastest variant that fits
    for i in sorted(range(len(variants)), key=lambda i: variants[i]["seconds"]):
        if variants[i]["fits"]:
            fastest.setdefault(variants[i]["ranks"], i)
    rows, marks = [], []
    for i, variant in enumerate(variants):
        cells = {heading: show(SimpleNamespace(**variant)) for heading, show in COLUMNS.items()}  # as in `str(plan)`
        if variant["offload"]:
            cells["offload"] += f": {unit(variant['host_bytes'])}"
        estimate_mark = "" if variant["measured"] else "~"
        memory = format_byte_range(variant["memory_bytes_range"], unit)
        row = [*cells.values(), f"{estimate_mark}{memory}", variant["phase"]]
        row += [format_range(variant[f"{name}_range"]) for name in ("seconds", "tokens_per_second")]
        rows.append(row)
        if i in fastest.values():
            marks.append("best")
        else:
            marks.append("" if variant["fits"] else "misses")
    best = None if plan["best"] is None else variants[plan["best"]]
    bars = _option_bars(plan, rows, marks)
    return {"unit": unit, "ways": rows, "marks": marks, "best": best, "bars": bars, "width": CHART_WIDTH}


def _option_bars(plan: Mapping[str, Any], rows: Sequence[Sequence[Any]], marks: Sequence[str]) -> dict[str, Any]:
    """Return the bars of memory and of seconds of each option of a plan, and the x of the memory of a device.

    Of each number of ranks, the first `MAX_PLAN_ROWS` options are shown, as in `str(plan)`, and the fastest that fits.

    Args:
        plan: The JSON of the plan.
        rows: The cells of its table, by option.
        marks: The class of each option: "best" for the fastest of a number of ranks, "misses" if it does not fit.
    """
    variants, unit = plan["ways"], SizeUnit(plan["unit"])
    count = Counter[int]()  # number of ranks -> options so far
    shown = []
    for i, variant in enumerate(variants):
        count[variant["ranks"]] += 1
        if count[variant["ranks"]] <= MAX_PLAN_ROWS or marks[i] == "best":
            shown.append(i)
    # Attention, layout, and those of the other columns in which the options differ, with their headings.
    labels = list[tuple[int, str]]()  # (number of the column, text before its cell)
    for column, heading in enumerate(COLUMNS):
        if heading in ("attention", "layout"):
            labels.append((column, ""))
        elif heading != "ranks" and len({str(rows[i][column]) for i in shown}) > 1:
            labels.append((column, f"{heading} "))
    most = {key: max([variants[i][key] for i in shown], default=0) for key in BAR_COLUMNS}
    most["memory_bytes"] = max(most["memory_bytes"], plan["memory_bytes"])
    options = []
    for line, i in enumerate(shown):
        variant = variants[i]
        estimate_mark = "" if variant["measured"] else "~"
        texts = {
            "memory_bytes": estimate_mark + unit(variant["memory_bytes"]),
            "seconds": f"{variant['seconds']:.3g} s",
        }
        widths = {key: BAR_WIDTH * variant[key] / (most[key] or 1) for key in BAR_COLUMNS}
        bars = [{"x": x, "width": widths[key], "text": texts[key]} for key, x in BAR_COLUMNS.items()]
        name = ", ".join([f"{variant['ranks']} ranks", *(f"{heading}{rows[i][column]}" for column, heading in labels)])
        note = "chosen" if i == plan["best"] else "does not fit" if not variant["fits"] else ""
        text = f"{name}: {', '.join(texts.values())}{f' ({note})' if note else ''}"
        short = name if len(name) <= OPTION_WIDTH else f"{name[: OPTION_WIDTH - 3]}..."
        options.append({"name": short, "text": text, "note": note, "mark": marks[i], "y": BAR_ROW * line, "bars": bars})
    limit = BAR_COLUMNS["memory_bytes"] + BAR_WIDTH * plan["memory_bytes"] / most["memory_bytes"]
    return {"options": options, "limit": limit, "height": BAR_ROW * len(options), "row": BAR_ROW, "x": BAR_COLUMNS}


def _count_equal(rows: Iterable[Mapping[str, Any]], *fields: str) -> list[tuple[int, dict[str, Any]]]:
    """Merge rows whose values of these fields are equal; return the number of merged rows, and these values by field.

    The table thus shows an exchange of 32 equal layers as one row, with the number 32.
    """
    counts = Counter(tuple(row[field] for field in fields) for row in rows)
    return [(count, dict(zip(fields, values, strict=True))) for values, count in counts.items()]


def _memory_rows(memory: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """Yield (text, bytes) for each row of the memory table: the kinds of memory, then the peaks.

    If n ranks shard the state of the model (parameters and optimizer), one row has the bytes of a rank's shards, and
    its text the bytes of all, such as "8 shards of parameters (16.0 GiB) and state of the optimizer (32.0 GiB)".
    """
    n = memory["shards"]
    if n == 1:
        yield "parameters", memory["parameters_bytes"]
        yield "gradients", memory["gradients_bytes"]
        yield "state of the optimizer", memory["optimizer_bytes"]
    else:
        parameters = f"parameters ({format_bytes(memory['parameters_bytes'])})"
        optimizer = f"state of the optimizer ({format_bytes(memory['optimizer_bytes'])})"
        # The constant bytes are the shards of a rank, the buffers and the inputs.
        shards = memory["constant_bytes"] - memory["buffers_bytes"] - memory["inputs_bytes"]
        yield f"{n} shards of {parameters} and {optimizer}", shards
    yield "buffers", memory["buffers_bytes"]
    yield "inputs", memory["inputs_bytes"]
    yield "saved for the backward", memory["kept_bytes"]
    if n == 1:
        yield "peak of the step", memory["peak_bytes"]
        yield "peak, with FSDP over the ranks", memory["peak_with_fsdp_bytes"]
    else:
        yield "peak of the step", memory["peak_with_fsdp_bytes"]
        yield "peak, with the state on every rank", memory["peak_bytes"]


def _area_chart(memory: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the SVG paths, the label of the peak and the ticks of the memory chart; None without points.

    The chart shows the bytes of values at each kernel of the step, above a floor: the constant bytes of the state. It
    has one area for each phase (forward, loss, backward). Of many points, only the largest of each run of neighbors is
    drawn, about `MAX_POINTS` in total, so that the peak is always one of them.
    """
    points, run_length = memory["curve"], max(1, len(memory["curve"]) // MAX_POINTS)
    if not points:
        return None
    runs = [points[i : i + run_length] for i in range(0, len(points), run_length)]
    curve = [max(run, key=lambda point: point["values_bytes"]) for run in runs]
    # Pixels of each point, from the left and from the top, as SVG counts them.
    state = memory["constant_bytes"]
    # The chart is 5 % higher than the peak.
    top = 1.05 * (state + max(point["values_bytes"] for point in curve))
    x = [CHART_WIDTH * i / max(1, len(curve) - 1) for i in range(len(curve))]
    y = [CHART_HEIGHT * (1 - (state + point["values_bytes"]) / top) for point in curve]
    floor = CHART_HEIGHT * (1 - state / top)
    phases = []
    for name, group in groupby(range(len(curve)), key=lambda i: curve[i]["phase"]):
        indices = list(group)
        left, right = x[indices[0]], x[min(indices[-1] + 1, len(curve) - 1)]  # up to the first point of the next phase
        line = " ".join(f"L{x[i]:.1f} {y[i]:.1f}" for i in indices)
        # From the floor along the points of the phase, and back to the floor.
        path = f"M{left:.1f} {floor:.1f} {line} L{right:.1f} {y[indices[-1]]:.1f} L{right:.1f} {floor:.1f} Z"
        # The loss is narrow: its label ends where it does, so that it does not overlap the next one.
        text_x, anchor = (right - 3, "end") if name == "loss" else (left + 3, "start")
        phases.append({"name": name, "path": path, "color": COLORS[name], "x": f"{text_x:.0f}", "anchor": anchor})
    peak = max(range(len(curve)), key=lambda i: curve[i]["values_bytes"])
    text = f"{format_bytes(state + curve[peak]['values_bytes'])} at {curve[peak]['where']}"
    text = text if len(text) <= LABEL_WIDTH else f"{text[:LABEL_WIDTH]}..."
    anchor, offset = ("end", -8) if x[peak] > CHART_WIDTH / 2 else ("start", 8)  # the text is on the wider side
    label = {"text": text, "anchor": anchor, "text_x": x[peak] + offset}
    label |= {"x": x[peak], "y": y[peak], "text_y": max(12.0, y[peak] - 4)}
    return {"floor": floor, "phases": phases, "peak": label, "ticks": _ticks(top)}


def _ticks(top: float) -> Sequence[Mapping[str, float]]:
    """Return the ticks of the vertical axis from 0 to `top` bytes: each has its bytes, and its y in pixels.

    Their distance is the largest power of two with at least four ticks above 0.
    """
    step = 2.0 ** math.floor(math.log2(top / 4))
    return [{"bytes": i * step, "y": CHART_HEIGHT * (1 - i * step / top)} for i in range(int(top / step) + 1)]


def _call_of(line: str) -> str:
    """Return the code of "file:line: code" as a short label: "f(x)" for "file.py:3: y = f(x)" and for "return f(x)"."""
    code = line.partition(": ")[2] or line
    return re.sub(r"^(return |[\w., ]+ = )", "", code)
