"""List the families of each table of `benchmarks/families.py`."""

from functools import cache

from .family_models import NAMED, Family


@cache
def families(table: str) -> list[Family]:
    """Return the families of a table.

    Args:
        table: The key of the table.
    """
    return {"named": NAMED}[table]
