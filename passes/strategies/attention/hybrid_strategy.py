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
from sp_compile.passes.cost.collective_time import collective_bytes
from sp_compile.passes.cost.exchange_cost import head_bytes, relayout_bytes
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, divides

from .base import ShardedAttention, head_counts, register_strategy
from .ring_strategy import ring_candidate, ring_grads, ring_send_bytes
from .ulysses_strategy import exchange_seconds, exchanged_memory


class HybridAttention(ShardedAttention):
    """Pass for attention that was chosen to run as a hybrid.

    Direct use: `HybridAttention(4)(graph_module)` rewrites any attention.
    """

    name = "hybrid"
    op = torch.ops.sp.hybrid_attention.default

    @classmethod
    def on_mesh(cls, ranks: Ranks) -> bool:
        """Return True if a mesh of this shape selects the strategy."""
        return ranks.ulysses not in (None, 1, ranks.n)

    def unsupported_reason(self, call: OpCall) -> str | None:
        """Return None if a number of Ulysses ranks divides the ranks and the query heads.

        Raises:
            SpError: No such number exists, or that of the mesh does not divide them.
        """
        if self._ulysses(call) is not None:
            return None
        n, (_, heads) = self.job.ranks.n, head_counts(call)
        own = self.job.ranks.ulysses
        which = (
            f"the mesh's 'ulysses' axis has {own} ranks, which do not divide"
            if own
            else f"no number of Ulysses ranks u with 1 < u < {n} divides"
        )
        cause = f"attention='hybrid': {which} both the {n} ranks and the {heads} query heads"
        raise SpError("SP401", f"{cause} of {describe_node(call.node)}.")

    def extra_arguments(self, node: Node) -> tuple[Any, ...]:
        """Return the arguments that only the op of this strategy has."""
        return self._ulysses(OpCall(node)), ring_grads(node)

    def describe(self, node: Node) -> str:
        """Return the line of the report for a rewritten attention."""
        ulysses = self._ulysses(OpCall(node))
        assert ulysses is not None
        return f"heads over {ulysses} neighbors, a ring of {self.job.ranks.n // ulysses} such groups"

    def _ulysses(self, call: OpCall) -> int | None:
        """Return the number of neighbors U: the chosen one, that of the mesh, or the largest possible one.

        None if no proper divisor of the number of ranks divides the query heads.
        """
        choice = node_info(call.node).choice
        n, (_, heads) = self.job.ranks.n, head_counts(call)
        if choice is not None:
            return choice.ulysses
        of_mesh = self.job.ranks.ulysses
        for u in [of_mesh] if of_mesh else range(n - 1, 1, -1):
            if n % u == 0 and divides(u, heads):
                return u
        return None


def _hybrid_candidates(shape: AttentionShape, machine: Machine, layout: str) -> Iterator[Candidate]:
    """Yield a candidate for each possible U, with predicted seconds and memory, see `Strategy.candidates`."""
    for u in range(2, shape.n):
        if shape.n % u == 0 and shape.heads % u == 0:
            seconds, exchanged = exchange_seconds(shape, machine, u), exchanged_memory(shape, u)
            ring_machine = replace(machine, memory=max(machine.memory - exchanged, 1.0))
            ring = ring_candidate(shape, ring_machine, layout, u)
            yield replace(
                ring,
                kind="hybrid",
                forward=seconds + ring.forward,
                backward=seconds + ring.backward,
                memory=ring.memory + exchanged,
                rounds=(2 + ring.rounds[0], 2 + ring.rounds[1]),
            )


def _hybrid_sends(call: OpCall, n: int) -> tuple[Size, Size]:
    """Return the bytes that one rank sends for a call of the op, forward and backward, for the report."""
    heads, u = head_bytes(call), call["ulysses"]
    others = collective_bytes("all_to_all", heads.exchange_bytes(u), u) + relayout_bytes(
        call, heads.exchange_bytes(1), n
    )
    there, back = ring_send_bytes(heads.repeat_keys(u), heads.widening, call["grads"], n // u, n // u - 1)
    return others + there, others + back


def _declare_hybrid(call: OpCall, ranks: Ranks) -> None:
    """Declare the routes of the exchanges of the op, when a program that contains it is lowered."""
    routes.declare_attention_routes(ranks.group, call["ulysses"], ranks.n // call["ulysses"])


register_strategy(
    Strategy(
        name="hybrid",
        preference=3,
        rewrite=HybridAttention,
        candidates=_hybrid_candidates,
        sends=_hybrid_sends,
        declare=_declare_hybrid,
        axes=("ring", "ulysses"),
        neighbors=lambda call: call["ulysses"],
    )
)
