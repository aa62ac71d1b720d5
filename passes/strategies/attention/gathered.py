"""Gathered keys and values: every rank attends with its own queries over all keys.

    scaled_dot_product_attention(q, k, v)   ->   sp::gathered_attention(q, k, v, ..., q_frame, k_frame, n, group, ...)

One all-gather of K and V forward, another and a reduce-scatter backward; nothing whole is kept in between, and causal
attention is cut into full blocks and diagonals. For few key heads, and for what no other pass takes: keys that are
whole already, odd head counts, cross attention. Refuses: queries that are not sharded along their sequence.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .base import ShardedAttention


class Gathered(ShardedAttention):
    """Claims attention that was chosen to gather its keys, and what is left of attention when its turn comes."""

    name = "gathered"
    op = torch.ops.sp.gathered_attention.default
    merges = moves_keys = False

    def chosen(self, node: Node) -> bool:
        return True

    def says(self, node: Node) -> str:
        return "keys and values are gathered, and gathered again in the backward"
