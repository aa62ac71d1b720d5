"""`python -m support.fuzz`: so many minutes of all sources, or one case again."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from support.fuzz.runner import SOURCES, Fuzzing, run, shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="support.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--seed", type=int, help="of all cases; drawn where none is given")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="where programs of bad outcomes are written")
    parser.add_argument("--case", help="run this one again, as it is named in an outcome")
    given = parser.parse_args()
    if given.case:
        result = run(given.case)
        sys.stdout.write(f"{result}\n{result.program}")
        return int(result.outcome.is_bad)
    seed = random.randrange(10**6) if given.seed is None else given.seed
    sys.stdout.write(f"seed {seed}: {' and '.join(given.sources)}, {given.minutes:g} minutes\n")
    counts = Fuzzing(given.sources, seed, given.folder).run(60 * given.minutes, given.workers)
    return int(not shown(counts))


if __name__ == "__main__":
    sys.exit(main())
