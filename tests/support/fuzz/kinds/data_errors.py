"""Errors that the data of a call causes, on one rank's rows or on all: every rank raises soon, with the cause."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.fuzz.kinds.on_ranks import alone, brief, compiled_alone, eager, named, pool, wrong_values
from support.fuzz.kinds.scene import (
    BODIES,
    WIDTH,
    Compile,
    Net,
    Scene,
    Values,
    drawn_length,
    drawn_world,
    matrix,
    normal,
    plain,
)
from support.fuzz.kinds.transforms import step
from support.fuzz.oracle import SESSION, first_line
from support.fuzz.outcomes import Outcome, Result
from support.ranks import Failure
from torch import Tensor

from sp_compile import sharding_rule

KINDS = 4  # ids are below
BROKEN = "SP623|SP661"
ODD = "the odd rank alone has failed"
_odd = -1  # the rank on which `raises_here` raises at once, in its process


@torch.library.custom_op("fuzz::raises", mutates_args=())
def raises(x: Tensor, ids: Tensor) -> Tensor:
    """Return x; raise for an invalid id, and always on the odd rank."""
    _check(ids)
    return x.clone()


@torch.library.custom_op("fuzz::raises_later", mutates_args=())
def raises_later(x: Tensor, ids: Tensor) -> Tensor:
    """Return the gradient of x; raise as `raises` does."""
    _check(ids)
    return x.clone()


@torch.library.custom_op("fuzz::passes", mutates_args=())
def passes(x: Tensor, ids: Tensor) -> Tensor:
    """Return x; its backward raises for an invalid id."""
    return x.clone()


def _check(ids: Tensor) -> None:
    if dist.is_initialized() and dist.get_rank() == _odd:
        raise ValueError(ODD)
    if bool(((ids < 0) | (ids >= KINDS)).any()):
        raise ValueError(f"an id is not below {KINDS}")


@cache
def _give_rules() -> None:
    """Register the rules of the ops in a process that runs scenes."""
    for op in (torch.ops.fuzz.raises, torch.ops.fuzz.raises_later, torch.ops.fuzz.passes):
        sharding_rule(op.default, "b s d, b s -> b s d")


for op in (raises, raises_later, passes):
    op.register_fake(lambda x, ids: torch.empty_like(x))
raises.register_autograd(lambda ctx, g: (g, None))
passes.register_autograd(
    lambda ctx, g: (torch.ops.fuzz.raises_later(g, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def _squares(x: Tensor, ids: Tensor) -> Tensor:
    """Return matrices of the rows, singular for an invalid id."""
    known = ((ids >= 0) & (ids < KINDS))[..., None].to(x.dtype)
    return (x * known).unflatten(-1, (2, 2))


FAULTY: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "embedding": lambda w, x, ids: x + F.embedding(ids, matrix(w, 20)),
    "one_hot": lambda w, x, ids: x + F.one_hot(ids, KINDS).to(x.dtype),
    "running one_hot": lambda w, x, ids: x * F.one_hot(ids.cummax(1)[0], KINDS).to(x.dtype).sum(-1, keepdim=True),
    "class loss": lambda w, x, ids: x * F.cross_entropy(x.flatten(0, 1), ids.flatten()),
    "gather": lambda w, x, ids: x + x.gather(-1, ids[..., None]),
    "index": lambda w, x, ids: x + matrix(w, 20)[ids],
    "index_select": lambda w, x, ids: x + matrix(w, 20).index_select(0, ids.flatten()).view_as(x),
    "scatter": lambda w, x, ids: torch.zeros_like(x).scatter(-1, ids[..., None], x[..., :1]),
    "inverse": lambda w, x, ids: _squares(x, ids).inverse().flatten(-2),
    "solve": lambda w, x, ids: torch.linalg.solve(_squares(x, ids), _squares(x.cos(), ids)).flatten(-2),
    "op": lambda w, x, ids: torch.ops.fuzz.raises(x, ids),
    "op in backward": lambda w, x, ids: torch.ops.fuzz.passes(x, ids),
}
BY_RANK = ("op", "op in backward")


@dataclass(frozen=True)
class DataError(Scene):
    """A call with an invalid id, or with an op that raises on one rank."""

    faulty: str = "embedding"
    body: str = "sum"
    sizes: tuple[int, int] = (2, 7)  # (B, S)
    bad: int = 9  # the invalid id
    at: tuple[int, ...] = (0,)  # its tokens in each sequence
    call: int = 0  # number of the call with the error
    odd: int = -1  # rank that raises without an invalid id; -1: none
    again: bool = True  # the body runs again after the faulty op
    trained: bool = True

    def inputs(self) -> list[Tensor]:
        return [normal(*self.sizes, WIDTH, grad=self.trained)]

    def model(self, weight: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        y = BODIES[self.body](x @ matrix(weight))
        y = FAULTY[self.faulty](weight, y, ids)
        return BODIES[self.body](y) @ matrix(weight, 80) if self.again else y

    def play(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        global _odd
        _odd = -1
        _give_rules()
        run, values = compiled(Net(self.model)), {}
        for call in range(self.call + 1):
            ids = torch.arange(self.sizes[0] * self.sizes[1]).view(self.sizes) % KINDS
            if call == self.call:
                ids[:, list(self.at)] = KINDS - 1 if self.odd >= 0 else self.bad
                _odd = self.odd
            x = inputs[0].detach().clone().requires_grad_(self.trained)
            with torch.set_grad_enabled(self.trained):
                found = run(x, ids)
            if self.trained:
                found.sin().sum().backward()
            values[f"result {call}"] = plain(found)
        return values


@dataclass(frozen=True)
class Afterwards(Scene):
    """Another model over the same group: right, or an error that the group is broken."""

    def inputs(self) -> list[Tensor]:
        return [normal(2, 5, WIDTH, grad=True)]

    def play(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        return step(compiled, lambda w, x: (x @ matrix(w)).cumsum(1), inputs)


def outcome(scene: DataError) -> Result:
    """Check that every rank raises in time with rank, line and cause, or that all raise the single-device error."""
    compilers = [eager, compiled_alone("aot_eager"), *[compiled_alone("inductor")] * scene.inductor]
    raised = [alone(scene, compiled) for compiled in compilers]
    causes = [Cause.of(error) for error in raised if isinstance(error, Exception)]
    if scene.odd < 0 and len(causes) < len(raised):
        return Result(Outcome.SKIPPED, "a single device, or torch.compile on it, raises nothing")
    answers = pool().ask(scene)
    try:
        result = judged(scene, answers, [Cause("ValueError", ODD)] if scene.odd >= 0 else causes)
        if result.outcome.is_bad:
            return result
        return _afterwards(scene, result)
    finally:
        pool().close()  # whose groups may be broken


@dataclass(frozen=True)
class Cause:
    """Class and message of the error of a single device."""

    kind: str
    words: str

    @classmethod
    def of(cls, error: Exception) -> Cause:
        return cls(type(error).__name__, first_line(error).partition(": ")[2])

    def is_named_by(self, failure: Failure) -> bool:
        """Return True if the failure has at least half of the words of the message, without the paths of files."""
        texts = (re.sub(r"/\S+", "", words).lower() for words in (self.words, failure.words))
        known, found = (set(re.findall(r"[a-z_]{4,}", text)) for text in texts)
        return len(known & found) >= len(known) / 2

    def is_raised_by(self, failure: Failure) -> bool:
        return self.kind in failure.kinds and self.is_named_by(failure)


def judged(scene: DataError, answers: dict[int, tuple[bool, Any]], causes: Sequence[Cause]) -> Result:
    """Return the outcome of the ranks' answers. causes: errors of a single device, by each compiler."""
    silent = [rank for rank in range(scene.world) if rank not in answers]
    failures = {rank: found for rank, (right, found) in answers.items() if not right}
    words = "; ".join(f"rank {rank}: {brief(failure)}" for rank, failure in failures.items())
    if silent:
        return Result(Outcome.HANG, f"no answer of ranks {silent} of {scene.world}; {words}")
    if len(failures) < scene.world:
        without = [rank for rank in range(scene.world) if rank not in failures]
        return Result(Outcome.WRONG, f"ranks {without} of {scene.world} raise nothing; {words}")
    if all(any(cause.is_raised_by(failure) for cause in causes) for failure in failures.values()):
        return Result(Outcome.REFUSED, f"the single-device error: {words}")
    unclear = {rank: failure for rank, failure in failures.items() if not _is_clear(failure, causes)}
    if unclear:
        return Result(Outcome.RAW, "; ".join(f"rank {rank}: {brief(failure)}" for rank, failure in unclear.items()))
    return Result(Outcome.REFUSED, words)


