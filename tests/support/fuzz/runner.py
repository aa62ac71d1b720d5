"""Run cases in processes that may hang or die, divide the time over the sources, and record bad outcomes."""

from __future__ import annotations

import multiprocessing
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from rich.console import Console
from support.fuzz import faults, ledger
from support.fuzz.kinds import after_failure, data_errors, memory, stepped, transforms
from support.fuzz.outcomes import Outcome, Result, table
from support.fuzz.simulated import op_db, programs, tiled_programs
from support.ranks import configure_torch


@dataclass(frozen=True)
class Source:
    """A source. cases: their names for a seed; run: returns a result; share: of the time."""

    cases: Callable[[int], Iterator[str]]
    run: Callable[[str], Result]
    share: float


KINDS = (memory, data_errors, transforms, after_failure)
SOURCES = {
    "programs": Source(programs.cases, programs.run, 3),
    "tiles": Source(tiled_programs.cases, tiled_programs.run, 2),
    "op_db": Source(op_db.cases, op_db.run, 2),
    "faults": Source(faults.cases, faults.run, 2),
    **{name: Source(*source, 3) for name, source in stepped.SOURCES.items()},
    **{name: Source(*source, 2) for kind in KINDS for name, source in kind.SOURCES.items()},
}
COMMAND = "PYTHONPATH=tests:benchmarks python -m support.fuzz --case '{}'"
PATIENCE = 900.0  # seconds for one case, and for making it small
WIDTH = 120  # of a table that goes to a file
LIFE = 1000  # cases of a worker; caches of torch grow with them


def run(name: str) -> Result:
    """One case by its name, in this process."""
    return SOURCES[name.partition(":")[0]].run(name)


def _work(pipe: Connection) -> None:
    """A worker's life: cases in, results out, until the pipe closes."""
    torch.set_num_threads(1)
    configure_torch()
    warnings.simplefilter("ignore")
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        try:
            result = run(name)
        except Exception:
            result = Result(Outcome.RAW, f"the fuzzer itself: {traceback.format_exc()}")
        pipe.send(result)


class Worker:
    """A process and the case that it runs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,))
        self.process.start()
        theirs.close()
        self.name = ""
        self.begun = 0.0
        self.cases = 0

    def start(self, name: str) -> None:
        self.name, self.begun, self.cases = name, time.monotonic(), self.cases + 1
        self.pipe.send(name)

    def result(self) -> Result | None:
        """Return the result of its case, None while it runs. A worker that hung or died cannot be used again."""
        if self.pipe.poll():
            try:
                return self.pipe.recv()
            except EOFError:
                return Result(Outcome.HANG, f"the process ended with {self.process.exitcode}")
        if time.monotonic() - self.begun > PATIENCE:
            return Result(Outcome.HANG, f"no end within {PATIENCE:.0f} s")
        return None

    def close(self) -> None:
        self.pipe.close()
        if self.name:
            self.process.kill()
        self.process.join()


@dataclass
class Fuzzing:
    """One run of the fuzzer."""

    begin: Mapping[str, int]  # number of the first case of each source
    folder: Path  # for programs of bad outcomes and a line for each case
    most: int | None = None  # cases of each source; None: limited by the time only
    ledger: Path | None = None  # file with the counts of outcomes
    seed: int = 0  # of the session
    console: Console = field(default_factory=Console)
    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    spent: Counter[str] = field(default_factory=Counter)
    bad: dict[str, Result] = field(default_factory=dict)  # bad outcomes by case

    def run(self, seconds: float, workers: int) -> Mapping[str, Counter[Outcome]]:
        """Run cases for some seconds; return the counts of outcomes of each source."""
        self.counts = {name: Counter() for name in self.begin}
        self.folder.mkdir(parents=True, exist_ok=True)
        left = {name: self._cases(name, first) for name, first in self.begin.items()}
        crew, end = [Worker() for _ in range(workers)], time.monotonic() + seconds
        while True:
            for i, worker in enumerate(crew):
                crew[i] = self._collect(worker)
                if not crew[i].name and time.monotonic() < end and (name := self._next(left)):
                    crew[i].start(name)
            if not any(worker.name for worker in crew):
                break
            wait([worker.pipe for worker in crew if worker.name], timeout=1)
        for worker in crew:
            worker.close()
        return self.counts

    def _cases(self, source: str, first: int) -> Iterator[str]:
        return islice(SOURCES[source].cases(self.seed), first, None if self.most is None else first + self.most)

    def _next(self, left: dict[str, Iterator[str]]) -> str:
        """A case of the source that has had the least of its share; "" if none has any."""
        while left:
            source = min(left, key=lambda name: self.spent[name] / SOURCES[name].share)
            if name := next(left[source], ""):
                return name
            del left[source]
        return ""

    def _collect(self, worker: Worker) -> Worker:
        """Take down the worker's result, if it has one; the worker, or another in its place."""
        result = worker.result() if worker.name else None
        if result is None:
            return worker
        source = worker.name.partition(":")[0]
        self.spent[source] += time.monotonic() - worker.begun
        self.counts[source][result.outcome] += 1
        if self.ledger is not None:
            number = self.begin[source] + self.counts[source].total() - 1
            ledger.add(ledger.Row.now(source, self.seed, number, result.outcome), self.ledger)
        with (self.folder / "cases.log").open("a") as log:
            log.write(f"{time.monotonic() - worker.begun:6.1f} s  {worker.name}: {result}\n")
        if result.outcome.is_bad:
            self._write(worker.name, result)
        if result.outcome is not Outcome.HANG:
            worker.name = ""
        if worker.name or worker.cases == LIFE:
            worker.close()
            return Worker()
        return worker

    def _write(self, name: str, result: Result) -> None:
        self.bad[name] = result
        path = self.folder / (re.sub(r"\W+", "_", name) + ".py")
        alone = f"from support.fuzz.runner import run\n\nprint(run({name!r}))\n"
        path.write_text(result.program or f'"""{result}"""\n\n{alone}')
        self.console.print(f"{name}: {result}\n  {path}", markup=False, highlight=False)


def shown(counts: Mapping[str, Counter[Outcome]], bad: Mapping[str, Result]) -> bool:
    """Print the table, and the command of each bad case; return True if there is none."""
    console = Console(width=max(Console().width, WIDTH))
    console.print(table(counts))
    for name, result in bad.items():
        console.print(f"{result.outcome.value}: {COMMAND.format(name)}", markup=False, highlight=False, soft_wrap=True)
    return not bad
