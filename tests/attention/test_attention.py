"""Attention in every form: results of a single device, with the expected collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.capturing import lowered
from support.models import BATCH, SIZES, WIDTH, Decoder, causal, check, floats, rotated, seeded, tokens
from support.variants.attention_variants import EXCHANGED, OTHERS, Attend, Model, sdpa
from torch import Tensor, nn

from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.passes.report import Report

HEADS = [(6, 6, 4), (8, 2, 4), (4, 1, 4), (3, 3, 2), (6, 3, 3)]
"""(query heads, key heads, ranks)."""


def run(attend: Attend, ranks: int, length: int, heads: int = 4, kv_heads: int | None = None, **config) -> Report:
    model = seeded(lambda: Model(attend, heads, kv_heads, config.pop("layers", 1)))
    padding = torch.arange(length) < torch.tensor([[max(1, length - 3)], [length]])
    positions = torch.stack([torch.arange(length) % max(length // 2, 1), torch.arange(length) % 5])
    return check(model, tokens(length), padding, positions, sp=ranks, **config)


def spread(table: dict[str, Attend]) -> list[object]:
    pairs = zip(table.items(), itertools.cycle(SIZES))
    return [pytest.param(attend, *size, id=name) for (name, attend), size in pairs]


@pytest.mark.sampled(every=1000)
@pytest.mark.parametrize("attend", EXCHANGED.values(), ids=EXCHANGED)
def test_one_exchange_there_and_one_back(attend: Attend) -> None:
    report = run(attend, 2, 17, heads=4, kv_heads=2, attention="ulysses")
    assert report.count("all_to_all") == 2
    assert report.count("unshard") == 1, "the logits only"
    assert report.count("all_gather") == 0
    assert not report.fallbacks


@pytest.mark.sampled(every=1000)
@pytest.mark.parametrize(("attend", "ranks", "length"), spread(OTHERS))
def test_other_attention(attend: Attend, ranks: int, length: int) -> None:
    run(attend, ranks, length)


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), HEADS)
@pytest.mark.parametrize("name", ["repeat_kv", "alibi (1, H, S, S)"])
def test_any_number_of_heads(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    run(EXCHANGED[name], ranks, 13, heads, kv_heads)


@pytest.mark.slow
@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", ["causal", "full", "documents", "learned bias", "repeat_kv"])
def test_attention_gather(name: str) -> None:
    report = run(EXCHANGED[name], 3, 13, heads=6, kv_heads=3, attention="gather")
    assert report.count("gathered_attention") == 1
    assert report.count("all_to_all") == report.count("all_gather") == 0
    assert not report.fallbacks


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", ["causal", "repeat_kv", "repeat_interleave"])
def test_only_the_key_heads_are_sent(name: str) -> None:
    """Bytes of the exchange there and back: (n - 1) / n of a rank's q, k, v and of its out."""
    ranks, length, heads, kv_heads = 2, 16, 4, 2
    report = run(EXCHANGED[name], ranks, length, heads, kv_heads)
    row = BATCH * (length // ranks) * (WIDTH // heads) * 8
    there, back = (e for e in report.exchanges if e.op == "all_to_all")
    assert there.forward == there.backward == (heads + 2 * kv_heads) * row * (ranks - 1) // ranks
    assert back.forward == back.backward == heads * row * (ranks - 1) // ranks


@pytest.mark.slow
def test_exchanges_of_a_plain_decoder() -> None:
    report = run(causal, 2, 16, layers=3)
    counts = {e.op: report.count(e.op) for e in report.exchanges if e.forward or e.op == "reduce_grad"}
    assert counts == {"all_to_all": 6, "reduce_grad": 1, "unshard": 1}


class Cached(Decoder):
    """Returns the keys and values that its attention read."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layers[0]
        q, k, v = layer.split(layer.before(self.embed(ids)))
        q, k = rotated(q), rotated(k)
        return self.head(layer.merge(sdpa(q, k, v, is_causal=True))), k, v


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (4, 17)])
def test_returned_keys_and_values(ranks: int, length: int) -> None:
    check(seeded(lambda: Cached(kv_heads=2)), tokens(length), sp=ranks)


class LaidOut(Decoder):
    """Keeps (B, S, H, D) around the call and permutes inside."""

    def forward(self, ids: Tensor) -> Tensor:
        layer, x = self.layers[0], self.embed(ids)
        q, k, v = (f(x).unflatten(-1, (-1, layer.head_dim)).permute(0, 2, 1, 3) for f in (layer.q, layer.k, layer.v))
        return layer.o(sdpa(q, k, v, is_causal=True).permute(0, 2, 1, 3).flatten(2))


def test_batch_sequence_heads_layout() -> None:
    assert check(seeded(lambda: LaidOut(kv_heads=2)), tokens(16), sp=2).count("all_to_all") == 2


class Cross(nn.Module):
    """A decoder of one length attends to an encoder of another."""

    def __init__(self, encode: bool) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True) if encode else nn.Identity()
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.decoder(x, self.encoder(memory), tgt_mask=mask)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("encode", [False, True])
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (3, 13)])
def test_cross_attention(encode: bool, ranks: int, length: int) -> None:
    x, memory = floats(BATCH, length, WIDTH).requires_grad_(), floats(BATCH, 11, WIDTH).requires_grad_()
    check(seeded(lambda: Cross(encode)), x, memory, sp=ranks)


class Stock(nn.Module):
    """torch's own modules."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[..., object]) -> None:
        super().__init__()
        self.module, self.call = make(), call

    def forward(self, x: Tensor, padding: Tensor) -> object:
        return self.call(self.module, x, padding)


def _multihead(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(WIDTH, 4, **options)


STOCK = {
    "multihead": (_multihead(batch_first=True), lambda f, x, p: f(x, x, x, need_weights=False)[0]),
    "multihead, padding, weights": (_multihead(batch_first=True), lambda f, x, p: f(x, x, x, key_padding_mask=~p)),
    "multihead, sequence first": (
        _multihead(),
        lambda f, x, p: f(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True),
        lambda f, x, p: f(x, src_key_padding_mask=~p),
    ),
}


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (3, 13)])
def test_modules_of_torch(name: str, ranks: int, length: int) -> None:
    padding = torch.arange(length) < torch.tensor([[length - 3], [length]])
    check(seeded(lambda: Stock(*STOCK[name])), floats(BATCH, length, WIDTH).requires_grad_(), padding, sp=ranks)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (3, 5)])
