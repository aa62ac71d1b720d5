"""Random programs of steps from a table of ops, some on real ranks; programs of bad outcomes are minimized.

A value is (B, S, D) rows of D = WIDTH numbers, and so is what a step makes of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch
from support.fuzz import oracle
from support.fuzz.kinds import on_ranks, routing, singular
from support.fuzz.kinds.scene import (
    BODIES,
    WEIGHTS,
    WIDTH,
    Compile,
    Scene,
    Values,
    drawn_length,
    drawn_world,
    matrix,
    normal,
    plain,
)
from support.fuzz.outcomes import Result
from support.fuzz.simulated.programs import Setting, shrunk
from support.fuzz.simulated.random_programs import Program, Step
from torch import Tensor

STEPS = 5
REAL = 4  # one in this number of programs runs on real ranks, which take ten times as long
RANKS = (2, 3, 4)  # simulated
TRIES = 200

COMMON: dict[str, Callable[..., Tensor]] = {
    "body": lambda w, i, x, name: BODIES[name](x),
    "linear": lambda w, i, x, at: x @ matrix(w, at),
    "add": lambda w, i, x, y: x + y,
    "tanh": lambda w, i, x: x.tanh() + 0.1,
}
TABLES: dict[str, tuple[Mapping[str, Callable[..., Tensor]], Mapping[str, Sequence[Any]]]] = {
    "singular": (singular.OPS, singular.ARGUMENTS),
    "routing": (routing.OPS, routing.ARGUMENTS),
}
"""Ops of each source in addition to COMMON, and the possible arguments of each op."""


@dataclass(frozen=True)
class RanksSetting(Setting):
    """A setting of which nothing is named that a user need not name. sizes: of x. table: a key of TABLES.

    real: on real ranks, of the first number, not on simulated ones.
    """

    table: str = "singular"
    real: bool = True
    inductor: bool = False

    def outcome(self, steps: Sequence[Step]) -> Result:
        if not self.real:
            given = (self.ranks, self.options, self.dynamic)
            return oracle.outcome(oracle.Case(self.program(steps), self.inputs(), *given))
        return on_ranks.outcome(Steps(self.ranks[0], self.inductor, self.options, self, tuple(steps)))

    def program(self, steps: Sequence[Step]) -> Program:
        return Program(list(steps), {**COMMON, **TABLES[self.table][0]})

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 4, self.sizes[:2], generator=generator)
        weight = normal(WEIGHTS, seed=2, grad=self.frozen != "weight")
        return normal(*self.sizes, grad=self.frozen != "x"), weight, ids


@dataclass(frozen=True)
class Steps(Scene):
    """A program of steps, forward and backward."""

    setting: RanksSetting | None = None
    steps: tuple[Step, ...] = field(default_factory=tuple)

    def inputs(self) -> list[Tensor]:
        assert self.setting is not None
        return [*self.setting.inputs()]

    def play(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        assert self.setting is not None
        model = compiled(self.setting.program(self.steps), dynamic=self.setting.dynamic or None)
        found = oracle.run_model(model, inputs).values
        return {name: plain(x) for name, x in found.items()}


def cases(table: str, seed: int) -> Iterator[str]:
    """Without end."""
    return (f"{table}:{number}" for number in itertools.count(seed * oracle.SESSION))


def run(name: str) -> Result:
    table, _, number = name.partition(":")
    return shrunk(name, *made(table, int(number)))


def made(table: str, seed: int) -> tuple[RanksSetting, list[Step]]:
    """The program of a seed, of which one device finds finite values and gradients, and where it runs."""
    random = Random(f"{table} {seed}")
    for _ in range(TRIES):
        drawn = drawn_world(random)
        world = drawn["world"]
        options, sizes = drawn.get("options", {}), (random.randint(1, 2), drawn_length(random, world), WIDTH)
        given = {"table": table, "frozen": random.choice(["", "", "", "x"]), "inductor": "inductor" in drawn}
        ranks = (world,) if seed % REAL == 0 else RANKS
        setting = RanksSetting(sizes, ranks, 1, random.random() < 0.2, options, real=seed % REAL == 0, **given)
        steps = _drawn(random, table)
        if _is_finite(setting, steps):
            return setting, steps
    raise AssertionError(f"{table}:{seed} has no program of finite values")


def _drawn(random: Random, table: str) -> list[Step]:
    """Something that looks along the sequence, one op of the table at least, and others."""
    own, arguments = TABLES[table]
    steps = [Step("linear", (0,), (random.randrange(200),))] if random.random() < 0.5 else []
    steps.append(Step("body", (len(steps),), (random.choice(sorted(BODIES)),)))
    while len(steps) < 2 + random.randrange(STEPS) or not any(step.name in own for step in steps):
        name = random.choice(sorted(own) if random.random() < 0.6 else sorted(COMMON))
        last = len(steps) if random.random() < 0.8 else random.randrange(len(steps) + 1)
        choices = {"body": sorted(BODIES), "linear": range(200), **arguments}
        args = (random.choice(choices[name]),) if name in choices else ()
        steps.append(Step(name, (last, random.randrange(len(steps) + 1)) if name == "add" else (last,), args))
    if random.random() < 0.7:  # the gradient of its weights adds up all rows of what is before it
        steps.append(Step("linear", (len(steps),), (random.randrange(200),)))
    return steps


def _is_finite(setting: RanksSetting, steps: Sequence[Step]) -> bool:
    try:
        found = oracle.run_model(setting.program(steps), setting.inputs())
    except Exception:
        return False
    values = [x for x in found.values.values() if isinstance(x, Tensor)]
    return all(bool(x.isfinite().all()) and oracle.largest_entry(x) < 1e6 for x in values)


SOURCES = {table: (partial(cases, table), run) for table in TABLES}
