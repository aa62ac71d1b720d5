"""Attention over shards: blocks, masks, and the ways round the ranks."""

from . import attend, flops, masked, ops  # noqa: F401  (registers the operators, and what they compute)
