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
from sp_compile.passes.cost.attention_cost import AttentionShape, Candidate, Strategy
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, exact_quotient, is_divisor, is_same_size
from sp_compile.passes.sharding.attention_axes import ATTENTION
from sp_compile.passes.sharding.placement import Demand, Placement, Shard

from .base import SEQUENCE_FROM_END, AttentionPass, head_counts, register_strategy, sequence_shard

sp, aten = torch.ops.sp, torch.ops.aten
HEADS_FROM_END = -3
DimFrame = tuple[int, tuple[Size, ...]]  # a dim counted from the last, and the frame that splits it


class AttendWithUlysses(AttentionPass):
    """Pass for the demands of attention whose query heads the ranks divide."""

    name = "ulysses"
    merges_blocks = False
    is_explained = True

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass).

        Raises:
            SpError: The user requested Ulysses, which does not support the attention (SP402).
        """
        if node.target not in ATTENTION or not self.is_chosen(node):
            return ""
        why = self._unsupported_reason(OpCall(node))
        if why is not None and self.context.options.attention == self.name:
            raise SpError("SP402", f"attention='ulysses' does not support {describe_node(node)}: {why}.")
        return why

    def _unsupported_reason(self, call: OpCall) -> str | None:
        """Return the reason why the heads of an attention cannot be exchanged for its rows, or None if they can."""
        n = self.context.ranks.n
        for i, operand in enumerate(call.operands[:3]):
            shape = call.shape(i)
            if len(shape) < 3:
                return f"operand {operand.name} of shape {list(shape)} has no head dim"
            heads = shape[HEADS_FROM_END]
            can_repeat = i > 0 and self._needs_repeat(call)  # heads of keys and values
            if not is_divisor(n, heads) and not can_repeat:
                return f"{n} ranks do not divide the {heads} heads of {operand.name}, of shape {list(shape)}"
            have = self.plan.of(operand)
            if isinstance(have, Shard) and sequence_shard(self.plan, call, i) is None:
                return f"{operand.name} is sharded on dim {have.dim}, not on its sequence"
        if _fewest_heads(call) is None:  # one frame cannot split them: 64 // s heads of q and 2 * (32 // s) of k
            return f"the numbers of heads {head_counts(call)} are not proved to be multiples of one of them"
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Insert the exchanges around an attention, or around each of several groups of its heads."""
        placed = {x: self.plan.of(x) for x in OpCall(node).operands[:3]}
        if self._needs_repeat(OpCall(node)):
            placed.update(self._repeat_heads(node, placed))
        num_groups = self._group_count(node)
        if num_groups == 1:
            _, text = self._exchange_around(node, placed)
            self.note(node, text)
            return
        parts = self._attend_in_groups(node, num_groups, placed)
        results_and_texts = [self._exchange_around(part, placed_in_part) for part, placed_in_part in parts]
        results, texts = zip(*results_and_texts)
        self.note(node, f"{texts[0]}, for each of {num_groups} groups of heads")
        with self.graph.inserting_before(node):
            joined = self.compute(aten.cat.default, (list(results), HEADS_FROM_END), node)
        self.replace(node, joined)

    def _group_count(self, node: Node) -> int:
        """Return the number of groups of heads that are exchanged separately: `ulysses_chunks`, or the chosen number.

        If the heads cannot be split into these groups, the result is 1, and the report states why. Operands that differ
        between heads, such as sinks, are not split into groups.
        """
        requested, choice, call = self.context.options.ulysses_chunks, node_info(node).choice, OpCall(node)
        chosen = choice.chunks if choice is not None else 1
        count = requested if isinstance(requested, int) else chosen
        heads = [call.shape(i)[HEADS_FROM_END] for i in range(3)]
        mask = call.get("attn_mask")
        # The leading 1 is the head dim of a mask with two dims.
        is_mask_per_head = mask is not None and not is_same_size((1, *call.shape("attn_mask"))[HEADS_FROM_END], 1)
        n, why = self.context.ranks.n, None
        if not all(is_divisor(count * n, h) for h in heads):
            why = f"{' and '.join(map(str, dict.fromkeys(heads)))} heads on {n} ranks cannot form these groups"
        elif call.get("heads") or call.get("sinks") is not None or is_mask_per_head or call["dropout_p"]:
            why = "its masks, scores, sinks or random draws differ between heads"
        if count == 1 or why is None:
            return int(count)
        self.note_refusal(node, f"ulysses_chunks={count}: {why}", "ulysses_chunks")
        return 1

    def _attend_in_groups(
        self, node: Node, num_groups: int, placed: dict[Node, Placement]
    ) -> list[tuple[Node, dict[Node, Placement]]]:
        """Emit one attention for each group of heads; return (attention, placements of its q, k and v) for each.

        Args:
            node: The attention of all heads.
            num_groups: The number of groups.
            placed: The placements of q, k and v.
        """
        call, parts = OpCall(node), []
        with self.graph.inserting_before(node):
            split = {x: self._split_heads(x, num_groups, node) for x in call.operands[:3]}
            for i in range(num_groups):
                operands = [split[x][i] for x in call.operands[:3]]
                args, kwargs = call.with_operands([*operands, *call.operands[3:]])
                part = self.compute(node.target, args, node, kwargs)
                part.meta = {**node.meta, "val": part.meta["val"]}
                # `placed` may also have k and v before their heads were repeated, which are not split.
                parts.append((part, {split[x][i]: have for x, have in placed.items() if x in split}))
        return parts

    def _split_heads(self, x: Node, num_groups: int, node: Node) -> list[Node]:
        """Emit a split of the heads of an operand into groups, and return the nodes of the groups.

        It is one op, because the gradients of several slices would be padded and added one by one.
        """
        dim = x.meta["val"].ndim + HEADS_FROM_END
        group_heads = as_sizes(x.meta["val"].shape)[dim] // num_groups
        pieces = self.compute(aten.split.Tensor, (x, group_heads, dim), node)
        return [self.emit(operator.getitem, (pieces, i), value, node) for i, value in enumerate(pieces.meta["val"])]

    def _exchange_around(self, node: Node, placed: dict[Node, Placement]) -> tuple[Node, str]:
        """Emit the exchanges before and after an attention, of its operands and of its result.

        Args:
            node: The attention.
            placed: The placements of q, k and v.

        Returns:
            The exchanged result, and text for the report.
        """
        call = OpCall(node)
        moved: dict[Node, Shard] = {}  # the operands that are exchanged
        for x in call.operands[:3]:
            have = placed[x]
            if isinstance(have, Shard):
                moved[x] = have
        groups = _group_by_frame(moved)
        # The heads of q, k and v are split by one frame, in which the operand with the fewest heads has one head per
        # position and another has several: with 8 heads of q and 2 of k, a position is 1 head of k and 4 of q.
        heads = _fewest_heads(call)
        assert heads is not None, call.node  # see `_unsupported_reason`
        heads_dim = (HEADS_FROM_END, (1, heads, 0, heads))
        exchanged: dict[Node, Node] = {}
        with self.graph.inserting_before(node):
            for group in groups:
                rows = (SEQUENCE_FROM_END, moved[group[0]].frame_arg())
                exchanged.update(zip(group, self._exchange(group, heads_dim, rows, node)))
        operands = [exchanged.get(x, x) for x in call.operands[:3]] + call.operands[3:]
        node.args, node.kwargs = call.with_operands(operands)
        queries, result = moved.get(call.operands[0]), node
        if queries is not None:
            with self.insert_after(node):
                (result,) = self._exchange([node], (SEQUENCE_FROM_END, queries.frame_arg()), heads_dim, node)
            self.insert_between(node, result)  # users of the attention read the exchanged result
        return result, f"{len(moved)} operands in {len(groups)} all-to-all, the result in 1"

    def _needs_repeat(self, call: OpCall) -> bool:
        """Return True if the ranks do not divide the key heads, of which each serves a number of query heads.

        The key heads, and with them the value heads, are then repeated, and each rank gets those that it needs.
        """
        heads, keys, values = (call.shape(i)[HEADS_FROM_END] for i in range(3))
        is_grouped = isinstance(keys, int) and keys == values and is_divisor(keys, heads)
        return is_grouped and call.ndim(1) == call.ndim(0) and not is_divisor(self.context.ranks.n, keys)

    def _repeat_heads(self, node: Node, placed: dict[Node, Placement]) -> dict[Node, Placement]:
        """Repeat the key and value heads of an attention, and return the placements of the new k and v.

        Args:
            node: The attention, whose operands are replaced.
            placed: The placements of q, k and v.
        """
        call, n = OpCall(node), self.context.ranks.n
        query, key, value, *others = call.operands
        heads = call.shape(1)[HEADS_FROM_END]
        times = math.lcm(heads, n) // heads  # there are then lcm(heads, n) heads, which the n ranks divide
        with self.graph.inserting_before(node):
            repeated = {x: self.repeat_each(x, HEADS_FROM_END, times, node) for x in (key, value)}
        node.args, node.kwargs = call.with_operands([query, repeated[key], repeated[value], *others], enable_gqa=True)
        return {new: placed[old] for old, new in repeated.items()}

    def _exchange(self, operands: list[Node], scattered: DimFrame, gathered: DimFrame, node: Node) -> list[Node]:
        """Emit one sp::all_to_all of several operands, and return its results.

        Args:
            operands: The operands.
            scattered: The dim that is split over the ranks, counted from the last, and its frame.
            gathered: The dim that is gathered, with its frame.
            node: The attention.
        """
        ndim, ranks = operands[0].meta["val"].ndim, self.context.ranks
        (scatter_dim, scatter_frame), (gather_dim, gather_frame) = scattered, gathered
        scatter_arguments = (ndim + scatter_dim, self.sizes.list(scatter_frame))
        gather_arguments = (ndim + gather_dim, self.sizes.list(gather_frame))
        args = (operands, *scatter_arguments, *gather_arguments, ranks.n, ranks.group)
        # Exchanges keep the global view, so that the values of the results are those of the operands.
        values = [x.meta["val"] for x in operands]
        results = self.emit(sp.all_to_all.default, args, values, node)
        return [self.emit(operator.getitem, (results, i), value, node) for i, value in enumerate(values)]


