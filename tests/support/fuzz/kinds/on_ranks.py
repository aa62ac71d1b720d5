"""Plays a scene on real ranks and on one device, and judges what came of it."""

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
GRACE = 25.0  # seconds that ranks have to raise once one has, on a busy machine
LIFE = 150  # scenes of a pool of ranks
TIMED_OUT = ("timed out", "Timed out", "timeout")


@dataclass
class Played:
    """What a rank found. fallbacks: what was gathered, by its report."""

    values: Values
    fallbacks: str


def on_rank(scene: Scene) -> Played:
    """One rank's part. Raises what the play raises."""
    given = {} if scene.inductor else {"compiler": "aot_eager", "cost": {}}
    options = {**given, **scene.options, "mesh": mesh()}
    with lowered_programs() as programs, _quiet():
        values = scene.play(partial(_compiled, options), scene.inputs())
    notes = [f"{note.label} {note.node}" for program in programs for note in program.report.fallbacks]
    return Played(values, ", ".join(dict.fromkeys(notes)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs what it raises, too."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _compiled(options: dict[str, Any], model: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    more = how.pop("options", {})
    return torch.compile(model, **{"backend": "sp", "options": {**options, **more}, **how})


def compiled_alone(name: str) -> Compile:
    """The model as one device compiles it, without our options."""

    def compiled(model: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        how.pop("options", None)
        return torch.compile(model, **{"backend": name, **how})

    return compiled


def eager(model: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return model


class Pool:
    """The ranks of this process, which many scenes share one after the other."""

    def __init__(self) -> None:
        self.ranks, self.scenes = Ranks(), 0
        atexit.register(self.close)

    def ask(self, scene: Scene, function: Callable[..., Any] = on_rank) -> dict[int, tuple[bool, Any]]:
        """What each rank answered, of those that did in time."""
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
    """The result of a case, with a script of it where that is bad."""
    if not result.outcome.is_bad:
        return result
    kind = type(scene)
    given = {"result": result, "name": name, "module": kind.__module__, "kind": kind.__name__, "scene": scene}
    return replace(result, program=SCRIPT.format(**given))


def outcome(scene: Scene) -> Result:
    """What comes of a scene; what is bad, of one in new processes."""
    expected = alone(scene, eager)
    if isinstance(expected, Exception):
        return Result(Outcome.SKIPPED, f"on one device: {first_line(expected)}")
    used = pool().scenes > 0
    result = _judged(scene, expected)
    if result.outcome in (Outcome.EXACT, Outcome.GATHERED, Outcome.SKIPPED):
        return result
    pool().close()  # what a failure leaves in a process is the subject of other scenes
    if not used or not result.outcome.is_bad:
        return result
    again = _judged(scene, expected)
    pool().close()
    if again.outcome.is_bad:
        return again
    return Result(result.outcome, f"only in processes that have run other cases before: {result.words}")


def alone(scene: Scene, compiled: Compile, inputs: Sequence[Tensor] | None = None) -> Run | Exception:
    """What one device finds, or raises."""
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


def unlike(expected: Run | Exception, found: Played) -> dict[str, float]:
    """What of a rank's values is not as one device has it."""
    assert isinstance(expected, Run)
    return differences(expected, [Run.of(found.values)])


def _refused(scene: Scene, failures: dict[int, Failure]) -> Result:
    """All ranks have to refuse, and one device's compilers have to be able to."""
    raw = {rank: failure for rank, failure in failures.items() if "SpError" not in failure.kinds}
    heard_nothing = [rank for rank in range(scene.world) if rank not in failures]
    words = "; ".join(f"rank {rank}: {brief(failure)}" for rank, failure in (raw or failures).items())
    if (raw or heard_nothing) and _torch_fails(scene):
        return Result(Outcome.SKIPPED, f"torch.compile cannot: {words}")
    if heard_nothing:
        return Result(Outcome.RAW, f"ranks {heard_nothing} go on; {words}")
    return Result(Outcome.RAW if raw else Outcome.REFUSED, words)


def _excuse(scene: Scene, expected: Run, wrong: dict[str, float]) -> str:
    """Why a difference is none of ours; "" if it is."""
    if all(not _finite(expected.values.get(name)) for name in wrong):
        return "one device has infinite values there"
    if not scene.strict and _torch_fails(scene, expected):
        return "torch.compile differs without ranks, too"

    def run(inputs: Sequence[Tensor]) -> Run:
        found = alone(scene, eager, inputs)
        if isinstance(found, Exception):
            raise found
        return found

    if is_rounding(run, scene.inputs(), expected, wrong):
        return f"one device is as far off where inputs differ in their last bits: {listed(wrong)}"
    return ""


def _torch_fails(scene: Scene, expected: Run | None = None) -> bool:
    """Does a compiler of torch's own fail on one device, or find something else?"""
    for name in ("aot_eager", *["inductor"] * scene.inductor):
        found = alone(scene, compiled_alone(name))
        if isinstance(found, Exception) or (expected is not None and differences(expected, [found])):
            return True
    return False


def _finite(x: Any) -> bool:
    return not isinstance(x, Tensor) or bool(x.isfinite().all())


def brief(failure: Failure) -> str:
    return f"{failure.kinds[0]}: {' '.join(failure.words.split())[:400]}"
