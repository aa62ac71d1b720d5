"""Train a tensor-parallel model by backend="sp", in eager mode, and without parallelism on a single device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from support import ranks as worker
from support.parallel.parallel_models import Split
from support.parity import compile_options, difference
from torch import Tensor, nn

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.joint.joint import JointPasses

STEPS = 3
Make = Callable[[Split], nn.Module]


def split(form: str = "pair") -> Split:
    """Return the split over the ranks of the running test."""
    group = worker.group()
    return Split(group.size(), dist.get_rank(group), group, form)


def message(call: Callable[[], Any]) -> str:
    """Return the message of an SpError, "" if none is raised."""
    try:
        call()
    except SpError as error:
        return str(error)
    return ""


@dataclass
class Trained:
    """The largest relative differences from eager mode and from a single device."""

    eager: float = 0.0
    alone: float = 0.0
    where: list[str] = field(default_factory=list)  # values that differ
    modes: list[str] = field(default_factory=list)  # of all layers

    def take(self, kind: str, name: str, found: Tensor | None, right: Tensor | None, floor: float) -> None:
        error = difference(found, right, floor)
        if error > 1e-9:
            self.where.append(f"{name} against {kind}: {error:.1e}")
        setattr(self, kind, max(getattr(self, kind), error))


@contextlib.contextmanager
def watched(found: Trained) -> Iterator[None]:
    """Record the reports of the passes on joint graphs."""
    plain = JointPasses.__call__

    def call(self: Any, gm: torch.fx.GraphModule) -> None:
        plain(self, gm)
        found.modes.append("".join(layer.mode[0] for layer in self.report.layers))

    JointPasses.__call__ = call
    try:
        yield
    finally:
        JointPasses.__call__ = plain


def total(results: Any) -> Tensor:
    """Return a loss of all results."""
    loss, *states = results if isinstance(results, tuple) else (results,)
    return loss + sum((0.01 * state.sin()).sum() for state in states)


def step(run: Callable[..., Any], model: nn.Module, args: Sequence[Any], optimizer: Any) -> tuple[Tensor, dict]:
    """Run a training step with a fixed seed; return the loss and the gradients by name."""
    torch.manual_seed(7)
    optimizer.zero_grad()
    loss = total(run(*args))
    loss.backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return loss.detach(), grads


def part_of(full: Tensor | None, parameter: nn.Parameter, tp: Split) -> Tensor | None:
    """Return this rank's part. Attributes: over (the axis that cuts, if not `tp`), outside (an axis that cuts first)."""
    cut, tp = getattr(parameter, "cut", None), getattr(parameter, "over", tp)
    if full is None or cut is None:
        return full
    outside = getattr(parameter, "outside", Split())
    return full.chunk(outside.n, 0)[outside.rank].chunk(tp.n, cut)[tp.rank]


def trained(
    make: Make,
    tp: Split,
    batches: Callable[[int], Sequence[Any]],
    against_one: bool = True,
    dynamic: bool | None = None,
    least: float = 1e-6,
    **options: Any,
) -> Trained:
    """Compare some steps of SGD with momentum.

    batches: the arguments of each step. against_one: compare with a single device. least: values below this share of
    the largest gradient count as rounding errors of zero.
    """
    found = Trained()
    mine, eager, alone = make(tp), make(tp), make(Split())
    options = {**compile_options(), **options}
    run = torch.compile(mine, backend="sp", dynamic=dynamic, options=options)
    optimizers = [torch.optim.SGD(_trainable(m), lr=0.1, momentum=0.9) for m in (mine, eager, alone)]
    with watched(found):
        for number in range(STEPS):
            args = batches(number)
            loss, grads = step(run, mine, args, optimizers[0])
            floor = least * max(g.abs().max().item() for g in grads.values() if g is not None)
            right, theirs = step(eager, eager, args, optimizers[1])
            found.take("eager", f"loss {number}", loss, right, 0)
            for name, grad in grads.items():
                found.take("eager", f"{name} {number}", grad, theirs[name], floor)
            if against_one:
                right, theirs = step(alone, alone, args, optimizers[2])
                found.take("alone", f"loss {number}", loss, right, 0)
                for name, parameter in mine.named_parameters():
                    found.take("alone", f"{name} {number}", grads[name], part_of(theirs[name], parameter, tp), floor)
    return found


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def inferred(make: Make, tp: Split, batches: Callable[[int], Sequence[Any]], **options: Any) -> Trained:
    """Results without gradients, for some batches."""
    found = Trained()
    mine, eager, alone = make(tp), make(tp), make(Split())
    run = torch.compile(mine, backend="sp", options={"compiler": "aot_eager", **options})
    with watched(found), torch.no_grad():
        for number in range(2):
            args = batches(number)
            found.take("eager", f"result {number}", total(run(*args)), total(eager(*args)), 0)
            found.take("alone", f"result {number}", total(run(*args)), total(alone(*args)), 0)
    return found
