"""Every strategy x mask x heads x length, on simulated ranks: loss and every gradient equal a single device's.

Every registered strategy: the built-in ones, and the toy, which is registered from outside like a user's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention import toy_strategy
from support.models import Decoder, check, rotated, seeded, tokens
from torch import Tensor

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.ranks import STRATEGIES
from sp_compile.passes.context import NoteKind

with toy_strategy.registered():
    NAMES = (*STRATEGIES, "auto")
LAYOUTS = ("auto", "contiguous", "zigzag")
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
LENGTHS = (16, 13)


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with toy_strategy.registered():
        yield


class Model(Decoder):
    """forward(ids, padding, documents); `mask` makes a bool mask (or "causal", None) of the two and the length."""

    def __init__(self, mask: Callable[..., Tensor | str | None], heads: tuple[int, int]) -> None:
        super().__init__(_attend, *heads)
        self.mask = mask

    def forward(self, ids: Tensor, padding: Tensor, documents: Tensor) -> Tensor:
        self.given = self.mask(ids.shape[1], padding, documents)
        return super().forward(ids)


def _attend(model: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, grouped = rotated(q), rotated(k), q.shape[1] != k.shape[1]
    if isinstance(model.given, str):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=model.given, enable_gqa=grouped)


def _before(length: int) -> Tensor:
    i = torch.arange(length)
    return i[:, None] >= i


def _window(length: int) -> Tensor:
    i = torch.arange(length)
    return _before(length) & (i[:, None] - i < 5)


MASKS: dict[str, Callable[..., Tensor | str | None]] = {
    "causal": lambda s, padding, documents: "causal",
    "full": lambda s, padding, documents: None,
    "sliding window": lambda s, padding, documents: _window(s),
    "padding": lambda s, padding, documents: _before(s) & padding[:, None, None],
    "documents": lambda s, padding, documents: _before(s) & (documents[:, None, :, None] == documents[:, None, None]),
}


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    padding = torch.arange(length) < torch.tensor([[length - 3], [length]])
    documents = torch.stack([torch.arange(length) // 4, torch.arange(length) // 7])
    return tokens(length), padding, documents


def run(
    strategy: str, mask: str, heads: str, length: int, ranks: int, layout: str = "auto", **options: Any
) -> sp_compile.Report:
    model = seeded(lambda: Model(MASKS[mask], HEADS[heads]))
    return check(model, *inputs(length), sp=ranks, attention=strategy, layout=layout, **options)


@pytest.mark.sampled(every=34)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("strategy", NAMES)
def test_equals_one_device(strategy: str, mask: str, heads: str) -> None:
    length = LENGTHS[(list(MASKS).index(mask) + list(HEADS).index(heads)) % 2]
    report = run(strategy, mask, heads, length, 4)
    if strategy != "auto":
        assert report.find_notes(NoteKind.REWRITTEN, subject=STRATEGIES[strategy].rewrite.name), str(report)
    assert not report.fallbacks


@pytest.mark.sampled(every=28)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", NAMES)
def test_layouts(strategy: str, layout: str) -> None:
    run(strategy, "causal", "GQA", 16, 4, layout)
    run(strategy, "documents", "GQA", 13, 4, layout)


@pytest.mark.sampled(every=27)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["MHA", "GQA"])
def test_groups_of_heads(heads: str, mask: str, length: int, ranks: int) -> None:
    """One head of the keys, or two, on a rank: two groups, where there are two."""
    report = run("ulysses", mask, heads, length, ranks, ulysses_chunks=2)
    assert report.find_notes(NoteKind.REWRITTEN, subject="ulysses")
    fits = HEADS[heads][1] % (2 * ranks) == 0
    assert bool(report.find_notes(NoteKind.DECLINED, subject="ulysses_chunks")) is not fits


@pytest.mark.sampled(every=32)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("strategy", ["ring", "gather", "toy", "auto"])
def test_any_number_of_ranks(strategy: str, ranks: int) -> None:
    run(strategy, "causal", "GQA", 24, ranks)
    run(strategy, "padding", "MQA", 13, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("strategy", "mask", "heads"), list(itertools.product(NAMES, MASKS, HEADS)))
def test_all(strategy: str, mask: str, heads: str, layout: str, length: int, ranks: int) -> None:
    if strategy in ("ulysses", "hybrid") and not _is_supported(strategy, ranks, HEADS[heads][0]):
        with pytest.raises(sp_compile.SpError, match=r"SP40[12]"):
            run(strategy, mask, heads, length, ranks, layout)
    else:
        run(strategy, mask, heads, length, ranks, layout)


def _is_supported(strategy: str, ranks: int, heads: int) -> bool:
    if strategy == "ulysses":
        return heads % ranks == 0
    return any(ranks % u == 0 and heads % u == 0 for u in range(2, ranks))


class Mixed(torch.nn.Module):
    """A layer that sees a window, then one that sees all, as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.near = Decoder(lambda m, q, k, v: _window_of(3, q, k, v))
        self.far = Decoder(lambda m, q, k, v: _window_of(1000, q, k, v))

    def forward(self, ids: Tensor) -> Tensor:
        return self.near(ids) + self.far(ids)


