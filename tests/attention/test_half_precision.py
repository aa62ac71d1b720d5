"""bfloat16 under every strategy: at most twice the error of one device, both against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capturing import lowered
from support.models import Decoder, rotated, seeded, tokens
from torch import Tensor, nn
from torch.fx import GraphModule

from sp_compile.lowering.simulate import run_ranks

LENGTH = 96


def attend(model: Decoder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = rotated(q).to(v.dtype), rotated(k).to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


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
    """The same of the compiled model, on simulated ranks (rank 0's)."""
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


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("strategy", ["ulysses", "ring", "hybrid", "gather"])
def test_error_is_at_most_twice_that_of_one_device(strategy: str, heads: tuple[int, int]) -> None:
    exact = seeded(lambda: Loss(Decoder(attend, *heads)))
    half = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({k: v.double() for k, v in half.state_dict().items()})
    ids = tokens(LENGTH)
    reference = one_device(exact, ids)
    alone = error(one_device(half, ids), reference)
    ours = error(on_ranks(half, ids, 4, attention=strategy), reference)
    assert 0 < ours <= 2 * alone, (ours, alone)
