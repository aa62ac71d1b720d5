"""Reports and plans as JSON and as a page, and the command line that writes them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from support.models import WIDTH, Decoder, tokens
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compile
from sp_compile import __main__ as command
from sp_compile.__main__ import main
from sp_compile.passes.context import Note, NoteKind, TiledRegion
from sp_compile.passes.cost.attention_cost import AttentionShape, all_candidates
from sp_compile.passes.cost.decision import Decision
from sp_compile.passes.cost.exchange_cost import Exchange
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.step_memory import GraphStep, HostValues, StepMemory, format_bytes
from sp_compile.passes.cost.walk.live_values import LiveValue
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.report import Report
from sp_compile.passes.sharding.sharded_work import SequenceCandidate
from sp_compile.planner import report_json as record
from sp_compile.planner.page import BAR_COLUMNS, BAR_WIDTH, CHART_HEIGHT, CHART_WIDTH, MAX_POINTS, PURPOSES, page
from sp_compile.planner.plan import MAX_PLAN_ROWS, StepPlan
from sp_compile.planner.report_json import plan_json, report_json
from sp_compile.planner.variants import Variant

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NODE = shutil.which("node")
VOID = {"meta", "input", "br"}
REASON = "an op <b> without a rule & more"


class Page(HTMLParser):
    """A parser that collects open tags, counts of tags, external links, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.met: Counter[str] = Counter()
        self.away: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.met[tag] += 1
        self.away += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "action")]
        self.met.update(f"{tag}.{value}" for name, value in attrs if name == "class")
        self.met.update(f"{tag}#{value}" for name, value in attrs if name == "id")
        self.met.update(f"{tag}[{name}]" for name, _ in attrs if name == "data-find")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report() -> Report:
    forward = make_fx(lambda x, w: ((x.exp() @ w).sin(),), tracing_mode="fake")(torch.ones(64, 8), torch.ones(8, 8))
    step = StepMemory(ModelBytes(256, 256, 0, 256), graphs=[GraphStep.of(forward.graph, None, False, 2048)])
    notes = [
        Note(NoteKind.REWRITTEN, "ulysses", "2 all-to-alls", "attend", "model.py:3: attend(x)"),
        Note(NoteKind.GATHERED, "gather", REASON, "sort", "model.py:4: sort(x)"),
        Note(NoteKind.REWRITTEN, "tiles", "4 tiles", "linear", "model.py:5: head(x)"),
    ]
    exchanges = [
        Exchange("all_to_all", "a", "model.py:3: attend(x)", "2 x 3", 100, 50),
        Exchange("all_gather", "g", "model.py:4: sort(x)", "4", 10, 0),
    ]
    tiled = [TiledRegion("linear", "model.py:5: head(x)", 4, 64, 2048, 512)]
    return Report(2, notes=notes, exchanges=exchanges, inputs={"x": [1]}, step=step, tiled=tiled)


def plan_of(*rows: Variant) -> StepPlan:
    return StepPlan(80e9, ModelBytes(10, 10, 0, 10), list(rows), {8: "8 ranks: too little"})


def row(ranks: int, seconds: float, fits: bool) -> Variant:
    return Variant(
        ranks, "ring", "zigzag", True, 16, "sharded", 0.5,
        host=5e8, memory=7e10, phase="loss", kept=1e9, seconds=seconds, tokens=1000, fits=fits,
    )  # fmt: skip


def test_a_report_as_json() -> None:
    found = json.loads(json.dumps(report_json(report())))
    assert (found["format"], found["version"], found["ranks"]) == ("sp_compile.report", 1, 2)
    assert found["collectives"][0]["forward_bytes"] == 100
    kinds = {block["where"]: block["kind"] for block in found["blocks"]}
    assert kinds["model.py:3: attend(x)"] == "exchanged"
    assert kinds["model.py:4: sort(x)"] == "gathered"
    assert kinds["model.py:5: head(x)"] == "tiled"
    sent = {block["where"]: block["sent_bytes"] for block in found["blocks"]}
    assert (sent["model.py:3: attend(x)"], sent["model.py:4: sort(x)"], sent["model.py:5: head(x)"]) == (150, 10, 0)
    assert found["tiles"][0]["tile_bytes"] == 512
    memory = found["memory"]
    assert [point["values_bytes"] for point in memory["curve"]] == [2048, 4096, 4096]
    assert (memory["optimizer_bytes"], memory["peak_bytes"]) == (512, 256 + 512 + 2048 + 4096)
    assert sum(alive["bytes"] for alive in memory["peaks"][0]["alive"]) == 4096


