"""Models of this year in every way of attention and every layout: `explain` has nothing to gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.test_hf import COUNTS, SIZES, SMALL, VOCAB, deepseek, gemma3, gpt_oss, qwen3, transformers

import sp_compile


def gemma2() -> torch.nn.Module:
    """Soft-caps, of scores too, and a window in every other layer."""
    how = {**SMALL, "attn_implementation": "eager"}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **COUNTS, **how, sliding_window=8))


WAYS = [
    *({"attention": attention} for attention in ("auto", "ring", "ulysses", "hybrid", "gather")),
    *({"attention": "ring", "layout": layout} for layout in ("zigzag", "balanced")),
]


@pytest.mark.sampled(every=18)
@pytest.mark.parametrize("config", WAYS, ids=lambda c: " ".join(c.values()))
@pytest.mark.parametrize("make", [gpt_oss, gemma2, gemma3, deepseek, qwen3])
def test_nothing_is_gathered(make: Callable[[], torch.nn.Module], config: dict[str, str]) -> None:
    transformers.logging.set_verbosity_error()
    model, ids = make(), torch.randint(0, VOCAB, (2, 18))
    model.config.use_cache = False
    report = sp_compile.explain(model, ids, labels=ids, sp=4, **config)
    assert not report.fallbacks, report
    assert report.attention
