"""Attention in every spelling: equal to one device, and with the exchanges that it should take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import BATCH, SIZES, WIDTH, Decoder, causal, check, floats, rotated, seeded, tokens
from torch import Tensor, nn

from sp_compile.backend import lower
from sp_compile.config import SPConfig
from sp_compile.explain import Report
from sp_compile.mesh import Ranks
from sp_compile.simulate import GROUP, run_ranks

Attend = Callable[..., Tensor]
HEADS = [(6, 6, 4), (8, 2, 4), (4, 1, 4), (3, 3, 2), (6, 3, 3)]
"""(query heads, key heads, ranks)."""
LONGEST = 20


class Model(Decoder):
    """attend(model, q, k, v) may read model.padding (B, S), model.positions (B, S) and parameters for biases."""

    def __init__(self, attend: Attend, heads: int = 4, kv_heads: int | None = None, layers: int = 1) -> None:
        super().__init__(attend, heads, kv_heads, layers)
        self.bias = nn.Parameter(torch.randn(1, heads, LONGEST, LONGEST))
        self.distance = nn.Embedding(2 * LONGEST, heads)
        self.sink = nn.Parameter(torch.randn(heads))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1))

    def forward(self, ids: Tensor, padding: Tensor, positions: Tensor) -> Tensor:
        self.padding, self.positions = padding, positions
        return super().forward(ids)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: object) -> Tensor:
    grouped = q.ndim == 4 and q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, **options)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """As in transformers."""
    batch, heads, length, width = x.shape
    return (
        x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)
    )


def expanded(q: Tensor, k: Tensor) -> Tensor:
    return repeat_kv(k, q.shape[1] // k.shape[1])


def before(q: Tensor, window: int = LONGEST) -> Tensor:
    """Bool (S, S): a query sees the last `window` keys."""
    i = torch.arange(q.shape[-2])
    return (i[:, None] >= i) & (i[:, None] - i < window)


def additive(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill(~mask, -1e9)


def documents(m: Model) -> Tensor:
    """Bool (B, 1, S, S): causal within a document; one begins where the position is 0."""
    document = (m.positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None]
    i = torch.arange(document.shape[1])
    return (same & (i[:, None] >= i))[:, None]


def alibi(m: Model, q: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    return (m.slopes[:, None, None] * (i - i[:, None]))[None]


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ expanded(q, k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ expanded(q, v)


def einsum_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, expanded(q, k)).masked_fill(~before(q), -1e9)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), expanded(q, v))


def with_sink(m: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ expanded(q, k).mT
    sink = m.sink[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ expanded(q, v)


def three_dims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, expanded(q, k), expanded(q, v)))
    return sdpa(q, k, v, is_causal=True).unflatten(0, (BATCH, -1))


def learned(m: Model, q: Tensor) -> Tensor:
    return m.bias[:, :, : q.shape[2], : q.shape[2]]


def relative(m: Model, q: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    return m.distance(i[:, None] - i + LONGEST).permute(2, 0, 1)[None]


def complex_rotation(x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angle = torch.outer(torch.arange(x.shape[2]), torch.arange(z.shape[-1])).to(x.dtype)
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


# Attention that costs one exchange before and one after, wherever the ranks divide the heads.
EXCHANGED: dict[str, Attend] = {
    "causal": causal,
    "full": lambda m, q, k, v: sdpa(q, k, v),
    "scale": lambda m, q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3),
    "keywords": lambda m, q, k, v: F.scaled_dot_product_attention(
        query=q, key=expanded(q, k), value=expanded(q, v), is_causal=True
    ),
    "positional": lambda m, q, k, v: F.scaled_dot_product_attention(
        q, expanded(q, k), expanded(q, v), before(q), 0.0, False
    ),
    "mask (S, S)": lambda m, q, k, v: sdpa(q, k, v, before(q)),
    "mask (1, S, S)": lambda m, q, k, v: sdpa(q, k, v, before(q)[None]),
    "mask (1, 1, S, S)": lambda m, q, k, v: sdpa(q, k, v, before(q)[None, None]),
    "mask (B, 1, 1, S)": lambda m, q, k, v: sdpa(q, k, v, m.padding[:, None, None]),
    "mask (1, S)": lambda m, q, k, v: sdpa(q, k, v, m.padding[:1]),
    "mask (B, 1, S, 1) of floats": lambda m, q, k, v: sdpa(q, k, v, additive(m.padding, q)[:, None, :, None]),
    "mask (B, 1, S, S)": lambda m, q, k, v: sdpa(q, k, v, m.padding[:, None, None] & before(q)),
    "mask (B, H, S, S) of floats": lambda m, q, k, v: sdpa(
        q, k, v, additive(m.padding, q)[:, None, None].expand(-1, q.shape[1], q.shape[2], -1)
    ),
    "mask (S, S) of floats": lambda m, q, k, v: sdpa(q, k, v, additive(before(q), q)),
    "left padding": lambda m, q, k, v: sdpa(
        q, k, v, (m.padding.flip(1)[:, None, None] & before(q)) | torch.eye(q.shape[2], dtype=torch.bool)
    ),
    "documents": lambda m, q, k, v: sdpa(q, k, v, documents(m)),
    "sliding window": lambda m, q, k, v: sdpa(q, k, v, before(q, 3)),
    "prefix": lambda m, q, k, v: sdpa(q, k, v, before(q) | (torch.arange(q.shape[2]) < 3)),
    "alibi (1, H, S, S)": lambda m, q, k, v: sdpa(q, k, v, alibi(m, q) + additive(before(q), q)),
    "alibi (H, S, S)": lambda m, q, k, v: sdpa(q, k, v, alibi(m, q)[0]),
    "alibi (1, H, 1, S)": lambda m, q, k, v: sdpa(
        q, k, v, -m.slopes[None, :, None, None] * torch.arange(k.shape[2])
    ),
    "bias (1, H, 1, 1)": lambda m, q, k, v: sdpa(q, k, v, m.sink[None, :, None, None]),
    "learned bias": lambda m, q, k, v: sdpa(q, k, v, learned(m, q)),
    "learned bias of all heads": lambda m, q, k, v: sdpa(q, k, v, learned(m, q)[:, :1]),
    "learned bias and padding": lambda m, q, k, v: sdpa(
        q, k, v, learned(m, q) + additive(m.padding, q)[:, None, None]
    ),
    "relative bias": lambda m, q, k, v: sdpa(q, k, v, relative(m, q)),
    "repeat_kv": lambda m, q, k, v: sdpa(q, expanded(q, k), expanded(q, v), is_causal=True),
    "repeat_interleave": lambda m, q, k, v: sdpa(
        q, *(t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v)), is_causal=True
    ),
    "tiled": lambda m, q, k, v: sdpa(q, *(t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))),
    "one tensor": lambda m, q, k, v: sdpa(q, q, q, is_causal=True),
    "three dims": lambda m, q, k, v: three_dims(q, k, v),
    "wider values": lambda m, q, k, v: sdpa(q, k, torch.cat([v, v.sin()], -1))[..., : q.shape[-1]],
    "complex rotation": lambda m, q, k, v: sdpa(complex_rotation(q), complex_rotation(k), v, is_causal=True),
    "normalised": lambda m, q, k, v: sdpa(F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:]), v),
    "values used again": lambda m, q, k, v: sdpa(q, k, v, is_causal=True) + expanded(q, v) + q,
}

# Attention that is exact, by whatever exchanges.
OTHERS: dict[str, Attend] = {
    "by hand": lambda m, q, k, v: by_hand(q, k, v),
    "by hand, causal": lambda m, q, k, v: by_hand(q, k, v, before(q)),
    "by hand, padding": lambda m, q, k, v: by_hand(q, k, v, before(q) & m.padding[:, None, None]),
    "einsum": lambda m, q, k, v: einsum_by_hand(q, k, v),
    "sink": with_sink,
    "linear": lambda m, q, k, v: q.softmax(-1) @ (expanded(q, k).softmax(-2).mT @ expanded(q, v)),
    "bias of the states": lambda m, q, k, v: sdpa(
        q, k, v, q.mean((1, 3))[:, None, :, None] * k.mean((1, 3))[:, None, None]
    ),
    "one key head, broadcast": lambda m, q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
    "values minus their mean": lambda m, q, k, v: sdpa(q, k, v - v.mean((1, 2), keepdim=True)),
    "learned keys in front": lambda m, q, k, v: sdpa(
        q,
        *(
            torch.cat([m.bias[:, : t.shape[1], :2, : t.shape[3]].expand(BATCH, -1, -1, -1), t], 2)
            for t in (k, v)
        ),
    ),
    "last query": lambda m, q, k, v: sdpa(q[:, :, -1:], k, v).expand_as(q),
    "learned queries": lambda m, q, k, v: (
        sdpa(m.bias[:, :, :3, : q.shape[3]].expand(BATCH, -1, -1, -1), k, v)
        .mean(2, keepdim=True)
        .expand_as(q)
    ),
}


def run(
    attend: Attend, ranks: int, length: int, heads: int = 4, kv_heads: int | None = None, **config
) -> Report:
    model = seeded(lambda: Model(attend, heads, kv_heads, config.pop("layers", 1)))
    padding = torch.arange(length) < torch.tensor([[max(1, length - 3)], [length]])
    positions = torch.stack([torch.arange(length) % max(length // 2, 1), torch.arange(length) % 5])
    return check(model, tokens(length), padding, positions, sp=ranks, **config)


def spread(table: dict[str, Attend]) -> list[object]:
    pairs = zip(table.items(), itertools.cycle(SIZES))
    return [pytest.param(attend, *size, id=name) for (name, attend), size in pairs]


@pytest.mark.parametrize("attend", EXCHANGED.values(), ids=EXCHANGED)
def test_one_exchange_there_and_one_back(attend: Attend) -> None:
    report = run(attend, 2, 17, heads=4, kv_heads=2, attention="ulysses")
    assert report.count("all_to_all") == 2
    assert report.count("unshard") == 1, "the logits only"
    assert report.count("all_gather") == 0
    assert not report.fallbacks


@pytest.mark.parametrize(("attend", "ranks", "length"), spread(OTHERS))
def test_other_attention(attend: Attend, ranks: int, length: int) -> None:
    run(attend, ranks, length)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), HEADS)
@pytest.mark.parametrize("name", ["repeat_kv", "alibi (1, H, S, S)"])
def test_any_number_of_heads(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    run(EXCHANGED[name], ranks, 13, heads, kv_heads)


@pytest.mark.parametrize("name", ["causal", "full", "documents", "learned bias", "repeat_kv"])
def test_attention_gather(name: str) -> None:
    report = run(EXCHANGED[name], 3, 13, heads=6, kv_heads=3, attention="gather")
    assert report.count("gathered_attention") == 1
    assert report.count("all_to_all") == report.count("all_gather") == 0
    assert not report.fallbacks


@pytest.mark.parametrize("name", ["causal", "repeat_kv", "repeat_interleave"])
def test_only_the_key_heads_are_sent(name: str) -> None:
    """Bytes of the exchange there and back: (n - 1) / n of a rank's q, k, v and of its out."""
    ranks, length, heads, kv_heads = 2, 16, 4, 2
    report = run(EXCHANGED[name], ranks, length, heads, kv_heads)
    row = BATCH * (length // ranks) * (WIDTH // heads) * 8
    there, back = (e for e in report.exchanges if e.op == "all_to_all")
    assert there.forward == there.backward == (heads + 2 * kv_heads) * row * (ranks - 1) // ranks
    assert back.forward == back.backward == heads * row * (ranks - 1) // ranks


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


@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (4, 17)])
def test_returned_keys_and_values(ranks: int, length: int) -> None:
    check(seeded(lambda: Cached(kv_heads=2)), tokens(length), sp=ranks)


