"""What may come of a case, which of it is a bug, and the table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rich.table import Table


class Outcome(Enum):
    """By weight; but for the last three they are what a case may come to. COVERED: a case with the same graph is right."""

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
    """What came of one case. words: why. program: a Python file that shows it, minimal where it is bad."""

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
