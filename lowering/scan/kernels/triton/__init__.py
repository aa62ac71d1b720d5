"""Register the scans on a GPU."""

from . import triton_scan  # noqa: F401  (registers itself)
