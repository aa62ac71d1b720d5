"""A report or a plan as one HTML page without anything from elsewhere: made of its JSON (`record.py`), by hand.

The program's lines are a strip, as wide as what they keep; memory over the step is an area; tables can be searched.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from sp_compile.cost.step import written

from .sizes import SizeUnit

WIDTH, HEIGHT, MOST_POINTS = 960, 220, 2000
LABEL = 80
"""Characters that have room beside the peak, which is at least half of the width away from one side."""
BESIDE, LEFT = 8, 60
"""Between a point and its label; and the room of the axis' labels."""
PARTS = 4
"""Of the axis, at least half as many."""
FEW = 24
"""Lines of a program that are shown before anybody asks."""
KINDS = {
    "sharded": "each rank has its rows",
    "tiled": "rows of a rank, some at a time",
    "exchanged": "ranks send and receive",
    "gathered": "whole on every rank",
}
MOVED = {
    "reduce_grad": "gradients of parameters, added over the ranks",
    "all_to_all": "heads for positions, and back",
    "unshard": "what ranks have, put together on all of them",
    "all_gather": "what ranks have, put together on all of them",
    "ring_attention": "keys and values, from rank to rank",
    "hybrid_attention": "heads for positions, then keys and values from rank to rank",
    "gathered_attention": "keys and values, put together on all of them",
    "shift": "a neighbour's rows",
    "all_reduce": "sums of the ranks, added",
    "shard": "nothing: a rank takes its rows of what is whole",
}
"""What an exchange is for, where its name does not say it."""
ORIGINS = (
    "saved: kept by the forward for the backward. value: made and read here. result: given to the caller, or kept for "
    "the backward. gradient: of a weight or an input. workspace: inside an operator. reuse: read no more, and kept for "
    "a later value of its size."
)
STYLE = """
:root { --sharded: #4c9a6a; --tiled: #8a63b3; --exchanged: #3b78b5; --gathered: #c2553f; --ink: #222; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
td, th { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
table + table { margin-top: 1rem; }
code { font-size: 12px; overflow-wrap: anywhere; }
.strip { display: flex; height: 3.2rem; border-radius: 4px; overflow: hidden; }
.strip div { min-width: 15px; flex-basis: 0; border-right: 1px solid #fff; overflow: hidden; white-space: nowrap; }
.strip div { font: 10px/3.2rem monospace; color: #fff; padding-left: 2px; text-overflow: ellipsis; }
.strip div { container-type: inline-size; } .strip i { font-style: normal; }
@container (max-width: 5rem) { .strip i { display: none; } }
td:not(:last-child):not(:has(code)) { white-space: nowrap; }
td.wide { width: 45%; }
.sharded { background: var(--sharded); } .exchanged { background: var(--exchanged); }
.gathered { background: var(--gathered); } .tiled { background: var(--tiled); }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 0; }
.named { white-space: nowrap; margin-right: 1rem; }
input { font: inherit; width: 100%; padding: .4rem; box-sizing: border-box; }
.best { background: #e5f3ea; font-weight: 600; } .misses { color: #999; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; }
"""
SCRIPT = """
document.getElementById("search").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const more of document.querySelectorAll("details")) more.open = event.target.value.trim() !== "";
  for (const row of document.querySelectorAll("[data-find]")) {
    const text = row.textContent.toLowerCase() + " " + (row.title || "").toLowerCase();
    row.style.display = words.every(word => text.includes(word)) ? "" : "none";
  }
});
"""
COLOURS = {"forward": "#8fb9dd", "loss": "#e0b05a", "backward": "#8cc4a2"}


def page(found: Mapping[str, Any]) -> str:
    """The page of a report's or a plan's JSON."""
    plan = found["format"] == "sp_compile.plan"
    title = "What fits" if plan else f"The program on {found['ranks']} ranks"
    body = _plan(found) if plan else _report(found)
    data = json.dumps(found).replace("<", "\\u003c")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>sp_compile: {title}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
        '<input id="search" type="search" placeholder="search lines, ops, reasons" aria-label="search">\n'
        + "\n".join(body)
        + f'\n<script type="application/json" id="data">{data}</script>\n<script>{SCRIPT}</script>\n</body></html>\n'
    )


