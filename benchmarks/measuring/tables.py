"""What the reports of the benchmarks share."""

import platform
from pathlib import Path

from rich.table import Table


def markdown(table: Table) -> str:
    """A rich table as Markdown, without its title."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    lines = [f"| {' | '.join(row)} |" for row in zip(*columns)]
    return "\n".join([lines[0], "|" + " --- |" * len(columns), *lines[1:]])


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
