"""Prefix scans: one table of implementations, and the ``sp::`` operators over it."""

from . import local

__all__ = ["local"]
