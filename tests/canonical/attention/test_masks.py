"""Masks computed in the graph: their predicates, and equal attention results."""

from __future__ import annotations

import math
from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support.golden import show
from support.models import Decoder, check, floats, seeded, tokens
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.canonical.canonicalize import Canonicalize

B, H, S, D = 2, 4, 8, 4
Mask = Callable[[Tensor, Tensor], Tensor]
PADDING = torch.arange(S) < torch.tensor([[5], [S]])
POSITIONS = torch.stack([torch.arange(S) % 4, torch.arange(S) % 5])
CAUSAL, NONE, DATA = "k <= q", "", "data"


def i() -> Tensor:
    return torch.arange(S)


def causal() -> Tensor:
    return i()[:, None] >= i()


def additive(mask: Tensor, fill: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, fill)


def document(positions: Tensor) -> Tensor:
    return (positions == 0).cumsum(1)


LOWEST = torch.finfo(torch.float64).min
# name: (mask of padding (B, S) and positions (B, S), what it becomes)
MASKS: dict[str, tuple[Mask, str]] = {
    "causal": (lambda p, x: causal(), CAUSAL),
    "causal, four dims": (lambda p, x: causal()[None, None].expand(B, H, -1, -1), CAUSAL),
    "tril": (lambda p, x: torch.ones(S, S, dtype=torch.bool).tril(), CAUSAL),
    "tril of ints": (lambda p, x: torch.tril(torch.ones(S, S)) != 0, CAUSAL),
    "not triu": (lambda p, x: ~torch.ones(S, S, dtype=torch.bool).triu(1), CAUSAL),
    "triu of -inf": (lambda p, x: torch.full((S, S), -math.inf, dtype=torch.float64).triu(1), CAUSAL),
    "nn.Transformer": (lambda p, x: nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64), CAUSAL),
    "floats of finfo.min": (lambda p, x: additive(causal(), LOWEST), CAUSAL),
    "floats of -1e9": (lambda p, x: (~causal()).double() * -1e9, CAUSAL),
    "where": (lambda p, x: torch.where(i()[:, None] < i(), -math.inf, 0.0).double(), CAUSAL),
    "xor": (lambda p, x: causal() ^ torch.zeros(S, S, dtype=torch.bool), CAUSAL),
    "slice of a longer one": (
        lambda p, x: (torch.arange(20)[:, None] >= torch.arange(20))[None, None, 4 : 4 + S, 4 : 4 + S],
        CAUSAL,
    ),
    "last rows": (lambda p, x: (torch.arange(20)[:, None] >= torch.arange(20))[-S:, -S:], CAUSAL),
    "cumsum of ones": (lambda p, x: (lambda c: c[:, None] >= c)(torch.ones(S, dtype=torch.long).cumsum(0)), CAUSAL),
    "window wider than all": (lambda p, x: causal() & (i()[:, None] - i() < 30), CAUSAL),
    "everything": (lambda p, x: torch.ones(S, S, dtype=torch.bool), NONE),
    "always true": (lambda p, x: (i() < S) & (i()[:, None] >= 0), NONE),
    "window": (lambda p, x: causal() & (i()[:, None] - i() < 3), "(k <= q) & (-k + q < 3)"),
    "both sides": (lambda p, x: (i()[:, None] - i()).abs() <= 2, "Abs(k - q) < 3"),
    "prefix": (lambda p, x: causal() | (i() < 3), "(k <= q) | (k < 3)"),
    "blocks": (lambda p, x: i()[:, None] // 4 == i() // 4, "Eq(floor(q/4), floor(k/4))"),
    "dilated": (lambda p, x: causal() & ((i()[:, None] - i()) % 2 == 0), "(k <= q) & Eq(Mod(-k + q, 2), 0)"),
    "padding": (lambda p, x: p[:, None, None], "Ne(col0, 0)"),
    "padding, causal": (lambda p, x: p[:, None, None] & causal(), "(k <= q) & Ne(col0, 0)"),
    "padding of floats": (lambda p, x: additive(p, -math.inf)[:, None, None].expand(-1, H, S, -1), "Ne(col0, 0)"),
    "padding by index": (
        lambda p, x: p[torch.arange(B)[:, None, None, None], i()] & causal(),
        "(k <= q) & Ne(col0, 0)",
    ),
    "padding, both": (lambda p, x: p[:, None, None] & p[:, None, :, None], "Ne(col0, 0) & Ne(row0, 0)"),
    "left padding and itself": (
        lambda p, x: (p.flip(1)[:, None, None] & causal()) | torch.eye(S, dtype=torch.bool),
        "Eq(q, k) | ((k <= q) & Ne(col0, 0))",
    ),
    "lengths": (lambda p, x: (i() < p.sum(1)[:, None])[:, None, None], "k < col0"),
    "one number": (lambda p, x: (i() < x[0, 3] + 2)[None], "-col0 + k < 2"),
    "documents": (
        lambda p, x: (document(x)[:, None, :, None] == document(x)[:, None, None]) & causal(),
        "Eq(row0, col0) & (k <= q)",
    ),
    "documents of one batch": (
        lambda p, x: document(x)[:1, None, :, None] == document(x)[:1, None, None],
        "Eq(row0, col0)",
    ),
    "keys by keys": (lambda p, x: x[:, None, None] >= x[:, None, :1, None], "col0 <= col1"),
    "joined": (
        lambda p, x: torch.cat([torch.ones(S, 2, dtype=torch.bool), causal()[:, 2:]], 1),
        "(k < 2) | ((k >= 2) & (k <= q))",
    ),
    "a slope": (lambda p, x: (i() - i()[:, None]).double() * 0.1, DATA),
    "of the head": (lambda p, x: causal() & (torch.arange(H)[:, None, None] < 2 + i()), DATA),
    "data of both": (lambda p, x: torch.outer(i(), i()).sin() < 0.5, DATA),
    "predicate and data of both": (lambda p, x: causal() & (torch.outer(i(), i()).sin() < 0.5), DATA),
    "finite fills where all may be filled": (lambda p, x: additive(p, -1e9)[:, None, None], DATA),
    "finite fills where the first row is": (lambda p, x: additive(i()[:, None] > i(), LOWEST), DATA),
    "fills that leave some weight": (lambda p, x: additive(causal(), -20.0), DATA),
}


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor, positions: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask(padding, positions))


