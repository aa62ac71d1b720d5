"""Inject random faults on real ranks; check the errors of all ranks, their steps, and the group afterwards."""

from __future__ import annotations

import re
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random

from support.fuzz.fault_replicas import RANKS as REPLICAS
from support.fuzz.fault_table import FAULTS, Fault
from support.fuzz.loop import AFTER, STEPS, TIMEOUT, Event, Scene, live
from support.fuzz.outcomes import Outcome, Result
from support.ranks import forkserver

PATIENCE = 240.0  # seconds for all ranks of a case, on a busy machine
BROKEN = "SP623|SP661"
OUT_OF_STEP = "SP60[15]|SP62[12]"
AFTERWARDS = {
    **dict.fromkeys(
        [
            *("SIGKILL", "SIGKILL, tensor-parallel", "SIGTERM", "SIGSTOP", "os._exit"),
            *(name for name in FAULTS if name.startswith("IndexError in ")),
            *("SIGINT while waiting", "MemoryError in forward", "KeyboardInterrupt in forward"),
            *("a weight that changes before backward", "a sum of its own", "a sum of its own, asynchronous"),
            *("a rank that destroys its group", "KeyboardInterrupt while compiling"),
            *(f"KeyboardInterrupt while compiling, {where}" for where in ("tensor-parallel", "grid")),
            *(f"SIGKILL while compiling, {where}" for where in ("tensor-parallel", "grid")),
            *(f"a rank that does not come to compile, {where}" for where in ("tensor-parallel", "grid")),
        ],
        BROKEN,
    ),
    **dict.fromkeys(
        [
            *("a flop counter", "a barrier", "a second thread", "the recompile limit", "torch.func", "the environment"),
            *("a mesh axis that is none", "a mesh that is none", "compiling is disabled", "another backend"),
        ],
        f"{BROKEN}|{OUT_OF_STEP}",
    ),
    **dict.fromkeys(["a later memory budget", "another memory budget"], "activation_memory_budget"),
    "another setting of functorch": "recompute_views",
    "deterministic algorithms": "deterministic algorithms",
    "another default dtype": "SP6(3[34568]|4[02])",
}
"""Faults that persist, end a group or leave ranks at different steps, with the errors that another model over the group
may raise. After all other faults it is right."""
NEXT_CALL = frozenset(
    [
        *("a second backward", "a second backward, tensor-parallel", "two models in another order"),
        *("SIGINT while waiting", "another learning rate", "weight decay", "a hook on a weight", "a sum of its own"),
        *("a step that a scaler skips", "an error in the optimizer", "an interrupt in the optimizer"),
    ]
)
"""Faults after the last exchange of their step: all ranks raise at the next call. The same holds for late faults. For
all others, only the odd rank may raise one step later, since it may have skipped a step."""
Reports = dict[int, list[Event | None]]
"""Events of each rank in order; None at the end if the rank finished."""


def cases(seed: int = 0) -> Iterator[str]:
    """Yield cases without end: every fault once in a random order, then again in other scenes."""
    random = Random(seed)
    while True:
        for fault in random.sample(sorted(FAULTS), len(FAULTS)):
            yield f"faults:{fault}:{random.randrange(10**6)}"


def run(name: str) -> Result:
    _, fault, seed = name.split(":")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        scene = made(fault, int(seed), folder)
        result = judged(scene, FAULTS[fault], lived(scene, FAULTS[fault]))
    return Result(result.outcome, f"{_shown(scene)}: {result.words}")


def made(fault: str, seed: int, folder: str) -> Scene:
    """Return the scene of a seed."""
    random, late = Random(seed), FAULTS[fault].recompiles or FAULTS[fault].late
    world = random.choice([2, 2, 3]) if FAULTS[fault].ranks is None else FAULTS[fault].ranks
    at_first = FAULTS[fault].begins or not (FAULTS[fault].acts or FAULTS[fault].everyone)
    step = 0 if at_first else random.randrange(1 if late else 0, STEPS - 1)
    return Scene(fault, world, random.randrange(world), step, random.random() < 0.5, folder)