def test_queries_keys_and_values_as_inputs(is_causal: bool, ranks: int, length: int) -> None:
    q, k, v = (floats(BATCH, 4, length, 3, seed=i).requires_grad_() for i in range(3))
    check(lambda q, k, v: sdpa(q, k, v, is_causal=is_causal), q, k, v, sp=ranks)


def test_dropout_differs_between_heads_and_keeps_the_mean() -> None:
    """Each rank has one head with its own random numbers; every rank returns the same full result."""
    length, ranks = 64, 4

    def model(x: Tensor) -> Tensor:
        q = (x * 0).expand(1, ranks, length, 1)
        return F.scaled_dot_product_attention(q, q, q + x.exp() / x.exp(), dropout_p=0.5)

    found: list[Tensor] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        local = lowered(gm, inputs, ranks)

        def draw(rank: int) -> Tensor:
            torch.manual_seed(rank)  # as `decorrelated` does on real ranks
            return local(*inputs)[0]

        found.extend(run_ranks(ranks, draw))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(floats(1, 1, length, 1).requires_grad_())
    torch._dynamo.reset()
    whole = found[0].detach()
    assert all(torch.equal(whole, other) for other in found)
    kept = whole[0, :, :, 0]
    assert abs(kept.mean().item() - 1) < 0.05
    for a, b in itertools.combinations(range(ranks), 2):
        assert abs(torch.corrcoef(kept[[a, b]])[0, 1].item()) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("attend", [*EXCHANGED.values(), *OTHERS.values()], ids=[*EXCHANGED, *OTHERS])
def test_all_attention_at_every_size(attend: Attend, size: tuple[int, int]) -> None:
    run(attend, *size)
