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
from sp_compile.lowering.torch_compat import abort_waits, all_groups, backward_threads

from .channel import ControlChannel, channel_of
from .message import StopNotice
from .store import STORE_TIMEOUT

WATCH_INTERVAL = 1.0  # seconds between looks
IDLE_SECONDS = 0.2  # of the time between two looks: a thread that has computed for less of it waits

log = logging.getLogger(__name__)


@contextmanager
def mark_running(groups: Sequence[Ranks]) -> Iterator[None]:
    """A program that is connected by these groups runs inside, forward or backward.

    Raises SpError if one of them was ended meanwhile: what a collective has given then is no result.
    """
    thread, wires = threading.get_ident(), [wire for wire in map(channel_of, groups) if wire is not None]
    outermost = thread not in _active_runs
    if outermost:
        _active_runs[thread], _recent_groups[:] = next(_run_numbers), groups
        _start_watching()
    try:
        yield
    finally:
        if outermost:
            del _active_runs[thread]
    for wire in wires:
        if wire.ended is not None:
            wire.check_broken()


_run_numbers = itertools.count(1)
_active_runs: dict[int, int] = {}  # of each thread that runs a program the number of the run
_recent_groups: list[Ranks] = []  # the groups of the program that runs, or ran last


def abort_groups(found: StopNotice, everywhere: bool = False) -> None:
    """End the collectives of all groups that the program which runs, or ran last, is connected by.

    found: which rank has raised. everywhere: of all groups that this rank shares with it.
    """
    names, at = {wire.name for wire in involved_groups()}, _progress_state()
    for group in all_groups():
        if everywhere and _progress_state() != at:  # the program has gone on: groups that are made now are none of it
            return
        wire = channel_of(ranks_of(group))
        if wire is not None and (wire.name in names or (everywhere and found.rank in wire.ranks)):
            if not wire.broken:
                wire.break_group(found, "ran a program")
            abort_waits(group)


def involved_groups() -> list[ControlChannel]:
    """Return the groups of the program that runs, or ran last."""
    return [wire for wire in map(channel_of, _recent_groups) if wire is not None]


def raised_rank() -> StopNotice | None:
    """Which rank has raised that the program which runs waits for; None: none that is known."""
    return next(filter(None, (wire.ended or wire.find_raised() for wire in involved_groups())), None)


class _Watcher:
    """What is remembered from look to look. at: the runs, and of each group how many exchanges there were. computed: by
    each thread that runs a program, in seconds. found: who has raised, once that has ended the groups of the program.
    """

    def __init__(self) -> None:
        self.at: list[tuple[int | str, int]] = []
        self.computed: dict[int, float] = {}
        self.found: StopNotice | None = None

    def poll(self) -> None:
        """End what waits for a rank that has raised."""
        if not self._is_stalled():
            self.found = None
            return
        if self.found is not None:
            if _progress_state() == self.at:
                abort_groups(self.found, everywhere=True)
            return
        self.found = raised_rank()
        if self.found is not None:
            if not _active_runs:  # but autograd, as for the sums of a DDP, whose error will be Gloo's own
                log.error("rank %d raised %s; what waits for it is ended", self.found.rank, self.found.text)
            abort_groups(self.found)

    def _is_stalled(self) -> bool:
        """Is a program running, or autograd around one, of which no thread has gone on since the last look?"""
        threads = {*_active_runs, *backward_threads()}
        computed, at = {one: _cpu_seconds(one) for one in threads}, _progress_state()
        before, self.computed = self.computed, computed
        same, self.at = at == self.at, at
        return (
            same
            and bool(threads)
            and all(computed[one] - before.get(one, -WATCH_INTERVAL) < IDLE_SECONDS * WATCH_INTERVAL for one in threads)
        )


def _progress_state() -> list[tuple[int | str, int]]:
    """Where this process is: the runs of its threads, and of each group how many exchanges there were."""
    return [*_active_runs.items(), *((wire.name, wire.exchanges) for wire in involved_groups())]


def _cpu_seconds(thread: int) -> float:
    """For how many seconds a thread has computed."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # there is no such clock; the thread has ended
        return 0.0


_watch_threads: list[threading.Thread] = []
_is_ended = threading.Event()


def _start_watching() -> None:
    """Start to look, unless that has begun."""
    if not (_watch_threads and _watch_threads[0].is_alive()) and not _is_ended.is_set():
        _watch_threads[:] = [threading.Thread(target=_watch_loop, daemon=True, name="sp_compile watch")]
        _watch_threads[0].start()


def _watch_loop() -> None:
    watch = _Watcher()
    while not _is_ended.wait(WATCH_INTERVAL):
        try:
            if _recent_groups and dist.is_initialized():
                watch.poll()
        except Exception as error:  # groups or the store may be destroyed meanwhile
            log.debug("a look at the ranks failed: %r", error)


def _stop_watching() -> None:
    """Wait for a thread in C++: one that comes back from there when Python has ended aborts the process."""
    _is_ended.set()
    for thread in _watch_threads:
        thread.join(STORE_TIMEOUT)


atexit.register(_stop_watching)
