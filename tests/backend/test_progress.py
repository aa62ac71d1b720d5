"""The progress line of long work: its delay, its text, and cases without it. Garbage collections during the work."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import sp_compile
from sp_compile.lowering import torch_compat
from sp_compile.lowering.base import progress
from sp_compile.lowering.base.progress import ProgressLine, set_step, show_progress

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=60)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return CONTROL.sub("", console.file.getvalue())


def test_it_is_delayed_and_leaves_one_line() -> None:
    clock, console = Clock(), terminal()
    line = ProgressLine("compiling f", console, clock)
    line.step = "capture"
    clock.time = 2.9
    line.refresh()
    assert shown(console) == ""
    clock.time = 3.1
    line.refresh()
    assert "sp: compiling f: capture (3 s)" in shown(console)
    line.step, clock.time = "pass gather", 4.2
    line.refresh()
    assert "sp: compiling f: pass gather (4 s)" in shown(console)
    clock.time = 5.0
    line.end()
    assert re.match(r"sp: compiling f: .*\b5 s, 0 graphs ", shown(console).splitlines()[-1])


def test_a_log_file_has_a_line_after_ten_seconds_and_one_at_the_end() -> None:
    clock, console = Clock(), Console(file=io.StringIO(), force_terminal=False, width=60)
    line = ProgressLine("compiling " + "f" * 100, console, clock)
    clock.time = 9.9
    line.refresh()
    assert shown(console) == ""
    for clock.time in (10.1, 10.4, 50.0):
        line.refresh()
    clock.time = 63.0
    line.end()
    first, last = shown(console).splitlines()
    assert first == f"sp: compiling {'f' * 100}: capture (10 s), continues"
    assert re.match(rf"sp: compiling {'f' * 100}: .*\b63 s, 0 graphs ", last)


def test_a_short_compilation_leaves_no_line_in_a_log_file() -> None:
    clock, console = Clock(), Console(file=io.StringIO(), force_terminal=False)
    line = ProgressLine("compiling f", console, clock)
    clock.time = 9.9
    line.refresh()
    line.end()
    assert shown(console) == ""


def test_short_work_shows_nothing() -> None:
    clock, console = Clock(), terminal()
    line = ProgressLine("explain", console, clock)
    clock.time = 2.9
    line.refresh()
    line.end()
    assert shown(console) == ""


def test_hits_are_those_of_this_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, console, hits = Clock(), terminal(), iter([5, 7])
    monkeypatch.setattr(progress, "count_cache_hits", lambda: next(hits))
    line = ProgressLine("compiling f", console, clock)
    clock.time = 4.0
    line.refresh()
    line.end()
    assert re.search(r"\b2 graphs ", shown(console))


def test_it_stays_on_one_line() -> None:
    clock, console = Clock(), terminal()
    line = ProgressLine("compiling " + "f" * 100, console, clock)
    clock.time = 4.0
    line.refresh()
    assert len(shown(console)) <= 60


@pytest.mark.parametrize(
    ("rank", "logs", "console", "read"),
    [
        ("0", "", terminal(), True),
        ("1", "", terminal(), False),
        ("0", "+sp_compile", terminal(), False),
        ("0", "", Console(file=io.StringIO(), force_terminal=False), True),
        ("0", "+sp_compile", Console(file=io.StringIO(), force_terminal=False), True),
        ("1", "", Console(file=io.StringIO(), force_terminal=False), False),
    ],
)
def test_consoles_that_show_it(
    monkeypatch: pytest.MonkeyPatch, rank: str, logs: str, console: Console, read: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCH_LOGS", logs)
    assert progress._may_show(console) is read


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the progress steps that work reports to a simulated terminal."""
    console, looks = terminal(), []
    monkeypatch.setattr(progress, "Console", lambda stderr: console)

    def record(line: ProgressLine, name: str, value: object) -> None:
        object.__setattr__(line, name, value)
        if name == "step" and value:
            looks.append(f"{line.title}: {value}")

    monkeypatch.setattr(ProgressLine, "__setattr__", record)
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    return looks


def program(x: torch.Tensor) -> torch.Tensor:
    return (x.cumsum(1) - x).sum()


def test_explain_and_verify_show_their_step(seen: list[str]) -> None:
    sp_compile.explain(program, torch.randn(1, 6, 4), sp=2)
    assert seen[:1] == ["explain: capture"]
    assert {"explain: pass localize", "explain: pass validate_shapes"} <= set(seen)
    seen.clear()
    sp_compile.verify(program, torch.randn(1, 6, 4), sp=2)
    assert seen[-2:] == ["verify: single device", "verify: 2 simulated ranks"]
    assert not progress._active_lines


def test_the_halves_of_a_compilation_are_seen(seen: list[str]) -> None:
    halves = []

    def compiler(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        halves.append(torch_compat.current_graph_kind())
        return gm

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(compiler(gm, inputs)))
    options = {"compiler": backend, "seq_dims": {"x": 1}}
    torch.compile(program, backend="sp", options=options)(torch.randn(1, 6, 4, requires_grad=True)).backward()
    assert halves == ["forward", "backward"]
    assert torch_compat.current_graph_kind() == ""
    titles = list(dict.fromkeys(one.partition(": ")[0] for one in seen))
    assert ["backward" in title for title in titles] == [False, True]
    assert f"{titles[0]}: compiler" in seen


@pytest.mark.slow
def test_a_backward_that_is_compiled_when_it_runs(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles the backward at its first run."""
    lines = []
    monkeypatch.setattr(
        progress, "ProgressLine", lambda title, console: lines.append(title) or ProgressLine(title, console)
    )
    x = torch.randn(1, 6, 4, requires_grad=True)
    with torch.compiler.config.patch(force_disable_caches=True):
        y = torch.compile(program, backend="sp", options={"seq_dims": {"x": 1}})(x)
        assert len(lines) == 1
        y.backward()
        y = torch.compile(lambda x: x.sin().sum(), backend="inductor")(x)
        y.backward()
    assert ["backward" in line for line in lines] == [False, True]
    assert not progress._active_lines


def test_work_inside_of_work_is_a_step_of_it(seen: list[str]) -> None:
    with show_progress("outer"):
        with show_progress("inner"):
            set_step("a step")
        assert len(progress._active_lines) == 1
    set_step("nothing is going on")
    assert seen == ["outer: capture", "outer: a step"]


def test_compilation_does_not_visit_old_objects() -> None:
    """Objects of the program are collected again after it, and what it has frozen itself stays frozen."""
    program = """
import gc, torch, sp_compile
counts = []
def compiler(graph, inputs):
    counts.append(gc.get_freeze_count())
    return graph.forward
x = torch.randn(1, 8, 4, 4)
attention = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)
run = torch.compile(attention, backend="sp", options={"compiler": compiler})
run(x)
assert counts[0] > 10_000 and gc.get_freeze_count() == 0, counts
torch.compiler.reset()
gc.freeze()
frozen = gc.get_freeze_count()
run(x)
assert counts[1] <= frozen and gc.get_freeze_count() > 10_000, counts
"""
    subprocess.run([sys.executable, "-c", program], check=True)
