"""Run Ulysses attention: full sequences, a share of the heads (Jacobs et al., arXiv:2309.14509).

    q: f32[B, H, S/n, D]   k, v: f32[B, Hkv, S/n, D]
    q, k, v = sp.all_to_all([q, k, v])        one exchange:   f32[B, H/n, S, D], f32[B, Hkv/n, S, D]
    out     = scaled_dot_product_attention    unchanged: causal, masks, scale, grouped heads
    out     = sp.all_to_all([out])            one exchange:   f32[B, H, S/n, D]

An exchange is one all-to-all: heads are scattered over the ranks and rows are gathered, or the reverse. Key heads that
n does not divide are repeated to lcm(Hkv, n) first, so that each is sent to the ranks that use it; their gradients are
summed. Bytes sent per rank: (n-1)/n of its q, k, v and out; equally many in the backward. A per-head mask is sliced by
head, any other mask is replicated. Refuses: query heads that n does not divide (an error if the user requested
Ulysses), operands without a head dim, unequal windows.

`ulysses_chunks` splits the heads into groups: the same ops once per group, and a cat of the results. The exchanges of
the next group's operands and of the last group's result overlap with the attention of a group. DeepSpeed's FPDT (Yao et
al. 2024, arXiv:2408.16978) splits the sequence instead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.passes.cost.attention_cost import BACKWARD_FLOPS, AttentionShape, Candidate, Strategy
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, divides, is_same_size
from sp_compile.passes.sharding.attention_axes import ATTENTION
from sp_compile.passes.sharding.placement import Demand, Placement, Shard

from .base import SEQUENCE_FROM_END, AttentionPass, register_strategy, sequence_shard

sp, aten = torch.ops.sp, torch.ops.aten
HEADS_FROM_END = -3
DimFrame = tuple[int, tuple[Size, ...]]  # a dim counted from the last, and the frame that splits it


class UlyssesAttention(AttentionPass):
    """Pass for the demands of attention whose query heads the ranks divide."""

    name = "ulysses"
    merges_blocks = False
    is_explained = True

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        if node.target not in ATTENTION or not self.is_chosen(node):
            return ""
        why = self._unsupported_reason(OpCall(node))
        if why is not None and self.job.options.attention == self.name:
            raise SpError("SP402", f"attention='ulysses' does not support {describe_node(node)}: {why}.")
        return why

    def _unsupported_reason(self, call: OpCall) -> str | None:
        """Return the reason why the heads of an attention cannot be exchanged for its rows, or None."""
        n = self.job.ranks.n
        for i, operand in enumerate(call.operands[:3]):
            shape = call.shape(i)
            if len(shape) < 3:
                return f"operand {operand.name} of shape {list(shape)} has no head dim"
            heads = shape[HEADS_FROM_END]
            if not divides(n, heads) and (i == 0 or not self._needs_repeat(call)):
                return f"{n} ranks do not divide the {heads} heads of {operand.name}, of shape {list(shape)}"
            have = self.plan.of(operand)
            if isinstance(have, Shard) and sequence_shard(self.plan, call, i) is None:
                return f"{operand.name} is sharded on dim {have.dim}, not on its sequence"
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Insert the exchanges around an attention, or around each of several groups of its heads."""
        placed = {o: self.plan.of(o) for o in OpCall(node).operands[:3]}
        if self._needs_repeat(OpCall(node)):
            placed.update(self._repeat(node, placed))
        chunks = self._chunk_count(node)
        if chunks == 1:
            self.note(node, self._exchange_around(node, placed)[1])
            return
        done = [self._exchange_around(part, places) for part, places in self._attend_in_chunks(node, chunks, placed)]
        self.note(node, f"{done[0][1]}, for each of {chunks} groups of heads")
        with self.graph.inserting_before(node):
            joined = self.compute(aten.cat.default, ([back for back, _ in done], HEADS_FROM_END), node)
        self.replace(node, joined)

    def _chunk_count(self, node: Node) -> int:
        """Return the requested or chosen number of groups of heads; 1 and a note if heads cannot be split."""
        requested, choice, call = self.job.options.ulysses_chunks, node_info(node).choice, OpCall(node)
        chunks = requested if isinstance(requested, int) else choice.chunks if choice is not None else 1
        heads = [call.shape(i)[HEADS_FROM_END] for i in range(3)]
        mask = call.get("attn_mask")
        of_heads = mask is not None and not is_same_size((1, *as_sizes(mask.meta["val"].shape))[HEADS_FROM_END], 1)
        n, why = self.job.ranks.n, None
        if not all(divides(chunks * n, h) for h in heads):
            why = f"{' and '.join(map(str, dict.fromkeys(heads)))} heads on {n} ranks cannot form these groups"
        elif call.get("heads") or call.get("sinks") is not None or of_heads or call["dropout_p"]:
            why = "its masks, scores, sinks or random draws differ between heads"
        if chunks == 1 or why is None:
            return int(chunks)
        self.note_refusal(node, f"ulysses_chunks={chunks}: {why}", "ulysses_chunks")
        return 1

    def _attend_in_chunks(
        self, node: Node, chunks: int, placed: dict[Node, Placement]
    ) -> list[tuple[Node, dict[Node, Placement]]]:
        """Emit the attention of each group of heads; return each with the placements of its operands.

        Args:
            node: The attention of all heads.
            chunks: The number of groups.
            placed: The placements of q, k and v.
        """
        call, parts = OpCall(node), []
        with self.graph.inserting_before(node):
            split = {o: self._split_heads(o, chunks, node) for o in call.operands[:3]}
            for i in range(chunks):
                operands = [split[o][i] for o in call.operands[:3]]
                args, kwargs = call.with_operands([*operands, *call.operands[3:]])
                part = self.compute(node.target, args, node, kwargs)
                part.meta = {**node.meta, "val": part.meta["val"]}
                parts.append((part, {split[o][i]: have for o, have in placed.items() if o in split}))
        return parts

    def _split_heads(self, x: Node, chunks: int, node: Node) -> list[Node]:
        """Split the heads of an operand into groups by one op.

        Gradients of slices would be padded and added one by one.
        """
        dim = x.meta["val"].ndim + HEADS_FROM_END
        both = self.compute(aten.split.Tensor, (x, as_sizes(x.meta["val"].shape)[dim] // chunks, dim), node)
        return [self.emit(operator.getitem, (both, i), value, node) for i, value in enumerate(both.meta["val"])]

    def _exchange_around(self, node: Node, placed: dict[Node, Placement]) -> tuple[Node, str]:
        """Exchange operands and result of an attention; return the exchanged result, and text for the report.

        Args:
            node: The attention.
            placed: The placements of q, k and v.
        """
        call = OpCall(node)
        moved = {o: have for o in call.operands[:3] if isinstance(have := placed[o], Shard)}
        groups = _group_by_frame(moved)
        heads = min((call.shape(i)[HEADS_FROM_END] for i in range(3)), key=lambda h: h if isinstance(h, int) else 0)
        heads_dim = (HEADS_FROM_END, (1, heads, 0, heads))
        fresh: dict[Node, Node] = {}
        with self.graph.inserting_before(node):
            for group in groups:
                rows = (SEQUENCE_FROM_END, moved[group[0]].frame_arg())
                fresh.update(zip(group, self._exchange(group, heads_dim, rows, node)))
        operands = [fresh.get(o, o) for o in call.operands[:3]] + call.operands[3:]
        node.args, node.kwargs = call.with_operands(operands)
        queries, back = moved.get(call.operands[0]), node
        if queries is not None:
            with self.insert_after(node):
                (back,) = self._exchange([node], (SEQUENCE_FROM_END, queries.frame_arg()), heads_dim, node)
            self.insert_between(node, back)
        return back, f"{len(moved)} operands in {len(groups)} all-to-all, the result in 1"

    def _needs_repeat(self, call: OpCall) -> bool:
        """Return True if the key heads must be repeated, since the ranks do not divide them."""
        heads, keys, values = (call.shape(i)[HEADS_FROM_END] for i in range(3))
        grouped = isinstance(keys, int) and keys == values and divides(keys, heads)
        return grouped and call.ndim(1) == call.ndim(0) and not divides(self.job.ranks.n, keys)

    def _repeat(self, node: Node, placed: dict[Node, Placement]) -> dict[Node, Placement]:
        """Repeat the key heads of an attention to lcm(Hkv, n) heads; return placements of the new operands.

        Args:
            node: The attention, whose operands are replaced.
            placed: The placements of q, k and v.
        """
        call = OpCall(node)
        with self.graph.inserting_before(node):
            repeated = {o: self._repeat_if_needed(o, node) for o in call.operands[1:3]}
        operands = [call.operands[0], *(repeated[o] for o in call.operands[1:3]), *call.operands[3:]]
        node.args, node.kwargs = call.with_operands(operands, enable_gqa=True)
        return {new: placed[old] for old, new in repeated.items()}

    def _repeat_if_needed(self, x: Node, node: Node) -> Node:
        """Emit x with each head repeated, so that the ranks divide the heads."""
        heads = as_sizes(x.meta["val"].shape)[HEADS_FROM_END]
        return self.repeat_each(x, HEADS_FROM_END, math.lcm(heads, self.job.ranks.n) // heads, node)

    def _exchange(self, operands: list[Node], scattered: DimFrame, gathered: DimFrame, node: Node) -> list[Node]:
        """Emit one all-to-all that scatters one dim of operands and gathers another; return its results."""
        ndim, ranks = operands[0].meta["val"].ndim, self.job.ranks
        cuts = [x for dim, frame in (scattered, gathered) for x in (ndim + dim, self.sizes.list(frame))]
        values = [o.meta["val"] for o in operands]
        both = self.emit(sp.all_to_all.default, (operands, *cuts, ranks.n, ranks.group), values, node)
        return [self.emit(operator.getitem, (both, i), value, node) for i, value in enumerate(values)]


def _group_by_frame(moved: dict[Node, Shard]) -> list[list[Node]]:
    """Group operands with equally sharded sequences for one exchange; cross attention has two lengths."""
    groups: list[list[Node]] = []
    for operand, have in moved.items():
        group = next((g for g in groups if have.has_same_positions(moved[g[0]])), [])
        if not group:
            groups.append(group)
        group.append(operand)
    return groups


def _ulysses_candidates(shape: AttentionShape, machine: Machine, layout: str) -> Iterator[Candidate]:
    """Yield the candidates, without and with groups of heads, with predicted seconds and memory.

    Full sequences are in contiguous order, so there are no candidates for other layouts. See `Strategy.candidates`.
    """
    n = shape.n
    if LAYOUTS[layout].chunks > 1:
        return
    why = None if shape.heads % n == 0 else f"{n} ranks do not divide {shape.heads} query heads"
    workspace = shape.workspace(n, shape.kv_len) if why is None else 0
    memory = exchanged_memory(shape, n) + workspace if n > 1 else 0
    found = [
        Candidate(
            "ulysses",
            n,
            1,
            layout,
            *_ulysses_seconds(shape, machine, 1),
            memory,
            (2, 2) if n > 1 else (0, 0),
            legal=why,
        )
    ]
    heads = math.lcm(shape.kv_heads, n) // n
    for chunks in range(2, heads + 1 if n > 1 and why is None else 0):
        if heads % chunks == 0 and shape.heads % (chunks * n) == 0:
            forward, backward = _ulysses_seconds(shape, machine, chunks)
            found.append(replace(found[0], forward=forward, backward=backward, rounds=(2 * chunks,) * 2, chunks=chunks))
    yield found[0]
    best = min(found, key=lambda c: c.seconds)
    if best.chunks > 1:
        yield best


def _ulysses_seconds(shape: AttentionShape, machine: Machine, chunks: int) -> tuple[float, float]:
    """Return the seconds of forward and backward if the heads run in groups.

    The exchange of one group is visible; those of the others overlap with attention.
    """
    compute = machine.attention(shape.flops, shape.kv_len)
    exchange = exchange_seconds(shape, machine, shape.n, chunks)
    visible = exchange / chunks + chunks * machine.call
    forward, backward = (
        machine.together(work, exchange - exchange / chunks) for work in (compute, BACKWARD_FLOPS * compute)
    )
    return forward + visible, backward + visible


def exchange_seconds(shape: AttentionShape, machine: Machine, ranks: int, chunks: int = 1) -> float:
    """Return the seconds of the all-to-all of q, k, v and of the result, with packing.

    Args:
        shape: The sizes of the attention.
        machine: The machine.
        ranks: The number of neighbors.
        chunks: The number of groups of heads; the result is their total.

    Returns:
        Seconds.
    """
    if ranks == 1:
        return 0.0
    back = shape.head_bytes.results
    there = shape.head_bytes.exchange_bytes(ranks) - back
    exchanges = sum(machine.seconds("all_to_all", nbytes / chunks, ranks) for nbytes in (there, back))
    return chunks * exchanges + machine.copy(2 * (there + back))


def exchanged_memory(shape: AttentionShape, ranks: int) -> int:
    """Return the bytes that a rank stores of exchanged q, k, v and results, and of their gradients."""
    return shape.head_bytes.exchange_bytes(ranks) * (2 if shape.training else 1)


register_strategy(
    Strategy(
        name="ulysses",
        preference=0,
        rewrite=UlyssesAttention,
        candidates=_ulysses_candidates,
        options=("ulysses_chunks",),
    )
)
