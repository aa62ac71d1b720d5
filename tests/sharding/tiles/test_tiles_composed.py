"""Tiles combined with attention strategies, AMP, checkpoints, FSDP2 and its mixed precision."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import ranks as worker
from support.parity import Checkpointed, Decoder, text
from support.ranks import TIMEOUT, Ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from sp_compile.lowering.tiles.tile_program import PROGRAMS

SEQ, TILES = 21, 3
WAYS: dict[str, dict[str, Any]] = {
    "ulysses": {"attention": "ulysses"},
    "ring": {"attention": "ring", "layout": "contiguous"},
    "zigzag": {"attention": "ring", "layout": "zigzag"},
    "gathered": {"attention": "gather", "layout": "zigzag"},
    "balanced": {"attention": "ring", "layout": "balanced"},
    "AMP": {"attention": "ring"},
    "AMP, ulysses": {"attention": "ulysses"},
    "AMP inside": {"attention": "ring"},
    "AMP inside, ulysses, host": {"attention": "ulysses", "offload": 0.5},
    "AMP inside, gathered, checkpoints": {"attention": "gather", "layout": "zigzag"},
    "AMP, FSDP2": {"param_grads": "partial"},
    "AMP inside, FSDP2": {"param_grads": "partial", "attention": "ring"},
    "AMP, FSDP2 by blocks, checkpoints, host": {"param_grads": "partial", "offload": 0.5},
    "bfloat16, FSDP2": {"param_grads": "partial", "attention": "ring"},
    "bfloat16, FSDP2 by blocks": {"param_grads": "partial"},
    "bfloat16, FSDP2 by blocks, checkpoints, host": {"param_grads": "partial", "offload": 0.5},
    "checkpoints": {"attention": "ring"},
    "host": {"offload": 1.0},
    "FSDP2": {"param_grads": "partial"},
    "FSDP2 by blocks": {"param_grads": "partial"},
    "FSDP2 by blocks, checkpoints, host": {"param_grads": "partial", "offload": 0.5},
}
ROUNDED = 2.0**-8
"""Of a number in bfloat16, to the nearest."""
FAST = ("ulysses", "ring", "zigzag", "balanced", "AMP", "AMP inside", "checkpoints")


class Mixed(nn.Module):
    """Its model under an autocast of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args)


class InBfloat16(nn.Module):
    """Its model on copies of its parameters in bfloat16, as FSDP2's mixed precision has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        low = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        return functional_call(self.model, low, args)


def decoder(way: str, layers: int) -> Decoder:
    """Return a decoder with equal weights for each way. By blocks, fully_shard wraps a checkpoint, as in torchtitan.

    Inside of a checkpoint it has hooks, for which Dynamo runs the checkpoint in eager mode.
    """
    torch.manual_seed(0)
    if "checkpoints" in way and "blocks" not in way:
        return Checkpointed(layers=layers)
    model = Decoder(layers=layers)
    if "checkpoints" in way:
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    return model


def shared(model: Decoder, way: str) -> None:
    """Shard the model over the ranks if the way has FSDP."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "FSDP2" in way:
        for part in (*(model.blocks if "blocks" in way else ()), model):
            fully_shard(part, mesh=worker.mesh(), mp_policy=low if "bfloat16" in way else MixedPrecisionPolicy())


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def given(way: str, compiler: str) -> dict[str, Any]:
    return {"mesh": worker.mesh(), "tiles": TILES, "compiler": compiler, "cost": {}, **WAYS[way]}


def step(way: str, compiler: str) -> bool:
    """Loss and gradients of a rank equal a single device's and are computed in tiles."""
    PROGRAMS.clear()
    (mixed if way.startswith(("AMP", "bfloat16")) else exact)(way, compiler)
    assert PROGRAMS
    return True


def exact(way: str, compiler: str) -> None:
    model = decoder(way, layers=1 if way in FAST else 2).double()
    alone = copy.deepcopy(model)
    shared(model, way)
    found, right = torch.compile(model, backend="sp", options=given(way, compiler))(*text(SEQ)), alone(*text(SEQ))
    found.backward(), right.backward()
    torch.testing.assert_close(found.detach(), right.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(gradients(model), gradients(alone), rtol=1e-9, atol=1e-12)


def mixed(way: str, compiler: str) -> None:
    """No further from float64 than one device in the same precisions; parameters and their gradients are in float32."""
    model, alone = decoder(way, layers=1), decoder("", layers=1)
    right = copy.deepcopy(alone).double()
    shared(model, way)
    runs: tuple[nn.Module, nn.Module] = model, InBfloat16(alone) if "bfloat16" in way else alone
    if "inside" in way:
        runs = Mixed(model), Mixed(alone)
    around = way.startswith("AMP") and "inside" not in way
    want = right(*text(SEQ))
    want.backward()
    errors = []
    for one, run in zip((model, alone), (torch.compile(runs[0], backend="sp", options=given(way, compiler)), runs[1])):
        with torch.autocast("cpu", torch.bfloat16) if around else nullcontext():
            loss = run(*text(SEQ))
        loss.backward()
        assert all(x.dtype == torch.float32 for x in (*one.parameters(), *gradients(one)))
        pairs = ((loss.detach(), want.detach()), *zip(gradients(one), gradients(right), strict=True))
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in pairs])
    bounds = [1.5 * x + 1e-3 for x in errors[1]]
    bounds[0] += ROUNDED  # one number, which may be right by chance
    assert all(found < most for found, most in zip(errors[0], bounds)), errors
    assert max(errors[0]) > 1e-3, "float32"


SLOW = pytest.mark.slow


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in FAST else SLOW) for way in WAYS])
@pytest.mark.parametrize(
    ("n", "compiler"),
    [(2, "aot_eager"), pytest.param(2, "inductor", marks=SLOW), pytest.param(4, "aot_eager", marks=SLOW)],
)
def test_one_device(ranks: Ranks, way: str, n: int, compiler: str) -> None:
    assert all(ranks.run(n, step, way, compiler, timeout=TIMEOUT if compiler == "aot_eager" else 5 * TIMEOUT))
