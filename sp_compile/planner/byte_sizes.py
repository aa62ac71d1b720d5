"""Parse sizes of memory that users pass to `plan`, and format sizes that it prints in the same unit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sp_compile.lowering.base.errors import SpError

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
LEAST_BYTES = 1e9  # smallest size without a unit: a smaller number is meant to be in another unit
# minimum number before the unit of a printed size, if the user passed bytes: 9e9 is printed in MB, 10e9 in GB
MIN_PRINTED_NUMBER = 10


@dataclass(frozen=True)
class SizeUnit:
    """The unit in which a plan prints sizes: that of the requested memory."""

    name: str  # a key of `UNITS`

    def __call__(self, nbytes: float) -> str:
        """Format bytes with one decimal, or three significant digits for small values."""
        value = nbytes / UNITS[self.name]
        return f"{value:.1f} {self.name}" if value >= 1 or not value else f"{value:.2g} {self.name}"


def parse_bytes(memory: str | float, name: str = "memory") -> float:
    """Return the bytes of a size: 80e9 for "80GB".

    Args:
        memory: A number with a unit, or a number of bytes that is at least `LEAST_BYTES`.
        name: The name of the argument, for errors.

    Raises:
        SpError: The value is not a size.
    """
    return _parse_size(memory, name)[0]


def parse_unit(memory: str | float) -> SizeUnit:
    """Return the unit of a size that a user passed, in which the plan prints all sizes.

    For a number of bytes it is the largest decimal unit in which the number is 10 or more: GB for 80e9, MB for 9e9.

    Raises:
        SpError: The value is not a size.
    """
    nbytes, unit = _parse_size(memory, "memory")
    decimal_units = {name: scale for name, scale in UNITS.items() if "i" not in name}  # without KiB, MiB, ...
    possible = [name for name, scale in decimal_units.items() if nbytes >= MIN_PRINTED_NUMBER * scale]
    return SizeUnit(unit or max(possible, key=UNITS.__getitem__, default="B"))


def _parse_size(memory: str | float, name: str) -> tuple[float, str]:
    """Return (bytes, unit) of a size that a user passed: (75 * 2**30, "GiB") for "75 gib", (8e10, "") for 80e9.

    Raises:
        SpError: The value is not a size, or a number without a unit that is too small for bytes.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", str(memory))  # number, unit
    units = {unit.upper(): unit for unit in ("", *UNITS)}  # a user may write "gib" for "GiB"
    if match is None or match[2].upper() not in units or not float(match[1]):
        expected = f"a positive number of bytes, or a size in one of ({', '.join(UNITS)})"
        raise SpError("SP722", f"{name}: expected {expected}, got {memory!r}.")
    unit, number = units[match[2].upper()], float(match[1])
    if not unit and number < LEAST_BYTES:
        raise SpError("SP722", f"{name}: {memory!r} is {number:g} bytes (did you mean '{number:g}GB'?).")
    return number * UNITS[unit or "B"], unit