def _report(found: Mapping[str, Any]) -> Iterable[str]:
    inputs = ", ".join(f"{name} dim {'/'.join(map(str, dims))}" for name, dims in found["inputs"].items())
    words = "; ".join([f"The sequence is {inputs or 'not an input dim'}", *found["constraints"]])
    yield f"<p>{escape(words)}.</p>"
    yield "<h2>The program, line by line</h2>" + _strip(found["blocks"])
    memory = found["memory"]
    if memory is not None:
        yield f"<h2>Memory of a rank over a training step</h2>{_area(memory)}"
        yield "<p>From left to right the operators of a step, in the order in which they run; the dot is the peak.</p>"
        yield _table(("what", "of a rank"), [(what, written(nbytes)) for what, nbytes in _shares(memory)])
        if sent := memory["offload"]:
            yield _waiting(sent)
        yield f"<p>Values that are alive at the peaks, by line. {ORIGINS}</p>"
        for peak in memory["peaks"]:
            alive = [(a["origin"], written(a["bytes"]), _code(a["where"])) for a in peak["alive"]]
            most = written(memory["constant_bytes"] + peak["values_bytes"])
            yield f"<details><summary>Peak of {peak['phase']}: {most}, {written(peak['values_bytes'])} of values, at "
            yield f"{_code(peak['where'])}</summary>{_table(('what', 'bytes', 'line'), alive)}</details>"
    if found["tiles"]:
        yield "<h2>Work in tiles</h2>" + _table(
            ("times", "tiles", "rows of a rank", "inside, of all rows", "of a tile", "line"),
            _counted(
                (t["tiles"], f"{t['rows']:,}", written(t["inside_bytes"]), written(t["tile_bytes"]), _code(t["where"]))
                for t in found["tiles"]
            ),
        )
    total: Counter[str] = Counter()
    for e in found["collectives"]:
        total[e["op"]] += e["forward_bytes"] + e["backward_bytes"]
    yield "<h2>Bytes by collective</h2>" + _bars(total)
    yield _table(
        ("times", "op", "local shape", "sent forward", "sent backward", "line"),
        _counted(
            (e["op"], _code(e["shape"]), written(e["forward_bytes"]), written(e["backward_bytes"]), _code(e["where"]))
            for e in found["collectives"]
        ),
        wide=True,
    )
    yield "<h2>Rewrites and refusals</h2>"
    yield _table(("times", "pass", "line", "what and why"), _counted(_rewrites(found)), wide=True)
    if found["attention"]:
        yield "<h2>Attention</h2>" + _table(
            ("attention", "nodes", "chosen", "layout", "ms of a step", "memory"),
            [
                (escape(a["attention"]), a["nodes"], a["chosen"], a["layout"], f"{1e3 * a['seconds']:,.1f}",
                 written(a["memory_bytes"]))
                for a in found["attention"]
            ],
        )  # fmt: skip
    if found["errors"]:
        rows = [(escape(e["name"]), "infinite" if e["error"] is None else f"{e['error']:.2e}") for e in found["errors"]]
        yield "<h2>Against one device</h2>" + _table(("what", "largest relative error"), rows)


