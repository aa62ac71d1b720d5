"""Measure values, gradients, bytes, link bandwidths and step times on one rank of the self-test."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_compile.lowering.base.ranks import STRATEGIES, Ranks
from sp_compile.passes.cost.measure import machine
from sp_compile.passes.graph.compare_runs import relative_error
from sp_compile.planner.explain import explain
from sp_compile.runtime.agreement import make_exchange
from sp_compile.runtime.control.message import MEASURE_MESSAGE

from .model import ModelSize, SelfTestModel, make_model

TIMED_STEPS = 5  # timed training steps, after one that compiles and one that warms up
# A rank may have this many times the rounding error of a single device in the same dtype, and at least the floor.
ERROR_FACTOR, ERROR_FLOOR = 4.0, 1e-6


@dataclass(frozen=True)
class Settings:
    """Arguments of a self-test."""

    ranks: int  # number of processes
    device: str  # "cuda" or "cpu"
    compiler: str  # value of the option `compiler` of the backend
    values: ModelSize  # model whose values are compared with float64
    times: ModelSize  # model whose steps are timed
    dtype: torch.dtype  # of both models


@dataclass(frozen=True)
class StrategyResult:
    """Results of one attention strategy, the largest of all ranks."""

    attention: str  # the strategy, or "single device"
    error: float  # largest relative error of the loss and of a gradient, against float64 on a single device
    allowed: float  # largest error that passes
    milliseconds: float  # median of training steps
    sent_bytes: int  # that a rank sends in a step of the timed model, from `explain`
    peak_bytes: int | None = None  # memory of the timed step beyond weights; None on a CPU

    @property
    def is_right(self) -> bool:
        """Return True if the error is allowed; False for NaN."""
        return self.error <= self.allowed


def strategies_of(ranks: int) -> list[str]:
    """Return the attention strategies that this number of ranks can run.

    A strategy with two mesh axes needs a number of ranks that is a product of two factors above 1.

    Args:
        ranks: Number of ranks.
    """
    has_factors = any(ranks % factor == 0 for factor in range(2, ranks))
    return [name for name, strategy in STRATEGIES.items() if has_factors or len(strategy.axes) < 2]


def run_rank(settings: Settings) -> dict[str, Any]:
    """Run the self-test on this rank; all ranks of the default group call it together.

    Args:
        settings: The arguments, equal on all ranks.

    Returns:
        The measured constants of the links, and the results of a single device and of each strategy, with the largest
        values of all ranks.
    """
    device = torch.device(settings.device, torch.cuda.current_device() if settings.device == "cuda" else None)
    ranks = Ranks(settings.ranks, dist.group.WORLD.group_name)
    links = machine(ranks, device, make_exchange(ranks, MEASURE_MESSAGE))  # measures the links
    model, ids = make_model(settings.values, torch.float64, device)
    truth = _loss_and_gradients(model, model, ids)
    single = _test_single_device(settings, truth, device)
    results = [single, *(_test_strategy(settings, name, truth, single, device) for name in strategies_of(ranks.n))]
    return {
        "all_to_all_bandwidth": links.all_to_all_bandwidth,
        "all_to_all_latency": links.all_to_all_latency,
        "all_gather_bandwidth": links.all_gather_bandwidth,
        "all_gather_latency": links.all_gather_latency,
        "results": [{**asdict(result), "is_right": result.is_right} for result in results],
    }


def _loss_and_gradients(model: SelfTestModel, run: Callable[..., Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Run a training step. Return the loss and the gradient of each parameter, in float64, by name.

    `run` is the model itself, or its compiled form, which has the same parameters.
    """
    loss = run(ids)
    loss.backward()
    values = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
    return {name: value.double() for name, value in values.items()}


