"""Reports and plans as JSON, as a page and as a picture, and the command line that writes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import WIDTH, Decoder, tokens
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compile
from sp_compile.cost.exchanges import Exchange
from sp_compile.cost.plan.command import main
from sp_compile.cost.plan.page import page
from sp_compile.cost.plan.plan import StepPlan, Variant
from sp_compile.cost.plan.record import of_plan, of_report
from sp_compile.cost.step import GraphStep, ModelBytes, StepMemory
from sp_compile.passes.job import Note, RegionInTiles
from sp_compile.passes.report import Report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "input", "br"}
REASON = "an op <b> without a rule & more"


class Page(HTMLParser):
    """Tags that are open, how often each was met, what links away, and all text."""

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
        Note("ulysses", "attend", "model.py:3: attend(x)", "2 all-to-alls"),
        Note("gather", "sort", "model.py:4: sort(x)", REASON),
        Note("tiles", "linear", "model.py:5: head(x)", "4 tiles"),
    ]
    exchanges = [
        Exchange("all_to_all", "a", "model.py:3: attend(x)", "2 x 3", 100, 50),
        Exchange("all_gather", "g", "model.py:4: sort(x)", "4", 10, 0),
    ]
    tiled = [RegionInTiles("linear", "model.py:5: head(x)", 4, 64, 2048, 512)]
    return Report(2, notes=notes, exchanges=exchanges, inputs={"x": [1]}, step=step, tiled=tiled)


def plan_of(*rows: Variant) -> StepPlan:
    return StepPlan(80e9, ModelBytes(10, 10, 0, 10), list(rows), {8: "8 ranks: too little"})


def row(ranks: int, seconds: float, fits: bool) -> Variant:
    return Variant(
        ranks, "ring", "zigzag", True, 16, 0.5, 5e8, "sharded", 7e10, "loss", 1e9, seconds, 1000, fits
    )  # fmt: skip


def test_a_report_as_json() -> None:
    found = json.loads(json.dumps(of_report(report())))
    assert (found["format"], found["version"], found["ranks"]) == ("sp_compile.report", 1, 2)
    assert found["collectives"][0]["forward_bytes"] == 100
    kinds = {block["where"]: block["kind"] for block in found["blocks"]}
    assert kinds["model.py:3: attend(x)"] == "exchanged"
    assert kinds["model.py:4: sort(x)"] == "gathered"
    assert kinds["model.py:5: head(x)"] == "tiled"
    assert found["tiles"][0]["tile_bytes"] == 512
    memory = found["memory"]
    assert [point["values_bytes"] for point in memory["curve"]] == [2048, 4096, 4096]
    assert (memory["optimizer_bytes"], memory["peak_bytes"]) == (512, 256 + 512 + 2048 + 4096)
    assert sum(alive["bytes"] for alive in memory["peaks"][0]["alive"]) == 4096


def test_a_plan_as_json() -> None:
    found = json.loads(json.dumps(of_plan(plan_of(row(8, 1.0, False), row(16, 3.0, True), row(32, 2.0, True)))))
    assert found["best"] == 2
    options = {"attention": "ring", "layout": "zigzag", "param_grads": "partial", "tiles": 16, "offload": 0.5}
    options["state"] = "sharded"
    assert found["ways"][2]["options"] == options
    assert of_plan(plan_of(row(8, 1.0, False)))["best"] is None


def test_a_page_is_whole_and_has_all() -> None:
    text = page(of_report(report()))
    found = Page(text)
    assert not found.open
    assert not found.away
    assert "http" not in text.replace("http-equiv", "")
    assert REASON in found.text, "escaped once"
    assert "<b>" not in text
    assert found.met["svg"] == found.met["input"] == 1
    assert found.met["div.exchanged"] >= 1
    assert found.met["div.gathered"] == found.met["div.tiled"] == 1
    assert "model.py:3: attend(x)" in found.text


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_browser_searches_the_page(tmp_path: Path) -> None:
    """Rows without the words are hidden, in tables and in the strip; the page says nothing of errors."""
    typed = "const box = document.getElementById('search'); box.value = 'SORT gather';"
    script = f"<script>{typed} box.dispatchEvent(new Event('input'))</script></body>"
    path = tmp_path / "page.html"
    path.write_text(page(of_report(report())).replace("</body>", script))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    found = subprocess.run(
        [str(BROWSER), *options, path.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    assert "CONSOLE" not in found.stderr
    rows = re.findall(r"<(?:tr|div)([^>]*data-find[^>]*)>(.*?)</(?:tr|div)>", found.stdout, re.DOTALL)
    shown = [text for attributes, text in rows if "display: none" not in attributes]
    assert 1 <= len(shown) < len(rows)
    assert all("sort" in text for text in shown)


def test_a_page_of_a_plan() -> None:
    found = Page(page(of_plan(plan_of(row(8, 1.0, False), row(16, 3.0, True)))))
    assert (found.met["tr.best"], found.met["tr.misses"]) == (1, 1)
    assert "8 ranks: too little" in found.text


def small() -> Any:
    return Decoder().double(), (tokens(16),)


def wrong() -> Any:
    return Decoder()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["explain", "nothing.here:f"], "expected module:function"),
        (["explain", f"{__name__}:wrong"], "expected it to give (model, args)"),
        (["explain", f"{__name__}:small", "--option", "attention"], "expected NAME=VALUE"),
        (["explain", f"{__name__}:small", "--png", "x.png"], "--png draws plans"),
        (["plan", f"{__name__}:small", "--memory", "much"], "memory='much'"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "verify", "plan"])
@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_place_that_cannot_be_written_is_one_line(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work: nothing is printed of a report, and nothing is left behind."""
    for place in (tmp_path / "missing" / "page.html", tmp_path):
        assert main([command, f"{__name__}:small", option, str(place)]) == 2
        printed = capsys.readouterr()
        assert not printed.out
        assert len(printed.err.splitlines()) == 1
        assert f"{place}: nothing can be written there" in printed.err
    assert not list(tmp_path.iterdir())


def test_a_head_in_tiles_stands_before_its_loss() -> None:
    """It runs with the line where it ends; the line where it begins comes first, and is told as tiled."""
    model = Decoder()
    model.head = nn.Linear(WIDTH, 4 * WIDTH)

    def loss(ids: Any) -> Any:
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    found = of_report(sp_compile.explain(loss, tokens(16), sp=2, memory=True, tiles=2))
    kinds = {block["where"].partition(": ")[2]: block["kind"] for block in found["blocks"]}
    head, end = (next(i for i, line in enumerate(kinds) if word in line) for word in ("self.head(", "cross_entropy"))
    assert head < end
    assert list(kinds.values())[head] == "tiled"
    assert head > next(i for i, line in enumerate(kinds) if "self.embed" in line)


@pytest.mark.slow
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules.setdefault("face_model", sys.modules[__name__])
    files = [str(tmp_path / name) for name in ("out.json", "out.html", "out.png")]
    assert main(["explain", "face_model:small", "--sp", "2", "--json", files[0], "--html", files[1]]) == 0
    assert "Memory of a training step" in capsys.readouterr().out
    assert json.loads(Path(files[0]).read_text())["memory"]["kept_bytes"] > 0
    assert not Page(Path(files[1]).read_text()).open
    assert main(["verify", "face_model:small", "--sp", "2", "--tolerance", "1e-9"]) == 0
    pytest.importorskip("matplotlib")
    assert main(["plan", "face_model:small", "--ranks", "2", "4", "--png", files[2], "--html", files[1]]) == 0
    assert Path(files[2]).read_bytes().startswith(b"\x89PNG")
