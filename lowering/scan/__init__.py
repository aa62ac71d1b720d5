"""Prefix scans: one table of implementations, and the ``sp::`` operators over it."""

from . import local, ops

__all__ = ["local", "ops"]
