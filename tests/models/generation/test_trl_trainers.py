"""TRL's Trainers that compare or sample completions: every number of their logs, and the weights, equal a single device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.docs.test_recipes import WEIGHT, launch

KINDS = "grpo evaluated", "rloo", "dpo", "reward evaluated"
LORA = "grpo LoRA", "rloo LoRA evaluated", "dpo LoRA"  # the reference is the model without its adapter
REPLICAS = "grpo fixed", "rloo fixed", "dpo", "reward evaluated"  # replicas sample with other seeds
SHARDED = "grpo fixed FSDP", "dpo FSDP", "reward evaluated FSDP"
OF_TIME = "time", "second", "flos", "epoch"  # parts of the names of other numbers
ROUNDING = 1e-4  # of float32, in metrics such as a KL divergence


def numbers(found: dict[str, Any]) -> list[dict[str, float]]:
    """Return the lines of a log, without times."""
    return [{word: line[word] for word in line if not any(part in word for part in OF_TIME)} for line in found["log"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "kinds"),
    [(2, KINDS), (2, LORA), (4, REPLICAS), (4, SHARDED), (2, ("grpo FSDP",))],
    ids=["", "LoRA", "replicas", "sharded", "sampled from shards"],
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


LONG = [(20, ("grpo",)), (10, ("rloo", "dpo", "reward"))]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "kinds"), LONG, ids=["grpo", "others"])
def test_each_step_of_changing_lengths(tmp_path: Path, steps: int, kinds: tuple[str, ...]) -> None:
    """Both ranks train on the same completions, each once; tokens, log-probabilities and rewards equal those of a single device."""
    pytest.importorskip("trl")
    for n in (1, 2):
        launch(tmp_path, n, "rl.py", f"rl{n}.pt", *kinds, RL_STEPS=str(steps))
    alone, found = (torch.load(tmp_path / f"rl{n}.pt") for n in (1, 2))
    for kind in kinds:
        check(found[kind], alone[kind], kind, steps)
        (right,) = alone[kind]["ranks"]
        assert len(right["trained"]) == steps
        assert len({x.shape for x in right["trained"]}) > 2  # lengths change
        for one in found[kind]["ranks"]:
            for name, values in right.items():
                assert [x.shape for x in one[name]] == [x.shape for x in values], (kind, name)
                torch.testing.assert_close(one[name], values, rtol=ROUNDING, atol=ROUNDING)
