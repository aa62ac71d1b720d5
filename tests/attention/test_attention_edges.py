"""Attention where a rewrite could go wrong without a sound: fills, autocast, windows, heads, second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.capturing import simulating
from support.models import Decoder, check, floats, rotated, seeded, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

sp = torch.ops.sp
LENGTH = 14
WAYS = ["ulysses", "ring", "hybrid", "gather", "auto"]
FILL = torch.finfo(torch.float64).min


def left_padding(x: Tensor) -> Tensor:
    """Additive (2, 1, S, S): causal, and the first 5 keys of the first batch are never attended; rows of nothing."""
    i = torch.arange(x.shape[-2])
    hidden = (i[:, None] < i) | (i < torch.tensor([[5], [0]])[:, None])
    return torch.zeros(2, 1, len(i), len(i), dtype=x.dtype).masked_fill(hidden[:, None], FILL)


def eager(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1]) + left_padding(q)).softmax(-1) @ v


def fused(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=left_padding(q))


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("attention", WAYS)
def test_rows_of_nothing_but_fills(attention: str, ranks: int) -> None:
    """They weight all keys equally, which a log-sum-exp does not record."""
    check(seeded(lambda: Decoder(eager)), tokens(LENGTH), sp=ranks, attention=attention)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("attention", WAYS)
def test_fills_in_a_mask_of_floats(attention: str) -> None:
    """The value only: torch's own gradient of such rows is that of another function."""
    model = seeded(lambda: Decoder(fused)).requires_grad_(False)
    report = check(model, tokens(LENGTH), sp=4, attention=attention)
    taken = {note.label for note in report.notes}
    assert attention not in ("ring", "hybrid") or taken >= {f"not {attention}", "gathered"}


