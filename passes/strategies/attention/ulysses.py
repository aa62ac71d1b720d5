"""Ulysses: attention on whole sequences and a share of the heads (Jacobs et al. 2023, arXiv:2309.14509).

    q: f32[B, H, S/n, D]   k, v: f32[B, Hkv, S/n, D]
    q, k, v = sp.all_to_all([q, k, v])        one exchange:   f32[B, H/n, S, D], f32[B, Hkv/n, S, D]
    out     = scaled_dot_product_attention    unchanged: causal, masks, scale, grouped heads
    out     = sp.all_to_all([out])            one exchange:   f32[B, H, S/n, D]

Key heads that n does not divide are repeated to lcm(Hkv, n) first, so that each goes to the ranks that use it; their
gradients come back summed. Bytes sent per rank: (n-1)/n of its q, k, v and out; as many in the backward. A per-head
mask is sliced by head, any other mask stays whole. Refuses: query heads that n does not divide (an error if the user
asked for Ulysses), operands without a head dim, unequal windows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from sp_compile.cost.attention import BACKWARD_FLOPS, Candidate, Shape, Strategy
from sp_compile.cost.machine import Machine
from sp_compile.graph.call import Call
from sp_compile.graph.sizes import Size, divides, sizes
from sp_compile.sharding.attention import ATTENTION
from sp_compile.sharding.placement import Demand, Placement, Shard

from .base import SEQUENCE_FROM_END, AttentionPass, register, sequence_shard

sp = torch.ops.sp
HEADS_FROM_END = -3
DimFrame = tuple[int, tuple[Size, ...]]  # a dim from behind, and the frame in which that is cut


class Ulysses(AttentionPass):
    """Claims the demands of attention where the ranks divide the query heads."""

    merges = False
    explains = True

    def refuses(self, node: Node, demands: list[Demand]) -> str | None:
        if node.target not in ATTENTION or not self.chosen(node):
            return ""
        why = self._unfit(Call(node))
        if why is not None and self.job.attention == self.name:
            raise self.error(node, f"attention='ulysses': {why}; use {self.others()}")
        return why

    def _unfit(self, call: Call) -> str | None:
        n = self.job.ranks.n
        for i, operand in enumerate(call.operands[:3]):
            shape = call.shape(i)
            if len(shape) < 3:
                return f"operand {operand.name} of shape {list(shape)} has no head dim"
            heads = shape[HEADS_FROM_END]
            if not divides(n, heads) and (i == 0 or not self._repeats(call)):
                return f"{n} ranks do not divide the {heads} heads of {operand.name}, of shape {list(shape)}"
            have = self.plan.of(operand)
            if isinstance(have, Shard) and sequence_shard(self.plan, call, i) is None:
                return f"{operand.name} is sharded on dim {have.dim}, not on its sequence"
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        placed = {o: self.plan.of(o) for o in Call(node).operands[:3]}
        if self._repeats(Call(node)):
            placed.update(self._repeat(node, placed))
        call = Call(node)
        moved = {o: have for o in call.operands[:3] if isinstance(have := placed[o], Shard)}
        groups = _by_frame(moved)
        heads = min((call.shape(i)[HEADS_FROM_END] for i in range(3)), key=lambda h: h if isinstance(h, int) else 0)
        whole = (HEADS_FROM_END, (1, heads, 0, heads))
        fresh: dict[Node, Node] = {}
        with self.graph.inserting_before(node):
            for group in groups:
                rows = (SEQUENCE_FROM_END, moved[group[0]].frame_arg())
                fresh.update(zip(group, self._exchange(group, whole, rows, node)))
        operands = [fresh.get(o, o) for o in call.operands[:3]] + call.operands[3:]
        node.args, node.kwargs = call.rebuild(operands)
        queries = moved.get(call.operands[0])
        if queries is not None:
            with self.behind(node):
                (back,) = self._exchange([node], (SEQUENCE_FROM_END, queries.frame_arg()), whole, node)
            self.interpose(node, back)
        self.note(node, f"{len(moved)} operands in {len(groups)} all-to-all, 1 back")

    def _repeats(self, call: Call) -> bool:
        """Must key heads be repeated, and is that what a share of the query heads needs?"""
        heads, keys, values = (call.shape(i)[HEADS_FROM_END] for i in range(3))
        grouped = isinstance(keys, int) and keys == values and divides(keys, heads)
        return grouped and call.ndim(1) == call.ndim(0) and not divides(self.job.ranks.n, keys)

    def _repeat(self, node: Node, placed: dict[Node, Placement]) -> dict[Node, Placement]:
        """Repeat every key head in place, lcm(Hkv, n) heads in all; the new operands lie as the old ones."""
        call = Call(node)
        with self.graph.inserting_before(node):
            repeated = {o: self._repeated(o, node) for o in call.operands[1:3]}
        operands = [call.operands[0], *(repeated[o] for o in call.operands[1:3]), *call.operands[3:]]
        node.args, node.kwargs = call.rebuild(operands, enable_gqa=True)
        return {new: placed[old] for old, new in repeated.items()}

    def _repeated(self, x: Node, node: Node) -> Node:
        heads = sizes(x.meta["val"].shape)[HEADS_FROM_END]
        return self.repeat_each(x, HEADS_FROM_END, math.lcm(heads, self.job.ranks.n) // heads, node)

    def _exchange(self, operands: list[Node], scattered: DimFrame, gathered: DimFrame, node: Node) -> list[Node]:
        ndim, ranks = operands[0].meta["val"].ndim, self.job.ranks
        cuts = [x for dim, frame in (scattered, gathered) for x in (ndim + dim, self.sizes.list(frame))]
        values = [o.meta["val"] for o in operands]
        both = self.emit(sp.all_to_all.default, (operands, *cuts, ranks.n, ranks.group), values, node)
        return [self.emit(operator.getitem, (both, i), value, node) for i, value in enumerate(values)]


def _by_frame(moved: dict[Node, Shard]) -> list[list[Node]]:
    """Operands whose sequences lie alike share one exchange (cross attention has two lengths)."""
    groups: list[list[Node]] = []
    for operand, have in moved.items():
        group = next((g for g in groups if have.matches(moved[g[0]])), [])
        if not group:
            groups.append(group)
        group.append(operand)
    return groups


def _candidates(shape: Shape, machine: Machine, layout: str) -> Iterator[Candidate]:
    """Whole sequences are in their own order, whatever that of the shards."""
    n = shape.n
    if layout == "zigzag":
        return
    legal = None if shape.heads % n == 0 else f"{n} ranks do not divide {shape.heads} query heads"
    compute = machine.attention(shape.flops, shape.kv_len)
    fixed = exchange_seconds(shape, machine, n) + machine.call
    backward = BACKWARD_FLOPS * compute + fixed
    memory, rounds = (exchanged_memory(shape, n), (2, 2)) if n > 1 else (0, (0, 0))
    yield Candidate("ulysses", n, 1, layout, compute + fixed, backward, memory, rounds, legal=legal)


def exchange_seconds(shape: Shape, machine: Machine, ranks: int) -> float:
    """Seconds of the all-to-all of q, k and v over so many neighbours, that of the result, and their packing."""
    if ranks == 1:
        return 0.0
    back = shape.heads * shape.out_bytes
    there = exchanged_bytes(shape, ranks) - back
    exchanges = machine.seconds("all_to_all", there, ranks) + machine.seconds("all_to_all", back, ranks)
    return exchanges + machine.copy(2 * (there + back))


def exchanged_bytes(shape: Shape, ranks: int) -> int:
    """q, k, v and the result of one rank on either side of the exchange; too few key heads are repeated."""
    repeated = math.lcm(shape.kv_heads, ranks)
    return shape.heads * (shape.q_bytes + shape.out_bytes) + repeated * shape.kv_bytes


def exchanged_memory(shape: Shape, ranks: int) -> int:
    """q, k, v and the result behind the exchange, and in the backward their gradients."""
    return exchanged_bytes(shape, ranks) * (2 if shape.training else 1)


register(Strategy(name="ulysses", preference=0, rewrite=Ulysses, candidates=_candidates))
