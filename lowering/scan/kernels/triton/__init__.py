"""Scans on a GPU."""

from . import triton_scan  # noqa: F401  (registers itself)
