"""Faults of one of four ranks under DDP: two replicas of two ranks each, which split a sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.fuzz.fault_acts import Acts
from support.fuzz.loop import TIMEOUT, Loop
from support.parity import difference
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sp_compile.integrations.ddp import compile_under_ddp

RANKS, OF_SEQUENCE = 4, 2


class ReplicaLoop(Loop):
    """Each replica has batches of its own, and all have the mean of their gradients. drawn: those of the last step."""

    drawn: list[list[Tensor]]

    def batch(self, step: int, seed: int | None = None) -> list[Tensor]:
        number = step + self.shift if seed is None else seed
        draw = super().batch
        self.drawn = [draw(step, RANKS * number + replica) for replica in range(RANKS // OF_SEQUENCE)]
        return self.drawn[self.rank // OF_SEQUENCE]

    def compare(self, loss: Tensor, given: Any) -> None:
        self.alone.zero_grad()
        losses = [self.alone(*batch) for batch in self.drawn]
        if self.honest and loss.requires_grad:
            torch.stack(losses).mean().backward()
            right = [p.grad for p in self.alone.parameters()]
            largest = max(g.abs().max().item() for g in right if g is not None)
            found = [p.grad for p in self.net.parameters()]
            errors = [difference(a, b, floor=1e-6 * largest) for a, b in zip(found, right, strict=True)]
            self.refuse(max(errors), "gradients")
        if self.honest:
            self.refuse(difference(loss.detach(), losses[self.rank // OF_SEQUENCE].detach()), "loss")


def of_replicas(**ddp: Any) -> Callable[[Loop], None]:
    """ddp: options of DistributedDataParallel."""

    def prepare(loop: Loop) -> None:
        loop.__class__ = ReplicaLoop
        mesh = impatient_mesh()
        compile_under_ddp(loop.net, mesh["sp"], **loop.options)
        loop.run = DistributedDataParallel(loop.net, **ddp)

    return prepare


def impatient_mesh(names: tuple[str, str] = ("dp", "sp")) -> DeviceMesh:
    """Return a mesh of groups with the timeout of the default group, in place of half an hour."""
    grid = torch.arange(RANKS).view(-1, OF_SEQUENCE)
    mine = []
    for rows in (grid.mT, grid):
        groups = [dist.new_group(row, timeout=timedelta(seconds=TIMEOUT)) for row in rows.tolist()]
        mine += [one for one in groups if one != dist.GroupMember.NON_GROUP_MEMBER]
    return DeviceMesh.from_group(mine, "cpu", mesh=grid, mesh_dim_names=names)


def by_replica(act: Acts, goes: Acts) -> Acts:
    """Run `act` on both ranks of the odd rank's replica, and `goes` on the other replica."""

    def both(loop: Loop, step: int) -> None:
        odd = loop.rank // OF_SEQUENCE == loop.scene.odd // OF_SEQUENCE
        (act if odd else goes)(loop, step)

    return both


def trained(loop: Loop, step: int) -> None:
    loop.train(step)


def accumulates(loop: Loop, step: int) -> None:
    """Two batches before the gradients are summed, where the other replica has one."""
    loop.honest = False
    with loop.run.no_sync():
        loop.train(step)
    loop.train(step)


def evaluates_alone(of: Callable[[Loop], Any], mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad) -> Acts:
    """of: the model itself, or the DDP."""

    def act(loop: Loop, step: int) -> None:
        with mode():
            of(loop)(*loop.batch(step))
        loop.train(step)

    return act


def joins(loop: Loop, step: int) -> None:
    """The odd replica has a batch more than the other, as torch's join lets it have."""
    loop.honest = False
    odd = loop.rank // OF_SEQUENCE == loop.scene.odd // OF_SEQUENCE
    with loop.run.join():
        for _ in range(2 + odd):
            loop.train(step)
