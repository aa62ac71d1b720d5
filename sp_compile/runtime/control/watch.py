"""End the waits of a rank inside of a program, once another rank has raised there.

A rank that raises leaves that in the store. The others wait in a collective, in C++, until the group's timeout. A
thread of each process looks once a second whether the program that runs has stood still since its last look, and only
then reads the store. Where a rank has raised since a group's last exchange, it ends the collectives of all groups that
the program is connected by: the program raises, and so do those of the other ranks of these groups.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from sp_compile.lowering.base.ranks import Ranks, ranks_of
from sp_compile.lowering.torch_compat import backward_threads, end_waits, every_group

from .channel import Wire, wire_of
from .message import Stop
from .store import ANSWERS

LOOK = 1.0  # seconds between looks
IDLE = 0.2  # of the time between two looks: a thread that has computed for less of it waits

log = logging.getLogger(__name__)


@contextmanager
def running(groups: Sequence[Ranks]) -> Iterator[None]:
    """A program that is connected by these groups runs inside, forward or backward.

    Raises SpError if one of them was ended meanwhile: what a collective has given then is no result.
    """
    thread, wires = threading.get_ident(), [wire for wire in map(wire_of, groups) if wire is not None]
    outermost = thread not in _running
    if outermost:
        _running[thread], _recent[:] = next(_numbers), groups
        _start()
    try:
        yield
    finally:
        if outermost:
            del _running[thread]
    for wire in wires:
        if wire.ended is not None:
            wire.refuse_broken()


_numbers = itertools.count(1)
_running: dict[int, int] = {}  # of each thread that runs a program the number of the run
_recent: list[Ranks] = []  # the groups of the program that runs, or ran last


def end_groups(found: Stop, everywhere: bool = False) -> None:
    """End the collectives of all groups that the program which runs, or ran last, is connected by.

    found: which rank has raised. everywhere: of all groups that this rank shares with it.
    """
    names, at = {wire.name for wire in involved()}, _place()
    for group in every_group():
        if everywhere and _place() != at:  # the program has gone on: groups that are made now are none of it
            return
        wire = wire_of(ranks_of(group))
        if wire is not None and (wire.name in names or (everywhere and found.rank in wire.ranks)):
            if not wire.broken:
                wire.end(found, "ran a program")
            end_waits(group)


def involved() -> list[Wire]:
    """Return the groups of the program that runs, or ran last."""
    return [wire for wire in map(wire_of, _recent) if wire is not None]


def raised_meanwhile() -> Stop | None:
    """Which rank has raised that the program which runs waits for; None: none that is known."""
    return next(filter(None, (wire.ended or wire.raised_meanwhile() for wire in involved())), None)


class _Watch:
    """What is remembered from look to look. at: the runs, and of each group how many exchanges there were. computed: by
    each thread that runs a program, in seconds. found: who has raised, once that has ended the groups of the program.
    """

    def __init__(self) -> None:
        self.at: list[tuple[int | str, int]] = []
        self.computed: dict[int, float] = {}
        self.found: Stop | None = None

    def look(self) -> None:
        """End what waits for a rank that has raised."""
        if not self._stand_still():
            self.found = None
            return
        if self.found is not None:
            if _place() == self.at:
                end_groups(self.found, everywhere=True)
            return
        self.found = raised_meanwhile()
        if self.found is not None:
            if not _running:  # but autograd, as for the sums of a DDP, whose error will be Gloo's own
                log.error("rank %d raised %s; what waits for it is ended", self.found.rank, self.found.words)
            end_groups(self.found)

    def _stand_still(self) -> bool:
        """Is a program running, or autograd around one, of which no thread has gone on since the last look?"""
        threads = {*_running, *backward_threads()}
        computed, at = {one: _computed(one) for one in threads}, _place()
        before, self.computed = self.computed, computed
        same, self.at = at == self.at, at
        return same and bool(threads) and all(computed[one] - before.get(one, -LOOK) < IDLE * LOOK for one in threads)


def _place() -> list[tuple[int | str, int]]:
    """Where this process is: the runs of its threads, and of each group how many exchanges there were."""
    return [*_running.items(), *((wire.name, wire.talks) for wire in involved())]


def _computed(thread: int) -> float:
    """For how many seconds a thread has computed."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # there is no such clock; the thread has ended
        return 0.0


_threads: list[threading.Thread] = []
_ended = threading.Event()


def _start() -> None:
    """Start to look, unless that has begun."""
    if not (_threads and _threads[0].is_alive()) and not _ended.is_set():
        _threads[:] = [threading.Thread(target=_watch, daemon=True, name="sp_compile watch")]
        _threads[0].start()


def _watch() -> None:
    watch = _Watch()
    while not _ended.wait(LOOK):
        try:
            if _recent and dist.is_initialized():
                watch.look()
        except Exception as error:  # groups or the store may be destroyed meanwhile
            log.debug("a look at the ranks failed: %r", error)


def _end() -> None:
    """Wait for a thread in C++: one that comes back from there when Python has ended aborts the process."""
    _ended.set()
    for thread in _threads:
        thread.join(ANSWERS)


atexit.register(_end)
