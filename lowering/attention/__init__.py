"""Attention over shards: blocks, masks, and the ways round the ranks."""

from . import attend, masked, ops

__all__ = ["attend", "masked", "ops"]