class LaidOut(Decoder):
    """Keeps (B, S, H, D) around the call and permutes inside."""

    def forward(self, ids: Tensor) -> Tensor:
        layer, x = self.layers[0], self.embed(ids)
        q, k, v = (
            f(x).unflatten(-1, (-1, layer.head_dim)).permute(0, 2, 1, 3) for f in (layer.q, layer.k, layer.v)
        )
        return layer.o(sdpa(q, k, v, is_causal=True).permute(0, 2, 1, 3).flatten(2))


def test_batch_sequence_heads_layout() -> None:
    assert check(seeded(lambda: LaidOut(kv_heads=2)), tokens(16), sp=2).count("all_to_all") == 2


class Cross(nn.Module):
    """A decoder of one length attends to an encoder of another."""

    def __init__(self, encode: bool) -> None:
        super().__init__()
        self.encoder = (
            nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True) if encode else nn.Identity()
        )
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.decoder(x, self.encoder(memory), tgt_mask=mask)


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
    "multihead, padding, weights": (
        _multihead(batch_first=True),
        lambda f, x, p: f(x, x, x, key_padding_mask=~p),
    ),
    "multihead, sequence first": (
        _multihead(),
        lambda f, x, p: f(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True),
        lambda f, x, p: f(x, src_key_padding_mask=~p),
    ),
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (3, 13)])
def test_modules_of_torch(name: str, ranks: int, length: int) -> None:
    padding = torch.arange(length) < torch.tensor([[length - 3], [length]])
    check(
        seeded(lambda: Stock(*STOCK[name])), floats(BATCH, length, WIDTH).requires_grad_(), padding, sp=ranks
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (3, 5)])
def test_queries_keys_and_values_as_inputs(is_causal: bool, ranks: int, length: int) -> None:
    q, k, v = (floats(BATCH, 4, length, 3, seed=i).requires_grad_() for i in range(3))
    check(lambda q, k, v: sdpa(q, k, v, is_causal=is_causal), q, k, v, sp=ranks)


def test_dropout_differs_between_heads_and_keeps_the_mean() -> None:
    """One head a rank, each with its own draws; every rank returns the same whole result."""
    length, ranks = 64, 4

    def model(x: Tensor) -> Tensor:
        q = (x * 0).expand(1, ranks, length, 1)
        return F.scaled_dot_product_attention(q, q, q + x.exp() / x.exp(), dropout_p=0.5)

    found: list[Tensor] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        local, _ = lower(gm, inputs, SPConfig(), Ranks(ranks, GROUP))

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
