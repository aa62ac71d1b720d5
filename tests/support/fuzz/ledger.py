"""Read and write the outcomes of the fuzzer in `benchmarks/results/checks/fuzz.md`; a run continues after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measuring.tables import commit
from support.fuzz.outcomes import Outcome

ROOT = Path(__file__).parents[3]
PATH = ROOT / "benchmarks" / "results" / "checks" / "fuzz.md"
HEAD = """\
# Fuzzing

`make fuzz MINUTES=n SEED=s` writes this table. For each source, it continues after the last case of that seed. The
source, the seed and a number determine a case: `python -m support.fuzz --list SOURCE --from n --cases 1 --seed s`
prints the name of case n, and `--case NAME` runs it again. `tests/support/fuzz/__init__.py` describes the sources.

Programs on simulated ranks and samples of op_db run on 2 and on 3 ranks, some programs also on 4. Each counts once,
with its worst outcome. "same graph" counts the samples that are skipped because an earlier sample of the run has the
same graph. The cases of a row ran at one commit. Their failures were fixed in later commits, and the failing cases are
in the table of `tests/models/test_fuzz.py`.
"""


@dataclass
class Row:
    """Cases first to end - 1 of a source and a seed, at one commit, on one version of torch."""

    source: str
    seed: int
    first: int
    end: int
    commit: str
    torch: str
    counts: Counter[Outcome] = field(default_factory=Counter)

    @classmethod
    def now(cls, source: str, seed: int, number: int, outcome: Outcome) -> Row:
        """Return the row of one case."""
        version = torch.__version__.partition("+")[0]
        return cls(source, seed, number, number + 1, commit(), version, Counter([outcome]))

    def __str__(self) -> str:
        counts = [str(self.counts[outcome]) for outcome in Outcome]
        return _line(self.source, str(self.seed), f"{self.first}-{self.end - 1}", self.commit, self.torch, *counts)


def end_of(source: str, seed: int = 0, path: Path = PATH) -> int:
    """Return the first case of a source and a seed that did not run."""
    return max((row.end for row in _rows(path) if (row.source, row.seed) == (source, seed)), default=0)


def add(row: Row, path: Path = PATH) -> None:
    """Write a row, merged with the row that ends where it starts."""
    rows = list(_rows(path))
    for other in rows:
        place = (row.source, row.seed, row.commit, row.torch, row.first)
        if (other.source, other.seed, other.commit, other.torch, other.end) == place:
            other.end, other.counts = row.end, other.counts + row.counts
            break
    else:
        rows.append(row)
    head = [
        _line("source", "seed", "cases", "commit", "torch", *(outcome.value for outcome in Outcome)),
        "|---|---:|---|---|---|" + "---:|" * len(Outcome),
    ]
    path.write_text(HEAD + "\n" + "\n".join([*head, *map(str, rows)]) + "\n")


def _rows(path: Path) -> Iterator[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("source", "---"):
            source, seed, cases, commit, version, *counts = cells
            first, _, last = cases.partition("-")
            found = Counter(dict(zip(Outcome, map(int, counts))))
            yield Row(source, int(seed), int(first), int(last) + 1, commit, version, found)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
