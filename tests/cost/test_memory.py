"""Memory of a rank in addition to attention, and candidates that do not fit into the remainder."""

from __future__ import annotations

import math
import re
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.models import Decoder, seeded, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.passes.cost.attention_memory import GIB, RankMemory
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.report import Report

LENGTH, RANKS = 64, 4


class Checkpointed(nn.Module):
    """A decoder whose layers are computed again."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids)
        for layer in self.model.layers:
            x = checkpoint(layer, x, partial(self.model.attend, self.model), use_reentrant=False)
        return self.model.head(x)


def explained(memory: float, again: bool = False, cost: Any = None, **options: Any) -> Report:
    model: nn.Module = seeded(partial(Decoder, layers=2))
    model = Checkpointed(model) if again else model  # type: ignore[arg-type]
    return sp_compile.explain(model, tokens(LENGTH), sp=RANKS, cost={"memory": memory, **(cost or {})}, **options)


@cache
def roomy() -> Report:
    return explained(1e15)


def kinds(report: Report) -> set[str]:
    return {decision.chosen.kind for decision in report.attention}


def test_weights_and_gradients_are_replicated() -> None:
    (memory,) = roomy().memory
    nbytes = sum(p.numel() * p.element_size() for p in seeded(partial(Decoder, layers=2)).parameters())
    assert (memory.weights, memory.gradients) == (nbytes, nbytes)
    assert memory.available == memory.device - memory.used


class Scaled(Decoder):
    """A decoder with a buffer, a list of parameters and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.layers[0].requires_grad_(False)
        self.register_buffer("_parameters_", torch.ones(1, 24))
        self.scales = nn.ParameterList([torch.ones(24), torch.ones(24)])

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (self.scales[0] * self.scales[1] * self._parameters_).sum()


def test_state_is_that_of_the_model() -> None:
    """Parameters that are not trained are no buffers, and the names of values decide nothing."""
    model = seeded(Scaled)
    (memory,) = sp_compile.explain(model, tokens(LENGTH), sp=RANKS, cost={"memory": 1e15}).memory
    assert memory.state == ModelBytes.of(model)
    assert memory.state.trainable < memory.state.parameters
    assert memory.state.buffers
    assert memory.state.unit


def test_saved_values_are_a_share() -> None:
    """Operands of every product are saved once; recomputed layers save only their inputs and attention's
    results."""
    (memory,) = roomy().memory
    rows, width, double = 2 * LENGTH // RANKS, 24, 8
    operands = 2 * (6 * width + 2 * width) + width  # normalized twice, q, k, v and out, the wide one; and of the head
    assert memory.saved == rows * double * operands
    (again,) = explained(1e15, again=True).memory
    heads, sums = 4, 4  # of each head a log-sum-exp in float32
    assert again.saved == rows * double * 3 * width + 2 * rows * (double * width + sums * heads)


def test_auto_takes_a_fitting_candidate() -> None:
    slow_exchanges = {
        "all_to_all_bandwidth": 1e5,
        "hop_bandwidth": 1e5,
    }  # the smallest candidate is not the fastest then
    report = explained(1e15, cost=slow_exchanges)
    (memory,), (decision,) = report.memory, report.attention
    fast, *others = sorted((c for c in decision.candidates if c.refusal is None), key=lambda c: c.seconds)
    smaller = [c for c in others if c.memory < fast.memory]
    assert smaller, "the fastest one needs least"
    report = explained(memory.used + fast.memory - 1, cost=slow_exchanges)
    (found,) = report.attention
    assert found.chosen.kind in {c.kind for c in smaller}
    same = (fast.kind, fast.ulysses, fast.layout)
    refused = next(c for c in found.candidates if (c.kind, c.ulysses, c.layout) == same)
    assert not refused.fits


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("options", [{}, {"attention": "ring"}])
def test_nothing_fits(options: dict[str, Any]) -> None:
    """Estimates do not stop a program: the smallest or the requested candidate is taken, with a note."""
    (memory,) = roomy().memory
    report = explained(memory.used + 1.0, **options)
    (decision,) = report.attention
    allowed = [c for c in decision.candidates if not c.fits and c.kind in (options.get("attention"), c.kind)]
    assert decision.chosen.memory == min(c.memory for c in allowed if options.get("attention") in (None, c.kind))
    assert not decision.chosen.fits


@pytest.mark.slow
def test_the_rest_alone_is_too_large() -> None:
    """If the rest alone does not fit, the fastest attention that fits alone is taken."""
    (memory,) = roomy().memory
    report = explained(memory.used)
    assert kinds(report) == kinds(roomy())
    assert report.memory[0].available == report.memory[0].device


def test_text() -> None:
    memory = RankMemory(device=80 * GIB, weights=15 * GIB, gradients=15 * GIB, saved=8 * GIB)
    assert re.findall(r"[\d.]+", str(memory)) == ["15.0", "15.0", "8.0", "42.0", "80.0"]
    assert math.isinf(RankMemory(device=math.inf, weights=1, gradients=1, saved=1).available)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
def test_eight_billion_at_a_million(ranks: int) -> None:
    """A layer of the sizes of Llama 3 8B: candidates that fit an H100, with bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=2048, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False, attn_implementation="sdpa", max_position_embeddings=1 << 20,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(sizes).bfloat16(), torch.zeros(1, 1 << 20, dtype=torch.int64)
    report = sp_compile.explain(model, ids, sp=ranks, kwargs={"labels": ids})
    (decision,), (memory,) = report.attention, report.memory
    assert decision.chosen.refusal is None
    assert decision.chosen.memory <= memory.available <= 80e9
    assert 0.05 < decision.chosen.seconds < 60


class Attends(nn.Module):
    """One attention between two layers. mask: a tensor of it. kv_heads: 4 query heads share them."""

    def __init__(self, kv_heads: int, masked: bool) -> None:
        super().__init__()
        self.kv_heads, self.masked = kv_heads, masked
        self.inner, self.out = nn.Linear(32, 32 + 16 * kv_heads, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.inner(x).split([32, 8 * self.kv_heads, 8 * self.kv_heads], -1)
        q, k, v = (one.unflatten(-1, (-1, 8)).transpose(1, 2) for one in (q, k, v))
        given = {"attn_mask": mask} if self.masked else {"is_causal": True}
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv_heads < 4, **given)
        return self.out(y.transpose(1, 2).flatten(2)).pow(2).mean()


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "masked"), [(torch.bfloat16, 2, False), (torch.float32, 4, False), (torch.bfloat16, 4, True)]
)
def test_attention_on_the_meta_device_keeps_no_scores(dtype: torch.dtype, kv_heads: int, masked: bool) -> None:
    """torch decomposes it into products there; a GPU has a fused kernel, also after Ulysses' exchange."""
    length = 2048
    with torch.device("meta"):
        model = Attends(kv_heads, masked).to(dtype)
        x, mask = torch.zeros(1, length, 32, dtype=dtype), torch.zeros(1, 1, length, length, dtype=torch.bool)
    report = sp_compile.explain(model, x, mask, sp=2, attention="ulysses", memory=True)
    assert report.step is not None
    scores = 2 * length * length * x.element_size()  # of this rank's heads
    bias = mask.numel() * x.element_size() if masked else 0
    assert kinds(report) == {"ulysses"}
    assert report.step.values < scores / 4 + 2 * bias, (report.step.values, scores)
