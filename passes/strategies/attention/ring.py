"""Ring attention (arXiv:2310.01889): keys and values go round, and every rank keeps its queries.

    scaled_dot_product_attention(q, k, v)   ->   sp::ring_attention(q, k, v, ..., q_frame, k_frame, n, group, ...)

Any number of heads; P - 1 shifts forward, at most 2 P - 1 backward; a sliding window needs only the shifts that reach
it. Causal attention is balanced by the zigzag layout, of the whole program or (`balance`) inside the op. Refuses:
queries that are not sharded along their sequence, keys and values that are not sharded alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from sp_compile.cost.attention import Candidate
from sp_compile.graph.call import Call
from sp_compile.graph.record import record
from sp_compile.lowering.attention.predicate import over, symbols
from sp_compile.sharding.attention import predicate_of

from .base import ShardedAttention, sequence_shard


class Ring(ShardedAttention):
    """Claims attention that was chosen to run as a ring (by hand: `Ring(4)(graph_module)`, any)."""

    name = "ring"
    op = torch.ops.sp.ring_attention.default

    def last(self, node: Node) -> tuple[Any, ...]:
        choice: Candidate | None = record(node).choice
        grads = choice.ring_grads if choice is not None else "travel"
        return self._steps(node), grads or "travel"

    def says(self, node: Node) -> str:
        shifts = self._steps(node) - 1
        return f"{shifts} shifts of keys and values forward, at most {2 * shifts + 1} backward"

    def _steps(self, node: Node) -> int:
        """1 + the furthest rank backwards whose keys any query may see; all ranks unless sizes and mask prove less."""
        call, n = Call(node), self.job.ranks.n
        query, key = (sequence_shard(self.plan, call, i) for i in range(2))
        predicate = predicate_of(call)
        if not predicate or query is None or key is None or self._balance(node):
            return n
        rows, in_order = query.frame.local(n), query.frame.folds == 1 and query.frame.start == 0
        if not query.matches(key) or not isinstance(rows, int) or not in_order:
            return n
        box = {name: (-math.inf, math.inf) for name in symbols(predicate)}
        needed = [
            step
            for step in range(n)
            for rank in range(n)
            if over(predicate, {**box, "q": _held(rank, rows), "k": _held((rank - step) % n, rows)})
            is not False
        ]
        return 1 + max(needed, default=0)


def _held(rank: int, rows: int) -> tuple[int, int]:
    return rank * rows, (rank + 1) * rows - 1
