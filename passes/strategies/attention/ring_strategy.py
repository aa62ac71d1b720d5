"""Run ring attention (arXiv:2310.01889): keys and values circulate, and every rank keeps its queries.

    scaled_dot_product_attention(q, k, v)   ->   sp::ring_attention(q, k, v, ..., q_frame, k_frame, n, group, ...)

Any number of heads; P - 1 shifts forward, at most 2 P - 1 backward; a sliding window needs only the shifts that reach
it. Causal attention is load-balanced by the zigzag layout, of the program or (`balance`) inside the op. Refuses:
queries that are not sharded along their sequence, keys and values that are sharded differently.
Bytes, for P ranks and G key heads of `n_h` bytes a rank: (P-1) * 2 G * n_h in P-1 hops, equally many in the backward,
and the gradients of K and V, which travel with them and one hop further, or are reduce-scattered.

A hop moves keys from a rank to the next one, in one shift of all ranks. Rank r attends to its own keys in step 0 and to
those of rank r - s (modulo n) in step s. A place of the ring is one rank, or the neighbors of a hybrid together.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.attention.ring_kernel import window_hops
from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.lowering.comm import routes
from sp_compile.lowering.masks.predicate import evaluate_over, is_distance_only, predicate_symbols, split_conjuncts
from sp_compile.passes.cost.attention_cost import TIE_RATIO, AttentionShape, Candidate, Strategy
from sp_compile.passes.cost.collective_time import collective_bytes
from sp_compile.passes.cost.exchange_cost import head_bytes, relayout_bytes
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.attention_axes import mask_predicate

from .base import ShardAttention, register_strategy, sequence_shard


class AttendWithRing(ShardAttention):
    """Pass for attention that was chosen to run as a ring.

    Direct use: `AttendWithRing(4)(graph_module)` rewrites any attention.
    """

    name = "ring"
    op = torch.ops.sp.ring_attention.default
    splits_mask = True

    def extra_arguments(self, node: Node) -> tuple[Any, ...]:
        """Return the arguments that only sp::ring_attention has: (steps of the ring, path of the gradients of keys)."""
        return self._ring_steps(node), ring_grads(node)

    def describe(self, node: Node) -> str:
        """Return the line of the report for a rewritten attention."""
        shifts = self._ring_steps(node) - 1
        return f"{shifts} shifts of keys and values forward, at most {2 * shifts + 1} backward"

    def _ring_steps(self, node: Node) -> int:
        """Return the number of steps of the ring: in step s, a rank attends to the keys of the rank s places before it.

        It is the number of ranks, unless the mask proves that queries attend only to keys of nearer ranks, as for a
        sliding window over rows in order.
        """
        call, n = OpCall(node), self.context.ranks.n
        query, key = (sequence_shard(self.plan, call, i) for i in range(2))
        predicate = mask_predicate(call)
        # In zigzag order, each rank has early and late rows; `max_hops` is for rows in order.
        if not predicate or query is None or key is None or self._needs_zigzag_exchange(node):
            return n
        rows = query.frame.local_length(n)
        is_in_order = query.frame.order.is_in_order and query.frame.start == 0
        if not query.has_same_positions(key) or not isinstance(rows, int) or not is_in_order:
            return n
        return 1 + max_hops(predicate, n, rows)


@lru_cache(maxsize=256)
def max_hops(predicate: str, n: int, rows: int) -> int:
    """Return the largest number of hops s for which queries of some rank r may attend to keys of rank (r - s) % n.

    The mask is a conjunction. Its conditions on the distance of a key from its query, such as q - k < 128, have one
    result for all ranks r >= s, whose keys are s ranks before them, and one for all r < s, whose keys come from later
    ranks. They are evaluated first, for one rank of each kind; only then is the full mask evaluated for each rank.

    Args:
        predicate: The mask, as a condition on the positions q and k.
        n: The number of ranks.
        rows: Rows of a rank.

    Returns:
        The number of hops, 0 to n - 1.
    """
    unknown = {name: (-math.inf, math.inf) for name in predicate_symbols(predicate)}  # ranges of other symbols
    distance_conditions = [c for c in split_conjuncts(predicate) if is_distance_only(c, ())]

    def may_hold(condition: str, rank: int, hops: int) -> bool:
        """Return True if a condition may hold for queries of a rank and the keys that arrive after some hops."""
        keys = _rank_rows((rank - hops) % n, rows)
        verdict = evaluate_over(condition, {**unknown, "q": _rank_rows(rank, rows), "k": keys})
        return verdict is not False  # None: it holds for some of the positions, or cannot be decided

    for hops in reversed(range(n)):
        # The ranks r >= hops, of which n - 1 is an example, and the ranks r < hops, of which 0 is one.
        for example, ranks in ((n - 1, range(hops, n)), (0, range(hops))):
            is_near = all(may_hold(condition, example, hops) for condition in distance_conditions)
            if is_near and any(may_hold(predicate, rank, hops) for rank in ranks):
                return hops
    return 0


def _rank_rows(rank: int, rows: int) -> tuple[int, int]:
    """Return the first and the last position of the rows of a rank, which has `rows` adjacent ones."""
    return rank * rows, (rank + 1) * rows - 1


def ring_grads(node: Node) -> str:
    """Return how gradients of keys and values return to the rank that owns these.

    "travel": around the ring with the keys, the default; "scatter": by one reduce_scatter at the end.
    """
    choice = node_info(node).choice
    return (choice.ring_grads if choice is not None else "") or "travel"


def ring_candidate(shape: AttentionShape, machine: Machine, layout: str, ulysses: int = 1) -> Candidate:
    """Return the candidate for a ring of `n / ulysses` places, with the faster path of the gradients of keys.

    Each place has the rows of `ulysses` neighbors and a share of the heads. All times are seconds of one rank: of the
    attention of a step (`compute`), of a shift (`hop_seconds`), and of both paths of the gradients, around the ring
    (`travel`) or by one reduce_scatter (`scatter`).

    Args:
        shape: The sizes of the attention.
        machine: The machine.
        layout: The order of the sequence.
        ulysses: The number of ranks of a place.

    Returns:
        The candidate.
    """
    places, chunks = shape.n // ulysses, LAYOUTS[layout].chunks
    kv_bytes = shape.head_bytes.repeat_keys(ulysses)  # that a rank sends in a hop
    grad_bytes = kv_bytes * shape.widening
    hops = _needed_hops(shape, places) if ulysses == 1 else places - 1
    keys = ulysses * shape.kv_rows / chunks  # that one kernel call (a block of queries and keys) reads
    imbalance = shape.imbalance(places, layout)  # the work of the busiest place over the mean
    compute = machine.attention(shape.flops * imbalance, keys) / machine.ring_efficiency / (hops + 1)
    # Zigzag: a step has two blocks; a hop changes the results of all queries or of half of them, 3 / 4 on average.
    blocks, share = (2, 0.75) if chunks > 1 else (1, 1.0)
    calls = (blocks * (hops + 1) + hops) * machine.call  # launches of the blocks, and of a merge after each hop
    hop_seconds = machine.seconds("shift", kv_bytes, shape.n)
    grad_hop_seconds = machine.seconds("shift", grad_bytes, shape.n)

    # `compute` of the last step, and of each step before it together with the shift that sends the next keys.
    forward = calls + compute + hops * machine.together(compute, hop_seconds)
    forward += hops * share * machine.copy(shape.merge_bytes)
    compute_backward = machine.attention_backward(compute)
    backward = calls + compute_backward + hops * share * machine.copy(shape.accumulate_bytes)
    # Current and next keys, and the accumulators with their increments.
    memory: float = 2 * kv_bytes + shape.head_bytes.results * (1 + shape.widening)
    if shape.training:
        workspace = shape.workspace(ulysses, keys=ulysses * shape.kv_rows)
        # In the backward: current and next keys; the accumulator of the gradient of queries, and its increment; three
        # times gradients of keys: their sum, the one that a shift moves, and those of a step.
        memory = max(memory, 2 * kv_bytes + 2 * shape.gradient_bytes + 3 * grad_bytes + workspace)
    last_hop = 1 if hops else 0  # from the last rank to the owner; none if no rank needs keys of another one
    # Each hop adds the gradients of a step to a sum: both are read, and the sum is written.
    travel_step = machine.together(compute_backward, hop_seconds + grad_hop_seconds) + machine.copy(3 * grad_bytes)
    travel = hops * travel_step + last_hop * hop_seconds  # the sums return in the dtype of the keys
    # Each hop copies the gradients of a step to a part; all parts are stacked by owner, and the received ones summed.
    scatter = hops * machine.together(compute_backward, hop_seconds)
    scatter += machine.copy((2 * hops + 2 * places + places + 1) * grad_bytes)
    # A reduce_scatter of the parts of all places sends the bytes of an all_gather of one part.
    scatter += machine.seconds("all_gather", grad_bytes, places, stride=ulysses)
    scatter_memory = memory + 2 * places * grad_bytes  # the gradients of all keys, and a packed copy of them
    is_travel_faster = forward + backward + travel <= TIE_RATIO * (forward + backward + scatter)
    # As in `RingKeys.backward`, gradients travel unless keys reach all places.
    if is_travel_faster or hops < places - 1 or scatter_memory > machine.memory:
        path, backward, backward_rounds = "travel", backward + travel, 2 * hops + last_hop
    else:
        path, backward, backward_rounds = "scatter", backward + scatter, hops + 1
        memory = scatter_memory
    rounds = (hops, backward_rounds)  # collectives of the forward, and of the backward
    return Candidate("ring", ulysses, places, layout, forward, backward, memory, rounds, ring_grads=path)


def _needed_hops(shape: AttentionShape, size: int) -> int:
    """Return the predicted hops of keys in a ring of `size` places: size - 1, or fewer for a causal window."""
    if shape.window is None or not shape.causal or shape.q_len != shape.kv_len:
        return size - 1
    rows = -(-shape.q_len // size)  # of a place, rounded up
    return window_hops(shape.window, rows, size)


def ring_sends(call: OpCall, n: int, ulysses: int, hops: int) -> tuple[Size, Size]:
    """Return (bytes that one rank sends in the forward, in the backward) for a call of the op, for the report.

    Args:
        call: The call of sp::ring_attention or sp::hybrid_attention.
        n: The number of ranks.
        ulysses: The number of ranks of a place of the ring, which exchange heads for rows before and after it.
        hops: The number of shifts of the ring.
    """
    heads, places = head_bytes(call), n // ulysses
    exchange = collective_bytes("all_to_all", heads.exchange_bytes(ulysses), ulysses)
    # Rows to zigzag order and back, if requested; before the exchange, and so without repeated heads of keys.
    relayout = relayout_bytes(call, heads.exchange_bytes(1), n)
    key_bytes = heads.repeat_keys(ulysses)  # keys and values, with heads repeated until `ulysses` divides their number
    forward = exchange + relayout + hops * collective_bytes("shift", key_bytes, places)
    # As in `RingKeys.backward`, gradients of keys travel with the keys, then one hop in the dtype of the keys. Or
    # they are reduce-scattered: a rank then sends those of all places but its own. `widening` is the size of a
    # gradient's element, in multiples of a key's.
    if not hops:  # no rank needs keys of another one
        grad_sends = 0
    elif hops < places - 1 or call["grads"] == "travel":
        grad_sends = hops * heads.widening + 1
    else:
        grad_sends = (places - 1) * heads.widening
    # The backward exchanges gradients where the forward exchanges values, and sends keys around again: it sends
    # `forward`, too.
    return forward, forward + grad_sends * key_bytes


register_strategy(
    Strategy(
        name="ring",
        preference=2,
        rewrite=AttendWithRing,
        candidates=lambda shape, machine, layout: [ring_candidate(shape, machine, layout)],
        sends=lambda call, n: ring_sends(call, n, ulysses=1, hops=call["steps"] - 1),
        declare=lambda call, ranks: routes.declare_attention_routes(ranks.group, 1, call["steps"]),
        always=True,
    )
)