def _fewest_heads(call: OpCall) -> Size | None:
    """Return the number of heads of q, k or v of which all three are provably multiples; None if there is none."""
    counts = head_counts(call)
    return next((fewest for fewest in counts if all(exact_quotient(n, fewest) is not None for n in counts)), None)


def _group_by_frame(moved: dict[Node, Shard]) -> list[list[Node]]:
    """Group operands whose sequences are sharded equally, because one exchange has one frame.

    Self attention has one group, cross attention has two: q, and k and v.

    Args:
        moved: The placements of the operands.
    """
    groups: list[list[Node]] = []
    for operand, have in moved.items():
        for group in groups:
            if have.has_same_positions(moved[group[0]]):
                group.append(operand)
                break
        else:
            groups.append([operand])
    return groups


def _ulysses_candidates(shape: AttentionShape, machine: Machine, layout: str) -> Iterator[Candidate]:
    """Yield the candidate of the strategy, and that with several groups of heads if it is predicted to be faster.

    Full sequences are in contiguous order, so there are no candidates for other layouts.

    Args:
        shape: The sizes of the attention.
        machine: The predicted speed of kernels and collectives.
        layout: The order of the sequence.
    """
    n = shape.n
    if LAYOUTS[layout].chunks > 1:
        return
    why = None if shape.heads % n == 0 else f"{n} ranks do not divide {shape.heads} query heads"
    workspace = shape.workspace(ulysses=n, keys=shape.kv_len) if why is None else 0
    memory = exchanged_memory(shape, n) + workspace if n > 1 else 0
    rounds = (2, 2) if n > 1 else (0, 0)  # exchanges in the forward, in the backward: before and after the attention
    forward, backward = _ulysses_seconds(shape, machine, num_groups=1)
    one_group = Candidate(
        "ulysses", ulysses=n, ring=1, layout=layout, forward=forward, backward=backward, memory=memory, rounds=rounds,
        refusal=why,
    )  # fmt: skip
    candidates = [one_group]
    rank_heads = math.lcm(shape.kv_heads, n) // n  # key heads of a rank, after they are repeated
    is_exchanged = n > 1 and why is None
    for groups in range(2, rank_heads + 1) if is_exchanged else ():
        if rank_heads % groups == 0 and shape.heads % (groups * n) == 0:
            forward, backward = _ulysses_seconds(shape, machine, groups)
            rounds = (2 * groups, 2 * groups)
            candidates.append(replace(one_group, forward=forward, backward=backward, rounds=rounds, chunks=groups))
    yield one_group
    best = min(candidates, key=lambda c: c.seconds)
    if best.chunks > 1:
        yield best


