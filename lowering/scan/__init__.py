"""Prefix scans: one table of implementations, and the ``sp::`` operators over it."""

from . import local, scan_ops  # noqa: F401  (registers the operators)
