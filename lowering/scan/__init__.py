"""Prefix scans: one table of implementations, and the ``sp::`` operators over it."""

from . import local, message, operators

__all__ = ["local", "message", "operators"]