def inputs() -> tuple[Tensor, ...]:
    return *(floats(B, H, S, D, seed=seed) for seed in range(3)), PADDING, POSITIONS


def captured(mask: Mask, **options: object) -> torch.fx.GraphModule:
    return sp_compile.capture_export(torch.export.export(Attention(mask), inputs(), **options))


def text(gm: torch.fx.GraphModule) -> str:
    """Return the mask text of the graph's attention."""
    (node,) = (n for n in gm.graph.nodes if "attention" in str(n.target))
    if node.target is torch.ops.sp.masked_attention.default:
        return str(node.args[6])
    return CAUSAL if node.kwargs.get("is_causal") else NONE if node.args[3] is None else DATA


def squares(gm: torch.fx.GraphModule) -> list[str]:
    """Values as large as the mask."""
    values = ((n.name, n.meta.get("val")) for n in gm.graph.nodes)
    return [name for name, v in values if isinstance(v, Tensor) and list(v.shape[-2:]) == [S, S]]


def grads(run: Callable[..., Tensor]) -> list[Tensor]:
    q, k, v, *rest = (t.clone().requires_grad_(t.is_floating_point()) for t in inputs())
    out = run(q, k, v, *rest)
    return [out, *torch.autograd.grad((out.sin() * floats(*out.shape, seed=9)).sum(), (q, k, v))]


# masks with values that torch rounds or wraps around, or that are not constant in the rows that are not read
ROUNDED: dict[str, tuple[Mask, str]] = {
    "cumsum of a part": (lambda p, x: (torch.arange(S + 3) >= 3).cumsum(0)[3:, None] > i(), "k < row0"),
    "last row of a cumsum": (lambda p, x: i()[None] < (i() < 5).cumsum(0)[-1], "k < col0"),
    "uint8 that wraps": (lambda p, x: causal().to(torch.uint8) - 1 > 0, DATA),
    "uint8 and a large number": (lambda p, x: causal().to(torch.uint8) >= 256, DATA),
    "int32 that wraps": (lambda p, x: i().int()[:, None] * 2**29 >= i().int() * 2**29, "col0 <= row0"),
    "float32 that rounds": (lambda p, x: i()[:, None].float() * 4194303 > i().float() * 4194303 - 1, DATA),
    "bfloat16 that rounds": (
        lambda p, x: (i()[:, None] + 256 > torch.full((S,), 256.0, dtype=torch.bfloat16)) | (i()[:, None] == i()),
        DATA,
    ),
    "fraction that rounds": (lambda p, x: i()[None] <= 2.9999999999, "k < 4"),
    "uint8 data": (
        lambda p, x: (lambda t: t[:, None, :, None] - t[:, None, None] < 2)((x + 250).to(torch.uint8).long()),
        "-col0 + row0 < 2",
    ),
    "powers": (lambda p, x: (i() * i())[:, None] + 1 > i(), DATA),
}


