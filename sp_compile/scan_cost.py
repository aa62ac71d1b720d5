"""How the ranks tell each other what their part of a scan adds up to: all at once, or in steps.

    gather   alpha + (n - 1) * C / beta                  one all-gather of everyone's C bytes
    steps    ceil(log2 n) * (alpha + C / beta)           step k: to the rank 2^k further on

One alpha for both, so that measured latencies, which are noisy, never decide: only bytes do. A vector of carries
is gathered; matrices of state on many ranks are stepped. The backward exchanges as much.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine


@dataclass(frozen=True)
class Carries:
    """What the exchange of one scan's carries costs: bytes of one rank's, predicted seconds of both ways, the choice."""

    nbytes: int
    gather: float
    steps: float
    rounds: int
    exchange: str

    def __str__(self) -> str:
        if self.exchange == "gather":
            return f"1 all-gather of {self.nbytes} B a rank"
        return f"{self.rounds} steps of {self.nbytes} B a rank, as predicted faster than an all-gather"


def carries(nbytes: int, n: int, machine: Machine, folds: int = 1) -> Carries:
    """The exchange of `nbytes` a rank. folds: chunks a rank holds; steps need contiguous ones (1)."""
    alpha = max(machine.all_gather_latency, machine.hop_latency)
    rounds = (n - 1).bit_length()
    gather = machine.all_gather(nbytes, n) - machine.all_gather_latency * (n > 1) + alpha * (n > 1)
    gather += machine.copy(2 * n * nbytes)
    step = machine.hop(nbytes, n) - machine.hop_latency + alpha + machine.copy(3 * nbytes)
    stepped = rounds * step
    exchange = "steps" if folds == 1 and n > 2 and stepped < gather else "gather"
    return Carries(nbytes, gather, stepped, rounds, exchange)
