"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sp_compile.lowering.base.errors import SpError

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MIN_BYTES = 10
"""Of a number without a unit, in the unit that it is shown in."""


@dataclass(frozen=True)
class SizeUnit:
    """What a plan's sizes are shown in: that of the memory which somebody asked for."""

    name: str

    def __call__(self, nbytes: float) -> str:
        """For people: to a tenth, or to three digits of what is smaller."""
        value = nbytes / UNITS[self.name]
        return f"{value:.1f} {self.name}" if value >= 1 or not value else f"{value:.2g} {self.name}"


def parse_bytes(memory: str | float, name: str = "memory") -> float:
    """80e9 of "80GB". name: of the argument. Raises SpError: of what is no size."""
    return _parse_size(memory, name)[0]


def parse_unit(memory: str | float) -> SizeUnit:
    """GB of "80GB", of 80e9 and of "80e9". Raises SpError: of what is no size."""
    nbytes, unit = _parse_size(memory, "memory")
    decimal = [name for name, scale in UNITS.items() if "i" not in name and nbytes >= MIN_BYTES * scale]
    return SizeUnit(unit or max(decimal, key=UNITS.__getitem__, default="B"))


def _parse_size(memory: str | float, name: str) -> tuple[float, str]:
    """Bytes, and the unit if there is one."""
    if isinstance(memory, int | float) and not isinstance(memory, bool) and 0 < memory < float("inf"):
        return float(memory), ""
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", str(memory))
    known = {name.upper(): name for name in UNITS} | {"": ""}
    if match is None or match[2].upper() not in known or not float(match[1]):
        raise SpError("SP722", f"{name}: expected bytes or a size, got {memory!r}.")
    unit = known[match[2].upper()]
    return float(match[1]) * UNITS[unit or "B"], unit
