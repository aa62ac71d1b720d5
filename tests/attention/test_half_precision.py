"""bfloat16 under every strategy: at most twice the single-device error, both against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capturing import lowered
from support.models import Decoder, rotated, seeded, tokens
from torch import Tensor, nn
from torch.fx import GraphModule

from sp_compile.lowering.comm.simulate import run_ranks

LENGTH = 96


def attend(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = rotated(q).to(v.dtype), rotated(k).to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def places(q: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(q.shape[2])
    return at[:, None], at


def masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    q, k = rotated(q).to(v.dtype), rotated(k).to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, allowed)


def window(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    row, column = places(q)
    return masked(q, k, v, (column <= row) & (row - column < 20))


def padding(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    row, column = places(q)
    return masked(q, k, v, (column <= row) & (column >= 5))


def documents(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    row, column = places(q)
    number = torch.bucketize(column, torch.tensor([7, 8, 50]), right=True)
    return masked(q, k, v, (column <= row) & (number[:, None] == number))


def causal_scores(q: Tensor, k: Tensor, cap: float | None) -> Tensor:
    """Return scores in float32 as transformers computes them, with finfo.min for keys after a query."""
    row, column = places(q)
    scores = rotated(q).float() @ rotated(k).float().mT * q.shape[-1] ** -0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return scores.masked_fill(column > row, torch.finfo(scores.dtype).min)


def soft_cap(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_scores(q, k, 2.0).softmax(-1).to(v.dtype) @ v


def sinks(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = causal_scores(q, k, None)
    column = torch.linspace(-1, 1, q.shape[1])[:, None, None].expand(*q.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(v.dtype) @ v


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def one_device(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Loss and gradients, float64."""
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    return [loss.detach().double(), *(p.grad.double() for p in model.parameters())]


def on_ranks(model: nn.Module, ids: Tensor, ranks: int, **config: Any) -> list[Tensor]:
    """Return results of the compiled model on simulated ranks (rank 0's)."""
    found: list[Tensor] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        local = lowered(gm, inputs, ranks, **config)

        def call(*args: Any) -> Any:
            def live(rank: int) -> list[Tensor]:
                leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
                loss = local(*leaves)[0]
                by_name = dict(zip(names, torch.autograd.grad(loss, [x for x in leaves if x.requires_grad])))
                return [loss.detach().double(), *(by_name[n].double() for n in order)]

            wanted = [i for i, a in enumerate(args) if a.requires_grad]
            names = [id(args[i]) for i in wanted]
            order = [id(p) for p in model.parameters()]
            found.extend(run_ranks(ranks, live)[0])
            return gm.forward(*args)

        return call

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(ids)
    torch._dynamo.reset()
    return found


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Over the loss and all gradients, relative to each one's size."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("strategy", ["ulysses", "ring", "hybrid", "gather"])
def test_error_is_at_most_twice_the_single_device_error(strategy: str, heads: tuple[int, int]) -> None:
    check(lambda: Decoder(attend, *heads), LENGTH, 4, attention=strategy)


@pytest.mark.sampled(every=46)
@pytest.mark.parametrize("mask", [documents, soft_cap, sinks, window, padding])
@pytest.mark.parametrize("layout", ["auto", "balanced"])
@pytest.mark.parametrize(
    ("n", "strategy"),
    [(4, "hybrid"), *((n, way) for n in (2, 3, 4) for way in ("ring", "gather")), (2, "ulysses"), (4, "ulysses")],
)
def test_of_any_mask(mask: Any, layout: str, n: int, strategy: str) -> None:
    """Any mask, with a length that no number of ranks divides."""
    with_order = {"layout": layout} if layout != "auto" and strategy != "ulysses" else {}
    check(lambda: Decoder(mask, 4, 4), LENGTH + 1, n, attention=strategy, **with_order)


def check(make: Callable[[], Decoder], length: int, ranks: int, **config: Any) -> None:
    exact = seeded(lambda: Loss(make()))
    half = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({k: v.double() for k, v in half.state_dict().items()})
    ids = tokens(length)
    reference = one_device(exact, ids)
    alone = error(one_device(half, ids), reference)
    ours = error(on_ranks(half, ids, ranks, **config), reference)
    assert 0 < ours <= 2 * alone, (ours, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_is_not_rounded(dtype: torch.dtype) -> None:
    """torch adds such a mask in float32; in bfloat16, 300.4 and 301 are both 300."""
    torch.manual_seed(0)
    qkv, mask = [torch.randn(1, 2, 8, 8).to(dtype).requires_grad_() for _ in range(3)], torch.randn(8, 8) + 300
    exact = [x.detach().double().requires_grad_() for x in qkv]
    out = torch.ops.sp.masked_attention(*qkv, [], [], [], "", 0.0, None, False, attn_mask=mask)
    right = F.scaled_dot_product_attention(*exact, attn_mask=mask.double())
    out.sum().backward(), right.sum().backward()
    torch.testing.assert_close(out.double(), right, rtol=0, atol=0.01)
    torch.testing.assert_close([x.grad.double() for x in qkv], [x.grad for x in exact], rtol=0, atol=0.03)
