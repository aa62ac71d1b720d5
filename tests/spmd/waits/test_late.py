"""A rank that does not arrive in an exchange: the ranks that wait log one line, long before the timeout."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parity import sp
from support.ranks import Ranks
from torch import Tensor, nn

from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.runtime import session
from sp_compile.runtime.agreement import all_gather_object
from sp_compile.runtime.control import channel, waits

LATE = 1.5  # seconds after which a wait is logged here
SLEEP = 3.5  # seconds of the rank that is late; waits are checked once a second


def lines_of_a_late_rank(case: str) -> list[str]:
    """Return the lines that this rank logs while rank 2 of three is late.

    In the case "chain" rank 0 waits for rank 1, and rank 1 for rank 2 in another group.
    """
    rank, lines = dist.get_rank(), list[str]()
    wait_for_all = timedelta(seconds=60)
    everyone, first, last = (dist.new_group(x, wait_for_all) for x in ([0, 1, 2], [0, 1], [1, 2]))
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    channel.log.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "LATE_SECONDS", LATE)
        for module in (channel, waits):
            patch.setattr(module, "STORE_DELAY", LATE / 8)
        groups = {0: [first], 1: [last, first], 2: [last]}[rank] if case == "chain" else [everyone]
        for group in groups:
            all_gather_object(ranks_of(group), "declares", "nothing", rank)
        if rank == 2:
            wait_or_compile(groups[0], compiles=case == "compiles")
        for group in groups:
            assert len(all_gather_object(ranks_of(group), "declares", "more", rank)) == group.size()
    channel.log.removeHandler(handler)
    return lines


def wait_or_compile(group: dist.ProcessGroup, compiles: bool) -> None:
    """Sleep; with `compiles`, send heartbeats as during a compilation."""
    end, wire = time.monotonic() + SLEEP, channel.channel_of(ranks_of(group))
    assert wire is not None
    while time.monotonic() < end:
        if compiles:
            wire.send_heartbeat(threading.get_ident())
        time.sleep(0.1)


def test_ranks_that_wait_name_the_late_rank(ranks: Ranks) -> None:
    *found, none = ranks.run(3, lines_of_a_late_rank, "one group")
    assert none == []
    for rank, lines in enumerate(found):
        (line,) = lines
        assert line.startswith("rank 2 ")
        assert f"rank {rank} declares more" in line
        assert "rank 2: declares nothing" in line


def test_a_late_rank_that_waits_in_another_group(ranks: Ranks) -> None:
    (first,), (second,), none = ranks.run(3, lines_of_a_late_rank, "chain")
    assert first.startswith("rank 1 ")
    assert first.count("declares more") == 2  # the operation of rank 0, and that in which rank 1 waits
    assert second.startswith("rank 2 ")
    assert none == []


def test_a_rank_that_compiles_is_not_late(ranks: Ranks) -> None:
    assert ranks.run(3, lines_of_a_late_rank, "compiles") == [[]] * 3


class Sines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).cumsum(1).sin().sum()


def heartbeats_of_a_backward() -> int:
    """Return the number of heartbeats while the first backward compiles, which takes a second."""

    @contextmanager
    def slow_progress(_title: str) -> Iterator[None]:
        time.sleep(1)
        yield

    wire = channel.channel_of(ranks_of(worker.mesh()))
    assert wire is not None
    with pytest.MonkeyPatch.context() as patch:
        loss = sp(Sines(), mesh=worker.mesh(), compiler="aot_eager", cost={})(torch.ones(2, 8, 16))
        patch.setattr(session, "HEARTBEAT_INTERVAL", 0.1)
        patch.setattr(session, "show_progress", slow_progress)
        before = wire.store.add("compiles", 0)
        loss.backward()
        return int(wire.store.add("compiles", 0)) - before


def test_a_rank_that_compiles_a_backward_is_not_late(ranks: Ranks) -> None:
    assert min(ranks.run(2, heartbeats_of_a_backward)) > 2
