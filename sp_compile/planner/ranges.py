"""Ranges of the predicted times and sizes of a plan, from the uncertainty of what they are computed from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .byte_sizes import UNITS, SizeUnit

Factors = tuple[float, float]  # of the smallest and of the largest value that is expected, over the prediction

RATES = ("flops", "memory_bandwidth", "all_gather_bandwidth", "all_to_all_bandwidth", "hop_bandwidth")
ASSUMED_TIMES: Factors = (0.9, 1.35)  # with rates of data sheets: steps were up to a third slower than predicted
MEASURED_TIMES: Factors = (0.9, 1.1)  # with rates that the user has measured and set
EXACT_MEMORY: Factors = (0.9, 1.1)  # of a program that was lowered with these options
ESTIMATED_MEMORY: Factors = (0.85, 1.15)  # of one that was derived from the program with other options


@dataclass(frozen=True)
class Ranges:
    """The ranges of one plan."""

    times: Factors = ASSUMED_TIMES  # of seconds of a step

    @classmethod
    def of(cls, set_constants: Collection[str]) -> Ranges:
        """Return the ranges of a plan in which the user has set these constants of the cost model.

        The times are those of measured rates if the rates of attention, memory and a link are set.
        """
        compute, links = RATES[:2], RATES[2:]  # (attention, memory) and (a link for each kind of collective)
        measured = all(name in set_constants for name in compute) and any(name in set_constants for name in links)
        return cls(MEASURED_TIMES if measured else ASSUMED_TIMES)

    def seconds(self, predicted: float) -> tuple[float, float]:
        """Return the least and the most seconds of a step."""
        return predicted * self.times[0], predicted * self.times[1]

    def tokens_per_second(self, predicted: float) -> tuple[float, float]:
        """Return the least and the most tokens per second."""
        return predicted / self.times[1], predicted / self.times[0]

    def memory(self, predicted: float, is_exact: bool) -> tuple[float, float]:
        """Return the least and the most bytes of a rank; `is_exact` if the program was lowered with its options."""
        low, high = EXACT_MEMORY if is_exact else ESTIMATED_MEMORY
        return predicted * low, predicted * high


def format_range(bounds: tuple[float, float]) -> str:
    """Return a range with two significant digits: "18-27", or one number if both are equal."""
    rounded = [float(f"{bound:.2g}") for bound in bounds]
    texts = [f"{number:,.12g}" for number in rounded]  # without an exponent, as ".2g" may have
    return "-".join(dict.fromkeys(texts))


def format_byte_range(bounds: tuple[float, float], unit: SizeUnit) -> str:
    """Return a range of bytes in a unit: "52-63 GB"."""
    return f"{format_range((bounds[0] / UNITS[unit.name], bounds[1] / UNITS[unit.name]))} {unit.name}"
