"""Scenes with results that share memory, and with writes in place by the model or after its call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from support.fuzz.kinds.on_ranks import named, outcome
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
from support.fuzz.oracle import SESSION
from support.fuzz.outcomes import Result
from torch import Tensor

LARGE = 16_411  # tokens: results of a MiB and more stay in shards by default
SCANS = ["sum", "max", "recurrence"]  # whose cost is linear

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda h: h,
    "first": lambda h: h[:, 0],
    "last": lambda h: h[:, -1],
    "flat": lambda h: h.flatten(0, 1),
    "transposed": lambda h: h.mT,
    "detached": lambda h: h.detach(),
    "left": lambda h: h.split(WIDTH // 2, -1)[0],
    "right": lambda h: h.split(WIDTH // 2, -1)[1],
    "front": lambda h: h[:, : h.shape[1] // 2 + 1],
    "rear": lambda h: h[:, h.shape[1] // 2 :],
    "heads": lambda h: h.unflatten(-1, (2, -1)),
    "one sequence": lambda h: h[0],
    "unsqueezed": lambda h: h.unsqueeze(1),
    "flat and back": lambda h: h.view(-1, WIDTH).view_as(h),
    "times one": lambda h: h * 1.0,
    "loss": lambda h: h.square().mean(),
    "rows": lambda h: h.unbind(0)[-1],
}
AROUND: dict[str, Callable[[Tensor], Tensor]] = {"": lambda h: h, "sin": torch.sin, "copied": lambda h: h.clone()}


def _normalized(y: Tensor) -> None:
    y.div_(y.norm(dim=-1, keepdim=True) + 1)


def _masked(y: Tensor) -> None:
    y[..., -1] = -100.0


def _first_row(y: Tensor) -> None:
    y[:1] = 0.5


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "twice": lambda y: y.mul_(2),
    "more": lambda y: y.add_(1),
    "normalized": _normalized,
    "masked": _masked,
    "first row": _first_row,
    "sine": lambda y: y.sin_(),
}
INSIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "": lambda x, y: None,
    "added": lambda x, y: y.add_(1),
    "row": lambda x, y: y[:, 0].mul_(2),
    "copied": lambda x, y: y.copy_(x.detach().sin()),
}
"""Writes of the model to its second input before it reads both."""
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x.detach().cos(),
    "the same": lambda x: x,
    "viewed": lambda x: x.view(x.shape),
    "flipped": lambda x: x.view(-1).view(x.shape),
}
"""Relations of the second input to the first, on the last call."""


@dataclass(frozen=True)
class Memory(Scene):
    """sizes: (B, S). views: the results. trained: those with a loss. writes: (result or -1 for the input, what) after the
    call, and after its backward unless `early`. inside: what the model itself writes. shared: how inputs are one."""

    body: str = "attention"
    around: str = ""
    sizes: tuple[int, int] = (2, 7)
    views: tuple[str, ...] = ("itself",)
    trained: tuple[int, ...] = ()
    writes: tuple[tuple[int, str], ...] = ()
    early: bool = False
    inside: str = ""
    shared: str = ""
    calls: int = 1

    @property
    def is_strict(self) -> bool:
        """Inputs that share memory and are written are refused, also where torch.compile alone is wrong."""
        return bool(self.shared and self.inside)

    def inputs(self) -> list[Tensor]:
        return [normal(*self.sizes, WIDTH, seed=number, grad=bool(self.trained)) for number in range(self.calls)]

    def model(self, weight: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        INSIDE[self.inside](x, y)
        h = AROUND[self.around](BODIES[self.body](x @ matrix(weight)) @ matrix(weight, 50) + y.detach() / 2)
        return tuple(VIEWS[view](h) for view in self.views)

    def play(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        net = Net(self.model)
        run, values = compiled(net), {}
        for call, given in enumerate(inputs):
            x = given.detach().clone().requires_grad_(given.requires_grad)
            last = call == self.calls - 1
            with nullcontext() if self.trained else torch.no_grad():
                y = SHARED[self.shared if last else ""](x)
                results = run(x, y)
                if self.early:
                    self._write(results, x)
            net.zero_grad()
            if self.trained:
                sum(_loss(results[i]) for i in self.trained).backward()
            if not self.early:
                with torch.no_grad():
                    self._write([result.detach() for result in results], x.detach())
            found = {f"result {i}": plain(result) for i, result in enumerate(results)} | {"x": plain(x), "y": plain(y)}
            found |= {"gradient of x": plain(x.grad), "gradient of weight": plain(net.weight.grad)}
            values |= {f"{name}, call {call}": value for name, value in found.items()}
        return values

    def _write(self, results: Sequence[Tensor], x: Tensor) -> None:
        for target, how in self.writes:
            WRITES[how](x if target < 0 else results[target])


def _loss(result: Tensor) -> Tensor:
    weights = torch.sin(12.9898 * torch.arange(result.numel(), dtype=result.dtype)).view(result.shape)
    return (result * weights).sum()


def made(source: str, seed: int) -> Memory:
    random = Random(f"{source} {seed}")
    drawn = drawn_world(random)
    large = random.random() < 0.15
    body = random.choice(SCANS if large else sorted(BODIES))
    length = LARGE if large else drawn_length(random, drawn["world"], least=2)
    if not drawn.get("inductor") and random.random() < 0.4:
        drawn["options"] = {**drawn["options"], "outputs": random.choice(["lazy", "lazy", "gather"])}
    views = tuple(random.choice(sorted(VIEWS)) for _ in range(random.randint(1, 3)))
    views = (*views, "itself") if random.random() < 0.5 else views
    scene = {**drawn, "body": body, "around": random.choice(sorted(AROUND)), "sizes": (random.randint(1, 2), length)}
    scene |= {"views": views, "calls": random.choice([1, 1, 2])}
    trainable = [i for i, view in enumerate(views) if view != "detached"]
    if trainable and (source == "aliases" or random.random() < 0.4):
        scene["trained"] = tuple(sorted(random.sample(trainable, random.randint(1, len(trainable)))))
    if source == "writes":
        writable = [i for i, view in enumerate(views) if view != "loss"]
        targets = [random.choice([*writable, *writable, -1]) for _ in range(random.randint(1, 2))]
        scene["writes"] = tuple((target, random.choice(sorted(WRITES))) for target in targets)
        scene["early"] = random.random() < 0.3
        if random.random() < 0.3:
            scene |= {"inside": random.choice(sorted(INSIDE)), "shared": random.choice(sorted(SHARED))}
            scene["trained"] = ()
    return Memory(**scene)


def cases(source: str, seed: int) -> Iterator[str]:
    """Return the names of cases, without end."""
    return (f"{source}:{number}" for number in itertools.count(seed * SESSION))


def run(name: str) -> Result:
    source, _, number = name.partition(":")
    scene = made(source, int(number))
    return named(name, scene, outcome(scene))


SOURCES = {source: (partial(cases, source), run) for source in ("aliases", "writes")}
