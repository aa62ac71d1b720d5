"""Simulate exchanges of small messages between many ranks, by a ring and in log2 n rounds, and a step with many.

The delay model: a rank arrives at an exchange at a random time (exponential, mean `skew`). Sending and receiving a
message takes the rank `cpu` each. A message arrives `latency` after it is sent, and a random time later (exponential,
mean `jitter`: other work on the host, and the network). Messages between two ranks stay in order. The exposed time of
an exchange is the time from the arrival of the last rank to the end of the slowest one: until the last rank arrives,
ranks would wait for it in the collectives of the program, too.

A step runs the graphs of a model, forward and backward, one after the other. Before each graph the host of a rank runs
an exchange and then launches the graph; the device runs graphs in order. The collectives of a graph begin when every
host has launched it. The host may be one graph ahead: an exchange waits for checksums that the device computes just
before the previous graph. The exposed time of a step is what its exchanges add to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DelayModel:
    """Delays of messages in us."""

    latency: float  # from the end of sending to the start of receiving, without load
    cpu: float  # of a rank to send a message; the same to receive one
    jitter: float = 5.0  # mean of a random delay of each message
    skew: float = 200.0  # mean of the time at which a rank arrives
    cores: int | None = None  # cores that all ranks share; None for a core or more a rank

    @property
    def description(self) -> str:
        """Return the parameters as text."""
        return (
            f"latency {self.latency:.0f} us, CPU {self.cpu:.0f} us to send and {self.cpu:.0f} us to receive a message, "
            f"jitter {self.jitter:.0f} us (mean of an exponential), skew {self.skew:.0f} us (the same)"
        )


def ring_distances(n: int) -> list[int]:
    """Return the distance of the sender in each step of an all-gather along a ring, as Gloo runs it."""
    return [1] * (n - 1)


def round_distances(n: int) -> list[int]:
    """Return the distance of the sender in each round of the package's exchange."""
    return [1 << k for k in range((n - 1).bit_length())]


def exposed_microseconds(n: int, distances: list[int], model: DelayModel, trials: int = 200) -> tuple[float, float]:
    """Return the median and the 99th percentile of the exposed time of an exchange in us.

    Args:
        n: Number of ranks.
        distances: Distance of the sender in each step.
        model: Delays.
        trials: Exchanges to simulate.
    """
    generator = torch.Generator().manual_seed(n)
    arrivals = _random_delays((trials, n), model.skew, generator)
    end = _run_exchange(arrivals, distances, model, generator)
    exposed = (end.amax(1) - arrivals.amax(1)).sort().values
    if model.cores is not None:  # the ranks of one machine also wait for its cores
        exposed = exposed.clamp(min=2 * model.cpu * len(distances) * n / model.cores)
    return statistics.median(exposed.tolist()), float(exposed[int(0.99 * trials)])


@dataclass(frozen=True)
class StepModel:
    """Times of the graphs of a step in us."""

    device: float  # of the device for a graph; 0 if it waits for the host at every graph
    graphs: int = 200  # forward and backward of 100 graphs
    launch: float = 300.0  # of the host for a graph
    check: float = 0.0  # of the host to prepare an exchange
    variation: float = 50.0  # mean of a random time of the host for each graph and rank (exponential)

    @property
    def description(self) -> str:
        """Return the parameters of the host as text."""
        return (
            f"the host takes {self.check:.0f} us to prepare an exchange, {self.launch:.0f} us for a graph and a random "
            f"time (mean {self.variation:.0f} us of an exponential), and is at most one graph ahead of the device"
        )


def exposed_step_microseconds(
    n: int, distances: list[int], model: DelayModel, step: StepModel, trials: int = 2
) -> float:
    """Return the median of the time in us that exchanges add to a step.

    Args:
        n: Number of ranks.
        distances: Distance of the sender in each step of an exchange.
        model: Delays of messages.
        step: Times of the graphs.
        trials: Steps to simulate.
    """
    with_exchanges = _run_step(n, distances, model, step, trials)
    without = _run_step(n, None, model, step, trials)
    return statistics.median((with_exchanges - without).tolist())


def _run_step(n: int, distances: list[int] | None, model: DelayModel, step: StepModel, trials: int) -> torch.Tensor:
    """Return the duration of steps, (trials); without exchanges if `distances` is None."""
    generator = torch.Generator().manual_seed(n)
    hosts = torch.zeros(trials, n, dtype=torch.float64)  # time at which each host is free
    device_start, device_end = torch.zeros(2, trials, dtype=torch.float64)  # of the last graph, equal on all ranks
    for _ in range(step.graphs):
        if distances is not None:
            ready = torch.maximum(hosts + step.check, device_start[:, None])
            hosts = _run_exchange(ready, distances, model, generator)
        elif not step.device:  # the host waits for the device
            hosts = torch.maximum(hosts, device_end[:, None])
        hosts = hosts + step.launch + _random_delays((trials, n), step.variation, generator)
        device_start = torch.maximum(device_end, hosts.amax(1))
        device_end = device_start + step.device
    return device_end


def _run_exchange(
    arrivals: torch.Tensor, distances: list[int], model: DelayModel, generator: torch.Generator
) -> torch.Tensor:
    """Return the time at which each rank ends an exchange, (trials, n), from that at which it arrives."""
    now = arrivals
    for distance in distances:
        sent = now + model.cpu
        received = sent.roll(distance, 1) + model.latency + _random_delays(now.shape, model.jitter, generator)
        now = torch.maximum(sent, received) + model.cpu
    return now


def _random_delays(shape: Sequence[int], mean: float, generator: torch.Generator) -> torch.Tensor:
    """Return exponential delays."""
    return torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator) * mean
