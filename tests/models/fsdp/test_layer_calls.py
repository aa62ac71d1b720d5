"""Replicas or ranks that call different layers of a model with sharded weights: an error on every rank, and no false one."""

from __future__ import annotations

import copy
import re
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models.fsdp.test_fully_shard import LENGTH, VOCABULARY, llama
from support.parity import error_text, worst_gradient
from support.ranks import Ranks, mesh, mesh2d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import sp_compile

LOSS, GRADIENT = 1e-12, 1e-9


class TwoTowers(nn.Module):
    """A text model, and an encoder of features that a batch may lack, as in a vision-language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.visual, self.text = (
            nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
            for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)
        self.skipped = -1  # the text layer that is not called
        self.recomputes = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, pixels: Tensor | None = None) -> Tensor:
        h = self.embed(input_ids)
        if pixels is not None:
            for layer in self.visual:
                pixels = layer(pixels)
            h = h + pixels
        for i, layer in enumerate(self.text):
            if i != self.skipped:
                h = checkpoint(layer, h, use_reentrant=False) if self.recomputes else layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), input_ids.flatten())


def batch_of(has_pixels: bool, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    batch = {"input_ids": torch.randint(VOCABULARY, (2, LENGTH)), "pixels": torch.randn(2, LENGTH, 16).double()}
    return batch if has_pixels else {"input_ids": batch["input_ids"]}


def two_towers(of_all: Any) -> tuple[nn.Module, nn.Module]:
    """The single-device model, and the sharded one."""
    torch.manual_seed(0)
    single = TwoTowers().double()
    options = {"compiler": "aot_eager", "cost": {}}
    return single, sp_compile.fully_shard_and_compile(copy.deepcopy(single), of_all, **options)


@torch.compiler.set_stance("force_eager")
def _differ(case: str) -> str:
    """Return the error of a rank, not compiled: replica 1, or rank 3 alone, differs from the others."""
    rank, of_all = dist.get_rank(), mesh2d(2, 2)
    _, model = two_towers(of_all)
    other = rank >= 2
    if case == "images":
        return error_text(lambda: model(**batch_of(not other)))
    if case == "layers":
        model.skipped = int(other)
        return error_text(lambda: model(**batch_of(False)).backward())
    loss = model(**batch_of(True))
    if case == "backward":
        return error_text(lambda: model(**batch_of(True)) if other else loss.backward())
    loss.backward()
    with torch.no_grad() if rank == 3 else nullcontext():
        model.train(rank != 3)
        return error_text(lambda: model(**batch_of(True)))


@pytest.mark.parametrize("case", ["images", "layers", "backward", "evaluation"])
def test_ranks_that_call_other_layers(ranks: Ranks, case: str) -> None:
    names = {
        "images": ("rank 0, 1 .* visual .*in train", "rank 2, 3 .* text .*in train"),
        "layers": ("text 1", "text 0"),
        "backward": ("rank 0, 1 .*backward", "rank 2, 3 .*TwoTowers .*in train"),
        "evaluation": ("rank 0, 1, 2 .*TwoTowers .*in train", "rank 3 .*TwoTowers .*in eval.. without gradients"),
    }[case]
    for message in ranks.run(4, _differ, case):
        assert message.startswith("SP620")
        assert all(re.search(name, message) for name in names), message


@torch.compiler.set_stance("force_eager")
def _generate_alone(replicas: int) -> str:
    """Return the error of a rank: rank 0 generates, the others train."""
    torch.manual_seed(0)
    of_all = mesh2d(2, 2) if replicas == 2 else mesh()
    model = sp_compile.fully_shard_and_compile(llama(pad_token_id=0, eos_token_id=1), of_all, compiler="aot_eager")
    ids = torch.arange(2, 2 + LENGTH)[None]
    if dist.get_rank() == 0:
        return error_text(lambda: model.generate(ids, max_new_tokens=2))
    return error_text(lambda: model(input_ids=ids, labels=ids).loss.backward())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_that_generates_alone(ranks: Ranks, replicas: int) -> None:
    pytest.importorskip("transformers")
    for message in ranks.run(2 * replicas, _generate_alone, replicas):
        assert message.startswith("SP620")
        assert re.search(
            r"rank 0 .*LlamaForCausalLM .*in generate\(\); rank 1.* LlamaForCausalLM .*in train", message
        ), message


SECONDS = 2  # timeout of a group


@torch.compiler.set_stance("force_eager")
def _wait_for_a_rank() -> str:
    """Return the error of rank 0, to which rank 1 does not come."""
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS), group_desc="late")
    _, model = two_towers(DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("sp",)))
    model(**batch_of(True)).backward()
    if dist.get_rank() == 1:
        time.sleep(2 * SECONDS)
        return ""
    return error_text(lambda: model.eval()(**batch_of(True)))


@pytest.mark.slow
def test_a_rank_that_does_not_come(ranks: Ranks) -> None:
    message, _ = ranks.run(2, _wait_for_a_rank)
    assert re.match(r"SP621: rank 1 .*: rank 0 .* TwoTowers .*in eval\(\) .*generate\(\), evaluat.*\n", message), (
        message
    )


def _train_in_all_ways() -> list[tuple[float, float]]:
    """Return the errors of losses and gradients of steps that all replicas make, each with another batch."""
    of_all = mesh2d(2, 2)
    replica, errors = of_all.get_local_rank("dp"), []
    single, model = two_towers(of_all)

    def step(*kinds: bool, length: int = LENGTH) -> None:
        """Add the errors of the sum of the losses of batches with and without pixels."""
        losses = []
        for i in range(2):
            batches = [batch_of(kind, 2 * j + i) for j, kind in enumerate(kinds)]
            short = [{name: x[:, : length if i else LENGTH] for name, x in batch.items()} for batch in batches]
            losses.append(torch.stack([single(**batch) for batch in short]).sum())
            if i == replica:
                loss = torch.stack([model(**batch) for batch in short]).sum()
        torch.stack(losses).mean().backward()
        loss.backward()
        errors.append((float((loss - losses[replica]).detach().abs()), worst_gradient(model, single)))
        for one in (single, model):
            one.zero_grad()

    for has_pixels in (True, False, True, False):  # alternate
        step(has_pixels)
    step(True, False)  # called twice before a backward
    step(True, length=7)  # compiled again on the ranks of one replica
    with torch.no_grad():
        for batch in (batch_of(True), batch_of(False)):
            errors.append((float((model.eval()(**batch) - single.eval()(**batch)).abs()), 0.0))
    for one in (single.train(), model.train()):
        one.skipped = 0  # the first layer of a list
    step(True)
    for one in (single, model):
        one.recomputes = True
    step(False)
    for has_pixels in (True, False):  # two backwards add to the gradients
        for i in range(2):
            (single(**batch_of(has_pixels, i)) / 2).backward()
        model(**batch_of(has_pixels, replica)).backward()
    errors.append((0.0, worst_gradient(model, single)))
    return errors


@pytest.mark.slow
def test_steps_of_all_replicas(ranks: Ranks) -> None:
    """No false error, and no wait: losses and gradients equal those of a single device."""
    for errors in ranks.run(4, _train_in_all_ways, timeout=500):
        assert len(errors) == 11
        assert all(loss < LOSS and gradient < GRADIENT for loss, gradient in errors), errors
