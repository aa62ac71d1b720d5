"""Attention over sequence shards: operators, block kernels, masks and key exchange."""

from . import attend, attend_parts, attention_flops, attention_ops, masked_attention  # noqa: F401  (registers the operators)
