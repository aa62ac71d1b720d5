"""What was fuzzed so far: `benchmarks/results/fuzz.md`, which the fuzzer reads to go on, and writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measuring.tables import commit
from support.fuzz.outcomes import Outcome

ROOT = Path(__file__).parents[3]
PATH = ROOT / "benchmarks" / "results" / "fuzz.md"
HEAD = """\
# Fuzzing

Written by `make fuzz MINUTES=n`, which goes on behind the last case of each source. Case n of a source is always the
same: n is the seed of a random program, and a sample of torch's op_db in the order of the ops' names. A random program
and a sample run on 2 and on 3 simulated ranks, some programs on 4 as well, and count once, by the worst outcome. A
sample whose graph an earlier one of the run had is not run again. A row is of one commit; what was bad in it was mended
behind it, and is in the table of `tests/models/test_fuzz.py`.
"""


@dataclass
class Row:
    """Cases first to end - 1 of a source, at one commit, on one version of torch."""

    source: str
    first: int
    end: int
    commit: str
    torch: str
    counts: Counter[Outcome] = field(default_factory=Counter)

    @classmethod
    def now(cls, source: str, number: int, outcome: Outcome) -> Row:
        """What has just come of a case."""
        version = torch.__version__.partition("+")[0]
        return cls(source, number, number + 1, commit(), version, Counter([outcome]))

    def __str__(self) -> str:
        counts = [str(self.counts[outcome]) for outcome in Outcome]
        return _line(self.source, f"{self.first}-{self.end - 1}", self.commit, self.torch, *counts)


def end_of(source: str, path: Path = PATH) -> int:
    """The case of a source with which to go on."""
    return max((row.end for row in _rows(path) if row.source == source), default=0)


def add(row: Row, path: Path = PATH) -> None:
    """Write the row down, as a part of one that it goes on behind."""
    rows = list(_rows(path))
    for other in rows:
        same = (other.source, other.commit, other.torch, other.end) == (row.source, row.commit, row.torch, row.first)
        if same:
            other.end, other.counts = row.end, other.counts + row.counts
            break
    else:
        rows.append(row)
    head = [
        _line("source", "cases", "commit", "torch", *(outcome.value for outcome in Outcome)),
        "|---|---|---|---|" + "---:|" * len(Outcome),
    ]
    path.write_text(HEAD + "\n" + "\n".join([*head, *map(str, rows)]) + "\n")


def _rows(path: Path) -> Iterator[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("source", "---"):
            source, cases, commit, version, *counts = cells
            first, _, last = cases.partition("-")
            yield Row(source, int(first), int(last) + 1, commit, version, Counter(dict(zip(Outcome, map(int, counts)))))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
