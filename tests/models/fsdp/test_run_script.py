"""`accelerate launch -m sp_compile run` of scripts that do not mention this library, against one process without it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.parity import error_text

from sp_compile.integrations.run_script import prepare_script

ROOT = Path(__file__).parents[3]
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_shard_size: 2
  parallelism_config_cp_size: 2
"""
# The file of the recipe, with two ranks for each sequence.
RECIPE = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/recipes/sharded.md").read_text(), re.DOTALL)[1].replace(
    "cp_size: 4", "cp_size: 2"
)
CPU = "compute_environment: LOCAL_MACHINE\nuse_cpu: true\nnum_processes: 4\n"
HEAD = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
rows = [{"input_ids": row, "labels": row} for row in (torch.randint(64, (48, 1)) + torch.arange(41)) % 64]
replicas, path = int(sys.argv[1]), sys.argv[2]
"""
SCRIPTS = {
    "trainer": """
from transformers import Trainer, TrainingArguments
class MyTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)
options = {"max_steps": 10, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True, "report_to": "none"}
arguments = TrainingArguments(path + ".out", per_device_train_batch_size=4 // replicas, save_strategy="no", **options)
trainer = MyTrainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
""",
    "accelerator": """
from accelerate import Accelerator
class MyAccelerator(Accelerator):
    pass
accelerator = MyAccelerator(cpu=True)
loader = torch.utils.data.DataLoader(rows, 4 // replicas, shuffle=True, generator=torch.Generator().manual_seed(0))
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
losses = []
for batch in list(loader)[:10]:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
""",
    "sft": """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
model = MistralForCausalLM(MistralConfig(num_hidden_layers=1, num_key_value_heads=2, sliding_window=8, **sizes))
lengths = [25, 16, 9, 18, 7, 12, 13] * 12  # packed to rows of 25
rows = Dataset.from_list([{"input_ids": torch.randint(3, 64, (n,)).tolist()} for n in lengths])
options = {"max_steps": 10, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True, "report_to": "none", "bf16": False}
options |= {"packing": True, "max_length": 25, "gradient_checkpointing": False, "save_strategy": "no"}
arguments = SFTConfig(path + ".out", per_device_train_batch_size=4 // replicas, **options)
trainer = SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=processing)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
""",
}
TAIL = """
weights = dict(getattr(model, "_orig_mod", model).named_parameters())
full = {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).double().sum().item() for name, x in weights.items()}
stored = sum((x.to_local() if hasattr(x, "to_local") else x).numel() for x in weights.values())
found = {"losses": losses, "weights": full, "share": stored / sum(x.numel() for x in weights.values())}
if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
    json.dump(found, open(path, "w"))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def run(command: list[str], folder: Path) -> None:
    """Run a command in a folder."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("", 0))
        return str(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCRIPTS)
def test_scripts_without_changes(tmp_path: Path, kind: str) -> None:
    """2 replicas of 2 ranks train as one process: losses, sums of all weights; weights are sharded over 4 ranks."""
    for package in ("transformers", "accelerate", *(["trl"] if kind == "sft" else [])):
        pytest.importorskip(package)
    script, config = tmp_path / "train.py", tmp_path / "config.yaml"
    script.write_text(HEAD + SCRIPTS[kind] + TAIL)
    config.write_text(CPU + textwrap.dedent(RECIPE) if kind == "sft" else CONFIG)
    run([sys.executable, str(script), "1", "alone.json"], tmp_path)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--main_process_port", free_port(), "-m", "sp_compile", "run", "--option", "compiler=aot_eager"]
    run([*launcher, str(script), "2", "ranks.json"], tmp_path)
    results: dict[str, Any] = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "ranks")}
    assert len(results["ranks"]["losses"]) == 10
    assert results["ranks"]["losses"] == pytest.approx(results["alone"]["losses"], rel=1e-5)
    assert results["ranks"]["weights"] == pytest.approx(results["alone"]["weights"], rel=1e-4, abs=1e-4)
    assert (results["alone"]["share"], results["ranks"]["share"]) == (1, 0.25)


def test_targets_that_do_not_exist() -> None:
    assert "SP736" in error_text(lambda: prepare_script("no_such_script.py"))
    for name in ("no_such_module", "no_such.module", ".relative"):
        assert "SP736" in error_text(lambda name=name: prepare_script(name, is_module=True))
    assert "SP102" in error_text(lambda: prepare_script(__file__, options={"atention": "ring"}))


USES = {  # scripts, and if the command has an effect on them
    "loop": ("torch.nn.Linear(1, 1)(torch.ones(1, 1)).backward(); Accelerator(cpu=True); sys.exit(0)", False),
    "own": ("own({'attention': 'ulysses', 'cost': {}}).prepare(torch.nn.Linear(1, 1))", True),
}
BEGIN = """
import logging, sys, torch
from accelerate import Accelerator
from sp_compile.integrations.accelerate import SequenceParallelAccelerator
logging.basicConfig()
def own(options):
    accelerator = SequenceParallelAccelerator(cpu=True, sp_options=options)
    assert accelerator.sp_options == {**options, "attention": "ring"}
    return accelerator
"""


FAILING = "import sys\nassert sys.argv[1:] == ['--lr', '1']\nopen('missing.json')\n"
# Each command in a fork of a process that has imported the packages.
FORKS = """
import json, os, runpy, sys
import accelerate, sp_compile.integrations.accelerate
for name, arguments in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        sys.argv = ["sp_compile", "run", *arguments]
        os.dup2(os.open(f"{name}.err", os.O_WRONLY | os.O_CREAT), 2)
        runpy.run_module("sp_compile", run_name="__main__", alter_sys=True)
        break
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit codes and stderr of scripts under `python -m sp_compile run`."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("scripts")
    texts = {**{kind: BEGIN + text for kind, (text, _) in USES.items()}, "fails": FAILING}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    commands = {kind: ["--option", "attention=ring", f"{kind}.py"] for kind in USES}
    commands["fails"] = ["fails.py", "--lr", "1"]
    command = [sys.executable, "-c", FORKS, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    codes = dict(line.split() for line in done.stdout.splitlines() if line.split()[:1] in [[name] for name in texts])
    return {name: (int(codes[name]), (folder / f"{name}.err").read_text()) for name in texts}


@pytest.mark.parametrize("kind", USES)
def test_options_apply_or_a_warning_follows(ended: dict[str, tuple[int, str]], kind: str) -> None:
    """A script whose model is not prepared ends with a warning; options replace those of the script."""
    code, errors = ended[kind]
    assert code == 0, errors[-3000:]
    assert ("WARNING:sp_compile.integrations.run_script:" in errors) != USES[kind][1]


def test_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name))
    assert "SP737" in error_text(lambda: prepare_script(__file__))


def test_errors_of_a_script_are_its_own(ended: dict[str, tuple[int, str]]) -> None:
    """Not an error of a file that this command writes."""
    code, errors = ended["fails"]
    assert code == 1
    assert 'fails.py", line 3' in errors
    assert "FileNotFoundError" in errors
    assert "SP733" not in errors
