"""Scans on a GPU."""

from . import scan

__all__ = ["scan"]
