"""Run convolutions, shifts and pools on shards, with rows of the neighboring ranks."""

from . import window_ops  # noqa: F401  (registers the operators)
