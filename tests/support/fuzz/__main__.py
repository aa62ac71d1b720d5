"""`python -m support.fuzz`: run all sources for some minutes from the end of the ledger, or one case again."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

from support.fuzz import ledger
from support.fuzz.runner import SOURCES, Fuzzing, run, shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="support.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--seed", type=int, default=0, help="seed of the session")
    parser.add_argument("--from", type=int, dest="first", help="the first case; by default the first that did not run")
    parser.add_argument("--cases", type=int, help="of each source, at most")
    parser.add_argument("--ledger", type=Path, default=ledger.PATH, help="file with the counts of outcomes")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="folder for programs of bad outcomes")
    parser.add_argument("--case", help="name of one case to run")
    parser.add_argument("--list", choices=SOURCES, help="print the names of a source's cases and run none")
    given = parser.parse_args()
    if given.case:
        result = run(given.case)
        sys.stdout.write(f"{result}\n{result.program}\n")
        return int(result.outcome.is_bad)
    if given.list:
        first = given.first or 0
        end = None if given.cases is None else first + given.cases
        sys.stdout.writelines(f"{name}\n" for name in islice(SOURCES[given.list].cases(given.seed), first, end))
        return 0
    begin = {
        s: ledger.end_of(s, given.seed, given.ledger) if given.first is None else given.first for s in given.sources
    }
    fuzzing = Fuzzing(begin, given.folder, given.cases, given.ledger, given.seed)
    counts = fuzzing.run(60 * given.minutes, given.workers)
    return int(not shown(counts, fuzzing.bad))


if __name__ == "__main__":
    sys.exit(main())
