"""Convolutions, shifts and pools over shards: rows of the neighbours, and what runs on them."""

from . import window_ops  # noqa: F401  (registers the operators)
