"""`python -m support.fuzz`: so many minutes of all sources, from where the ledger ends, or one case again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from support.fuzz import ledger
from support.fuzz.runner import SOURCES, Fuzzing, run, shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="support.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--from", type=int, dest="first", help="the first case; by default the first that did not run")
    parser.add_argument("--cases", type=int, help="of each source, at most")
    parser.add_argument("--ledger", type=Path, default=ledger.PATH, help="where the outcomes are added up")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="where programs of bad outcomes are written")
    parser.add_argument("--case", help="run this one again, as it is named in an outcome")
    given = parser.parse_args()
    if given.case:
        result = run(given.case)
        sys.stdout.write(f"{result}\n{result.program}")
        return int(result.outcome.is_bad)
    begin = {s: ledger.end_of(s, given.ledger) if given.first is None else given.first for s in given.sources}
    counts = Fuzzing(begin, given.folder, given.cases, given.ledger).run(60 * given.minutes, given.workers)
    return int(not shown(counts))


if __name__ == "__main__":
    sys.exit(main())
