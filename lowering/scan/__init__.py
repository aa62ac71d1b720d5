"""Register the implementations of prefix scans, and the ``sp::`` operators that use them."""

from . import affine_scan, linear_attention, local, scan_ops  # noqa: F401  (registers the operators)