def _window_of(width: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i[:, None] >= i) & (i[:, None] - i < width))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("flops", [1e3, 1e15], ids=["compute counts", "bytes count"])
def test_one_layout_for_layers_that_want_different_ones(flops: float) -> None:
    """`explain` prints the strategy that runs: all candidates are priced in the program's final row order."""
    report = check(seeded(Mixed), tokens(64), sp=4, attention="ring", cost={"flops": flops, "block_keys": 1e-9})
    sent = sorted(e.forward for e in report.exchanges if e.op == "ring_attention")
    rounds = sorted(d.chosen.rounds[0] for d in report.attention)
    assert len({nbytes / count for nbytes, count in zip(sent, rounds, strict=True)}) == 1


FREE = {"flops": 1e30, "memory_bandwidth": 1e30, "all_gather_bandwidth": 1e30}
"""Only the number of collectives counts; the toy has one each way, and any other more."""


def test_a_model_on_the_meta_device_is_planned_with_the_kernels_of_a_gpu() -> None:
    with torch.device("meta"):
        model = Decoder(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)).bfloat16()
        ids = torch.zeros(1, 64, dtype=torch.int64)
    (decision,) = sp_compile.explain(model, ids, sp=2).attention
    assert decision.shape.kernel == "cudnn"


class Biased(Decoder):
    """T5's bias: a learned number per distance and head in `dtype`, combined with masks."""

    def __init__(self, learned: bool, dtype: torch.dtype | None = None, causal: bool = True, dropout: float = 0.0):
        super().__init__(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.mask, dropout))
        self.table = torch.nn.Parameter(torch.empty(64, 4), requires_grad=learned)
        self.dtype, self.causal = dtype, causal

    def forward(self, ids: Tensor) -> Tensor:
        i = torch.arange(ids.shape[1], device=ids.device)
        bias = self.table[(i[:, None] - i).abs()].permute(2, 0, 1)[None]
        bias = bias.masked_fill(i > i[:, None], -torch.inf) if self.causal else bias
        self.mask = bias.to(self.dtype)
        return super().forward(ids)


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize(
    ("learned", "dtype", "more", "kernel"),
    [
        (True, torch.bfloat16, {}, "efficient"),
        (True, torch.bfloat16, {"causal": False}, "efficient"),
        (False, torch.bfloat16, {}, "fused"),
        (True, torch.float32, {}, "efficient"),
        (False, torch.float32, {}, "efficient"),
        (True, torch.bfloat16, {"dropout": 0.1}, "dense"),
    ],
)
def test_the_kernel_of_a_bias_is_planned(learned: bool, dtype: torch.dtype, more: dict[str, Any], kernel: str) -> None:
    with torch.device("meta"):
        model = Biased(learned, dtype, **more).to(dtype)
        ids = torch.zeros(1, 64, dtype=torch.int64)
    (decision,) = sp_compile.explain(model, ids, sp=2).attention
    assert decision.shape.kernel == kernel


class UnderAutocast(Biased):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(ids)


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("learned", "kernel"), [(True, "efficient"), (False, "fused")])
def test_autocast_is_planned(learned: bool, kernel: str) -> None:
    """A bias is cast with the queries, so half the bytes move."""
    with torch.device("meta"):
        model, ids = UnderAutocast(learned), torch.zeros(1, 64, dtype=torch.int64)
    (decision,) = sp_compile.explain(model, ids, sp=2).attention
    assert (decision.shape.kernel, decision.shape.element_size) == (kernel, 2)


def test_auto_considers_a_strategy_from_outside() -> None:
    report = check(seeded(Decoder), tokens(16), sp=4, cost=FREE)
    (decision,) = report.attention
    assert decision.chosen.kind == "toy"
    assert {c.kind for c in decision.candidates} == set(STRATEGIES)
    assert report.find_notes(NoteKind.REWRITTEN, subject="toy")
    (sent,) = [e for e in report.exchanges if e.op == "toy_attention"]
    shards = 3 * 2 * 4 * 4 * 6 * 8  # q, k, v: (batch 2, 4 heads, 4 positions, 6) of float64
    assert sent.forward == sent.backward == 3 * shards
    assert "toy" in str(decision)
    assert "toy_attention" in str(report)


def test_a_strategy_is_an_option_while_it_is_registered() -> None:
    with pytest.raises(SpError, match=r"SP103: attention: .*'toy', .*'toys'"):
        SPConfig(attention="toys")
    with pytest.raises(SpError, match=r"SP901: .*'toy'"):
        toy_strategy.registered()
