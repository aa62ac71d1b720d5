"""Run graphs forward and backward and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import run_once

ROUNDING_ERROR = 1e-6  # relative to the largest gradient, in float64; lower precisions use the square root of their eps


class RunResult(NamedTuple):
    """Results of one run of a graph, forward and backward."""

    results: list[Any]  # outputs of the graph, detached
    gradients: list[Tensor]  # gradients of the inputs that require one
    inputs: list[Any]  # inputs after the run, detached


def run_with_grads(
    gm: GraphModule,
    inputs: Sequence[Any],
    finish: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None,
) -> RunResult:
    """Run a graph forward and backward with fixed cotangents, so that runs can be compared.

    Inputs are copied to new leaves. Inputs that are not leaves are cloned, because the graph may mutate them.

    Args:
        gm: Graph to run.
        inputs: Inputs of the graph.
        finish: Computes the final results from the outputs and the inputs of the graph.

    Returns:
        Results, gradients and inputs after the run.
    """
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    with torch.enable_grad():
        arguments = [a.clone() if isinstance(x, Tensor) and not x.is_leaf else a for x, a in zip(inputs, leaves)]
        results = run_once(gm, arguments)
        results = results if finish is None else finish(results, arguments)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    outs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    gradients = [torch.zeros_like(x) for x in wanted]
    if outs and wanted:
        gradients = list(torch.autograd.grad(outs, wanted, list(map(_cotangent, outs)), materialize_grads=True))
    results, arguments = ([x.detach() if isinstance(x, Tensor) else x for x in each] for each in (results, arguments))
    return RunResult(results, gradients, arguments)


def _cotangent(y: Tensor) -> Tensor:
    """Return ones for a scalar (a loss), else fixed pseudo-random values."""
    if y.numel() == 1:
        return torch.ones_like(y)
    index = torch.arange(y.numel(), device=y.device, dtype=torch.float64)
    return torch.sin(index * 12.9898).view(y.shape).to(y.dtype)


def compare_runs(
    gm: GraphModule, before: Sequence[Any], single_device: RunResult, rank: RunResult
) -> Iterator[tuple[str, float]]:
    """Yield the name and the relative error of each result, mutated input and gradient.

    Args:
        gm: Graph that was run.
        before: Inputs of the graph before the runs.
        single_device: Result of the single-device run.
        rank: Result of a rank.
    """
    for i, (a, b) in enumerate(zip_longest(single_device.results, rank.results)):
        yield _error_row(f"result {i}", a, b)
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    for name, x, a, b in zip(names, before, single_device.inputs, rank.inputs):
        if _relative_error(x, a) or _relative_error(x, b):
            yield _error_row(f"mutated input {name}", a, b)
    # Gradients that are zero up to rounding (a key's bias) are compared relative to the largest gradient.
    known = [g for g in single_device.gradients if g.numel()]
    floor = max(
        (g.abs().max().item() * max(ROUNDING_ERROR, torch.finfo(g.dtype).eps ** 0.5) for g in known), default=0.0
    )
    wanted = [name for name, x in zip(names, before) if isinstance(x, Tensor) and x.requires_grad]
    for name, a, b in zip(wanted, single_device.gradients, rank.gradients):
        yield _error_row(f"gradient of {name}", a, b, floor)


def _error_row(name: str, expected: Any, found: Any, floor: float = 0.0) -> tuple[str, float]:
    """Return a name and the relative error; if dtype or shape differ, the name includes both."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        facts = [(x.dtype, tuple(x.shape)) for x in (expected, found)]
        if facts[0] != facts[1]:
            return f"{name}: {facts[1]}, on a single device {facts[0]}", float("inf")
    return name, _relative_error(expected, found, floor)


def _relative_error(expected: Any, found: Any, floor: float = 0.0) -> float:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return 0.0 if expected is found or expected == found else float("inf")
    if expected.shape != found.shape:
        return float("inf")
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(expected, found) else float("inf")
    equal = (expected == found) | (
        expected.isnan() & found.isnan()
    )  # NaN and inf at the positions of the single-device run
    if equal.all():
        return 0.0
    worst = (expected - found)[~equal].abs().max().item()
    scale = max(expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0, floor, 1e-30)
    return worst / scale if worst == worst else float("inf")
