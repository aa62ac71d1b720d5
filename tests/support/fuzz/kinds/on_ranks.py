"""Run a scene on real ranks and on a single device, and compare the values."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from support.fuzz.kinds.scene import Compile, Scene, Values
from support.fuzz.oracle import Run, differences, first_line, is_rounding, listed
from support.fuzz.outcomes import Outcome, Result
from support.ranks import Failure, Ranks, mesh
from support.recording import lowered_programs
from torch import Tensor

LIMIT = {False: 150.0, True: 280.0}  # seconds for a scene, and under Inductor
GRACE = 25.0  # seconds for all ranks to raise after the first error, on a busy machine
LIFE = 150  # scenes of a pool of ranks
TIMED_OUT = ("timed out", "Timed out", "timeout")


@dataclass
class Played:
    """Values of a rank. fallbacks: gathered ops by its report."""

    values: Values
    fallbacks: str


def on_rank(scene: Scene) -> Played:
    """Run a scene on this rank."""
    given = {} if scene.inductor else {"compiler": "aot_eager", "cost": {}}
    options = {**given, **scene.options, "mesh": mesh()}
    with lowered_programs() as programs, _quiet():
        values = scene.play(partial(_compiled, options), scene.inputs())
    notes = [f"{note.label} {note.node}" for program in programs for note in program.report.fallbacks]
    return Played(values, ", ".join(dict.fromkeys(notes)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable logging, because torch logs the errors that it raises."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _compiled(options: dict[str, Any], model: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    more = how.pop("options", {})
    return torch.compile(model, **{"backend": "sp", "options": {**options, **more}, **how})


def compiled_alone(name: str) -> Compile:
    """Return a function that compiles a model for a single device, without our options."""

    def compiled(model: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        how.pop("options", None)
        return torch.compile(model, **{"backend": name, **how})

    return compiled


def eager(model: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return model


class Pool:
    """The ranks of this process, which scenes use one after the other."""

    def __init__(self) -> None:
        self.ranks, self.scenes = Ranks(), 0
        atexit.register(self.close)

    def ask(self, scene: Scene, function: Callable[..., Any] = on_rank) -> dict[int, tuple[bool, Any]]:
        """Return the answers of the ranks that answered in time."""
        if self.scenes >= LIFE:
            self.close()
        self.scenes += 1
        return self.ranks.answers(scene.world, function, scene, timeout=LIMIT[scene.inductor], grace=GRACE)

    def close(self) -> None:
        self.ranks.close()
        self.scenes = 0


@cache
def pool() -> Pool:
    return Pool()


SCRIPT = '''\
"""{result}

The same case: PYTHONPATH=tests:benchmarks python -m support.fuzz --case '{name}'
"""

from {module} import {kind}, outcome

if __name__ == "__main__":
    print(outcome({scene}))
'''


def named(name: str, scene: Scene, result: Result) -> Result:
    """Return the result of a case, with a script if it is bad."""
    if not result.outcome.is_bad:
        return result
    kind = type(scene)
    given = {"result": result, "name": name, "module": kind.__module__, "kind": kind.__name__, "scene": scene}
    return replace(result, program=SCRIPT.format(**given))


def outcome(scene: Scene) -> Result:
    """Return the outcome of a scene; run a bad one again in new processes."""
    expected = alone(scene, eager)
    if isinstance(expected, Exception):
        return Result(Outcome.SKIPPED, f"a single device raises: {first_line(expected)}")
    used = pool().scenes > 0
    result = _judged(scene, expected)
    if result.outcome in (Outcome.EXACT, Outcome.GATHERED, Outcome.SKIPPED):
        return result
    pool().close()  # other scenes test a process after a failure
    if not used or not result.outcome.is_bad:
        return result
    again = _judged(scene, expected)
    pool().close()
    if again.outcome.is_bad:
        return again
    return Result(result.outcome, f"only in processes that have run other cases before: {result.words}")


def alone(scene: Scene, compiled: Compile, inputs: Sequence[Tensor] | None = None) -> Run | Exception:
    """Return the values of a single device, or its error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        with _quiet():
            return Run.of(scene.play(compiled, scene.inputs() if inputs is None else inputs))
    except Exception as error:
        return error


def _judged(scene: Scene, expected: Run) -> Result:
    answers = pool().ask(scene)
    silent = [rank for rank in range(scene.world) if rank not in answers]
    failures = {rank: found for rank, (right, found) in answers.items() if not right}
    if silent or any(word in failure.words for failure in failures.values() for word in TIMED_OUT):
        raised = "; ".join(f"rank {rank} raised {brief(failure)}" for rank, failure in failures.items())
        return Result(Outcome.HANG, f"no answer of ranks {silent} of {scene.world}; {raised}")
    if failures:
        return _refused(scene, failures)
    found = [Run.of(answers[rank][1].values) for rank in range(scene.world)]
    wrong = differences(expected, found)
    if not wrong:
        fallbacks = answers[0][1].fallbacks
        return Result(Outcome.GATHERED if fallbacks else Outcome.EXACT, fallbacks)
    why = _excuse(scene, expected, wrong)
    if why:
        return Result(Outcome.SKIPPED, why)
    return Result(Outcome.WRONG, f"{scene.world} ranks: {listed(wrong)}")


def wrong_values(expected: Run | Exception, found: Played) -> dict[str, float]:
    """Return the errors of a rank's values that differ from a single device."""
    assert isinstance(expected, Run)
    return differences(expected, [Run.of(found.values)])


def _refused(scene: Scene, failures: dict[int, Failure]) -> Result:
    """Return the outcome of failures: all ranks must raise an SpError, unless torch.compile fails, too."""
    raw = {rank: failure for rank, failure in failures.items() if "SpError" not in failure.kinds}
    without = [rank for rank in range(scene.world) if rank not in failures]
    words = "; ".join(f"rank {rank}: {brief(failure)}" for rank, failure in (raw or failures).items())
    if (raw or without) and _torch_fails(scene):
        return Result(Outcome.SKIPPED, f"torch.compile cannot: {words}")
    if without:
        return Result(Outcome.RAW, f"ranks {without} continue; {words}")
    return Result(Outcome.RAW if raw else Outcome.REFUSED, words)


def _excuse(scene: Scene, expected: Run, wrong: dict[str, float]) -> str:
    """Return the reason why a difference is not ours, or ""."""
    if all(not _is_finite(expected.values.get(name)) for name in wrong):
        return "a single device has infinite values there"
    if not scene.is_strict and _torch_fails(scene, expected):
        return "torch.compile differs without ranks, too"

    def run(inputs: Sequence[Tensor]) -> Run:
        found = alone(scene, eager, inputs)
        if isinstance(found, Exception):
            raise found
        return found

    if is_rounding(run, scene.inputs(), expected, wrong):
        return f"a single device differs as much for inputs that differ in their last bits: {listed(wrong)}"
    return ""


def _torch_fails(scene: Scene, expected: Run | None = None) -> bool:
    """Return True if a compiler of torch fails on a single device, or computes other values."""
    for name in ("aot_eager", *["inductor"] * scene.inductor):
        found = alone(scene, compiled_alone(name))
        if isinstance(found, Exception) or (expected is not None and differences(expected, [found])):
            return True
    return False


def _is_finite(x: Any) -> bool:
    return not isinstance(x, Tensor) or bool(x.isfinite().all())


def brief(failure: Failure) -> str:
    return f"{failure.kinds[0]}: {' '.join(failure.words.split())[:400]}"
