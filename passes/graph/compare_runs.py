"""Run graphs forward and backward, and compare the results of a rank with those of a single device.

A run returns a `RunResult`; `compare_runs` yields a row such as ("gradient of w", 1e-16) for each tensor. `verify`
uses this module. Cotangents are the gradients of the outputs, from which a backward starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import argument_name, is_wrapper, run_once

MIN_SCALE = 1e-30  # prevents a division by zero if all expected elements are zero
# The magnitude of a gradient, relative to the largest one, below which it may be zero up to rounding. A sum of many
# rows has an error of several eps of its terms, which is about 1e-9 of this magnitude in float64 and 1e-5 in float32.
MIN_MAGNITUDES = {torch.float64: 1e-6, torch.float32: 0.02}
MIN_MAGNITUDE = 0.1  # of other dtypes


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
    """Run a graph forward and backward with fixed gradients of its outputs, so that runs can be compared.

    Inputs are copied to new leaves, of which gradients are returned. In place of an input that is not a leaf, the graph
    gets a clone of the new leaf: it may mutate the clone, which autograd forbids for a leaf.

    Args:
        gm: Graph to run.
        inputs: Inputs of the graph.
        finish: finish(outputs, inputs) computes the results to compare, such as gathered ones; None for the outputs.

    Returns:
        Results, gradients and inputs after the run.
    """
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    with torch.enable_grad():
        arguments = [
            leaf.clone() if isinstance(x, Tensor) and not x.is_leaf else leaf for x, leaf in zip(inputs, leaves)
        ]
        results = run_once(gm, arguments)
        results = results if finish is None else finish(results, arguments)
    trained = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    outputs = [y for y in results if isinstance(y, Tensor) and y.requires_grad]
    gradients = [torch.zeros_like(x) for x in trained]
    if outputs and trained:
        cotangents = [_fixed_cotangent(y) for y in outputs]
        gradients = list(torch.autograd.grad(outputs, trained, cotangents, materialize_grads=True))
    return RunResult(_detach_all(results), gradients, _detach_all(arguments))


def _detach_all(values: Sequence[Any]) -> list[Any]:
    """Return the values with detached tensors, so that a result does not keep the autograd graph."""
    return [x.detach() if isinstance(x, Tensor) else x for x in values]


def _fixed_cotangent(y: Tensor) -> Tensor:
    """Return ones for a scalar (a loss), else pseudo-random values that are equal in all runs."""
    if y.numel() == 1:
        return torch.ones_like(y)
    index = torch.arange(y.numel(), device=y.device, dtype=torch.float64)
    # Any factor that is no simple multiple of pi gives values without a short period.
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
    for i, (expected, actual) in enumerate(zip_longest(single_device.results, rank.results)):
        yield _error_row(f"result {i}", expected, actual)
    names = [argument_name(n) for n in gm.graph.find_nodes(op="placeholder")]
    for name, x, expected, actual in zip(names, before, single_device.inputs, rank.inputs):
        if relative_error(x, expected) or relative_error(x, actual):
            yield _error_row(f"mutated input {name}", expected, actual)
    # The relative error of a gradient that is zero up to rounding, such as that of a key's bias, would be meaningless.
    # Differences are divided by at least a small part of the largest gradient.
    magnitudes = [
        g.abs().max().item() * MIN_MAGNITUDES.get(g.dtype, MIN_MAGNITUDE)
        for g in map(_dense, single_device.gradients)
        if g.numel()
    ]
    min_scale = max(magnitudes, default=0.0)
    trained = [name for name, x in zip(names, before) if isinstance(x, Tensor) and x.requires_grad]
    for name, expected, actual in zip(trained, single_device.gradients, rank.gradients):
        yield _error_row(f"gradient of {name}", expected, actual, min_scale)


def _error_row(name: str, expected: Any, actual: Any, min_scale: float = 0.0) -> tuple[str, float]:
    """Return a row of `compare_runs`: the name and the relative error.

    If dtypes or shapes differ, the error is inf and the name includes both. See `relative_error` for `min_scale`.
    """
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        expected_type, actual_type = ((x.dtype, tuple(x.shape)) for x in (expected, actual))
        if expected_type != actual_type:
            return f"{name}: {actual_type}, on a single device {expected_type}", math.inf
    return name, relative_error(expected, actual, min_scale)


def relative_error(expected: Any, actual: Any, min_scale: float = 0.0) -> float:
    """Return the largest difference relative to the largest expected element, or inf for different types.

    Integers and values that are no tensors have an error of 0 or inf. Equal NaN and inf are no error.

    Args:
        expected: Value of the single-device run.
        actual: Value of the rank.
        min_scale: Minimum of the magnitude by which the difference is divided.
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return 0.0 if expected is actual or expected == actual else math.inf
    if expected.shape != actual.shape or expected.layout != actual.layout:
        return math.inf
    expected, actual = _dense(expected), _dense(actual)
    if is_wrapper(expected) and type(expected) is type(actual):  # such as a quantized weight
        names, _ = expected.__tensor_flatten__()  # type: ignore[attr-defined]
        return max(relative_error(getattr(expected, name), getattr(actual, name), min_scale) for name in names)
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(expected, actual) else math.inf
    equal = (expected == actual) | (expected.isnan() & actual.isnan())
    if equal.all():
        return 0.0
    largest_error = (expected - actual)[~equal].abs().max().item()
    finite = expected[expected.isfinite()]
    scale = max(finite.abs().max().item() if finite.numel() else 0.0, min_scale, MIN_SCALE)
    return math.inf if math.isnan(largest_error) else largest_error / scale


def _dense(x: Tensor) -> Tensor:
    """Return a sparse tensor, such as the gradient of a sparse embedding, as a dense one; others unchanged."""
    return x if x.layout == torch.strided else x.to_dense()
