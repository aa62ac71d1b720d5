"""Work on rows done tile by tile, one behind the other: a program of one tile, and the loops that call it."""

from . import ops  # noqa: F401
