"""One line on the terminal while something takes long: what a compilation, `explain` or `verify` is at, and since when.

It comes after `SHOW_AFTER` seconds, on rank 0, and goes at the end, when a line says how long it took and what torch
had
in its caches. There is none where stderr is no terminal, or where TORCH_LOGS asks for torch's own words.

`with show_progress("verify"):` is a piece of work, in which `set_step("one device")` says what comes now; outside of
one it says
nothing. Inside of AOTAutograd and Inductor, which take the longest, the line has the graph that torch compiles:
"forward" or "backward".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sp_compile.lowering.torch_compat import count_cache_hits, current_partition

SHOW_AFTER = 3.0  # seconds before anything is shown
UPDATE_INTERVAL = 0.25  # seconds between looks


@dataclass(eq=False)
class ProgressLine:
    """The line of one piece of work. clock: seconds, from any start. step: the current one."""

    title: str
    console: Console
    clock: Callable[[], float] = time.monotonic
    step: str = "capture"
    live: Live | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.begun, self.hits = self.clock(), count_cache_hits()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self.clock() - self.begun

    def refresh(self) -> None:
        """Show what it is at now, once it has taken long enough."""
        with self.lock:
            if self.seconds < SHOW_AFTER:
                return
            words = Text(f"sp: {self.title}: {current_partition() or self.step} ({self.seconds:.0f} s)")
            words.truncate(self.console.width, overflow="ellipsis")
            if self.live is None:
                # Whatever else is written meanwhile is left alone: it is not ours to lead it elsewhere.
                self.live = Live(
                    console=self.console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self.live.start()
            self.live.update(words, refresh=True)

    def end(self) -> None:
        """Take it away and say what it took, if it was shown."""
        with self.lock:
            if self.live is not None:
                self.live.stop()
                hits = count_cache_hits() - self.hits
                words = f"sp: {self.title}: took {self.seconds:.0f} s, {hits} graphs were in torch's caches"
                self.console.print(words, highlight=False, markup=False, soft_wrap=True)


_active_lines: list[ProgressLine] = []
"""What this process is at; one at a time: work inside of other work is a step of that."""


def set_step(step: str) -> None:
    """What the work that is going on is at now, if any is."""
    for line in _active_lines:
        line.step = step


@contextmanager
def show_progress(title: str) -> Iterator[None]:
    """A piece of work, with a line if it takes long and anybody is there to read it."""
    ended, line = threading.Event(), _start_line(title)
    if line is None:
        yield
        return
    watch = threading.Thread(target=_update_line, args=(line, ended), name="sp_compile progress", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def show_in_thread(title: Callable[[], str], ended: threading.Event) -> None:
    """The same in a thread of its own, until the work of another one has ended."""
    line = _start_line(title())
    if line is not None:
        _update_line(line, ended)


def _start_line(title: str) -> ProgressLine | None:
    """None where nobody reads it, or inside of other work."""
    console = Console(stderr=True)
    if _active_lines or not _is_terminal(console):
        return None
    _active_lines.append(ProgressLine(title, console))
    return _active_lines[-1]


def _update_line(line: ProgressLine, ended: threading.Event) -> None:
    try:
        while not ended.wait(UPDATE_INTERVAL):
            line.refresh()
    finally:
        _active_lines.remove(line)
        line.end()


def _is_terminal(console: Console) -> bool:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank == 0 and console.is_terminal and not os.environ.get("TORCH_LOGS")
