"""What a graph computes, forward and backward, and how far two of these are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import run_once

ROUNDING_ERROR = 1e-6  # of the largest gradient, in float64; the square root of the precision of smaller types


class RunResult(NamedTuple):
    """What a graph computes: its results, the gradients of the inputs that require one, and its inputs afterwards."""

    results: list[Any]
    gradients: list[Tensor]
    inputs: list[Any]


def run_with_grads(
    gm: GraphModule,
    inputs: Sequence[Any],
    finish: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None,
) -> RunResult:
    """Run a graph on fresh leaves, or on copies of these where inputs are no leaves and may be changed in place; the
    cotangents are fixed, so that runs can be compared.

    finish: makes the results of what the graph returns, and of its inputs.
    """
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    with torch.enable_grad():
        given = [a.clone() if isinstance(x, Tensor) and not x.is_leaf else a for x, a in zip(inputs, leaves)]
        results = run_once(gm, given)
        results = results if finish is None else finish(results, given)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    outs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    gradients = [torch.zeros_like(x) for x in wanted]
    if outs and wanted:
        gradients = list(torch.autograd.grad(outs, wanted, list(map(_cotangent, outs)), materialize_grads=True))
    results, given = ([x.detach() if isinstance(x, Tensor) else x for x in each] for each in (results, given))
    return RunResult(results, gradients, given)


def _cotangent(y: Tensor) -> Tensor:
    """Ones for a scalar (a loss), else fixed pseudo-random numbers."""
    if y.numel() == 1:
        return torch.ones_like(y)
    index = torch.arange(y.numel(), device=y.device, dtype=torch.float64)
    return torch.sin(index * 12.9898).view(y.shape).to(y.dtype)


def compare_runs(
    gm: GraphModule, before: Sequence[Any], alone: RunResult, rank: RunResult
) -> Iterator[tuple[str, float]]:
    """What is compared, and its error. before: the inputs of the graph as they were."""
    for i, (a, b) in enumerate(zip_longest(alone.results, rank.results)):
        yield _error_row(f"result {i}", a, b)
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    for name, x, a, b in zip(names, before, alone.inputs, rank.inputs):
        if _relative_error(x, a) or _relative_error(x, b):
            yield _error_row(f"mutated input {name}", a, b)
    # A gradient that is zero but for rounding (a key's bias) is measured against the largest one.
    known = [g for g in alone.gradients if g.numel()]
    floor = max(
        (g.abs().max().item() * max(ROUNDING_ERROR, torch.finfo(g.dtype).eps ** 0.5) for g in known), default=0.0
    )
    wanted = [name for name, x in zip(names, before) if isinstance(x, Tensor) and x.requires_grad]
    for name, a, b in zip(wanted, alone.gradients, rank.gradients):
        yield _error_row(f"gradient of {name}", a, b, floor)


def _error_row(name: str, expected: Any, found: Any, floor: float = 0.0) -> tuple[str, float]:
    """The error under a name, which says what is not alike besides values."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        facts = [(x.dtype, tuple(x.shape)) for x in (expected, found)]
        if facts[0] != facts[1]:
            return f"{name}: {facts[1]}, on one device {facts[0]}", float("inf")
    return name, _relative_error(expected, found, floor)


def _relative_error(expected: Any, found: Any, floor: float = 0.0) -> float:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return 0.0 if expected is found or expected == found else float("inf")
    if expected.shape != found.shape:
        return float("inf")
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(expected, found) else float("inf")
    alike = (expected == found) | (expected.isnan() & found.isnan())  # NaN and inf where one device has them
    if alike.all():
        return 0.0
    worst = (expected - found)[~alike].abs().max().item()
    scale = max(expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0, floor, 1e-30)
    return worst / scale if worst == worst else float("inf")