def _largest_error(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a value, relative to its largest entry.

    It is infinite if values are missing or not finite.
    """
    if found.keys() != truth.keys() or not all(x.isfinite().all() for x in truth.values()):
        return math.inf
    return max(relative_error(truth[name], found[name]) for name in truth)


def _test_single_device(settings: Settings, truth: Mapping[str, Tensor], device: torch.device) -> StrategyResult:
    """Return the error and the time of the same model on a single device, compiled without sequence parallelism.

    Rank 0 times the steps while the others wait, so that ranks that share a device do not disturb it.
    """
    model, ids = make_model(settings.values, settings.dtype, device)
    error = _largest_error(_loss_and_gradients(model, model, ids), truth)
    milliseconds, peak = 0.0, None
    if dist.get_rank() == 0:
        model, ids = make_model(settings.times, settings.dtype, device)
        milliseconds, peak = _time_steps(model, torch.compile(model, backend=settings.compiler, dynamic=False), ids)
        torch.compiler.reset()
    dist.barrier()
    allowed, sent_bytes = error, 0  # the reference passes by definition, and sends nothing
    return _largest_of_ranks(StrategyResult("single device", error, allowed, milliseconds, sent_bytes, peak))


def _test_strategy(
    settings: Settings, attention: str, truth: Mapping[str, Tensor], single: StrategyResult, device: torch.device
) -> StrategyResult:
    """Return the error, the bytes and the time of one attention strategy on all ranks.

    The error is that of the small model `settings.values` against `truth`, its loss and gradients in float64 on a
    single device. It may be a few times `single.error`, that of the same dtype on a single device. The time and the
    bytes are those of the large model `settings.times`.
    """
    options = {"attention": attention, "compiler": settings.compiler}
    model, ids = make_model(settings.values, settings.dtype, device)
    error = _largest_error(_loss_and_gradients(model, torch.compile(model, backend="sp", options=options), ids), truth)
    torch.compiler.reset()
    model, ids = make_model(settings.times, settings.dtype, device)
    is_rank0 = dist.get_rank() == 0  # which predicts for all: the result is the largest number of the ranks
    sent_bytes = _predict_sent_bytes(model, ids, settings.ranks, attention) if is_rank0 else 0
    dist.barrier()
    milliseconds, peak = _time_steps(model, torch.compile(model, backend="sp", options=options), ids)
    torch.compiler.reset()
    allowed = max(ERROR_FACTOR * single.error, ERROR_FLOOR)
    return _largest_of_ranks(StrategyResult(attention, error, allowed, milliseconds, sent_bytes, peak))


def _predict_sent_bytes(model: SelfTestModel, ids: Tensor, ranks: int, attention: str) -> int:
    """Return the bytes that a rank sends in a training step, forward and backward, without running it."""
    report = explain(model, ids, sp=ranks, attention=attention)
    torch.compiler.reset()
    return sum(int(exchange.forward) + int(exchange.backward) for exchange in report.exchanges)


def _time_steps(model: SelfTestModel, run: Callable[..., Tensor], ids: Tensor) -> tuple[float, int | None]:
    """Return the median milliseconds of a training step, and on a GPU its peak memory without weights and gradients."""
    is_cuda, times, peak = ids.is_cuda, [], None
    for step in range(2 + TIMED_STEPS):  # the first two compile and warm up
        model.zero_grad(set_to_none=False)  # keeps the gradients allocated, as `allocated` counts them
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated() if is_cuda else 0
        begin = time.perf_counter()
        run(ids).backward()
        if is_cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - allocated
        if step >= 2:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), peak


def _largest_of_ranks(result: StrategyResult) -> StrategyResult:
    """Return the result with the largest error, time, bytes and memory of all ranks."""
    all_results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_results, result)
    peaks = [other.peak_bytes for other in all_results if other.peak_bytes is not None]
    return replace(
        result,
        error=max(other.error for other in all_results),
        milliseconds=max(other.milliseconds for other in all_results),
        sent_bytes=max(other.sent_bytes for other in all_results),
        peak_bytes=max(peaks, default=None),
    )
