"""`python -m sp_compile selftest`: ranks of this machine against a single device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Ranks

from sp_compile import SpError
from sp_compile import __main__ as command_line
from sp_compile.selftest import launch
from sp_compile.selftest.model import ModelSize
from sp_compile.selftest.rank import Settings, StrategyResult, _largest_error, run_rank, strategies_of

TINY = ModelSize(16, 4, 1, 13)


def _result(**changes: Any) -> dict[str, Any]:
    row = {
        "attention": "ring",
        "error": 1e-7,
        "allowed": 1e-6,
        "milliseconds": 4.0,
        "sent_bytes": 10,
        "peak_bytes": None,
    }
    single = {**row, "attention": "single device", "milliseconds": 8.0, "is_right": True}
    links = {f"{kind}_{what}": 1e9 for kind in ("all_to_all", "all_gather") for what in ("bandwidth", "latency")}
    machine = launch._describe_machine(Settings(2, "cpu", "eager", TINY, TINY, torch.float32))
    return {**machine, **links, "results": [single, {**row, "is_right": True, **changes}]}


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "found.json"
    for is_right, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(command_line, "selftest", lambda *_, right=is_right: _result(is_right=right))
        assert command_line.main(["selftest", "--json", str(path)]) == status
        assert ("WRONG" in capsys.readouterr().out) is not is_right
        assert json.loads(path.read_text())["results"][1]["is_right"] is is_right


def test_errors_are_relative_and_count_nan() -> None:
    truth = {"loss": torch.tensor(2.0), "weight": torch.tensor([4.0, 0.0])}
    assert _largest_error({"loss": torch.tensor(2.0), "weight": torch.tensor([4.0, 1.0])}, truth) == 0.25
    assert _largest_error({"loss": truth["loss"]}, truth) == float("inf")
    for error in (float("nan"), 2e-6):
        assert not StrategyResult("ring", error, 1e-6, 1.0, 0).is_right


@pytest.mark.parametrize(
    "arguments", [["--ranks", "0"], ["--ranks", "1"], ["--ranks", "9"], ["--device", "cuda", "--ranks", "2"]]
)
def test_what_this_machine_cannot_run(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    assert command_line.main(["selftest", *arguments]) == 2
    assert "SP741" in capsys.readouterr().err
    with pytest.raises(SpError, match="SP741"):
        launch.selftest(device="tpu")


def test_strategies() -> None:
    assert sorted(strategies_of(2)) == sorted(strategies_of(3)) == ["gather", "ring", "ulysses"]
    assert sorted(strategies_of(4)) == ["gather", "hybrid", "ring", "ulysses"]


@pytest.mark.slow
def test_processes_of_this_machine() -> None:
    found = launch.selftest(device="cpu")
    assert [row["attention"] for row in found["results"]] == ["single device", *strategies_of(2)]
    assert all(row["is_right"] and row["milliseconds"] > 0 for row in found["results"])
    assert all(0 < row["error"] < 1e-5 for row in found["results"])
    assert [row["sent_bytes"] > 0 for row in found["results"]] == [False, True, True, True]
    assert found["all_to_all_bandwidth"] > 1e6


@pytest.mark.slow
def test_four_ranks_have_hybrid_attention(ranks: Ranks) -> None:
    settings = Settings(4, "cpu", "aot_eager", TINY, TINY, torch.float32)
    for found in ranks.run(4, run_rank, settings, timeout=300):
        assert [row["attention"] for row in found["results"]] == ["single device", *strategies_of(4)]
        assert all(row["is_right"] for row in found["results"])
