"""Models of this year with every attention strategy and every layout: `explain` has nothing to gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.hf.test_hf import COUNTS, SIZES, SMALL, VOCAB, deepseek, gemma3, gpt_oss, qwen3, transformers

import sp_compile
from sp_compile.passes.context import NoteKind


def gemma2() -> torch.nn.Module:
    """Soft-caps, of scores too, and a window in every other layer."""
    how = {**SMALL, "attn_implementation": "eager"}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **COUNTS, **how, sliding_window=8))


OPTIONS = [
    *({"attention": attention} for attention in ("auto", "ring", "ulysses", "hybrid", "gather")),
    *({"attention": "ring", "layout": layout} for layout in ("zigzag", "balanced")),
]


@pytest.mark.slow
@pytest.mark.sampled(every=36)
@pytest.mark.parametrize("config", OPTIONS, ids=lambda c: " ".join(c.values()))
@pytest.mark.parametrize("make", [gpt_oss, gemma2, gemma3, deepseek, qwen3])
def test_nothing_is_gathered(make: Callable[[], torch.nn.Module], config: dict[str, str]) -> None:
    transformers.logging.set_verbosity_error()
    model, ids = make(), torch.randint(0, VOCAB, (2, 18))
    model.config.use_cache = False
    report = sp_compile.explain(model, ids, labels=ids, sp=4, **config)
    assert not report.fallbacks, report
    assert report.attention


@pytest.mark.slow
def test_a_head_before_a_loss_with_a_warning() -> None:
    """The warning breaks the graph, and a note names its line; with a loss_type, the model is one graph in tiles."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
    model, ids = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), torch.randint(0, 64, (1, 32))
    model.config.use_cache = False
    (broken,) = explained(model, ids).find_notes(NoteKind.GRAPH_BREAK)
    assert "modeling_gpt2.py" in broken.where
    model.loss_type = "ForCausalLM"
    report = explained(model, ids)
    assert not report.find_notes(NoteKind.GRAPH_BREAK)
    assert any("lm_head" in one.where for one in report.tiled), report.tiled


def explained(model: torch.nn.Module, ids: torch.Tensor) -> sp_compile.Report:
    return sp_compile.explain(model, ids, labels=ids, sp=2, tiles=4)