def _ulysses_seconds(shape: AttentionShape, machine: Machine, num_groups: int) -> tuple[float, float]:
    """Return (seconds of the forward, seconds of the backward) if the heads run in this number of groups.

    The exchange of one group is visible; those of the others overlap with attention.
    """
    compute = machine.attention(shape.flops, shape.kv_len)
    exchange = exchange_seconds(shape, machine, shape.n, num_groups)
    visible = exchange / num_groups + num_groups * machine.call  # `call`: the launches of one attention
    hidden = exchange - exchange / num_groups
    forward = machine.together(compute, hidden)
    backward = machine.together(machine.attention_backward(compute), hidden)
    return forward + visible, backward + visible


def exchange_seconds(shape: AttentionShape, machine: Machine, ranks: int, num_groups: int = 1) -> float:
    """Return the seconds of the all-to-all of q, k, v and of the result, with packing.

    Args:
        shape: The sizes of the attention.
        machine: The machine.
        ranks: The number of neighbors.
        num_groups: The number of groups of heads; the result is their total.
    """
    if ranks == 1:
        return 0.0
    result_bytes = shape.head_bytes.results
    operand_bytes = shape.head_bytes.exchange_bytes(ranks) - result_bytes
    group_bytes = operand_bytes / num_groups, result_bytes / num_groups
    exchanges = sum(machine.seconds("all_to_all", nbytes, ranks) for nbytes in group_bytes)
    # Packing reads and writes each value once.
    return num_groups * exchanges + machine.copy(2 * (operand_bytes + result_bytes))


def exchanged_memory(shape: AttentionShape, ranks: int) -> int:
    """Return the bytes that a rank stores of exchanged q, k, v and results, and of their gradients."""
    return shape.head_bytes.exchange_bytes(ranks) * (2 if shape.training else 1)


register_strategy(
    Strategy(
        name="ulysses",
        preference=0,
        rewrite=AttendWithUlysses,
        candidates=_ulysses_candidates,
        options=("ulysses_chunks",),
    )
)
