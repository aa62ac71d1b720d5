"""TRL's Trainers that compare or sample completions: every number of their logs, and the weights, equal a single device's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models.docs.test_recipes import ROOT, WEIGHT, launch

KINDS = "grpo evaluated", "rloo", "distillation evaluated", "dpo", "reward evaluated"
LORA = "grpo LoRA", "rloo LoRA evaluated", "dpo LoRA"  # the reference is the model without its adapter
REPLICAS = (
    "grpo fixed",
    "rloo fixed",
    "distillation fixed",
    "dpo",
    "reward evaluated",
)  # replicas sample with other seeds
SHARDED = ("reward evaluated HSDP",)  # the others are in test_fsdp_trainer.py
OF_TIME = "time", "second", "flos", "epoch"  # parts of the names of other numbers
ROUNDING = 1e-4  # of float32, in metrics such as a KL divergence


def numbers(found: dict[str, Any]) -> list[dict[str, float]]:
    """Return the lines of a log, without times."""
    return [{word: line[word] for word in line if not any(part in word for part in OF_TIME)} for line in found["log"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "kinds"),
    [(2, KINDS), (2, LORA), (4, REPLICAS), (4, SHARDED), (2, ("grpo FSDP",)), (2, ("grpo cached",))],
    ids=["", "LoRA", "replicas", "sharded", "sampled from shards", "shared cache"],
)
def test_trainers_equal_one_device(tmp_path: Path, processes: int, kinds: tuple[str, ...]) -> None:
    for package in ("trl", "peft"):
        pytest.importorskip(package)
    for n, share in ((1, 1), (processes, 2)):
        launch(tmp_path, n, "rl.py", f"rl{n}.pt", *kinds, RL_SHARE=str(share))
    alone, found = (torch.load(tmp_path / f"rl{n}.pt") for n in (1, processes))
    for kind in kinds:
        check(found[kind], alone[kind], kind)


def check(found: dict[str, Any], alone: dict[str, Any], kind: str, shortest: int = 5) -> None:
    """Logs and weights equal those of the Trainer of TRL in one process."""
    lines, expected = numbers(found), numbers(alone)
    assert len(lines) == len(expected) >= shortest
    for line, right in zip(lines, expected):
        assert line == pytest.approx(right, rel=ROUNDING, abs=ROUNDING), kind
    for name, weight in alone["weights"].items():
        assert torch.allclose(found["weights"][name], weight, rtol=0, atol=WEIGHT), (kind, name)


STEPS = 20
RATE = 1e-3  # with 1e-2, a difference in the last bit grows by a factor of 3 with each step of a reward model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "rloo", "dpo", "reward"])
def test_each_step_of_changing_lengths(tmp_path: Path, kind: str) -> None:
    """Both ranks train on the same completions, each once; tokens, log-probabilities and rewards equal those of a single device."""
    pytest.importorskip("trl")
    for n in (1, 2):
        launch(tmp_path, n, "rl.py", f"rl{n}.pt", kind, RL_STEPS=str(STEPS), RL_RATE=str(RATE))
    alone, found = (torch.load(tmp_path / f"rl{n}.pt")[kind] for n in (1, 2))
    check(found, alone, kind, STEPS)
    (right,) = alone["ranks"]
    assert len(right["trained"]) == STEPS
    assert len({x.shape for x in right["trained"]}) > 2  # lengths change
    for one in found["ranks"]:
        for name, values in right.items():
            assert [x.shape for x in one[name]] == [x.shape for x in values], (kind, name)
            torch.testing.assert_close(one[name], values, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.slow
def test_a_step_of_grpo_has_logits_of_a_tile(tmp_path: Path) -> None:
    """While it samples, compares with the reference, and trains."""
    pytest.importorskip("trl")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    launch(tmp_path, 2, "grpo_logits.py", str(tmp_path / "sizes.pt"), RL_VOCABULARY="8192", PYTHONPATH=path)
    found = torch.load(tmp_path / "sizes.pt")
    assert found["tile"] // 2 < max(found["allocated"]) <= found["tile"] * 3 // 2 < found["logits"] // 4