def test_an_infinite_error_is_json() -> None:
    """JSON has no infinity."""
    made = report()
    made.errors = [("result 0: torch.float32, on a single device torch.float64", math.inf), ("result 1", 0.5)]
    found = report_json(made)
    json.dumps(found, allow_nan=False)
    assert [one["error"] for one in found["errors"]] == [None, 0.5]
    assert "infinite" in Page(page(found)).text


def test_sharded_state_is_drawn_sharded() -> None:
    """Each of 8 ranks has an eighth of the state; the peak includes the gradients of its moment."""
    made = report()
    assert made.step is not None
    assert report_json(made)["memory"]["constant_bytes"] == made.step.state
    made.step.shards = 8
    memory = report_json(made)["memory"]
    assert memory["constant_bytes"] == made.step.sharded_state(8) < made.step.state
    assert memory["constant_bytes"] + max(p["values_bytes"] for p in memory["curve"]) == made.step.fsdp(8)
    assert memory["peak_with_fsdp_bytes"] == made.step.fsdp(8), "of FSDP's shards, for any number of sequence ranks"
    assert re.search(rf"\b8 shards .*: {format_bytes(made.step.sharded_state(8))}", page(report_json(made)))
    assert re.search(rf"\bpeak .* {format_bytes(made.step.fsdp(8))}, ", made.step.text(8))


def test_a_page_has_a_ranks_own_state_in_its_table() -> None:
    made = report()
    assert made.step is not None
    assert "shards of parameters" not in page(report_json(made))
    made.step.shards = 8
    text = Page(page(report_json(made))).text
    assert re.search(rf"8 shards .*\(256 B\).*\({format_bytes(512)}\){format_bytes((256 + 512) // 8)}", text)
    assert re.search(rf"peak of .*{format_bytes(made.step.fsdp(8))}[\s\S]*peak, .*{format_bytes(made.step.peak)}", text)


def test_a_line_has_its_saved_bytes() -> None:
    whole, line = report(), "model.py:3: attend(x)"
    assert whole.step is not None
    held = [LiveValue("a", line, 7, "saved"), LiveValue("b", line, 5, "saved"), LiveValue("c", line, 9, "value")]
    backward = MagicMock(moments=[], end=0, alive=lambda index: held)
    whole.step.graphs[0].backward = backward
    assert {block["where"]: block["kept_bytes"] for block in report_json(whole)["blocks"]}[line] == 7 + 5


