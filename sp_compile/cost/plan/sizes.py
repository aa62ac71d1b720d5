"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from sp_compile.errors import SpError

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of_text(memory: str | float) -> float:
    """80e9 of "80GB". Raises SpError: of what is no size."""
    if isinstance(memory, int | float) and memory > 0:
        return float(memory)
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", str(memory))
    if match is None or match[2].upper() not in UNITS or not float(match[1]):
        raise SpError(f'memory={memory!r}: expected bytes or a size such as "80GB" or "75GiB"')
    return float(match[1]) * UNITS[match[2].upper()]
