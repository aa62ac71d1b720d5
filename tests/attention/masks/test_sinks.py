"""Sinks, an extra logit per head: sharded loss and gradients equal those of a single device with every mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.capturing import simulating
from support.golden import show
from support.models import check, seeded, tokens
from support.variants.attention_variants import EXCHANGED, Model, additive, before, documents, learned, with_sinks
from torch import Tensor, nn

from sp_compile.passes.context import NoteKind
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


@pytest.mark.sampled(every=66)
@pytest.mark.parametrize("attention", ["ulysses", "ring", "hybrid", "gather", "auto"])
@pytest.mark.parametrize(("n", "length"), SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_one_device(mask: str, n: int, length: int, attention: str) -> None:
    unfit = n != 4 if attention == "hybrid" else n == 3 if attention == "ulysses" else False
    report = run(mask, n, length, attention="auto" if unfit else attention)
    assert not report.fallbacks, report
    assert report.count("all_gather") == 0
    assert report.count("unshard") == 1, "the logits only"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("attention", ["ring", "gather", "hybrid"])
def test_zigzag(attention: str) -> None:
    assert not run("causal, then a window", 4, 18, attention=attention, layout="zigzag").fallbacks


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("attention", ["gather", "ring", "hybrid"])
def test_balanced(attention: str) -> None:
    report = run("documents", 4, 18, attention=attention, layout="balanced")
    assert not report.fallbacks
    assert report.find_notes(NoteKind.REWRITTEN, subject="balanced")


class OpenAI(nn.Module):
    """GPT-OSS in its authors' own form: no batch dim, key heads and the queries of each in two dims."""

    def __init__(self, window: int, key_heads: int = 2, each: int = 4, width: int = 6) -> None:
        super().__init__()
        self.window, self.shape = window, (key_heads, each, width)
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, key_heads * (each + 2) * width)
        self.sinks = nn.Parameter(torch.randn(key_heads * each))
        self.out = nn.Linear(key_heads * each * width, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads, each, width = self.shape
        q, k, v = self.qkv(self.norm(x)).split([heads * each * width, heads * width, heads * width], 1)
        q, k, v = q.reshape(-1, heads, each, width), k.reshape(-1, heads, width), v.reshape(-1, heads, width)
        length = len(q)
        k, v = (y[:, :, None, :].expand(-1, -1, each, -1) for y in (k, v))
        sinks = self.sinks.reshape(heads, each, 1, 1).expand(-1, -1, length, -1)
        mask = torch.triu(q.new_full((length, length), -math.inf), diagonal=1)
        if self.window:
            mask += torch.tril(mask.new_full((length, length), -math.inf), diagonal=-self.window)
        scores = torch.einsum("qhmd,khmd->hmqk", q, k)
        scores *= width**-0.5
        scores += mask[None, None, :, :]
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
        return x + self.out(torch.einsum("hmqk,khmd->qhmd", weights, v).reshape(length, -1))


@pytest.mark.sampled(every=29)
@pytest.mark.parametrize("attention", ["ulysses", "ring", "hybrid", "gather"])
@pytest.mark.parametrize(("n", "length"), SIZES)
@pytest.mark.parametrize("window", [0, 3])
def test_form_of_its_authors(window: int, n: int, length: int, attention: str) -> None:
    unfit = n != 4 if attention == "hybrid" else n == 3 if attention == "ulysses" else False
    x = torch.randn(length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    report = check(seeded(lambda: OpenAI(window)), x, sp=n, attention="auto" if unfit else attention)
    assert not report.fallbacks, report
    if n > 1:
        (decision,) = report.attention
        assert (decision.shape.heads, decision.shape.kv_heads) == (8, 2)


def test_groups_with_masks_of_their_own_stay() -> None:
    """A bias per group and query head is one per head; no rule matches it in this grouping."""

    class Biased(OpenAI):
        def forward(self, x: Tensor) -> Tensor:
            heads, each, width = self.shape
            q, k, v = self.qkv(self.norm(x)).split([heads * each * width, heads * width, heads * width], 1)
            q, k, v = q.reshape(-1, heads, each, width), k.reshape(-1, heads, width), v.reshape(-1, heads, width)
            k, v = (y[:, :, None, :].expand(-1, -1, each, -1) for y in (k, v))
            sinks = self.sinks.reshape(heads, each, 1, 1)
            scores = torch.einsum("qhmd,khmd->hmqk", q, k) + sinks
            every = torch.cat([scores, sinks.expand(-1, -1, len(q), -1)], dim=-1)
            return x + self.out(torch.einsum("hmqk,khmd->qhmd", every.softmax(-1)[..., :-1], v).reshape(len(q), -1))

    x = torch.randn(13, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = check(seeded(lambda: Biased(0)), x, sp=2)
    assert report.find_notes(NoteKind.DECLINED, subject="fuse_eager_attention")


def both(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A predicate, data and sinks in one call."""
    options = [], [], [], "k <= q", 0.0, None, True
    return torch.ops.sp.masked_attention(q, k, v, *options, attn_mask=learned(m, q), sinks=m.sink)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("attention", ["ring", "gather", "ulysses"])
def test_a_predicate_beside_data(attention: str) -> None:
    model, x = seeded(lambda: Layers(both)), torch.randn(3, 2, 4, 9, 6, dtype=torch.float64)
    infinite = torch.zeros(9, 9).masked_fill(~before(x[0]), -math.inf)
    reference = with_sinks(model, *x, learned(model, x[0]) + infinite)
    torch.testing.assert_close(both(model, *x), reference, rtol=1e-12, atol=1e-12)
    padding = torch.ones(2, 13, dtype=torch.bool)
    report = check(model, tokens(13), padding, padding.long(), sp=2, attention=attention)
    assert not report.fallbacks


def test_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    model, graphs = seeded(lambda: Layers(causal)), []

    backend = simulating(4, graphs, cost={}, attention="ring")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (13, 18):
            padding = torch.ones(2, length, dtype=torch.bool)
            given = tokens(length), padding, padding.long()
            torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-9, atol=1e-9)
    assert len(graphs) == 1
    assert "sp.ring_attention" in show(graphs[0])


def test_heads_without_a_sink_and_rows_without_a_key() -> None:
    """Sinks of -inf are none; a row without keys is 0, with gradients of 0 for its head's sink."""
    x = [t.requires_grad_() for t in torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)]
    sinks = torch.tensor([-math.inf, 0.5], dtype=torch.float64, requires_grad=True)
    out = torch.ops.sp.masked_attention(*x, [], [], [], "(k < q)", 0.0, 1.0, False, sinks=sinks)
    alone = torch.ops.sp.masked_attention(*x, [], [], [], "(k < q)", 0.0, 1.0, False)
    torch.testing.assert_close(out[:, 0], alone[:, 0], rtol=0, atol=1e-15)
    assert not out[:, :, 0].any()
    dx, dsinks = torch.autograd.grad(out[:, :, 0].sum(), (x[0], sinks), retain_graph=True)
    assert not dx.any()
    assert dsinks.tolist() == [0.0, 0.0]
    for grad in torch.autograd.grad(out.sum(), (*x, sinks)):
        assert grad.isfinite().all()
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: torch.ops.sp.masked_attention(q, k, v, [], [], [], "(k <= q)", 0.0, 1.0, False, sinks=s),
        (*x, torch.randn(2, dtype=torch.float64, requires_grad=True)),
    )
