"""Register the implementations of prefix scans, and the ``sp::`` operators that use them."""

from . import local, scan_ops  # noqa: F401  (registers the operators)