REPORT = {
    **dict.fromkeys(["format", "version", "ranks"]),
    "inputs": {"x": None},
    "constraints": None,
    "sequences": dict.fromkeys(["size", "evidence", "ops", "is_input", "is_chosen", "is_split", "share", "why"]),
    "work": dict.fromkeys(["flops", "sharded_flops", "rank_flops", "activation_bytes", "sharded_activation_bytes"]),
    "rewrites": dict.fromkeys(["kind", "subject", "done", "node", "where", "why"]),
    "collectives": dict.fromkeys(["op", "node", "where", "shape", "forward_bytes", "backward_bytes"]),
    "attention": dict.fromkeys(["attention", "nodes", "chosen", "layout", "seconds", "memory_bytes"]),
    "blocks": {**dict.fromkeys(["where", "kind", "kept_bytes", "sent_bytes"]), "done": None},
    "tiles": dict.fromkeys(["node", "where", "tiles", "rows", "inside_bytes", "tile_bytes"]),
    "memory": {
        **dict.fromkeys(["parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes", "inputs_bytes"]),
        **dict.fromkeys(["kept_bytes", "constant_bytes", "shards", "peak_bytes", "peak_with_fsdp_bytes"]),
        "offload": dict.fromkeys(["values", "nbytes", "kept", "seconds", "waits"]),
        "peaks": {
            **dict.fromkeys(["phase", "node", "where", "values_bytes"]),
            "alive": dict.fromkeys(["origin", "where", "bytes"]),
        },
        "curve": dict.fromkeys(["phase", "node", "where", "values_bytes"]),
    },
    "errors": dict.fromkeys(["name", "error"]),
}
WAY = """ranks attention layout checkpoint tiles offload host_bytes state memory_bytes phase kept_bytes seconds
tokens_per_second fits measured most_tiles options
memory_bytes_range seconds_range tokens_per_second_range""".split()
PLAN = {
    **dict.fromkeys(
        [
            "format",
            "version",
            "memory_bytes",
            "host_memory_bytes",
            "hardware",
            "unit",
            "parameters_bytes",
            "best",
            "notes",
        ]
    ),
    "ways": dict.fromkeys(WAY),
    "changes": {"8": None},
}
"""Names that programs read, which stay while the version is 1; those that are added are added here."""


def names(found: Any) -> Any:
    """The names in a JSON value, and in the first of a list; not those of options, which are torch.compile's."""
    if isinstance(found, dict):
        return {name: None if name == "options" else names(value) for name, value in found.items()}
    return names(found[0]) if isinstance(found, list) and found else None


def flat(found: Any) -> set[str]:
    return set(found).union(*map(flat, found.values())) if isinstance(found, dict) else set()


def test_names_in_json_are_those_that_are_documented() -> None:
    sizes = {"q_len": 64, "kv_len": 64, "heads": 4, "kv_heads": 4, "head_dim": 8, "v_head_dim": 8}
    shape = AttentionShape(n=2, batch=1, element_size=4, **sizes)
    ways = all_candidates(shape, Machine.of("cpu", {}))
    whole = report()
    assert whole.step is not None
    whole.step.graphs[0].offloaded = HostValues(1, 2, 3, 0.5, 0.25)
    whole.attention = [Decision(shape, ways, ways[0])]
    whole.errors = [("result 0", 1e-12)]
    whole.candidates = [SequenceCandidate(64, "attention", 1, True, True)]
    found = report_json(whole), plan_json(plan_of(row(8, 1.0, True)))
    assert [names(one) for one in found] == [REPORT, PLAN]
    assert [one["version"] for one in found] == [1, 1]
    documented = set(re.findall(r'"(\w+)"', record.__doc__ or ""))
    assert (flat(REPORT) | flat(PLAN)) - {"x"} <= documented


def test_a_plan_as_json() -> None:
    found = json.loads(json.dumps(plan_json(plan_of(row(8, 1.0, False), row(16, 3.0, True), row(32, 2.0, True)))))
    assert found["best"] == 2
    options = {"attention": "ring", "layout": "zigzag", "param_grads": "partial", "tiles": 16, "offload": 0.5}
    options["state"] = "sharded"
    assert found["ways"][2]["options"] == options
    assert plan_json(plan_of(row(8, 1.0, False)))["best"] is None


