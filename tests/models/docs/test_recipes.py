"""The recipes of docs/ and the program of its first page, unmodified, on real processes against a single device that runs the same lines eagerly."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "recipes"
LOSS, WEIGHT = 2e-5, 1e-4  # float32; AdamW moves a weight whose gradient is next to nothing by as much as any other

NEEDS = {
    "trainer": ("accelerate",),
    "sft": ("trl", "peft"),
    "grpo": ("trl",),
    "accelerate": ("accelerate",),
    "sharded": ("accelerate",),
    "fabric": ("lightning",),
    "lightning": ("lightning",),
    "lightning_sharded": ("lightning",),
    "torchrun": (),
    "fsdp": (),
    "blocks": (),
    "titan": (),
}

OF_LIGHTNING = ("fabric", "lightning")  # which needs the number of processes that torchrun starts
TWO = (1, 1, 2)  # the mesh of three axes, as the page has it
WITHOUT_CASTS = ("torch.bfloat16", "torch.float32")  # so that there is one right answer
BF16 = 5e-3  # of a loss of 4, after ten steps in which two programs round in other places


def code_of(name: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.DOTALL)
    return code


def launch(folder: Path, processes: int, script: str, *arguments: str, timeout: float = 600, **others: str) -> str:
    """Run a program of tests/support/programs in a folder, and return its output; on one process without the compiler.

    others: of the environment.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": str(int(processes == 1)),
        **others,
    }
    program = ROOT / "tests" / "support" / "programs" / script
    command = [sys.executable, *torchrun, str(program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def run(name: str, folder: Path, processes: int, *changes: str, **launched: Any) -> dict[str, Any]:
    """Run a recipe and return its results. launched: arguments of `launch`."""
    folder.mkdir(exist_ok=True)
    result = folder / f"{name}{processes}.pt"
    page = (PAGES if name in NEEDS else PAGES.parent) / f"{name}.md"
    printed = launch(folder, processes, "recipe.py", str(page), str(result), *changes, **launched)
    return {**torch.load(result), "printed": printed}


def alone_is(name: str) -> tuple[str, ...]:
    """Return replacements of a page for one process."""
    if name == "sharded":  # which the Trainer refuses on one process
        return "fsdp=True", "fsdp=False"
    if name == "lightning_sharded":
        return "replicas, share = 1, 2", "replicas, share = 1, 1", *PLAIN_LIGHTNING
    return ("devices=2", "devices=1") if name in OF_LIGHTNING else on_mesh(1, 1, 1) if name == "titan" else ()


SHARD = 'sp_compile.fully_shard_and_compile(self.inner, self.device_mesh, mesh_dim="tensor_parallel")'
FSDP_STRATEGY = "strategy = ModelParallelStrategy(data_parallel_size=replicas, tensor_parallel_size=share)"
AS_REPLICAS_ARE = "dataset, sampler=torch.utils.data.DistributedSampler(dataset, 1, 0), "  # which Lightning shuffles
PLAIN_LIGHTNING = (
    SHARD,
    "pass",
    FSDP_STRATEGY,
    'strategy = "auto"',
    "DataLoader(dataset, ",
    f"DataLoader({AS_REPLICAS_ARE}",
)


def on_mesh(*sizes: int) -> tuple[str, str]:
    """Return replacements of the three-axes page for other sizes."""
    return str(TWO), str(sizes)


def compare(found: dict[str, Any], alone: dict[str, Any], steps: int = 10) -> None:
    assert len(found["losses"]) == len(alone["losses"]) >= steps
    assert torch.allclose(*(torch.tensor(one["losses"]) for one in (found, alone)), rtol=0, atol=LOSS)
    assert found["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        assert torch.allclose(found["weights"][name], weight, rtol=0, atol=WEIGHT), name


def test_every_page_is_run_and_short() -> None:
    pages = {page.stem for page in PAGES.glob("*.md")} - {"README"}
    assert pages == set(NEEDS)
    for name in pages:
        code = code_of(name)
        compile(code, name, "exec")
        lines = [line for line in code.splitlines() if line]
        assert len(lines) <= 30, (name, len(lines))
        assert "environ" not in code
        assert "optimize_ddp" not in code
        assert "print(" in code or re.search(r"logging_steps\W+1\b", code), f"{name} does not print its losses"


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_recipe_equals_one_device(name: str, tmp_path: Path) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    casts = WITHOUT_CASTS if name == "blocks" else ()
    alone = run(name, tmp_path / "alone", 1, *alone_is(name), *casts)
    found = run(name, tmp_path / "shared", 2, *casts)
    compare(found, alone)
    if "print(" in code_of(name):  # otherwise a Trainer prints, in a format of its own
        printed = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", found["printed"])]  # by one rank
        assert printed == pytest.approx(found["losses"], abs=1e-3)


ON_FOUR = ("accelerate", "sft", *OF_LIGHTNING)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_recipe_on_four_ranks_equals_one_device(name: str, tmp_path: Path) -> None:
    """All of them share each sequence."""
    for package in NEEDS[name]:
        pytest.importorskip(package)
    one, four = (("devices=2", f"devices={n}") if name in OF_LIGHTNING else () for n in (1, 4))
    compare(run(name, tmp_path, 4, *four), run(name, tmp_path, 1, *one))


@pytest.mark.slow
def test_blocks_in_bf16(tmp_path: Path) -> None:
    """The unmodified page, which trains in bfloat16."""
    found, alone = (torch.tensor(run("blocks", tmp_path, n)["losses"]) for n in (2, 1))
    assert torch.allclose(found, alone, rtol=0, atol=BF16), (found - alone).abs().max()


@pytest.mark.slow
def test_blocks_with_replicas(tmp_path: Path) -> None:
    found, alone = (run("blocks", tmp_path, n, *WITHOUT_CASTS) for n in (4, 1))
    compare(found, alone)


@pytest.mark.slow
def test_the_first_page_equals_one_device(tmp_path: Path) -> None:
    found, alone = run("start", tmp_path, 2), run("start", tmp_path, 1)
    assert found["losses"][0] > 5 > 0.5 > found["losses"][-1]
    compare(found, alone)


@pytest.mark.slow
def test_trainer_with_replicas_equals_one_device(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    batch = "per_device_train_batch_size=2"
    compare(run("trainer", tmp_path, 4), run("trainer", tmp_path, 1, batch, "per_device_train_batch_size=4"))


SAID = ("loss", "eval_rows", "eval_right", "eval_size", "test_rows", "test_right", "test_size")
OF_BATCHES = ("eval_loss", "test_loss")  # with replicas, the Trainer weights rows in another way than one device


def trained(folder: Path, processes: int, words: Sequence[str], *checkpoint: str, **environment: str) -> dict[str, Any]:
    """Run a Trainer and return its log, predictions and results; log and metrics are under `losses`."""
    result = folder / f"trainer{processes}.pt"
    launch(folder, processes, "trainer.py", str(result), *checkpoint, **environment)
    found = torch.load(result)
    lines = [*found["log"], found["metrics"]]
    assert [line["eval_rows"] for line in lines if "eval_rows" in line] == [7, 7]  # each once
    assert found["metrics"]["test_rows"] == len(found["predictions"]) == 5
    return {**found, "losses": [line[word] for line in lines for word in words if word in line]}


def losses_of_batches(found: dict[str, Any]) -> list[float]:
    lines = [*found["log"], found["metrics"]]
    return [line[word] for line in lines for word in OF_BATCHES if word in line]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "words"), [(2, SAID + OF_BATCHES), (4, SAID)], ids=["", "replicas"])
def test_all_that_a_trainer_does(tmp_path: Path, processes: int, words: Sequence[str]) -> None:
    """Evaluations, metrics and predictions equal a single device's, and a checkpoint continues the same training.

    With replicas, the loss of an evaluation equals that of a Trainer under DDP with one process per replica.
    """
    pytest.importorskip("accelerate")
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    alone, whole = trained(tmp_path / "alone", 1, words), trained(tmp_path / "shared", processes, words)
    compare(whole, alone, steps=5)
    if processes == 4:  # two replicas
        plain = trained(tmp_path / "alone", 2, words, TRAINER_DDP="1")
        assert losses_of_batches(whole) == pytest.approx(losses_of_batches(plain), rel=LOSS)
        assert losses_of_batches(whole) != pytest.approx(losses_of_batches(alone), rel=100 * LOSS)
    assert torch.allclose(whole["predictions"], alone["predictions"], rtol=0, atol=WEIGHT)
    resumed = trained(tmp_path / "shared", processes, words, "out/checkpoint-3")
    assert resumed["losses"] == whole["losses"]
    assert resumed["predictions"].equal(whole["predictions"])
    assert all(weight.equal(whole["weights"][name]) for name, weight in resumed["weights"].items())


@pytest.mark.slow
def test_a_trainer_that_generates_counts_each_row_once(tmp_path: Path) -> None:
    """A Seq2SeqTrainer gathers predictions and labels by `Accelerator.gather`, which on ranks of one sequence are the same."""
    pytest.importorskip("accelerate")
    for processes in (1, 2):
        launch(tmp_path, processes, "seq2seq.py", str(tmp_path / f"seq2seq{processes}.pt"))
    alone, found = (torch.load(tmp_path / f"seq2seq{processes}.pt") for processes in (1, 2))
    words = "eval_rows", "eval_sum", "test_rows", "test_sum"
    assert [found["metrics"][word] for word in words] == [alone["metrics"][word] for word in words]
    assert (found["metrics"]["eval_rows"], found["metrics"]["test_rows"]) == (5, 3)
    assert found["metrics"]["eval_loss"] == pytest.approx(alone["metrics"]["eval_loss"], rel=LOSS)
    assert found["predictions"].equal(alone["predictions"])
    assert all(torch.allclose(weight, alone["weights"][name], atol=WEIGHT) for name, weight in found["weights"].items())


@pytest.mark.slow
def test_replicas_with_ddp_equal_one_device(tmp_path: Path) -> None:
    compare(run("torchrun", tmp_path, 4), run("torchrun", tmp_path, 1))


@pytest.mark.slow
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(tmp_path: Path) -> None:
    alone = run("fsdp", tmp_path, 1)
    for path in (tmp_path / "checkpoint").iterdir():
        path.unlink()
    (tmp_path / "checkpoint").rmdir()
    run("fsdp", tmp_path, 2)
    resumed = run("fsdp", tmp_path, 4)
    compare(resumed, {**alone, "losses": alone["losses"][5:]}, steps=5)


MESHES = ((1, 2, 2), (2, 2, 2), TWO)  # replicas of the weights, replicas that shard them, ranks of a sequence
IN_A_CHECKPOINT = (  # the lines of the page about FSDP2
    "for row in",
    "import torch.distributed.checkpoint as dcp\n"
    "from pathlib import Path\n"
    "from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict\n"
    "sampler = SequenceSampler(data, mesh)\n"
    'state = {"model": model, "optimizer": optimizer, "sampler": sampler}\n'
    'if Path("checkpoint").exists():\n'
    "    get_optimizer_state_dict(model, optimizer)\n"
    '    dcp.load(state, checkpoint_id="checkpoint")\n'
    "for row in",
    "sampler=SequenceSampler(data, mesh)",
    "sampler=sampler",
    '{loss.item():.3f}")\n',
    '{loss.item():.3f}")\nsampler.set_epoch(sampler.epoch + 1)\ndcp.save(state, checkpoint_id="checkpoint")\n',
)


@pytest.mark.slow
def test_a_mesh_of_three_axes_is_resumed_on_others(tmp_path: Path) -> None:
    """An epoch of ten steps on four ranks, one on eight, one on two; each stores its part of the weights."""
    before = 10.0
    for sizes in MESHES:
        found = run("titan", tmp_path / "shared", math.prod(sizes), *on_mesh(*sizes), *IN_A_CHECKPOINT)
        alone = run("titan", tmp_path / "alone", 1, *alone_is("titan"), *IN_A_CHECKPOINT)
        compare(found, alone)
        assert found["bytes"] * sizes[1] * sizes[2] == alone["bytes"]
        assert found["losses"][0] < before  # training did continue, also on a single device
        before = sum(found["losses"]) / len(found["losses"])


TWO_EPOCHS = '"max_epochs": 1', '"max_epochs": 2'


ONE_FILE = "tensor_parallel_size=share)", "tensor_parallel_size=share, save_distributed_checkpoint=False)"


@pytest.mark.slow
@pytest.mark.parametrize("saved", [(), ONE_FILE], ids=["shards", "one file"])
def test_lightning_shards_weights_and_resumes_on_fewer_ranks(saved: tuple[str, ...], tmp_path: Path) -> None:
    """Two replicas of two ranks train the first epoch, two ranks of one sequence the second one."""
    pytest.importorskip("lightning")
    alone = run("lightning_sharded", tmp_path / "alone", 1, *alone_is("lightning_sharded"), *TWO_EPOCHS)
    sizes = "replicas, share = 1, 2", "replicas, share = 2, 2"
    first = run("lightning_sharded", tmp_path / "shared", 4, *sizes, *saved)
    assert first["bytes"] * 4 == alone["bytes"]
    assert torch.allclose(*(torch.tensor(one["losses"][:10]) for one in (first, alone)), rtol=0, atol=LOSS)
    assert (tmp_path / "shared" / "out" / "last.ckpt").is_dir() is not bool(saved)
    second = run("lightning_sharded", tmp_path / "shared", 2, *TWO_EPOCHS, *saved)
    assert second["bytes"] * 2 == alone["bytes"]
    compare(second, {**alone, "losses": alone["losses"][10:]})


FABRIC_WITH_FSDP = (
    'strategy="ddp"',
    "strategy=ModelParallelStrategy(parallelize, 2, 2)",
    "from sp_compile.integrations.ddp import compile_under_ddp",
    "from lightning.fabric.strategies import ModelParallelStrategy\nimport sp_compile\n\n"
    "def parallelize(model, mesh):\n"
    '    return sp_compile.fully_shard_and_compile(model, mesh, mesh_dim="tensor_parallel")',
    'compile_under_ddp(model, mesh["sp"])',
    "",
    "wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))",
    "wrapped = fabric.setup_module(model)\n"
    "optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))",
    "batch_size=4",
    "batch_size=2",
    "(1, fabric.world_size)",
    "(2, 2)",
    "devices=2",
    "devices=4",
)


@pytest.mark.slow
def test_fabric_shards_weights(tmp_path: Path) -> None:
    """The lines that the page about Lightning with sharded weights names."""
    pytest.importorskip("lightning")
    alone, found = run("fabric", tmp_path, 1, *alone_is("fabric")), run("fabric", tmp_path, 4, *FABRIC_WITH_FSDP)
    assert found["bytes"] * 4 == alone["bytes"]
    compare(found, alone)