def lived(scene: Scene, fault: Fault) -> Reports:
    """Run the ranks of a scene; return their reports."""
    for number in range(2):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            Path(scene.folder, f"port{number}").write_text(str(one.getsockname()[1]))
    context = forkserver()
    pipes, processes = [], []
    for rank in range(scene.world):
        ours, theirs = context.Pipe()
        process = context.Process(target=live, args=(scene, rank, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, fault, scene)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=1)
            process.kill()
            process.join()


def _collect(pipes: list[Connection], fault: Fault, scene: Scene) -> Reports:
    reports: Reports = {rank: [] for rank in range(len(pipes))}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes) if not (fault.ends and rank == scene.odd)}
    deadline = time.monotonic() + PATIENCE
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=1):
            rank = waiting[pipe]
            try:
                reports[rank].append(pipe.recv())
            except (EOFError, ConnectionError):
                del waiting[pipe]
                continue
            if reports[rank][-1] is None:
                del waiting[pipe]
    return reports


def judged(scene: Scene, fault: Fault, reports: Reports) -> Result:
    """Return the outcome of a fault: the worst violation, or the expected one."""
    problems = [
        (outcome, f"rank {rank} {words}")
        for rank in reports
        for outcome, words in _of_rank(scene, fault, rank, reports)
    ]
    for outcome in (Outcome.HANG, Outcome.WRONG, Outcome.RAW):
        found = [words for one, words in problems if one is outcome]
        if found:
            return Result(outcome, "\n".join(found))
    return Result(Outcome.REFUSED if fault.error else Outcome.EXACT)


def _of_rank(scene: Scene, fault: Fault, rank: int, reports: Reports) -> Iterator[tuple[Outcome, str]]:
    """Yield the violations in the reports of one rank."""
    odd = rank == scene.odd
    if fault.ends and odd:
        return
    if None not in reports[rank]:
        yield Outcome.HANG, f"reported only {reports[rank]}"
        return
    events = [event for event in reports[rank] if event is not None]
    for event in events:
        if event.kind in ("wrong", "raw"):
            yield (Outcome.WRONG if event.kind == "wrong" else Outcome.RAW), f"on step {event.step}: {event.words}"
        waited = re.search(r"(?:timed out|exited,) after (\d+) s", event.words)
        if event.kind == "refused" and waited and int(waited[1]) > 2 * TIMEOUT:
            yield Outcome.HANG, f"waited too long, on step {event.step}: {event.words}"
    refusals = [event for event in events if event.kind == "refused" and event.step != AFTER]
    if not fault.error:
        for event in refusals:
            yield Outcome.WRONG, f"raised an unexpected error on step {event.step}: {event.words}"
    elif not refusals and not (fault.unaware and odd) and not any(event.kind in ("raw", "wrong") for event in events):
        yield Outcome.WRONG, f"raised no error: {events}"
    replica = OUT_OF_STEP if fault.ranks == REPLICAS else None  # one replica may raise it a step later
    afterwards = AFTERWARDS.get(scene.fault, replica)
    for event in events:
        if (event.step, event.kind) == (AFTER, "refused") and not re.search(afterwards or "$^", event.words):
            yield Outcome.WRONG, f"raised an error in another model afterwards: {event.words}"
    for event in refusals:
        if event.step > scene.step + (odd or fault.late or scene.fault in NEXT_CALL):
            yield Outcome.WRONG, f"raised the error on step {event.step} only: {event.words}"
        elif not re.search(fault.error, event.words, re.DOTALL):
            yield Outcome.WRONG, f"raised another error: {event.words}"


def _shown(scene: Scene) -> str:
    how = f"step {scene.step}, rank {scene.odd} of {scene.world}"
    return f"{scene.fault}, {how}{', tcp' * scene.tcp}"
