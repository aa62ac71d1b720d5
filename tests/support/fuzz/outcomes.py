"""Outcomes of cases, the bad ones, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rich.table import Table


class Outcome(Enum):
    """Outcome of a case, in ascending order of weight; the last three are bad. COVERED: an equal graph was right."""

    COVERED = "same graph"
    EXACT = "exact on shards"
    GATHERED = "gathered and exact"
    REFUSED = "clear error"
    SKIPPED = "not comparable"
    RAW = "raw error"
    WRONG = "silent difference"
    HANG = "hang or abort"

    @property
    def is_bad(self) -> bool:
        return self in (Outcome.RAW, Outcome.WRONG, Outcome.HANG)


@dataclass(frozen=True)
class Result:
    """Result of a case. words: the reason. program: a Python file that reproduces it, minimal if it is bad."""

    outcome: Outcome
    words: str = ""
    program: str = ""

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.words}" if self.words else self.outcome.value


def table(counts: Mapping[str, Counter[Outcome]]) -> Table:
    """A row for each source, or kind of program, and a column for each outcome."""
    made = Table(title="cases by outcome")
    made.add_column("source")
    for outcome in Outcome:
        made.add_column(outcome.value, justify="right", style="bold red" if outcome.is_bad else "")
    made.add_column("all", justify="right")
    for source, count in counts.items():
        made.add_row(source, *(str(count[outcome]) for outcome in Outcome), str(count.total()))
    return made
