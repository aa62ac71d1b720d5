"""Attention over shards: blocks, masks, and the ways round the ranks."""

from . import attend, attention_flops, attention_ops, masked_attention  # noqa: F401  (registers the operators, and what they compute)
