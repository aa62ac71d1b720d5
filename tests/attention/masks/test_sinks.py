"""Sinks, a logit of each head beside its keys: loss and gradients of one device, in shards, whatever the mask is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import check, seeded, tokens
from support.spellings.attention_spellings import EXCHANGED, Model, additive, before, documents, with_sinks
from torch import Tensor

from sp_compile.passes.report import Report

SIZES = [(1, 7), (2, 17), (3, 13), (4, 16), (4, 18), (4, 3)]
Attend = Callable[[Model, Tensor, Tensor, Tensor], Tensor]


class Layers(Model):
    """Other masks in every other layer, as GPT-OSS has them."""

    def __init__(self, *attends: Attend, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__(attends[0], heads, kv_heads, len(attends))
        self.attends = attends

    def states(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, attend in zip(self.layers, self.attends, strict=True):
            x = layer(x, lambda q, k, v, attend=attend: attend(self, q, k, v))
        return x


def causal(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return with_sinks(m, q, k, v, additive(before(q), q))


def within_documents(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return with_sinks(m, q, k, v, additive(documents(m), q))


def of_later_documents(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries before the first document see nothing: all that they have is the sink."""
    return with_sinks(m, q, k, v, additive(documents(m) & ((m.positions == 0).cumsum(1) > 1)[:, None, None], q))


window = EXCHANGED["sinks, window"]
MASKS: dict[str, tuple[Attend, ...]] = {
    "none": (with_sinks,),
    "causal, then a window": (window, causal),
    "padding": (EXCHANGED["sinks, padding"],),
    "documents": (within_documents,),
    "rows without a key": (of_later_documents,),
    "learned bias": (EXCHANGED["sinks, learned bias"],),
}


def run(mask: str, n: int, length: int, make: Any = Layers, **how: Any) -> Report:
    model = seeded(lambda: make(*MASKS[mask]))
    padding = torch.arange(length) < torch.tensor([[max(1, length - 3)], [length]])
    positions = torch.stack([torch.arange(length) % max(length // 2, 1), torch.arange(length) % 5])
    return check(model, tokens(length), padding, positions, sp=n, **how)


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("attention", ["ulysses", "ring", "hybrid", "gather", "auto"])
@pytest.mark.parametrize(("n", "length"), SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_one_device(mask: str, n: int, length: int, attention: str) -> None:
    unfit = n != 4 if attention == "hybrid" else n == 3 if attention == "ulysses" else False
    report = run(mask, n, length, attention="auto" if unfit else attention)
    assert not report.fallbacks, report
    assert report.count("all_gather") == 0
    assert report.count("unshard") == 1, "the logits only"


@pytest.mark.parametrize("attention", ["ring", "gather", "hybrid"])
def test_zigzag(attention: str) -> None:
    assert not run("causal, then a window", 4, 18, attention=attention, layout="zigzag").fallbacks


@pytest.mark.parametrize("attention", ["ring", "gather", "hybrid"])
def test_balanced(attention: str) -> None:
    report = run("documents", 4, 18, attention=attention, layout="balanced")
    assert not report.fallbacks
    assert [note for note in report.notes if note.done == "balanced"]
