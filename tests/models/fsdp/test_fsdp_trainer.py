"""The Trainer with FSDP2, on real processes: all that it does equals a single device, and checkpoints are resumed on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.docs.test_recipes import WEIGHT, compare, run, trained

WORDS = "loss", "grad_norm", "eval_rows", "eval_right", "eval_size", "test_rows", "test_right", "test_size"


def train_sharded(folder: Path, processes: int, kind: str, *checkpoint: str) -> dict[str, Any]:
    """Run a Trainer with FSDP and return its results; its log and metrics are under `losses`."""
    return trained(folder, processes, WORDS, *checkpoint, TRAINER_FSDP=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes", "others", "file"),
    [("FULL_STATE_DICT", 2, 4, "pytorch_model_fsdp.bin"), ("SHARDED_STATE_DICT", 4, 2, "pytorch_model_fsdp_0")],
)
def test_a_sharded_trainer(tmp_path: Path, kind: str, processes: int, others: int, file: str) -> None:
    pytest.importorskip("accelerate")
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    alone, whole = train_sharded(tmp_path / "alone", 1, kind), train_sharded(tmp_path / "shared", processes, kind)
    compare(whole, alone, steps=5)
    assert torch.allclose(whole["predictions"], alone["predictions"], rtol=0, atol=WEIGHT)
    assert whole["parts"] == [1 / processes] * 2
    assert {file, "model.safetensors"} <= whole["files"]
    resumed = train_sharded(tmp_path / "shared", processes, kind, "out/checkpoint-3")
    assert resumed["losses"] == whole["losses"]
    assert all(weight.equal(whole["weights"][name]) for name, weight in resumed["weights"].items())
    compare(train_sharded(tmp_path / "shared", others, kind, "out/checkpoint-3"), alone, steps=5)


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
