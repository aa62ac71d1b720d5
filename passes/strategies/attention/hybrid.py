"""Hybrid attention (USP, arXiv:2405.07719; LoongTrain, arXiv:2406.18485): heads over neighbours, a ring between them.

    n = U * R ranks:  all-to-all among U neighbours: (B, H/U, U * S/n, D);  a ring of R;  all-to-all back
    scaled_dot_product_attention(q, k, v)   ->   sp::hybrid_attention(q, k, v, ..., n, group, balance, U, grads)

For more ranks than heads, and for machines whose neighbours are close. U comes from the mesh's "ulysses" axis, from the
cost model, or is the largest proper divisor of n that divides the query heads. Refuses: n without such a divisor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from sp_compile.cost.attention import Candidate
from sp_compile.graph.call import Call
from sp_compile.graph.record import record
from sp_compile.graph.sizes import divides

from .base import ShardedAttention


class Hybrid(ShardedAttention):
    """Claims attention that was chosen to run as a hybrid (by hand: `Hybrid(4)(graph_module)`, any)."""

    name = "hybrid"
    op = torch.ops.sp.hybrid_attention.default

    def unfit(self, call: Call) -> str | None:
        if self._ulysses(call) is not None:
            return None
        n, heads = self.job.ranks.n, call.shape(0)[-3]
        raise self.error(
            call.node,
            f"attention='hybrid': {self.job.ranks.ulysses or 'no U > 1 with 1 < U < n'} does not factor {n} ranks so "
            f"that it divides the {heads} query heads; use another mesh, 'ring', or 'auto'",
        )

    def last(self, node: Node) -> tuple[Any, ...]:
        choice: Candidate | None = record(node).choice
        grads = choice.ring_grads if choice is not None else "travel"
        return self._ulysses(Call(node)), grads or "travel"

    def says(self, node: Node) -> str:
        ulysses = self._ulysses(Call(node))
        assert ulysses is not None
        return f"heads over {ulysses} neighbours, a ring of {self.job.ranks.n // ulysses} neighbourhoods"

    def _ulysses(self, call: Call) -> int | None:
        choice: Candidate | None = record(call.node).choice
        n, heads = self.job.ranks.n, call.shape(0)[-3]
        if choice is not None:
            return choice.ulysses
        wanted = self.job.ranks.ulysses
        for u in [wanted] if wanted else range(n - 1, 1, -1):
            if n % u == 0 and divides(u, heads):
                return u
        return None