@pytest.mark.parametrize("attention", WAYS)
def test_gradients_of_fills_in_a_learned_bias(attention: str) -> None:
    """Rows of padding are filled, as in conformers. With a bias that requires a gradient, torch's own are right."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
            is_token = torch.arange(x.shape[1]) < 9
            mask = bias.masked_fill(~(is_token[:, None] & is_token), FILL)
            return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

    x, bias = (floats(*shape).requires_grad_() for shape in ((1, LENGTH, 8), (1, 4, LENGTH, LENGTH)))
    check(seeded(Biased), x, bias, sp=4, attention=attention)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("attention", WAYS)
def test_a_sequence_of_no_tokens(attention: str) -> None:
    check(seeded(Decoder), tokens(0), sp=4, attention=attention)


class Autocast(nn.Module):
    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.decoder = Decoder(self.attend, kv_heads=kv_heads)

    def attend(self, model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(
                rotated(q.float()), rotated(k), v, is_causal=True, enable_gqa=True
            ).to(q.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("attention", WAYS)
def test_autocast_around_attention(attention: str) -> None:
    model = seeded(Autocast).float()
    report = sp_compile.verify(model, tokens(LENGTH), sp=4, attention=attention)
    assert report.worst < 0.05


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("attention", ["auto", "ring", "gather"])
def test_a_mask_on_a_window_of_the_sequence(attention: str, ranks: int) -> None:
    bias = floats(LENGTH - 2, LENGTH, seed=5)

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention((x * 2)[:, 2:], x * 3, x.sin(), attn_mask=bias)

    check(Late(), floats(2, LENGTH, 4).requires_grad_(), sp=ranks, attention=attention, seq_dims={"x": 1})


HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "one query head": lambda q, k, v: (q[:, :1], k, v),
    "one key head": lambda q, k, v: (q, k[:, :1], v),
    "one value head": lambda q, k, v: (q, k, v[:, :1]),
    "one key head and value head": lambda q, k, v: (q, k[:, :1], v[:, :1]),
}


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("attention", ["ring", "gather", "auto"])
def test_heads_that_broadcast(attention: str, heads: str) -> None:
    def attend(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*HEADS[heads](q, k, v), is_causal=True)

    check(seeded(lambda: Decoder(attend)), tokens(LENGTH), sp=4, attention=attention)


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {}), (2, {"attention": "ulysses"})])
def test_heads_of_a_symbolic_size(ranks: int, options: dict[str, str]) -> None:
    """A guard fixes the size: 4 * (32 // size) for queries equals 8 * (16 // size) for keys for some sizes only."""

    class OfAnySize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, width) for width in (32, 16, 16))

        def forward(self, x: Tensor, size: int) -> Tensor:
            q, k, v = (f(x).view(1, LENGTH, -1, size).transpose(1, 2) for f in (self.q, self.k, self.v))
            q, k, v = q.repeat(1, 4, 1, 1), k.repeat(1, 8, 1, 1), v.repeat(1, 8, 1, 1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    torch._dynamo.reset()
    model, x = seeded(OfAnySize), floats(1, LENGTH, 8)
    compiled = torch.compile(model, backend=simulating(ranks, [], cost={}, **options), dynamic=True)
    with torch.no_grad():
        for size in (4, 8):
            torch.testing.assert_close(compiled(x, size), model(x, size), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", ["ring", "gathered", "masked"])
def test_second_derivatives_are_refused(op: str) -> None:
    def live(rank: int) -> None:
        x = floats(1, 2, 4, 4).requires_grad_()
        frames = [1, 8, 0, 8], [1, 8, 0, 8], 2, SIMULATED_GROUP, False
        if op == "masked":
            y = sp.masked_attention(x, x, x, [], [], [], "k <= q", 0.0, None, False)
        elif op == "ring":
            y = sp.ring_attention(
                x, x, x, None, [], [], [], [], "", None, 0.0, None, "", [], [], None, False, *frames, 2, "travel"
            )
        else:
            y = sp.gathered_attention(
                x, x, x, None, [], [], [], [], "", None, 0.0, None, "", [], [], None, False, *frames
            )
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    run_ranks(2, live)


@pytest.mark.slow
def test_axes_of_a_mesh_in_the_wrong_order(ranks) -> None:
    errors = ranks.run(4, _ulysses_first)
    assert len(set(errors)) == 1
    assert errors[0].startswith("SP115: mesh: ")
    assert "ulysses" in errors[0]


def _ulysses_first() -> str:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("ulysses", "ring"))
    x = torch.ones(1, 4, 8, 4)
    try:
        sp_compile.hybrid_attention(x, x, x, mesh=mesh)
    except SpError as error:
        return str(error)
    return "no error"


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "heads against data": lambda q, keep: torch.arange(4)[:, None, None] < 3 + keep[:, None, None, :],
    "heads against positions": lambda q, keep: (
        torch.arange(4)[:, None, None] * 2 > torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    ),
}


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("attention", WAYS)
def test_masks_that_differ_between_heads_stay_data(attention: str, mask: str) -> None:
    class Model(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            self.keep = ids % 2
            return super().forward(ids)

    def attend(model: Model, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        eye = torch.eye(LENGTH, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=MASKS[mask](q, model.keep) | eye)

    check(seeded(lambda: Model(attend)), tokens(LENGTH), sp=4, attention=attention)


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("attention", WAYS)
def test_scales_that_are_not_positive(attention: str, scale: float) -> None:
    def attend(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(LENGTH)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=i[:, None] >= i, scale=scale)

    check(seeded(lambda: Decoder(attend)), tokens(LENGTH), sp=4, attention=attention)


@pytest.mark.parametrize("op", [sp_compile.ring_attention, sp_compile.gathered_attention])
def test_functional_refuses_fills(op: Callable[..., Tensor]) -> None:
    x, mask = torch.ones(1, 2, 4, 4), torch.zeros(1, 1, 4, 4)
    mask[..., 1:] = torch.finfo(torch.float32).min
    with pytest.raises(SpError, match="SP455"):
        op(x, x, x, attn_mask=mask, is_causal=True)


def test_rounding_of_small_gradients_in_float32() -> None:
    """A bias of the keys has no gradient but rounding errors, and is not to fail a check."""
    model = seeded(lambda: Decoder(causal_with_bias)).float()
    assert sp_compile.verify(model, tokens(64), sp=4).worst < 1e-4


def causal_with_bias(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k + model.embed.weight[0, 0], v, is_causal=True)
