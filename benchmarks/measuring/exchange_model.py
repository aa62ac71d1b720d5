"""Simulate one exchange of small messages between many ranks, by a ring and in log2 n rounds.

The delay model: a rank arrives at an exchange at a random time (exponential, mean `skew`). Sending and receiving a
message takes the rank `cpu` each. A message arrives `latency` after it is sent, and a random time later (exponential,
mean `jitter`: other work on the host, and the network). Messages between two ranks stay in order. The exposed time of
an exchange is the time from the arrival of the last rank to the end of the slowest one: until the last rank arrives,
ranks would wait for it in the collectives of the program, too.
"""

from __future__ import annotations

import statistics
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

    def random_delays(mean: float) -> torch.Tensor:
        """Return exponential delays, (trials, n)."""
        return torch.empty(trials, n, dtype=torch.float64).exponential_(generator=generator) * mean

    arrivals = random_delays(model.skew)
    now = arrivals.clone()
    for distance in distances:
        sent = now + model.cpu
        received = sent.roll(distance, 1) + model.latency + random_delays(model.jitter)
        now = torch.maximum(sent, received) + model.cpu
    exposed = (now.amax(1) - arrivals.amax(1)).sort().values
    if model.cores is not None:  # the ranks of one machine also wait for its cores
        exposed = exposed.clamp(min=2 * model.cpu * len(distances) * n / model.cores)
    return statistics.median(exposed.tolist()), float(exposed[int(0.99 * trials)])
