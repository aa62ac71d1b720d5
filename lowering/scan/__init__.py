"""Register the implementations of prefix scans, and the ``sp::`` operators that use them."""

from . import affine_scan, local, scan_ops  # noqa: F401  (registers the operators)