def _shares(memory: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """What a rank holds, and the peak that it comes to, as the program says that its state lies; then the other way."""
    n = memory["shards"]
    state = {"parameters": "parameters", "gradients": "gradients", "optimizer": "state of the optimizer"}
    if n == 1:
        yield from ((words, memory[f"{name}_bytes"]) for name, words in state.items())
    else:
        shards = memory["constant_bytes"] - memory["buffers_bytes"] - memory["inputs_bytes"]
        parameters, _, optimizer = (f"{words} ({written(memory[f'{name}_bytes'])})" for name, words in state.items())
        yield f"{n} shards of {parameters} and {optimizer}", shards
    for name, words in {"buffers": "buffers", "inputs": "inputs", "kept": "kept for the backward"}.items():
        yield words, memory[f"{name}_bytes"]
    if n == 1:
        yield "peak of the step", memory["peak_bytes"]
        yield "peak, with FSDP over the ranks", memory["peak_with_fsdp_bytes"]
    else:
        yield "peak of the step", memory["peak_with_fsdp_bytes"]
        yield "peak, with the state on every rank", memory["peak_bytes"]


def _waiting(sent: Mapping[str, Any]) -> str:
    whole, nbytes = written(sent["nbytes"] + sent["kept"]), written(sent["nbytes"])
    if not sent["nbytes"]:
        return f"<p>Of {whole} kept for the backward nothing waits in the host's memory.</p>"
    copies = f"copies take {sent['seconds']:.3g} s each way, {sent['waits']:.3g} s of them beside no other work"
    return f"<p>Of {whole} kept for the backward {nbytes} wait in the host's memory; {copies}.</p>"


def _rewrites(found: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """What is whole on every rank comes first, and is marked."""
    whole = {block["where"] for block in found["blocks"] if block["kind"] == "gathered"}
    rows = sorted(found["rewrites"], key=lambda row: row["where"] not in whole)
    for row in rows:
        mark = '<span class="key gathered"></span>' if row["where"] in whole else ""
        yield mark + escape(row["done"]), _code(row["where"]), escape(row["why"])


def _plan(found: Mapping[str, Any]) -> Iterable[str]:
    unit, limit = SizeUnit(found["unit"]), found["host_memory_bytes"]
    of_host = "" if limit is None else f", {unit(limit)} of its host"
    yield (
        f"<p>{unit(found['memory_bytes'])} a rank{of_host}; parameters {unit(found['parameters_bytes'])}. "
        "The fastest on each number of ranks is green; what does not fit is grey; ~ is estimated from a way beside.</p>"
    )
    columns = ("ranks", "attention", "layout", "checkpoints", "tiles", "offload", "state", "memory", "peak of")
    rows, marks = [], []
    fastest: dict[int, int] = {}
    for i in sorted(range(len(found["ways"])), key=lambda i: found["ways"][i]["seconds"]):
        if found["ways"][i]["fits"]:
            fastest.setdefault(found["ways"][i]["ranks"], i)
    for i, way in enumerate(found["ways"]):
        again = "each layer" if way["checkpoint"] else "as written"
        numbers = (
            f"{'' if way['looked'] else '~'}{unit(way['memory_bytes'])}",
            way["phase"],
            f"{way['seconds']:.3g}",
            f"{way['tokens_per_second']:,.0f}",
        )
        host = f"{way['offload']:.0%}: {unit(way['host_bytes'])}" if way["offload"] else "never"
        tiles = f"auto: {way['most_tiles'] or 'none'}" if way["tiles"] == "auto" else way["tiles"]
        rows.append((way["ranks"], way["attention"], way["layout"], again, tiles, host, way["state"], *numbers))
        marks.append("best" if i in fastest.values() else "" if way["fits"] else "misses")
    yield _table((*columns, "s/step", "tokens/s"), rows, marks)
    if found["best"] is not None:
        best = found["ways"][found["best"]]
        yield f"<h2>Options of the fastest, on {best['ranks']} ranks</h2>"
        yield f"<p><code>{escape(json.dumps(best['options']))}</code></p>"
    if words := [*found["changes"].values(), *found["notes"]]:
        yield "<h2>What would have to change</h2>" + "".join(f"<p>{escape(w)}</p>" for w in words)


def _strip(blocks: Sequence[Mapping[str, Any]]) -> str:
    most = max((block["kept_bytes"] for block in blocks), default=0) or 1
    cells = []
    for number, block in enumerate(blocks, 1):
        kept, sent = written(block["kept_bytes"]), written(block["sent_bytes"])
        words = f"{block['where']} | {block['kind']}, keeps {kept}, sends {sent} {', '.join(block['done'])}"
        grow = 1 + 9 * block["kept_bytes"] / most
        cells.append(
            f'<div class="{block["kind"]}" style="flex-grow:{grow:.2f}" title="{escape(words)}" data-find>'
            f"<strong>{number}</strong><i> {escape(_called(block['where']))}</i></div>"
        )
    key = "<br>".join(
        f'<span class="named"><span class="key {kind}"></span>{kind}: {words}</span>' for kind, words in KINDS.items()
    )
    rows = [
        (
            *(number, _code(b["where"]), f'<span class="key {b["kind"]}"></span>{b["kind"]}'),
            *(written(b["kept_bytes"]), written(b["sent_bytes"]), escape(", ".join(b["done"]))),
        )
        for number, b in enumerate(blocks, 1)
    ]
    shown = _table(("", "line", "kind", "kept for the backward", "sent", "passes"), rows)
    return (
        f'<div class="strip">{"".join(cells)}</div>'
        "<p>A line of the model each, in the order in which they run; wider ones keep more for the backward. "
        "Numbers are those of the list below."
        f"<br>{key}</p>"
        f"<details{' open' if len(blocks) <= FEW else ''}><summary>{len(blocks)} lines</summary>{shown}</details>"
    )


def _area(memory: Mapping[str, Any]) -> str:
    """Values over the step, above what stays; of many points the highest in a row of them, so the peak is one."""
    points, width = memory["curve"], max(1, len(memory["curve"]) // MOST_POINTS)
    runs = [points[i : i + width] for i in range(0, len(points), width)]
    curve = [max(run, key=lambda point: point["values_bytes"]) for run in runs]
    if not curve:
        return ""
    state = memory["constant_bytes"]
    top = 1.05 * (state + max(point["values_bytes"] for point in curve))
    x = [WIDTH * i / max(1, len(curve) - 1) for i in range(len(curve))]
    y = [HEIGHT * (1 - (state + point["values_bytes"]) / top) for point in curve]
    floor = HEIGHT * (1 - state / top)
    parts = [_axis(top)]
    for phase, points in groupby(range(len(curve)), key=lambda i: curve[i]["phase"]):
        run = list(points)
        last = min(run[-1] + 1, len(curve) - 1)
        path = " ".join(f"L{x[i]:.1f} {y[i]:.1f}" for i in run)
        shape = f"M{x[run[0]]:.1f} {floor:.1f} {path} L{x[last]:.1f} {y[run[-1]]:.1f} L{x[last]:.1f} {floor:.1f} Z"
        parts.append(f'<path d="{shape}" fill="{COLOURS[phase]}"><title>{phase}</title></path>')
        # The loss is narrow, and its word ends where it does, so it does not run into the next one.
        word, side = (x[last] - 3, "end") if phase == "loss" else (x[run[0]] + 3, "start")
        parts.append(f'<text x="{word:.0f}" y="{HEIGHT + 14}" text-anchor="{side}">{phase}</text>')
    rest = HEIGHT - floor
    parts.append(
        f'<rect x="0" y="{floor:.1f}" width="{WIDTH}" height="{rest:.1f}" fill="#ccc"><title>state</title></rect>'
    )
    peak = max(range(len(curve)), key=lambda i: curve[i]["values_bytes"])
    words = f"{written(state + curve[peak]['values_bytes'])} at {curve[peak]['where']}"
    words = words if len(words) <= LABEL else f"{words[:LABEL]}..."
    side, beside = ("end", -BESIDE) if x[peak] > WIDTH / 2 else ("start", BESIDE)
    parts.append(f'<circle cx="{x[peak]:.1f}" cy="{y[peak]:.1f}" r="4"></circle>')
    parts.append(
        f'<text x="{x[peak] + beside:.1f}" y="{max(12.0, y[peak] - 4):.1f}" text-anchor="{side}">{escape(words)}</text>'
    )
    shards = "" if memory["shards"] == 1 else f"{memory['shards']} shards of "
    what = f"{shards}parameters and state of the optimizer, buffers, inputs"
    parts.append(f'<text x="3" y="{HEIGHT - 4}">there all the time: {what}: {written(state)}</text>')
    size = f"{-LEFT} -4 {WIDTH + LEFT} {HEIGHT + 24}"
    return f'<svg viewBox="{size}" role="img" aria-label="memory over the step">{"".join(parts)}</svg>'


def _axis(top: float) -> str:
    """Labels at the left, of round numbers from nothing to the top, and their lines."""
    step = 2.0 ** math.floor(math.log2(top / PARTS)) if top else 1.0
    lines = []
    for i in range(int(top / step) + 1):
        at = HEIGHT * (1 - i * step / top)
        lines.append(f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{written(i * step)}</text>')
        lines.append(f'<path d="M0 {at:.1f} H{WIDTH}" stroke="#ddd"></path>')
    return "".join(lines)


def _bars(total: Mapping[str, int]) -> str:
    most = max(total.values(), default=0) or 1
    rows = [
        (
            escape(op),
            MOVED.get(op, ""),
            written(nbytes),
            f'<div class="exchanged" style="height:.8rem;width:{100 * nbytes / most:.1f}%"></div>',
        )
        for op, nbytes in sorted(total.items(), key=lambda item: -item[1])
    ]
    return _table(("op", "what it moves", "bytes", ""), rows, wide=True)


def _counted(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Equal rows once, how many they are in front."""
    return [(times, *row) for row, times in Counter(rows).items()]


def _called(where: str) -> str:
    """What a line does, as far as a cell of the strip has room: the code without the file and what it is put into."""
    code = where.partition(": ")[2] or where
    return re.sub(r"^(return |[\w., ]+ = )", "", code)


def _code(where: str) -> str:
    return f"<code>{escape(where)}</code>"


def _table(headers: Sequence[str], rows: Iterable[Sequence[Any]], marks: Sequence[str] = (), wide: bool = False) -> str:
    """Cells are HTML already. wide: does the last column take most of the width?"""
    last = '<td class="wide">' if wide else "<td>"
    head = "".join(f"<th>{name}</th>" for name in headers)
    lines = []
    for i, row in enumerate(rows):
        mark = f' class="{marks[i]}"' if marks and marks[i] else ""
        cells = [f"<td>{cell}</td>" for cell in row[:-1]] + [f"{last}{row[-1]}</td>"]
        lines.append(f"<tr{mark} data-find>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