def test_a_page_is_complete() -> None:
    text = page(report_json(report()))
    found = Page(text)
    assert not found.open
    assert not found.away
    assert "http" not in text.replace("http-equiv", "")
    assert REASON in found.text, "escaped once"
    assert "<b>" not in text
    assert found.met["svg"] == found.met["input"] == 1
    (area,) = re.findall('<path d="([^"]+)" fill', text)
    first, second, *_ = [CHART_HEIGHT - float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", area)]
    state = 256 + 512 + 2048
    assert first / second == pytest.approx((state + 2048) / (state + 4096), rel=1e-2), "of the curve, above what stays"
    assert found.met["div.exchanged"] >= 1
    assert found.met["div.gathered"] == found.met["div.tiled"] == 1
    assert "model.py:3: attend(x)" in found.text


def test_a_page_lists_offloaded_values() -> None:
    whole = report()
    assert whole.step is not None
    whole.step.graphs[0].offloaded = HostValues(1, 2048, 1024, 0.5, 0.25)
    text = Page(page(report_json(whole))).text.replace("\n", "")
    assert re.search(r"Of 3\.0 KiB .* 2\.0 KiB .*host; .* 0\.5 s .* 0\.25 s", text)
    assert "host" not in Page(page(report_json(report()))).text


def test_the_highest_of_many_points_is_drawn() -> None:
    """A spike between the points of a long step that the chart samples."""
    found = report_json(report())
    point = found["memory"]["curve"][0]
    found["memory"]["curve"] = [{**point, "values_bytes": 0} for _ in range(3 * MAX_POINTS)]
    found["memory"]["curve"][4] = {**point, "values_bytes": 10 * 2**30, "where": "model.py:9: spike(x)"}
    assert "10.0 GiB at model.py:9: spike(x)" in Page(page(found)).text


ROWS = """
const shown = [], more = {}, rows = %s.map(([textContent, title]) => ({textContent, title, style: {display: ""}}));
let typed;
globalThis.document = {
  getElementById: name => name === "search" ? {addEventListener: (what, listener) => what === "input" && (typed = listener)} : null,
  querySelectorAll: what => ({"[data-find]": rows, details: [more]})[what],
};
(0, eval)(%s);
for (const value of %s) {
  typed({target: {value}});
  shown.push([more.open, ...rows.map(row => row.style.display !== "none")]);
}
console.log(JSON.stringify(shown));
"""
"""The page's script in a document of these rows, and what is typed; which rows are shown then."""


def test_gathered_values_are_marked_and_first() -> None:
    """Rows with equal texts are merged, although their nodes differ; each collective has its bytes."""
    made = report()
    made.notes += [Note(NoteKind.GATHERED, "gather", "a place", node, "model.py:4: sort(x)") for node in "ab"]
    text = page(report_json(made))
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", text.partition("Rewrites and refusals")[2].partition("</table>")[0])
    assert ["gathered" in row for row in rows[1:]] == [True, True, False, False]
    assert "<td>2</td>" in rows[2]
    assert PURPOSES["all_to_all"] in text


def test_searchable_rows() -> None:
    """The script finds every row of every table and every line of the strip, and reads the page's search box."""
    found = report_json(report())
    met = Page(page(found)).met
    assert met["tr[data-find]"] == met["tr"] - met["thead"] > 0
    assert met["div[data-find]"] == len(found["blocks"]) > 0
    assert met["input#search"] == 1


def script_of(text: str) -> str:
    """Return the script of a page."""
    return text.rpartition("<script>")[2].partition("</script>")[0]


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_the_script_hides_rows_without_the_words() -> None:
    rows = [["model.py:4: sort(x)", "gathered whole"], ["Sort", ""], ["matmul", "gathered"], ["nothing", None]]
    typed = ["SORT gather", "sort", "", "a b c"]
    script = ROWS % tuple(map(json.dumps, (rows, script_of(page(report_json(report()))), typed)))
    found = subprocess.run([str(NODE), "-e", script], capture_output=True, text=True, timeout=60, check=True)
    wanted = [[True, True, False, False, False], [True, True, True, False, False]]
    wanted += [[False, *[True] * 4], [True, *[False] * 4]]  # nothing is folded while something is searched for
    assert json.loads(found.stdout) == wanted


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_browser_searches_the_page(tmp_path: Path) -> None:
    """Rows without the search text are hidden in tables and in the strip; the browser logs no errors."""
    typed = "const box = document.getElementById('search'); box.value = 'SORT gather';"
    script = f"<script>{typed} box.dispatchEvent(new Event('input'))</script></body>"
    path = tmp_path / "page.html"
    path.write_text(page(report_json(report())).replace("</body>", script))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    found = subprocess.run(
        [str(BROWSER), *options, path.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    assert "CONSOLE" not in found.stderr
    rows = re.findall(r"<(?:tr|div)([^>]*data-find[^>]*)>(.*?)</(?:tr|div)>", found.stdout, re.DOTALL)
    shown = [text for attributes, text in rows if "display: none" not in attributes]
    assert 1 <= len(shown) < len(rows)
    assert all("sort" in text for text in shown)


LOOK = """
const box = node => { const { left, right, top, bottom } = node.getBoundingClientRect(); return [left, right, top, bottom]; };
const boxes = found => [...document.querySelectorAll(found)].map(box);
const words = found => [...document.querySelectorAll(found)].map(node => node.textContent);
const seen = {
  strip: boxes(".strip"), cells: boxes(".strip div"), numbers: boxes(".strip strong"), names: words(".strip div"),
  chart: boxes("svg"), areas: boxes("svg path[fill]"), dot: boxes("svg circle"),
  labels: boxes("svg text"), words: words("svg text"), text: document.body.innerText,
};
document.body.textContent = "SEEN" + JSON.stringify(seen) + "SEEN";
"""


def seen_by_a_browser(path: Path, of: Any) -> dict[str, Any]:
    """Return (left, right, top, bottom) of the shown elements of a page, and its text."""
    path.write_text(page(of).replace("</body>", f"<script>{LOOK}</script></body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,3000", "--dump-dom", path.as_uri()]
    found = subprocess.run([str(BROWSER), *options], capture_output=True, text=True, timeout=240, check=True)
    return json.loads(unescape(found.stdout.split("<body>SEEN")[1].split("SEEN\n</body>")[0]))


def are_disjoint(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[1] <= b[0] + 0.5 or b[1] <= a[0] + 0.5 or a[3] <= b[2] + 0.5 or b[3] <= a[2] + 0.5


def is_within(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] >= b[0] - 0.5 and a[1] <= b[1] + 0.5 and a[2] >= b[2] - 0.5 and a[3] <= b[3] + 0.5


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_a_browser_shows_the_strip_and_the_chart(state: str, tmp_path: Path) -> None:
    """Strip and chart are complete, without overlaps; the peak is at the highest area, and a rank shows its options."""
    options = {"param_grads": "partial", "state": "sharded"} if state == "sharded" else {}
    found = report_json(sp_compile.explain(Decoder(), tokens(64), sp=2, memory=True, tiles=2, **options))
    seen = seen_by_a_browser(tmp_path / "page.html", found)

    (strip,), cells = seen["strip"], seen["cells"]
    assert strip[1] - strip[0] > 500
    assert len(cells) == len(found["blocks"])
    assert all(is_within(cell, strip) and cell[1] - cell[0] > 10 and cell[3] - cell[2] > 10 for cell in cells)
    assert all(a[1] <= b[0] + 0.5 for a, b in pairwise(cells))
    assert all(map(is_within, seen["numbers"], cells))
    for i in (0, -1):
        code = found["blocks"][i]["where"].partition(": ")[2] or found["blocks"][i]["where"]
        number, _, name = seen["names"][i].partition(" ")
        assert int(number) == (i % len(cells)) + 1
        assert name
        assert code.endswith(name)

    (chart,), labels, words = seen["chart"], seen["labels"], seen["words"]
    assert chart[1] - chart[0] > 500
    assert chart[3] - chart[2] > 100
    assert all(is_within(label, chart) for label in labels), words
    assert all(are_disjoint(a, b) for a, b in combinations(labels, 2)), words
    assert {"forward", "loss", "backward"} <= set(words)
    (dot,) = seen["dot"]
    assert (dot[2] + dot[3]) / 2 == pytest.approx(min(area[2] for area in seen["areas"]), abs=2)

    memory = found["memory"]
    most = max(point["values_bytes"] for point in memory["curve"]) + memory["constant_bytes"]
    assert any(word.startswith(f"{format_bytes(most)} at ") for word in words)
    assert (memory["shards"], "2 shards of parameters" in seen["text"]) == ((2, True) if options else (1, False))
    assert any(("2 shards" in word) == bool(options) for word in words if word.startswith("constant: "))


def test_a_page_of_a_plan() -> None:
    """The fastest row of each number of ranks is marked, and rows that do not fit; numbers have units."""
    ways = row(8, 1.0, False), row(16, 3.0, True), row(16, 2.0, True), row(32, 0.001, True)
    found = Page(page(plan_json(plan_of(*ways))))
    assert (found.met["tr.best"], found.met["tr.misses"]) == (2, 1)
    assert "740,000-1,100,000" in found.text
    assert "8 ranks: too little" in found.text


TEXT_WIDTH = 70  # at least the pixels of "~160.0 GB" or "0.00123 s"


def test_a_page_of_a_plan_draws_the_options() -> None:
    """Bars are as long as their values; the chosen option is marked, and each has a text."""
    ways = replace(row(8, 1.0, False), memory=1.6e11, state="replicated"), row(16, 3.0, True), row(16, 2.0, True)
    text = page(plan_json(plan_of(*ways)))
    drawing = ElementTree.fromstring(re.findall(r'<svg class="options".*?</svg>', text, re.DOTALL)[0])
    options = drawing.findall("g")
    assert [option.get("class") for option in options] == ["option misses", "option", "option best chosen"]
    widths = [[float(bar.get("width", "")) for bar in option.findall("rect")] for option in options]
    assert [width[0] / BAR_WIDTH for width in widths] == pytest.approx([1, 7 / 16, 7 / 16], abs=1e-3)
    assert [width[1] / BAR_WIDTH for width in widths] == pytest.approx([1 / 3, 1, 2 / 3], abs=1e-3)
    ends = [float(text.get("x", "")) + TEXT_WIDTH for option in options for text in option.findall("text")]
    assert max(ends) < CHART_WIDTH
    limit = drawing.findall("path")[0].get("d", "").split()[0]
    assert float(limit[1:]) == pytest.approx(BAR_COLUMNS["memory_bytes"] + BAR_WIDTH / 2, abs=0.1)  # 80 of 160 GB
    assert drawing.get("role") == "img"
    assert set(drawing.get("aria-labelledby", "").split()) == {found.get("id") for found in drawing[:2]}
    described = (drawing[1].text or "").split("; ")
    assert described == [option.findtext("title") for option in options]
    assert described[0].startswith("8 ranks, ring, zigzag, state replicated: 160.0 GB, 1 s (")  # a note
    assert described[2] == "16 ranks, ring, zigzag, state sharded: 70.0 GB, 2 s (chosen)"


def test_a_page_of_a_plan_draws_a_few_options_of_many() -> None:
    ways = *(row(8, 1.0 + i, False) for i in range(MAX_PLAN_ROWS + 3)), row(8, 99.0, True), row(8, 100.0, True)
    options = Page(page(plan_json(plan_of(*ways)))).met
    assert (options["g.option misses"], options["g.option best chosen"], options["g.option"]) == (MAX_PLAN_ROWS, 1, 0)


def small() -> Any:
    return Decoder().double(), (tokens(16),)


def wrong() -> Any:
    return Decoder()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["explain", "nothing.here:f"], "SP734: target: "),
        (["explain", "os:sep"], "SP734: target: .*'os:sep': '/'"),
        (["explain", "os.path:isfile"], "SP734: target: .*'os.path:isfile': "),
        (["explain", ".here:f"], r"SP734: target: .*'\.here:f'"),
        (["explain", "here"], "SP734: target: .*'here'"),
        (["explain", f"{__name__}:wrong"], "SP735: target: "),
        (["explain", f"{__name__}:small", "--option", "attention"], "SP731: --option: .*NAME=VALUE"),
        (["plan", "no:model", "--ranks", "8,few"], "SP711: --ranks: .*'8,few'"),
        (["plan", f"{__name__}:small", "--memory", "much"], "SP722: memory"),
        (["explain", f"{__name__}:small", "--option", "memory=True"], "SP732: --option memory: .*explain"),
        (["explain", f"{__name__}:small", "--memory"], "SP731: explain: .*'--memory'.*explain"),
        (["plan", f"{__name__}:small", "--option", "ranks=8"], "SP732: --option ranks"),
        (["verify", f"{__name__}:small", "--tiles", "3"], "SP731: verify: .*'--tiles 3'"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("words", [["8", "16", "64"], ["8,16,64"], ["8,", "16,64"]])
def test_numbers_of_ranks_have_spaces_or_commas_between_them(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "plan", plan := MagicMock(return_value=plan_of(row(8, 1.0, True))))
    assert main(["plan", f"{__name__}:small", "--ranks", *words]) == 0
    assert plan.call_args.kwargs["ranks"] == [8, 16, 64]


@pytest.mark.parametrize("command", ["explain", "verify", "plan"])
@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_place_that_cannot_be_written_is_one_line(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails before any work: it prints no report and leaves no file."""
    for place in (tmp_path / "missing" / "page.html", tmp_path):
        assert main([command, f"{__name__}:small", option, str(place)]) == 2
        printed = capsys.readouterr()
        assert not printed.out
        assert len(printed.err.splitlines()) == 1
        assert f"SP733: {place}:" in printed.err
    assert not list(tmp_path.iterdir())


def test_a_head_in_tiles_stands_before_its_loss() -> None:
    """It runs with its last line; its first line precedes that one, and the report marks it as tiled."""
    model = Decoder()
    model.head = nn.Linear(WIDTH, 4 * WIDTH)

    def loss(ids: Any) -> Any:
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    found = report_json(sp_compile.explain(loss, tokens(16), sp=2, memory=True, tiles=2))
    kinds = {block["where"].partition(": ")[2]: block["kind"] for block in found["blocks"]}
    head, end = (next(i for i, line in enumerate(kinds) if word in line) for word in ("self.head(", "cross_entropy"))
    assert head < end
    assert list(kinds.values())[head] == "tiled"
    assert head > next(i for i, line in enumerate(kinds) if "self.embed" in line)


@pytest.mark.parametrize("name", ["explain", "verify", "plan"])
def test_files_of_a_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command writes JSON and its page; both equal the printed report."""
    monkeypatch.setitem(sys.modules, "face_model", sys.modules[__name__])
    made = plan_of(row(8, 1.0, True)) if name == "plan" else report()
    monkeypatch.setattr(command, name, lambda *given, **options: made)
    files = [tmp_path / "out.json", tmp_path / "out.html"]
    assert main([name, "face_model:small", "--json", str(files[0]), "--html", str(files[1])]) == 0
    found = plan_json(made) if isinstance(made, StepPlan) else report_json(made)
    assert json.loads(files[0].read_text()) == json.loads(json.dumps(found))
    assert files[1].read_text() == page(found)


@pytest.mark.parametrize(
    ("argv", "error", "fits", "status"),
    [
        (["verify"], 1e-2, True, 1),
        (["verify", "--tolerance", "0.1"], 1e-2, True, 0),
        (["verify"], float("nan"), True, 1),
        (["plan"], 0.0, False, 1),
    ],
)
def test_status_of_a_command(
    argv: list[str], error: float, fits: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "face_model", sys.modules[__name__])
    found = report()
    found.errors = [("result 0", error)]
    monkeypatch.setattr(command, "verify", lambda *given, **options: found)
    monkeypatch.setattr(command, "plan", lambda *given, **options: plan_of(row(8, 1.0, fits)))
    assert main([argv[0], "face_model:small", *argv[1:]]) == status


@pytest.mark.slow
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules.setdefault("face_model", sys.modules[__name__])
    files = [str(tmp_path / name) for name in ("out.json", "out.html")]
    assert main(["explain", "face_model:small", "--sp", "2", "--json", files[0], "--html", files[1]]) == 0
    assert "FSDP" in capsys.readouterr().out  # the memory of a step
    assert json.loads(Path(files[0]).read_text())["memory"]["kept_bytes"] > 0
    assert not Page(Path(files[1]).read_text()).open
    assert main(["verify", "face_model:small", "--sp", "2", "--tolerance", "1e-9"]) == 0
    assert main(["plan", "face_model:small", "--ranks", "2", "4", "--html", files[1]]) == 0
