"""End the waits of a rank inside of a program after another rank has raised.

A rank that raises publishes that in the store. The other ranks wait in a collective, in C++, until the group's timeout.
A thread of each process checks once a second whether the running program has made progress, and reads the store only if
it has not. If a rank has raised since the last exchange of a group, the thread aborts the collectives of all groups of
the program. The program then raises, as do those of the other ranks of these groups.

A run is one execution of a program, forward or backward, by one thread. Progress is a new run, a new exchange of
messages, or CPU time of the threads of the runs. The involved groups are those of the program that runs or ran last.
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

WATCH_INTERVAL = 1.0  # seconds between checks
IDLE_SHARE = 0.2  # a thread that has used less CPU time than this share of the time between checks is waiting

log = logging.getLogger(__name__)


@contextmanager
def mark_running(groups: Sequence[Ranks]) -> Iterator[None]:
    """Mark that a program over these groups runs in the context, forward or backward.

    Raises:
        SpError: If a group was ended during the run, since the results of its collectives are invalid.
    """
    thread = threading.get_ident()
    channels = [channel for channel in map(channel_of, groups) if channel is not None]
    # A program over several groups enters one context for each, nested; the outermost one is passed all groups.
    is_outermost = thread not in _active_runs
    if is_outermost:
        _active_runs[thread] = next(_run_numbers)
        _recent_groups[:] = groups
        _start_watching()
    try:
        yield
    finally:
        if is_outermost:
            del _active_runs[thread]
    for channel in channels:
        if channel.ended is not None:  # the watch thread has aborted the collectives, so their results are invalid
            channel.check_broken()


_run_numbers = itertools.count(1)
_active_runs: dict[int, int] = {}  # number of the run of each thread that runs a program
_recent_groups: list[Ranks] = []  # the groups of the program that runs, or ran last


def abort_groups(notice: StopNotice, everywhere: bool = False) -> None:
    """Abort the collectives of all groups of the program that runs or ran last, so that their waits raise.

    Args:
        notice: The notice of the rank that has raised.
        everywhere: If True, abort all groups that this rank shares with that rank, as is required if the program still
            waits after its own groups were aborted.
    """
    names, progress = {channel.name for channel in involved_channels()}, _progress_state()
    for group in all_groups():
        if everywhere and _progress_state() != progress:  # the program has continued, so it waits in no further group
            return
        channel = channel_of(ranks_of(group))
        if channel is None:
            continue
        is_shared = everywhere and notice.rank in channel.ranks
        if channel.name in names or is_shared:
            if not channel.broken:  # record the cause, which the program's error will state
                channel.break_group(notice, "ran a program")
            abort_waits(group)


def involved_channels() -> list[ControlChannel]:
    """Return the channels of the groups of the program that runs or ran last, which wait if a rank raises."""
    return [channel for channel in map(channel_of, _recent_groups) if channel is not None]


def find_stop_notice() -> StopNotice | None:
    """Return the notice of a rank that has raised in the running program, from the store, or None."""
    for channel in involved_channels():
        notice = channel.ended or channel.find_raised()
        if notice is not None:
            return notice
    return None


class _Watcher:
    """State of the watch thread between checks.

    Attributes:
        progress: The result of `_progress_state` at the last check.
        cpu_seconds: CPU time of each thread that runs a program, in seconds.
        notice: The notice of the rank that has raised, after the groups of the program were aborted.
    """

    def __init__(self) -> None:
        self.progress: list[tuple[int | str, int]] = []
        self.cpu_seconds: dict[int, float] = {}
        self.notice: StopNotice | None = None

    def poll(self) -> None:
        """Abort the collectives that wait for a rank that has raised; the watch thread calls it once a second."""
        if not self._is_stalled():
            self.notice = None
            return
        if self.notice is not None:  # the last check has aborted the groups of the program
            if _progress_state() == self.progress:  # it still waits, in a collective of another group
                abort_groups(self.notice, everywhere=True)
            return
        self.notice = find_stop_notice()
        if self.notice is not None:
            if not _active_runs:  # outside of programs, as in DDP's reducer, Gloo's error will not name the cause
                log.error(
                    "rank %d raised %s; aborting the collectives that wait for it", self.notice.rank, self.notice.text
                )
            abort_groups(self.notice)

    def _is_stalled(self) -> bool:
        """Return True if a program or its autograd runs and no thread has progressed since the last check.

        The present state is stored for the next check.
        """
        threads = {*_active_runs, *backward_threads()}
        cpu_seconds, progress = {thread: _cpu_seconds(thread) for thread in threads}, _progress_state()
        before = self.cpu_seconds
        # A new thread counts as progress: the default is as if it had used all the time since the last check.
        used = [seconds - before.get(thread, -WATCH_INTERVAL) for thread, seconds in cpu_seconds.items()]
        are_idle = all(seconds < IDLE_SHARE * WATCH_INTERVAL for seconds in used)
        is_same = progress == self.progress
        self.cpu_seconds, self.progress = cpu_seconds, progress
        return bool(threads) and is_same and are_idle


def _progress_state() -> list[tuple[int | str, int]]:
    """Return the runs of this process and the number of exchanges of each group; progress changes them."""
    return [*_active_runs.items(), *((channel.name, channel.exchanges) for channel in involved_channels())]


def _cpu_seconds(thread: int) -> float:
    """Return the CPU time of a thread in seconds."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # no such clock, or the thread has ended
        return 0.0


_watch_threads: list[threading.Thread] = []
_is_ended = threading.Event()


def _start_watching() -> None:
    """Start the watch thread if it is not running."""
    if not (_watch_threads and _watch_threads[0].is_alive()) and not _is_ended.is_set():
        _watch_threads[:] = [threading.Thread(target=_watch_loop, daemon=True, name="sp_compile watch")]
        _watch_threads[0].start()


def _watch_loop() -> None:
    """Check the running program once a second until the process ends, in the watch thread."""
    watcher = _Watcher()
    while not _is_ended.wait(WATCH_INTERVAL):
        try:
            if _recent_groups and dist.is_initialized():
                watcher.poll()
        except Exception as error:  # groups or the store may be destroyed concurrently
            log.debug("the check of the running program failed: %r", error)


def _stop_watching() -> None:
    """Join the watch threads, since a thread that returns from C++ after Python's exit aborts the process."""
    _is_ended.set()
    for thread in _watch_threads:
        thread.join(STORE_TIMEOUT)


atexit.register(_stop_watching)
