"""A process that goes on after a program that could not be compiled, or raised while it was: the next one is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from support.fuzz.kinds.on_ranks import compiled_alone, named, outcome
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
from support.fuzz.kinds.transforms import TRANSFORMS, step
from support.fuzz.oracle import SESSION
from support.fuzz.outcomes import Result
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Bad = Callable[[Compile, list[Tensor]], Any]


class _Unexpected(Exception):
    """What a model or a compiler raises."""


def _raises(*_: Any) -> Any:
    raise _Unexpected


def _raises_on_rank_0(*given: Any) -> Any:
    if dist.is_initialized() and dist.get_rank() == 0:
        raise _Unexpected
    return torch._dynamo.lookup_backend("aot_eager")(*given)


@torch.library.custom_op("fuzz::has_no_shape", mutates_args=())
def has_no_shape(x: Tensor) -> Tensor:
    """x; there is no way to trace it."""
    return x.clone()


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise _Unexpected


def _model(w: Tensor, x: Tensor) -> Tensor:
    return (x @ matrix(w)).cumsum(1)


def _in_regions(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = _model(w, x)
        torch._check(False)
    return y


def _checkpointed(w: Tensor, x: Tensor) -> Tensor:
    return checkpoint(lambda t: torch.ops.fuzz.has_no_shape(_model(w, t)), x, use_reentrant=False).cumsum(1)


def _twice(compiled: Compile, inputs: list[Tensor]) -> None:
    net = Net(_model)
    found = compiled(net)(*inputs).sin().sum()
    (first,) = torch.autograd.grad(found, net.weight, create_graph=True)
    first.square().sum().backward()


def _failing(function: Callable[..., Any], trained: bool = True, **how: Any) -> Bad:
    return lambda compiled, inputs: step(compiled, function, inputs, trained, **how)


BAD: dict[str, Bad] = {
    "a size of the data": _failing(lambda w, x: _model(w, x)[x > 0].cumsum(0)[None], fullgraph=True),
    "no sequence": _failing(lambda w, x: (x @ matrix(w)).sin()),
    "an unknown option": _failing(_model, options={"attention": "nonsense"}),
    "no such dim": _failing(_model, options={"seq_dims": {"x": 9}}),
    "the model raises": _failing(lambda w, x: _raises() if x.ndim == 3 else x),
    "the model raises after ops": _failing(lambda w, x: _model(w, x) + _raises()),
    "raises in regions": _failing(_in_regions),
    "the compiler raises": _failing(_model, options={"compiler": _raises}),
    "the compiler raises on a rank": _failing(_model, options={"compiler": _raises_on_rank_0}),
    "an op of no shape": _failing(lambda w, x: torch.ops.fuzz.has_no_shape(_model(w, x))),
    "an op of no shape, checkpointed": _failing(_checkpointed),
    "shapes do not fit": _failing(lambda w, x: _model(w, x) + x[:, :, :3]),
    "no backward": _failing(lambda w, x: _NoBackward.apply(_model(w, x))),
    "a second derivative": _twice,
    "gathers nothing": _failing(lambda w, x: _model(w, x).sort(1)[0], options={"fallback": "error"}),
    "from outside": lambda compiled, inputs: torch.func.grad(lambda x: compiled(Net(_model))(x).sum())(*inputs),
    "mapped from outside": lambda compiled, inputs: torch.vmap(lambda x: compiled(Net(_model))(x[None]))(*inputs),
    "a view of the input": lambda compiled, inputs: compiled(Net(lambda w, x, y: y.add_(1) + _model(w, x)))(
        inputs[0].detach(), inputs[0].detach()
    ),
    **{
        f"torch.func: {name}": _failing(lambda w, x, name=name: TRANSFORMS[name](w, x, BODIES["sum"]))
        for name in ("learned", "learned by each", "tangent", "force", "mapped")
    },
}


@dataclass(frozen=True)
class AfterFailure(Scene):
    """Programs that fail, in order, and a good one after them. sizes: (B, S)."""

    bad: tuple[str, ...] = ("the model raises",)
    good: str = "sum"
    sizes: tuple[int, int] = (2, 7)
    first: bool = False

    def inputs(self) -> list[Tensor]:
        return [normal(*self.sizes, WIDTH, grad=True)]

    def play(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        values = {"before": self._good(compiled, inputs)} if self.first else {}
        for name in self.bad:
            with suppress(Exception):
                BAD[name](compiled, [x.detach().clone().requires_grad_() for x in inputs])
        state = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
        values |= {
            "plain": step(compiled_alone("aot_eager"), _model, inputs),
            "afterwards": self._good(compiled, inputs),
        }
        x = inputs[0].detach().clone().requires_grad_()
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        flat = {f"{name} {when}": value for when, some in values.items() for name, value in some.items()}
        return {**flat, "state": state, "checkpoint": plain(x.grad)}

    def _good(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        return step(compiled, lambda w, x: BODIES[self.good](x @ matrix(w)) @ matrix(w, 50), inputs)


def made(seed: int) -> AfterFailure:
    random = Random(f"after_failure {seed}")
    drawn = drawn_world(random)
    sizes = (random.randint(1, 2), drawn_length(random, drawn["world"], least=2))
    bad = tuple(random.choice(sorted(BAD)) for _ in range(random.choice([1, 1, 2])))
    return AfterFailure(**drawn, bad=bad, good=random.choice(sorted(BODIES)), sizes=sizes, first=random.random() < 0.3)


def cases(seed: int) -> Iterator[str]:
    """Without end."""
    return (f"after_failure:{number}" for number in itertools.count(seed * SESSION))


def run(name: str) -> Result:
    scene = made(int(name.partition(":")[2]))
    return named(name, scene, outcome(scene))


SOURCES = {"after_failure": (cases, run)}