def _is_clear(failure: Failure, causes: Sequence[Cause]) -> bool:
    """Return True if an SpError, or the single-device error on its rank, has rank, line and cause."""
    names = re.search(r"rank \d", failure.words) and re.search(r"\w+\.py:\d+", failure.words)
    named = any(cause.is_named_by(failure) for cause in causes)
    ours = "SpError" in failure.kinds or any(cause.is_raised_by(failure) for cause in causes)
    return bool(names and named and ours)


def _afterwards(scene: DataError, result: Result) -> Result:
    after = Afterwards(scene.world, False)
    expected = alone(after, eager)
    answers = pool().ask(after)
    for rank in range(scene.world):
        if rank not in answers:
            return Result(Outcome.HANG, f"rank {rank} does not come to another model afterwards")
        right, found = answers[rank]
        if not right and not ("SpError" in found.kinds and re.search(BROKEN, found.words)):
            return Result(Outcome.RAW, f"rank {rank}, with another model afterwards: {brief(found)}")
        if right and wrong_values(expected, found):
            return Result(Outcome.WRONG, f"rank {rank}, with another model afterwards")
    return result


def made(seed: int) -> DataError:
    random = Random(f"data_errors {seed}")
    drawn = drawn_world(random)
    sizes = (random.randint(1, 2), drawn_length(random, drawn["world"], least=3))
    faulty = random.choice(sorted(FAULTY))
    everywhere = random.random() < 0.3
    at = tuple(range(sizes[1])) if everywhere else (random.randrange(sizes[1]),)
    odd = random.randrange(drawn["world"]) if faulty in BY_RANK and random.random() < 0.6 else -1
    trained = random.random() < 0.8 or faulty == "op in backward"
    given = {"call": random.choice([0, 1, 1]), "again": random.random() < 0.6, "bad": random.choice([9, 9, -1])}
    body = random.choice(sorted(BODIES))
    return DataError(**drawn, faulty=faulty, body=body, sizes=sizes, at=at, odd=odd, trained=trained, **given)


def cases(seed: int) -> Iterator[str]:
    """Return the names of cases, without end."""
    return (f"data_errors:{number}" for number in itertools.count(seed * SESSION))


def run(name: str) -> Result:
    scene = made(int(name.partition(":")[2]))
    return named(name, scene, outcome(scene))


SOURCES = {"data_errors": (cases, run)}
