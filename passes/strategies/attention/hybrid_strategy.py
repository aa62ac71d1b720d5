"""Combine Ulysses and ring attention (USP, arXiv:2405.07719; LoongTrain, arXiv:2406.18485).

    n = U * R ranks:  all-to-all among U neighbors: (B, H/U, U * S/n, D);  a ring of R;  all-to-all back
    scaled_dot_product_attention(q, k, v)   ->   sp::hybrid_attention(q, k, v, ..., n, group, balance, U, grads)

The ranks form a grid: U neighbors exchange heads for rows (Ulysses), and R such groups are the places of a ring. For
more ranks than heads, and for machines with fast links between neighbors. U comes from the mesh's "ulysses" axis or
from the cost model; the default is the largest proper divisor of n that divides the query heads. Refuses: n without
such a divisor. Bytes: those of Ulysses over U neighbors, and those of a ring of R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm import routes
from sp_compile.passes.cost.attention_cost import AttentionShape, Candidate, Strategy
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import is_divisor

from .base import ShardAttention, head_counts, register_strategy
from .ring_strategy import ring_candidate, ring_grads, ring_sends
from .ulysses_strategy import exchange_seconds, exchanged_memory


class AttendWithHybrid(ShardAttention):
    """Pass for attention that was chosen to run as a hybrid.

    Direct use: `AttendWithHybrid(4)(graph_module)` rewrites any attention.
    """

    name = "hybrid"
    op = torch.ops.sp.hybrid_attention.default

    @classmethod
    def is_used_on_mesh(cls, ranks: Ranks) -> bool:
        """Return True if the mesh has a "ulysses" axis of some, but not all ranks, which selects the strategy."""
        return ranks.ulysses not in (None, 1, ranks.n)

    def unsupported_reason(self, call: OpCall) -> str | None:
        """Return None if a number of Ulysses ranks divides the ranks and the query heads; else raise an error.

        Other strategies return a reason, and the attention is gathered. Here the option or the mesh must change.

        Raises:
            SpError: No such number exists, or that of the mesh does not divide them (SP401).
        """
        if self._ulysses_ranks(call) is not None:
            return None
        n, (heads, *_) = self.context.ranks.n, head_counts(call)
        if self.context.ranks.ulysses:
            subject = f"the mesh's 'ulysses' axis has {self.context.ranks.ulysses} ranks, which do not divide"
        else:
            subject = f"no number of Ulysses ranks u with 1 < u < {n} divides"
        cause = f"attention='hybrid': {subject} both the {n} ranks and the {heads} query heads"
        raise SpError("SP401", f"{cause} of {describe_node(call.node)}.")

    def extra_arguments(self, node: Node) -> tuple[Any, ...]:
        """Return the arguments that only sp::hybrid_attention has: (Ulysses ranks, path of the gradients of keys)."""
        return self._ulysses_ranks(OpCall(node)), ring_grads(node)

    def describe(self, node: Node) -> str:
        """Return the line of the report for a rewritten attention."""
        ulysses = self._ulysses_ranks(OpCall(node))
        assert ulysses is not None  # `unsupported_reason` refuses calls without such a number
        return f"heads over {ulysses} neighbors, a ring of {self.context.ranks.n // ulysses} such groups"

    def _ulysses_ranks(self, call: OpCall) -> int | None:
        """Return the number of neighbors that exchange heads: as chosen, or that of the mesh, or the largest possible.

        It divides the ranks and the query heads; the result is None if there is no such number.
        """
        choice = node_info(call.node).choice
        if choice is not None:
            return choice.ulysses
        n, (heads, *_) = self.context.ranks.n, head_counts(call)
        of_mesh = self.context.ranks.ulysses
        for u in [of_mesh] if of_mesh else range(n - 1, 1, -1):
            if n % u == 0 and is_divisor(u, heads):
                return u
        return None


def _hybrid_candidates(shape: AttentionShape, machine: Machine, layout: str) -> Iterator[Candidate]:
    """Yield a candidate for each possible number u of Ulysses ranks, with predicted seconds and bytes of memory.

    It is a ring of n / u places, with two all-to-all more in forward and in backward, before and after the attention.
    `exchange_seconds` predicts the time of both together, and `exchanged_memory` the bytes of what they return.

    Args:
        shape: The sizes of the attention.
        machine: The predicted speed of kernels and collectives.
        layout: The order of the sequence.
    """
    for u in range(2, shape.n):
        if shape.n % u == 0 and shape.heads % u == 0:
            seconds, exchanged_bytes = exchange_seconds(shape, machine, u), exchanged_memory(shape, u)
            # The ring has the memory that exchanged tensors leave.
            ring_machine = replace(machine, memory=max(machine.memory - exchanged_bytes, 1.0))
            ring = ring_candidate(shape, ring_machine, layout, ulysses=u)
            yield replace(
                ring,
                kind="hybrid",
                forward=seconds + ring.forward,
                backward=seconds + ring.backward,
                memory=ring.memory + exchanged_bytes,
                rounds=(2 + ring.rounds[0], 2 + ring.rounds[1]),  # collectives of forward and backward
            )


register_strategy(
    Strategy(
        name="hybrid",
        preference=3,
        rewrite=AttendWithHybrid,
        candidates=_hybrid_candidates,
        sends=lambda call, n: ring_sends(call, n, call["ulysses"], hops=n // call["ulysses"] - 1),
        declare=lambda call, ranks: routes.declare_attention_routes(
            ranks.group, call["ulysses"], ranks.n // call["ulysses"]
        ),
        axes=("ring", "ulysses"),
        neighbors=lambda call: call["ulysses"],
    )
)
