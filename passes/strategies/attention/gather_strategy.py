"""Gather keys and values: every rank attends with its own queries to all keys.

    scaled_dot_product_attention(q, k, v)   ->   sp::gathered_attention(q, k, v, ..., q_frame, k_frame, n, group, ...)

One all-gather of K and V forward, another one and a reduce-scatter backward. Gathered tensors are not saved, and causal
attention is split into full blocks and diagonals. For few key heads, and for attention that no other pass supports:
replicated keys, odd head counts, cross attention. Refuses: queries that are not sharded along their sequence.
Bytes, for P ranks and G key heads of `n_h` bytes a rank: (P-1) * 2 G * n_h, again in the backward, and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from sp_compile.lowering.base.frames import LAYOUTS
from sp_compile.lowering.comm import routes
from sp_compile.passes.cost.attention_cost import AttentionShape, Candidate, Strategy
from sp_compile.passes.cost.collective_time import collective_bytes
from sp_compile.passes.cost.exchange_cost import head_bytes, relayout_bytes
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size

from .base import ShardAttention, register_strategy


class AttendWithGatheredKeys(ShardAttention):
    """Pass for attention that was chosen to gather its keys, and for the remaining attention."""

    name = "gathered"
    op = torch.ops.sp.gathered_attention.default
    merges_blocks = moves_keys = False
    splits_mask = True
    is_default = True

    def describe(self, node: Node) -> str:
        """Return the line of the report for a rewritten attention."""
        return "keys and values are gathered in the forward and in the backward"


def _gather_candidates(shape: AttentionShape, machine: Machine, layout: str) -> Iterator[Candidate]:
    """Yield the one candidate of the strategy, with predicted seconds of forward and backward and bytes of memory.

    Args:
        shape: The sizes of the attention.
        machine: The predicted speed of kernels and collectives.
        layout: The order of the sequence.
    """
    n, kv_bytes = shape.n, shape.head_bytes.keys  # the bytes of a rank's keys and values
    imbalance = shape.imbalance(n, layout)
    compute = machine.attention(shape.flops * imbalance, shape.kv_len)
    # A rank has one run of rows, or two in zigzag order; keys are gathered run by run. For a run of queries, a causal
    # mask splits the keys into a full and a diagonal block, whose results are merged: 3 calls.
    runs = LAYOUTS[layout].chunks
    calls = (3 if shape.causal else 1) * runs * machine.call
    gather = runs * machine.seconds("all_gather", kv_bytes / runs, n) + machine.copy(2 * n * kv_bytes)
    grad_bytes = kv_bytes * shape.widening
    # A reduce_scatter takes the time of an all_gather of the same bytes.
    scatter = runs * machine.seconds("all_gather", grad_bytes / runs, n) + machine.copy(2 * n * grad_bytes)
    forward = compute + gather + calls
    backward = machine.attention_backward(compute) + gather + scatter + calls
    if shape.causal:
        forward += machine.copy(shape.merge_bytes)
        backward += machine.copy(shape.accumulate_bytes)
    memory: float = n * kv_bytes
    if shape.training:
        # The maximum is in the kernel of the backward (keys, values, their gradients in the accumulation dtype,
        # workspace), or after it (these gradients, and a packed copy that is sent). Gradients of queries are added.
        in_kernel = memory * (1 + shape.widening) + shape.workspace(ulysses=1, keys=shape.kv_len // runs)
        after_kernel = 2 * n * kv_bytes * shape.widening
        memory = max(in_kernel, after_kernel) + shape.gradient_bytes
    rounds = (runs, 2 * runs)  # collectives of forward and backward
    ulysses, ring = 1, n  # no heads are exchanged; each rank has the keys of n ranks
    # folds_keys=False: an exchange of rows to another order moves queries only, as keys are gathered in any order.
    yield Candidate("gather", ulysses, ring, layout, forward, backward, memory, rounds, folds_keys=False)


def _gather_sends(call: OpCall, n: int) -> tuple[Size, Size]:
    """Return (bytes that one rank sends in the forward, in the backward) for a call of the op, for the report.

    The backward gathers the keys again, and reduces and scatters their gradients.
    """
    heads = head_bytes(call)
    key_bytes = heads.keys if len(call["k_frame"]) else 0  # without a frame, every rank has all keys
    relayout = relayout_bytes(call, heads.queries + heads.results, n)  # rows to zigzag order and back, if requested
    forward = relayout + collective_bytes("all_gather", key_bytes, n)
    # Gradients of keys are sent in float32: `widening` is 2 for bfloat16 keys.
    return forward, forward + collective_bytes("reduce_scatter", key_bytes * heads.widening, n)


register_strategy(
    Strategy(
        name="gather",
        preference=1,
        rewrite=AttendWithGatheredKeys,
        candidates=_gather_candidates,
        sends=_gather_sends,
        declare=lambda call, ranks: routes.declare_attention_routes(ranks.group, 1, ranks.n),
    )
)
