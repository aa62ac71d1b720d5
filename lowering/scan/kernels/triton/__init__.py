"""Scans on a GPU."""

from . import scan  # noqa: F401  (registers itself)
