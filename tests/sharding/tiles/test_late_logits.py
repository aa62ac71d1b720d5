"""Logits that a model returns with a tiled loss: computed when they are read, on every rank."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharding.tiles.losses import VOCAB, Model, batch, mean
from support.ranks import Ranks, mesh
from torch import Tensor, nn

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.collectives.deferred import DeferredRows
from sp_compile.lowering.collectives.sharded import Sharded

SEQ, TILES = 13, 3
OPTIONS = {"tiles": TILES, "compiler": "aot_eager", "cost": {}, "outputs": "lazy"}


class Both(Model):
    """The loss, and the capped logits that it is made of."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(mean, tied=tied, bias=not tied)

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            seen.append(torch.tanh(head(h) / 3) * 3)
            return F.cross_entropy(seen[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        self.loss = loss
        return super().forward(ids, weights), seen[0]


def of(loss: Tensor, logits: Tensor) -> Tensor:
    return loss + logits.square().mean()


def on_a_rank(tied: bool) -> bool:
    """Read, unread, cast before it is read: the rows are made once, if ever."""
    model = Both(tied).double()
    alone, made = copy.deepcopy(model), []
    run = torch.compile(model, backend="sp", options={**OPTIONS, "mesh": mesh() if dist.is_initialized() else None})
    plain = DeferredRows.compute
    with mock.patch.object(DeferredRows, "compute", lambda self: made.append(self) or plain(self)):
        for way in ("unread", "read", "cast"):
            model.zero_grad(), alone.zero_grad()
            loss, logits = run(*batch(SEQ))
            right, whole = alone(*batch(SEQ))
            assert isinstance(logits, Sharded)
            assert logits.shape == whole.shape
            assert not made
            if way == "unread":
                loss.backward(), right.backward()
            elif way == "read":
                of(loss, logits).backward(), of(right, whole).backward()
            else:
                torch.testing.assert_close(logits.detach().float().full(), whole.detach().float())
                loss.backward(), right.backward()
            assert len(made) == (way != "unread")
            made.clear()
            torch.testing.assert_close(loss, right, rtol=1e-9, atol=0)
            gradients = [[p.grad for p in one.parameters()] for one in (model, alone)]
            torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    return _after_a_step(run, model)


def _after_a_step(run: nn.Module, model: nn.Module) -> bool:
    """They would be of other weights: an error on every rank, and none where no gradient is wanted."""
    loss, logits = run(*batch(SEQ))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(SpError, match="SP321"):
        logits.sum()
    _, logits = run(*batch(SEQ))
    model.head.weight.data.mul_(1.01)  # which torch counts as no change, as what FSDP gathers into freed weights
    with pytest.raises(SpError, match="SP321"):
        logits.sum()
    with torch.no_grad():
        _, logits = run(*batch(SEQ))
        torch.testing.assert_close(logits.full(), model(*batch(SEQ))[1], rtol=1e-9, atol=1e-12)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_on_ranks(ranks: Ranks, n: int, tied: bool) -> None:
    assert all(ranks.run(n, on_a_rank, tied))


def test_single_device() -> None:
    assert on_a_rank(tied=False)


class Cast(Model):
    """A head in float32 within autocast, whose logits are multiplied in that once more."""

    def __init__(self) -> None:
        super().__init__(mean)
        self.again = nn.Linear(VOCAB, VOCAB)

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                with torch.autocast("cpu", enabled=False):
                    z = head(h)
                seen.append(self.again(z))
            return F.cross_entropy(seen[0][:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())

        self.loss = loss
        return super().forward(ids, weights), seen[0]


def test_each_product_is_made_in_its_autocast() -> None:
    model = Cast()
    loss, logits = torch.compile(model, backend="sp", options=OPTIONS)(*batch(SEQ))
    right, whole = model(*batch(SEQ))
    assert isinstance(logits, Sharded)
    assert logits.dtype == whole.dtype == torch.bfloat16
    torch.testing.assert_close(logits.full(), whole, rtol=0, atol=0)
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=0)


class Turned(Model):
    """Logits that are the absolute values of complex ones."""

    def __init__(self) -> None:
        super().__init__(mean)
        self.turn = nn.Parameter(torch.randn(8, VOCAB, dtype=torch.complex128))

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def loss(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
            seen.append((torch.complex(h, h * 2) @ self.turn).abs() + head(h))
            return F.cross_entropy(seen[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        self.loss = loss
        return super().forward(ids, weights), seen[0]


@pytest.mark.slow
def test_gradients_of_complex_operands() -> None:
    model = Turned().double()
    alone = copy.deepcopy(model)
    loss, logits = torch.compile(model, backend="sp", options=OPTIONS)(*batch(SEQ))
    assert isinstance(logits, Sharded)
    of(loss, logits).backward(), of(*alone(*batch(SEQ))).backward()
    gradients = [[p.grad for p in one.parameters()] for one in (model, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


class Head(nn.Module):
    """The head and the loss only, of hidden rows that are an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def head_on_a_rank() -> bool:
    """Deferred logits of shards of hidden that the caller passes: all their operands are arguments."""
    torch.manual_seed(0)
    model, hidden, labels = Head().double(), torch.randn(2, 12, 8).double(), torch.randint(VOCAB, (2, 12))
    alone = copy.deepcopy(model)
    options = {**OPTIONS, "mesh": mesh(), "inputs": "local", "seq_dims": {"hidden": 1, "labels": 1}}
    run = torch.compile(model, backend="sp", options=options)
    part = [x.chunk(mesh().size(), 1)[mesh().get_local_rank()].clone() for x in (hidden, labels)]
    hidden.requires_grad_(), part[0].requires_grad_()
    (loss, logits), (right, whole) = run(*part), alone(hidden, labels)
    assert isinstance(logits, Sharded)
    of(loss, logits).backward(), of(right, whole).backward()
    torch.testing.assert_close(loss, right, rtol=1e-9, atol=0)
    torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad, rtol=1e-9, atol=1e-12)
    of_part = hidden.grad.chunk(mesh().size(), 1)[mesh().get_local_rank()]
    torch.testing.assert_close(part[0].grad, of_part, rtol=1e-9, atol=1e-12)
    return True


def test_shards_of_hidden_as_arguments(ranks: Ranks) -> None:
    assert all(ranks.run(2, head_on_a_rank))
