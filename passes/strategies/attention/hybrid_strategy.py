"""Hybrid attention (USP, arXiv:2405.07719; LoongTrain, arXiv:2406.18485): heads over neighbours, a ring between them.

    n = U * R ranks:  all-to-all among U neighbours: (B, H/U, U * S/n, D);  a ring of R;  all-to-all back
    scaled_dot_product_attention(q, k, v)   ->   sp::hybrid_attention(q, k, v, ..., n, group, balance, U, grads)

For more ranks than heads, and for machines whose neighbours are close. U comes from the mesh's "ulysses" axis, from the
cost model, or is the largest proper divisor of n that divides the query heads. Refuses: n without such a divisor.
Bytes: those of Ulysses over U neighbours, and those of a ring of R.
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
from sp_compile.passes.cost.attention_cost import Candidate, Shape, Strategy
from sp_compile.passes.cost.collective_time import bytes_of
from sp_compile.passes.cost.exchange_cost import Heads
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import Call
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.sizes import Size, divides

from .base import ShardedAttention, heads_of, register
from .ring_strategy import candidate, ring_grads, sends
from .ulysses_strategy import exchange_seconds, exchanged_memory


class Hybrid(ShardedAttention):
    """Claims attention that was chosen to run as a hybrid (by hand: `Hybrid(4)(graph_module)`, any)."""

    op = torch.ops.sp.hybrid_attention.default

    @classmethod
    def on_mesh(cls, ranks: Ranks) -> bool:
        return ranks.ulysses not in (None, 1, ranks.n)

    def unfit(self, call: Call) -> str | None:
        if self._ulysses(call) is not None:
            return None
        n, (_, heads) = self.job.ranks.n, heads_of(call)
        given = self.job.ranks.ulysses
        which = f"{given}, of the mesh's 'ulysses' axis, does not divide" if given else f"no U with 1 < U < {n} divides"
        cause = f"attention='hybrid': {which} both the {n} ranks and the {heads} query heads"
        raise SpError("SP401", f"{cause} of {describe_node(call.node)}.")

    def last(self, node: Node) -> tuple[Any, ...]:
        return self._ulysses(Call(node)), ring_grads(node)

    def says(self, node: Node) -> str:
        ulysses = self._ulysses(Call(node))
        assert ulysses is not None
        return f"heads over {ulysses} neighbours, a ring of {self.job.ranks.n // ulysses} neighbourhoods"

    def _ulysses(self, call: Call) -> int | None:
        choice = record(call.node).choice
        n, (_, heads) = self.job.ranks.n, heads_of(call)
        if choice is not None:
            return choice.ulysses
        wanted = self.job.ranks.ulysses
        for u in [wanted] if wanted else range(n - 1, 1, -1):
            if n % u == 0 and divides(u, heads):
                return u
        return None


def _candidates(shape: Shape, machine: Machine, layout: str) -> Iterator[Candidate]:
    for u in range(2, shape.n):
        if shape.n % u == 0 and shape.heads % u == 0:
            heads, exchanged = exchange_seconds(shape, machine, u), exchanged_memory(shape, u)
            left = replace(machine, memory=max(machine.memory - exchanged, 1.0))
            ring = candidate(shape, left, layout, u)
            yield replace(
                ring,
                kind="hybrid",
                forward=heads + ring.forward,
                backward=heads + ring.backward,
                memory=ring.memory + exchanged,
                rounds=(2 + ring.rounds[0], 2 + ring.rounds[1]),
            )


def _sends(call: Call, n: int) -> tuple[Size, Size]:
    heads, u = Heads(call), call["ulysses"]
    keys = heads.repeated(u)
    others = bytes_of("all_to_all", heads.queries + keys, u) + heads.moved(n, keys=True)
    there, back = sends(heads, keys, n // u, n // u - 1)
    return others + there, others + back


def _declare(call: Call, ranks: Ranks) -> None:
    routes.declare(ranks.group, call["ulysses"], ranks.n // call["ulysses"])


register(
    Strategy(
        name="hybrid",
        preference=3,
        rewrite=Hybrid,
        candidates=_candidates,
        sends=_sends,
        declare=_declare,
        axes=("ring", "ulysses"),
        neighbours=lambda call: call["ulysses"],
    )
)
