"""Compiled, on real ranks: loss and gradients of a decoder with MLPs in tiles equal a single device's."""

from __future__ import annotations

import pytest
import torch
from support.parity import Decoder, sp, text
from support.ranks import Ranks, mesh

SEQ = 21


def step(tiles: int | str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Decoder(layers=1, tie=True).double()
    loss = sp(model, mesh=mesh(), tiles=tiles)(*text(SEQ))
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.as_users_run(n=2)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_decoder(ranks: Ranks, n: int) -> None:
    torch.manual_seed(0)
    model = Decoder(layers=1, tie=True).double()
    loss = model(*text(SEQ))
    loss.backward()
    for found, gradients in ranks.run(n, step, 3):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-9, atol=0)
        torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=1e-9, atol=1e-12)