def canonical_graph(mask: Callable[..., Tensor], expected: str) -> torch.fx.GraphModule:
    """Return the canonical graph of attention with a mask, whose text must be as expected."""
    gm = captured(mask)
    Canonicalize()(gm)
    assert text(gm) == expected
    return gm


@pytest.mark.parametrize("name", ROUNDED)
def test_mask_of_rounded_values(name: str) -> None:
    mask, expected = ROUNDED[name]
    gm = canonical_graph(mask, expected)
    torch.testing.assert_close(gm(*inputs()), Attention(mask)(*inputs()), rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    mask, expected = MASKS[name]
    gm = canonical_graph(mask, expected)
    assert expected == DATA or not squares(gm)
    torch.testing.assert_close(grads(gm), grads(Attention(mask)), rtol=1e-12, atol=1e-12)


DYNAMIC: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "causal": (lambda p: torch.ones(p.shape[1], p.shape[1], dtype=torch.bool).tril(), CAUSAL),
    "everything": (lambda p: (torch.arange(p.shape[1]) < p.shape[1])[None], NONE),
    "padding": (lambda p: p[:, None, None], "Ne(col0, 0)"),
    "first half": (lambda p: (torch.arange(p.shape[1]) < p.shape[1] // 2)[None], "k < n0"),
    "window of a third": (
        lambda p: torch.arange(p.shape[1])[:, None] - torch.arange(p.shape[1]) < p.shape[1] // 3 + 1,
        "-k + q < n0",
    ),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_mask_of_dynamic_length(name: str) -> None:
    mask, expected = DYNAMIC[name]
    length = torch.export.Dim("length", min=4, max=64)
    dims = [{2: length}] * 3 + [{1: length}] * 2
    gm = captured(lambda p, x: mask(p), dynamic_shapes=dims)
    Canonicalize()(gm)
    assert text(gm) == expected
    for size in (8, 11):
        q, k, v = (floats(B, H, size, D, seed=seed) for seed in range(3))
        padding = torch.arange(size) < torch.tensor([[size - 3], [size]])
        expected_out = F.scaled_dot_product_attention(q, k, v, mask(padding))
        torch.testing.assert_close(gm(q, k, v, padding, padding.long()), expected_out)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [(0, CAUSAL), (4, "k - q < 5"), (-2, "-k + q >= 2")],
    ids=["top left", "bottom right", "late"],
)
def test_fewer_queries_than_keys(shift: int, expected: str) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            mask = torch.ones(S, S + 4, dtype=torch.bool).tril(shift)
            return F.scaled_dot_product_attention(q, k, k, mask)

    q, k = floats(B, H, S, D), floats(B, H, S + 4, D)
    gm = sp_compile.capture_export(torch.export.export(Model(), (q, k)))
    Canonicalize()(gm)
    assert text(gm) == expected
    torch.testing.assert_close(gm(q, k), Model()(q, k), rtol=1e-12, atol=1e-12)


def padded_without_heads(m: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B * H, S, D) with a mask (B * H, 1, S) that differs from batch to batch."""
    mask = (torch.arange(q.shape[2]) < m.lengths[:, None])[:, None].repeat_interleave(q.shape[1], 0)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).unflatten(0, (B, -1))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("attention", ["ulysses", "gather"])
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (4, 13)])
def test_vectors_of_three_dims_follow_their_heads(attention: str, ranks: int, length: int) -> None:
    model = seeded(lambda: Decoder(padded_without_heads))
    model.lengths = torch.tensor([length, length - 3])
    check(model, tokens(length), sp=ranks, attention=attention)


def at_most_a_fraction(distance: Tensor) -> Tensor:
    return (distance >= 0) & (distance <= 2.5)


def below_a_fraction(distance: Tensor) -> Tensor:
    return (distance > -0.5) & (distance < 2.5)


def halves(distance: Tensor) -> Tensor:
    return (distance * 0.5 >= -0.25) & (distance * 0.5 != 1.5)


@pytest.mark.parametrize("mask", [at_most_a_fraction, below_a_fraction, halves])
def test_positions_are_compared_with_fractions(mask: Callable[[Tensor], Tensor]) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            positions, q = torch.arange(x.shape[1]), x.unsqueeze(1)
            keep = mask(positions[:, None] - positions)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=keep).squeeze(1)

    check(Masked(), floats(2, 9, 8), sp=3)


def cast_constants(causal: Tensor) -> Tensor:
    return torch.where(causal, 256, 257).to(torch.bfloat16) == 256


def add_constants(causal: Tensor) -> Tensor:
    return torch.where(causal, 256, 255).to(torch.bfloat16) + 1 == 256


def overflowing_constants(causal: Tensor) -> Tensor:
    return torch.where(causal, 0, -100_000).to(torch.float16) >= -100_000


def compare_constants(causal: Tensor) -> Tensor:
    return torch.where(causal, 256, 0).to(torch.bfloat16) == 257


@pytest.mark.parametrize("mask", [cast_constants, add_constants, overflowing_constants, compare_constants])
def test_constants_are_rounded_to_their_dtype(mask: Callable[[Tensor], Tensor]) -> None:
    """In bfloat16, 257 is 256."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            positions, q = torch.arange(x.shape[1]), x.unsqueeze(1)
            keep = mask(positions[:, None] >= positions)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=keep).squeeze(1)

    check(Masked(), floats(2, 9, 8), sp=3)


class Goldens(expecttest.TestCase):
    def test_window_and_padding(self):
        gm = captured(lambda p, x: (p[:, None, None] & causal()) & (i()[:, None] - i() < 3))
        Canonicalize()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
q: [2, 4, 8, 4] = placeholder
k: [2, 4, 8, 4] = placeholder
v: [2, 4, 8, 4] = placeholder
padding: [2, 8] = placeholder
positions: [2, 8] = placeholder
masked_attention_default: [2, 4, 8, 4] = sp.masked_attention(q, k, v, [], [padding], [], (k <= q) & Ne(col0, 0) & (-k + q < 3), 0.0, None, False)
return (masked_attention_default,)""",
        )

    def test_vectors_are_cut_where_the_mask_reads_them(self):
        def mask(padding: Tensor, positions: Tensor) -> Tensor:
            seen = torch.cat([positions, positions], 1).t().cumsum(0)  # (2 S, B)
            return (seen[S:].t()[:, None, :, None] >= seen[2 : S + 2].t()[:, None, None]) & (i() < seen[3, 1])

        gm = captured(mask)
        Canonicalize()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
q: [2, 4, 8, 4] = placeholder
k: [2, 4, 8, 4] = placeholder
v: [2, 4, 8, 4] = placeholder
padding: [2, 8] = placeholder
positions: [2, 8] = placeholder
cat: [2, 16] = aten.cat([positions, positions], 1)
t: [16, 2] = aten.t(cat)
cumsum: [16, 2] = aten.cumsum(t, 0)
slice_tensor_1: [8, 2] = aten.slice.Tensor(cumsum, 0, 2, 10)
transpose_int_1: [2, 8] = aten.transpose.int(slice_tensor_1, 0, 1)
select_int: [16] = aten.select.int(cumsum, 1, 1)
select_int_1: [] = aten.select.int(select_int, 0, 3)
reshape_default: [1, 1] = aten.reshape(select_int_1, [1, 1])
expand_default: [1, 8] = aten.expand(reshape_default, [1, 8])
slice_tensor: [8, 2] = aten.slice.Tensor(cumsum, 0, 8, 16)
transpose_int: [2, 8] = aten.transpose.int(slice_tensor, 0, 1)
masked_attention_default: [2, 4, 8, 4] = sp.masked_attention(q, k, v, [transpose_int], [expand_default, transpose_int_1], [], (col1 <= row0) & (k < col0), 0.0, None, False)
return (masked_attention_default,)""",
        )
