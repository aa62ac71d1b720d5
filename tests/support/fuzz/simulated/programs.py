"""Random programs, static and dynamic, along any dim, under every strategy; bad ones are minimized."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from support.fuzz.oracle import SESSION, Case, outcome
from support.fuzz.outcomes import Outcome, Result
from support.fuzz.simulated.random_programs import Program, Sizes, Step, inputs_of, random_program
from torch import Tensor

STEPS = 12
RANKS = [(2, 3), (2, 3), (2, 3, 4)]
SHRINKING = 120.0  # seconds
OPTIONS: list[dict[str, Any]] = [
    {},
    {"attention": "ulysses"},
    {"attention": "ring"},
    {"attention": "ring", "layout": "zigzag"},
    {"attention": "hybrid"},
    {"attention": "gather"},
    {"attention": "gather", "layout": "zigzag"},
    {"layout": "zigzag"},
]

SCRIPT = '''\
"""{result}

The same case: PYTHONPATH=tests:benchmarks python -m support.fuzz --case '{name}'
"""

from {module} import {kind}
from support.fuzz.simulated.random_programs import Step

print({kind}({setting}).outcome([
{steps}
]))
'''


@dataclass(frozen=True)
class Setting:
    """Setting of a program. sizes: (B, S, D) of x. dim: of the sequence in x. frozen: "x", "weight" or neither."""

    sizes: Sizes
    ranks: tuple[int, ...]
    dim: int
    dynamic: bool
    options: dict[str, Any]
    frozen: str = ""

    def outcome(self, steps: Sequence[Step]) -> Result:
        options = {**self.options, "seq_dims": {"x": self.dim}}
        return outcome(Case(self.program(steps), self.inputs(), self.ranks, options, self.dynamic))

    def program(self, steps: Sequence[Step]) -> Program:
        return Program(list(steps))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return inputs_of(self.sizes, self.frozen)


def cases(seed: int = 0) -> Iterator[str]:
    """Return the names of cases, without end."""
    return (f"programs:{number}" for number in itertools.count(seed * SESSION))


def made(seed: int) -> tuple[Setting, list[Step]]:
    """The program of a seed, and where it runs."""
    random = Random(seed)
    program, sizes = random_program(random, random.choice([4, STEPS]))
    dim = random.choice([1, 1, 1, 0, 2])
    setting = Setting(sizes, random.choice(RANKS), dim, random.random() < 0.4, random.choice(OPTIONS))
    if random.random() < 0.2:
        setting = replace(setting, frozen=random.choice(["x", "weight"]))
    return setting, program.steps


def run(name: str) -> Result:
    return shrunk(name, *made(int(name.partition(":")[2])))


def shrunk(name: str, setting: Setting, steps: list[Step]) -> Result:
    """Return the result of a program, with a script of a minimized one if it is bad."""
    result = setting.outcome(steps)
    if not result.outcome.is_bad:
        return result
    if result.outcome is not Outcome.HANG:  # each try of which takes minutes
        setting, steps, result = minimal(setting, steps, result)
    fields = ", ".join(f"{key}={value!r}" for key, value in vars(setting).items())
    lines = "\n".join(f"    Step({s.name!r}, {s.operands!r}, {s.args!r}, {s.around!r})," for s in steps)
    made_of = {"module": type(setting).__module__, "kind": type(setting).__name__}
    return replace(result, program=SCRIPT.format(result=result, name=name, setting=fields, steps=lines, **made_of))


def minimal(setting: Setting, steps: list[Step], result: Result) -> tuple[Setting, list[Step], Result]:
    """A smaller program of the same outcome, of which no step and no option can be left out."""
    deadline = time.monotonic() + SHRINKING

    def same(smaller: Setting, some: list[Step]) -> Result | None:
        if time.monotonic() > deadline or not some:
            return None
        found = smaller.outcome(some)
        return found if found.outcome is result.outcome else None

    fewer_ranks = [{"ranks": (n,)} for n in setting.ranks[::-1]]
    for change in (*fewer_ranks, {"dynamic": False}, {"options": {}}, {"frozen": ""}):
        plain = replace(setting, **change)
        if plain != setting and (found := same(plain, steps)):
            setting, result = plain, found
    i = len(steps)
    while i:
        i -= 1
        fewer = without(steps, i)
        if found := same(setting, fewer):
            steps, result, i = fewer, found, len(fewer)
    for i, step in enumerate(steps):
        for simpler in _simpler(step):
            some = [*steps[:i], simpler, *steps[i + 1 :]]
            if found := same(setting, some):
                steps, result = some, found
                break
    return setting, steps, result


def _simpler(step: Step) -> list[Step]:
    """The step with fewer stops, the fewest first."""
    around = [replace(step, around="")] if step.around else []
    stops = step.args[2:] if step.name == "idiom" else ()
    alone = [tuple(s if i == j else "" for j, s in enumerate(stops)) for i, stop in enumerate(stops) if stop]
    fewer = [replace(step, args=(*step.args[:2], *some), around="") for some in (("",) * 3, *alone) if some != stops]
    return [*fewer, *around] if any(stops) else around


def without(steps: Sequence[Step], i: int) -> list[Step]:
    """The steps but for one, whose value its first operand takes the place of. Value 0 is x; step i makes i + 1."""
    instead = steps[i].operands[0]

    def moved(value: int) -> int:
        return instead if value == i + 1 else value - (value > i + 1)

    return [
        *steps[:i],
        *(replace(step, operands=tuple(moved(value) for value in step.operands)) for step in steps[i + 1 :]),
    ]
