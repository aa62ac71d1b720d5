"""Load the registry of error codes: a title and a fix for each code, such as SP101.

The rows are in `error_codes.toml`. `docs/reference/errors.md` is generated from it:
`python -m sp_compile.lowering.base.error_codes`.

Sections: SP1xx options, SP2xx capture, SP3xx sequence and sharding, SP4xx attention, SP5xx scans and collectives,
SP6xx ranks, SP7xx memory and cost, SP8xx data and integrations, SP9xx passes and rules of a contributor.
"""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ErrorInfo:
    """Title and fix of the errors with one code."""

    title: str  # what is wrong, without the values of one case
    fix: str  # what to do, as one or two sentences; it ends every message of this code


# Titles of the sections, by the first digit of a code.
SECTIONS = {
    "1": "Options",
    "2": "Capture of the program",
    "3": "Sequence and sharding",
    "4": "Attention",
    "5": "Scans and collectives",
    "6": "Ranks and process groups",
    "7": "Memory and cost",
    "8": "Data and integrations",
    "9": "Passes and rules of a contributor",
}

# Every code of an `SpError`. A code keeps its meaning; the code of an error that is removed is not used again.
ERRORS = {
    code: ErrorInfo(**row)
    for code, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


def errors_page() -> str:
    """Return the text of `docs/reference/errors.md`, which this module prints if it is run, and a test compares."""
    lines = [
        "# Errors",
        "",
        "Every error of this package is an `SpError`, a `ValueError` with a `code`. Its message is the code, the cause",
        "and the fix. This page is generated from `lowering/base/error_codes.toml`.",
    ]
    for digit, section in SECTIONS.items():
        rows = [(code, info) for code, info in sorted(ERRORS.items()) if code[2] == digit]
        if rows:
            lines += ["", f"## {section}", "", "| code | error | fix |", "|---|---|---|"]
            lines += [f"| `{code}` | {_cell(info.title)} | {_cell(info.fix)} |" for code, info in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escape the bars of a text, which would end a cell of a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(errors_page())
