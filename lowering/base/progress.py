"""Show a progress line on the terminal during long compilations, `explain` and `verify`.

The line appears after `SHOW_AFTER` seconds, on rank 0. At the end another line reports the duration and the number of
graphs that torch found in its caches. There is none if TORCH_LOGS is set. If stderr is no terminal, such as a log file,
one line is written after `LOG_AFTER` seconds, and that of the end.

`with show_progress("verify"):` surrounds a piece of work, in which `set_step("single device")` sets the current step,
the part of the work that runs now. Outside of such a block `set_step` has no effect. While AOTAutograd or Inductor
runs, the line shows the graph that torch compiles: "forward" or "backward".
"""

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

from sp_compile.lowering.torch_compat import count_cache_hits, current_graph_kind

SHOW_AFTER = 3.0  # seconds before anything is shown
LOG_AFTER = 10.0  # seconds before a line is written where stderr is no terminal
UPDATE_INTERVAL = 0.25  # seconds between updates


@dataclass(eq=False)
class ProgressLine:
    """Progress line of one piece of work."""

    title: str  # name of the work
    console: Console  # of stderr
    clock: Callable[[], float] = time.monotonic  # current time in seconds, from any origin
    step: str = "capture"  # current step of the work
    live: Live | None = None  # None until the line is shown on a terminal
    is_shown: bool = False  # True from the first line on
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `live`, which two threads use

    def __post_init__(self) -> None:
        self.started, self.hits_at_start = self.clock(), count_cache_hits()

    @property
    def seconds(self) -> float:
        """Return the seconds since the start of the work."""
        return self.clock() - self.started

    def refresh(self) -> None:
        """Create or update the line after `SHOW_AFTER` seconds; without a terminal, write it once after `LOG_AFTER`."""
        with self.lock:
            is_terminal = self.console.is_terminal
            is_early = self.seconds < (SHOW_AFTER if is_terminal else LOG_AFTER)
            is_logged = self.is_shown and not is_terminal
            if is_early or is_logged:
                return
            self.is_shown = True
            current = current_graph_kind() or self.step  # the graph that torch compiles ("forward"), else the step
            line = f"sp: {self.title}: {current} ({self.seconds:.0f} s)"
            if not is_terminal:
                self._write(f"{line}, continues")
                return
            text = Text(line)
            text.truncate(self.console.width, overflow="ellipsis")
            if self.live is None:
                # Other output of the process is not redirected.
                self.live = Live(
                    console=self.console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self.live.start()
            self.live.update(text, refresh=True)

    def end(self) -> None:
        """Remove the line and report the duration, if the line was shown."""
        with self.lock:
            if self.live is not None:
                self.live.stop()
            if self.is_shown:
                hits = count_cache_hits() - self.hits_at_start
                self._write(f"sp: {self.title}: took {self.seconds:.0f} s, {hits} graphs were in torch's caches")

    def _write(self, line: str) -> None:
        """Write a line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


# Progress line of this process, at most one: nested work counts as a step of the outer one.
_active_lines: list[ProgressLine] = []


def set_step(step: str) -> None:
    """Set the current step of the running work, if any, which the next update of the line shows."""
    for line in _active_lines:
        line.step = step


@contextmanager
def show_progress(title: str) -> Iterator[None]:
    """Show a progress line for the body of the block if it runs long.

    Shows nothing inside another such block, or if this process may not show a line.

    Args:
        title: Name of the work.
    """
    line = _start_line(title)
    if line is None:
        yield
        return
    ended = threading.Event()
    updates = threading.Thread(target=_update_line, args=(line, ended), name="sp_compile progress", daemon=True)
    updates.start()
    try:
        yield
    finally:
        ended.set()
        updates.join()


def show_in_thread(title: str, ended: threading.Event) -> None:
    """Show a progress line in the calling thread until the work of another thread has ended.

    The runtime (`sp_compile/runtime/session.py`) starts such a thread for each compilation, next to one that sends
    heartbeats to the other ranks. Other callers use `show_progress`, which starts its own thread.

    Args:
        title: Name of the work.
        ended: Event that is set at the end of the work.
    """
    line = _start_line(title)
    if line is not None:
        _update_line(line, ended)


def _start_line(title: str) -> ProgressLine | None:
    """Add a line to `_active_lines` and return it, or None inside of other work or where no line may be shown."""
    console = Console(stderr=True)
    if _active_lines or not _may_show(console):
        return None
    _active_lines.append(ProgressLine(title, console))
    return _active_lines[-1]


def _update_line(line: ProgressLine, ended: threading.Event) -> None:
    """Refresh the line until the event is set, then remove it from `_active_lines` and from the terminal."""
    try:
        while not ended.wait(UPDATE_INTERVAL):
            line.refresh()
    finally:
        _active_lines.remove(line)
        line.end()


def _may_show(console: Console) -> bool:
    """Return True if this process may show a line: rank 0, in a log file or on a terminal without TORCH_LOGS."""
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    else:
        rank = int(os.environ.get("RANK", "0"))  # set by torchrun before the process group exists
    logs_would_mix = console.is_terminal and bool(os.environ.get("TORCH_LOGS"))
    return rank == 0 and not logs_would_mix
