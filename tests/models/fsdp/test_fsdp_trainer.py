"""The Trainer with FSDP2, on real processes: all that it does equals a single device, and checkpoints are resumed on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.docs.test_recipes import LOSS, WEIGHT, compare, launch, run, trained

WORDS = "loss", "grad_norm", "eval_rows", "eval_right", "eval_size", "test_rows", "test_right", "test_size"


def train_sharded(folder: Path, processes: int, kind: str, *checkpoint: str) -> dict[str, Any]:
    """Run a Trainer with FSDP and return its results; its log and metrics are under `losses`."""
    return trained(folder, processes, WORDS, *checkpoint, TRAINER_FSDP=kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("FULL_STATE_DICT", 2), ("SHARDED_STATE_DICT", 4)])
def test_a_sharded_trainer(tmp_path: Path, kind: str, processes: int) -> None:
    """Evaluations, metrics and predictions, and a checkpoint, which continues the same training bit for bit."""
    pytest.importorskip("accelerate")
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    alone, whole = train_sharded(tmp_path / "alone", 1, kind), train_sharded(tmp_path / "shared", processes, kind)
    compare(whole, alone, steps=5)
    assert torch.allclose(whole["predictions"], alone["predictions"], rtol=0, atol=WEIGHT)
    assert "model.safetensors" in whole["files"]
    resumed = train_sharded(tmp_path / "shared", processes, kind, "out/checkpoint-3")
    assert resumed["losses"] == whole["losses"]
    assert all(weight.equal(whole["weights"][name]) for name, weight in resumed["weights"].items())


FULL_FILE, SHARDS_FILE = "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"
# Where people train, and the file of the weights in a checkpoint. Packing and TRL's loss in chunks are in each kind of SFT.
KINDS = {
    "loop": SHARDS_FILE,
    "trainer FSDP": FULL_FILE,
    "sft FSDP": SHARDS_FILE,
    "sft LoRA FSDP": FULL_FILE,
    "dpo FSDP": SHARDS_FILE,
    "grpo fixed FSDP": SHARDS_FILE,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_resumed_on_other_ranks(tmp_path: Path, kind: str) -> None:
    """2 x 2 ranks store a quarter of weights and moments each. Two ranks continue from their fourth step."""
    for package in ("accelerate", "trl", "peft"):
        pytest.importorskip(package)
    found: dict[int, dict[str, Any]] = {}
    for processes, folder, *checkpoint in ((1, "alone"), (4, "shared"), (2, "shared", "checkpoint-4")):
        (tmp_path / folder).mkdir(exist_ok=True)
        result, out = tmp_path / f"{processes}.pt", f"out-{kind.replace(' ', '-')}"
        saved = [f"{out}/{name}" for name in checkpoint]
        share = str(min(processes, 2))
        launch(tmp_path / folder, processes, "sharded.py", str(result), kind, *saved, RL_SHARE=share)
        found[processes] = torch.load(result)
        assert found[processes]["parts"] == [1 / processes] * 2  # elements of one dtype: bytes
    assert KINDS[kind] in found[4]["files"]
    alone = found[1]
    for one in (found[4], found[2]):
        assert len(one["loss"]) >= (10 if one is found[4] else 6)
        for word in ("loss", "grad_norm"):
            assert one[word] == pytest.approx(alone[word][-len(one[word]) :], rel=0, abs=LOSS)
        for name, weight in alone["weights"].items():
            assert torch.allclose(one["weights"][name], weight, rtol=0, atol=WEIGHT), name


CONFIG_FILE = {  # what `accelerate launch` makes of its file
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_CP_SIZE": "2",
}
LORA = 'LoraConfig(r=4, target_modules=["q_proj", "v_proj"])'
FULL = "from peft import LoraConfig\n", "", LORA, "None"  # all weights are trained


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), FULL], ids=["LoRA", "full"])
def test_sft_with_a_config_file(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """The program of the page on TRL, unmodified, with packing: FSDP2 and its sizes are only in accelerate's file."""
    for package in ("trl",) if changes else ("trl", "peft"):
        pytest.importorskip(package)
    alone = run("sft", tmp_path, 1, *changes)
    compare(run("sft", tmp_path, 2, *changes, **CONFIG_FILE), alone)
