"""Scenes with torch.func's grad, vjp, jvp, vmap and functional_call around ops along the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from support.fuzz.kinds.on_ranks import alone, eager, named, outcome
from support.fuzz.kinds.scene import (
    BODIES,
    WIDTH,
    Body,
    Compile,
    Net,
    Scene,
    Values,
    drawn_length,
    drawn_world,
    leaves,
    matrix,
    normal,
    plain,
)
from support.fuzz.oracle import SESSION
from support.fuzz.outcomes import Result
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap


def _learned(w: Tensor, x: Tensor, body: Body) -> Tensor:
    """One step of an inner loss, then the outer product."""
    inner = matrix(w)
    return body(x @ (inner - 0.1 * grad(lambda v: (body(x @ v) - x).square().mean())(inner)))


def _learned_by_each(w: Tensor, x: Tensor, body: Body) -> Tensor:
    """A weight of its own for every sequence."""
    inner = matrix(w)
    steps = vmap(grad(lambda v, t: (body((t @ v)[None])[0] - t).square().mean()), (None, 0))(inner, x)
    return torch.einsum("bsd,bde->bse", x, inner - 0.1 * steps)


def _tangent(w: Tensor, x: Tensor, body: Body) -> Tensor:
    return jvp(lambda t: body(t @ matrix(w)), (x,), (x.cos(),))[1]


def _pulled_back(w: Tensor, x: Tensor, body: Body) -> Tensor:
    found, pull = vjp(lambda t: body(t @ matrix(w)), x)
    return pull(found.sin())[0]


def _force(w: Tensor, x: Tensor, body: Body) -> Tensor:
    """The gradient of an energy of the tokens."""
    return x - 0.1 * grad(lambda t: body(t @ matrix(w)).square().sum())(x)


def _weighed(w: Tensor, x: Tensor, body: Body) -> Tensor:
    slope, value = grad_and_value(lambda t: body(t).square().mean())(x)
    return slope * value + x


def _mapped(w: Tensor, x: Tensor, body: Body) -> Tensor:
    return vmap(lambda t: body((t @ matrix(w))[None])[0])(x)


def _ensemble(w: Tensor, x: Tensor, body: Body) -> Tensor:
    """Two linears by functional_call, one body."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=x.dtype, device="meta")
    weights = torch.stack([matrix(w), matrix(w, 60)])
    found = vmap(lambda weight: functional_call(linear, {"weight": weight}, (x,)))(weights)
    return body(found.mean(0))


def _called(w: Tensor, x: Tensor, body: Body) -> Tensor:
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=x.dtype, device="meta")
    return functional_call(linear, {"weight": matrix(w)}, (body(x),))


def _jacobian(w: Tensor, x: Tensor, body: Body) -> Tensor:
    """Multiply x by the Jacobian of the mean row with respect to a vector."""
    found = jacrev(lambda v: body(x * v).mean((0, 1)))(w[:WIDTH])
    return x @ found


TRANSFORMS: dict[str, Callable[[Tensor, Tensor, Body], Tensor]] = {
    "learned": _learned,
    "learned by each": _learned_by_each,
    "tangent": _tangent,
    "pulled back": _pulled_back,
    "force": _force,
    "weighed": _weighed,
    "mapped": _mapped,
    "ensemble": _ensemble,
    "called": _called,
    "jacobian": _jacobian,
}


@dataclass(frozen=True)
class Transformed(Scene):
    """sizes: (B, S). inner: what is transformed. outer: what comes after it, if something does. then: a model without a
    transform, compiled in the same process afterwards."""

    transform: str = "called"
    inner: str = "sum"
    outer: str = ""
    sizes: tuple[int, int] = (2, 7)
    trained: bool = True
    then: str = ""

    def inputs(self) -> list[Tensor]:
        return [normal(*self.sizes, WIDTH, grad=self.trained)]

    def model(self, weight: Tensor, x: Tensor) -> Tensor:
        y = TRANSFORMS[self.transform](weight, x, BODIES[self.inner])
        return BODIES[self.outer](y @ matrix(weight, 100)) if self.outer else y

    def play(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        values = step(compiled, self.model, inputs, self.trained)
        if self.then:
            plainly = step(compiled, lambda w, x: BODIES[self.then](x @ matrix(w)), inputs, True)
            values |= {f"{name} afterwards": value for name, value in plainly.items()}
        return values


def step(
    compiled: Compile, function: Callable[..., Tensor], inputs: Sequence[Tensor], trained: bool = True, **how: Any
) -> Values:
    """One step of training, or one call, of a model of one parameter and one result."""
    net, given = Net(function), leaves(inputs)
    with torch.set_grad_enabled(trained):
        found = compiled(net, **how)(*given)
    if trained:
        found.sin().sum().backward()
    gradients = {"gradient of weight": net.weight.grad, "gradient of x": given[0].grad}
    return {"result": plain(found), **{name: plain(value) for name, value in gradients.items()}}


def made(seed: int) -> Transformed:
    """One that one device can do: attention has no second derivative there."""
    random = Random(f"transforms {seed}")
    while True:
        drawn = drawn_world(random)
        sizes = (random.randint(1, 2), drawn_length(random, drawn["world"], least=2))
        given = {"transform": random.choice(sorted(TRANSFORMS)), "inner": random.choice(sorted(BODIES)), "sizes": sizes}
        given |= {"outer": random.choice(["", *sorted(BODIES)]), "then": random.choice(["", *sorted(BODIES)])}
        scene = Transformed(**drawn, **given, trained=random.random() < 0.8)
        if not isinstance(alone(scene, eager), Exception):
            return scene


def cases(seed: int) -> Iterator[str]:
    """Return the names of cases, without end."""
    return (f"transforms:{number}" for number in itertools.count(seed * SESSION))


def run(name: str) -> Result:
    scene = made(int(name.partition(":")[2]))
    return named(name, scene, outcome(scene))


SOURCES = {"transforms": (partial(cases), run)}
