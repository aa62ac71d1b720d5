"""What may go wrong on one rank of a tensor-parallel model, also under a split sequence, while ranks compile together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from support.fuzz.fault_replicas import impatient_mesh
from support.fuzz.loop import DIM, TIMEOUT, Loop
from support.parallel.parallel_models import Linear, Norm, Split, drawn
from support.parity import VOCAB, build
from torch import Tensor, nn

from sp_compile.runtime import session

GRID = 4
"""Ranks of a grid: two for the sequence by two for each layer."""


class Parallel(nn.Module):
    """Layers split over all ranks, with the inputs of `Subject`; with one rank, without parallelism."""

    def __init__(self, tp: Split) -> None:
        super().__init__()
        self.embed = tp.part(drawn(VOCAB, DIM), None)
        self.norm, self.up, self.down = Norm(tp, DIM, "rms"), Linear(tp, DIM, 12, 0), Linear(tp, 12, DIM, 1)
        self.tp, self.head, self.slope = tp, tp.part(drawn(VOCAB, DIM), None), 1.0

    def forward(self, ids: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, self.embed) + noise
        x = self.mixed(self.norm(x + self.down(self.up(self.tp.f(x)).tanh())))
        x = self.norm(x + self.down(self.up(self.tp.f(x)).mul(self.slope).tanh()))
        return nn.functional.cross_entropy(nn.functional.linear(x, self.head).flatten(0, 1), labels.flatten())

    def mixed(self, x: Tensor) -> Tensor:
        """What tokens have of each other."""
        return x


class Scanned(Parallel):
    """With a sequence that can be split."""

    def mixed(self, x: Tensor) -> Tensor:
        return x.cumsum(1).tanh()


class GridLoop(Loop):
    """Parameters are cut over one axis of the grid."""

    def _part(self, grad: Tensor | None, like: nn.Parameter) -> Tensor | None:
        dim = getattr(like, "cut", None)
        return grad if grad is None or dim is None else grad.chunk(2, dim)[self.rank % 2]


def tensor_parallel(loop: Loop) -> None:
    """In place of a model whose sequence is split. A compiler of one's own has no place for passes on collectives."""
    loop.net = loop.run = build(partial(Parallel, Split(loop.scene.world, loop.rank, dist.group.WORLD)))
    loop.alone = build(partial(Parallel, Split()))
    loop.options["compiler"] = "aot_eager"


def grid(loop: Loop) -> None:
    """A tensor-parallel model whose sequence is split over the other axis."""
    loop.__class__, mesh = GridLoop, impatient_mesh(("sp", "tp"))
    tp = mesh.get_group("tp")
    loop.net = loop.run = build(partial(Scanned, Split(2, dist.get_rank(tp), tp)))
    loop.alone = build(partial(Scanned, Split()))
    loop.options.update(compiler="aot_eager", mesh=mesh, mesh_dim="sp")


Act = Callable[[], Any]


def while_compiling(act: Act) -> Callable[[Loop], None]:
    """Run `act` once, before the first exchange between ranks in a compilation."""

    def begin(loop: Loop) -> None:
        digests = session.input_digests

        def odd(*given: Any) -> Any:
            session.input_digests = digests
            act()
            return digests(*given)

        session.input_digests = odd
        rests(loop, 1, TIMEOUT / 2)

    return begin


def raises(error: type[BaseException]) -> Act:
    def act() -> NoReturn:
        raise error("of the fault")

    return act


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rests(loop: Loop, step: int, seconds: float) -> None:
    """In front of a step, as a rank that has caught an interrupt does not come back at once."""
    draw, slept = loop.batch, []

    def batch(number: int, seed: int | None = None) -> list[Tensor]:
        if number == step and not slept:
            slept.append(seconds)
            time.sleep(seconds)
        return draw(number, seed)

    loop.batch = batch


def comes_late(loop: Loop) -> None:
    """The others are compiling, and give up."""
    rests(loop, 0, 1.5 * TIMEOUT)
