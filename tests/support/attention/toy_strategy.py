"""An attention strategy that is registered from outside the package: gather everything, keep the rank's rows.

    scaled_dot_product_attention(q, k, v)   ->   sp::toy_attention(q, k, v, ..., q_frame, k_frame, n, group, ...)

Correct and wasteful: every rank computes everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.attention.attention_ops import ATTENTION_ARGUMENTS
from sp_compile.lowering.base.frames import nearest_rows, own_positions
from sp_compile.lowering.base.library import composite
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.strategies.attention import (
    AttentionShape,
    Candidate,
    Machine,
    ShardAttention,
    Strategy,
    head_bytes,
    register_strategy,
)

sp = torch.ops.sp
SEQUENCE = 2


@composite(f"toy_attention({ATTENTION_ARGUMENTS}) -> Tensor", padded="finite")
def toy_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shard(2), Shard(2), Shard(2) -> Shard(2). Every rank computes everything, so there is nothing to balance."""
    *scores, q_frame, k_frame, n, group, _balance = rest
    frames = (q_frame, k_frame, k_frame)
    gathered = [sp.all_gather(x, SEQUENCE, frame, n, group) for x, frame in zip((q, k, v), frames)]
    length = gathered[0].shape[SEQUENCE]
    out = sp.gathered_attention(*gathered, *scores, [1, length, 0, length], [], 1, group, False)
    positions = own_positions(q_frame, n, group, q.device)
    return out.index_select(SEQUENCE, nearest_rows(positions, q_frame, 1))


class AttendWithToy(ShardAttention):
    name = "toy"
    op = sp.toy_attention.default

    def describe(self, node: torch.fx.Node) -> str:
        return "everything is gathered"


def _candidates(shape: AttentionShape, machine: Machine, layout: str) -> Iterator[Candidate]:
    sent = shape.head_bytes.queries + shape.head_bytes.keys
    compute = shape.n * machine.attention(shape.flops, shape.kv_len) + machine.call
    exchange = machine.seconds("all_gather", sent, shape.n)
    forward, backward = compute + exchange, 2.5 * compute + exchange
    yield Candidate("toy", 1, shape.n, layout, forward, backward, shape.n * sent, (1, 1))


def _sends(call: OpCall, n: int) -> tuple[Size, Size]:
    heads = head_bytes(call)
    sent = (n - 1) * (heads.queries + heads.keys)
    return sent, sent


def registered() -> ExitStack:
    """Register the strategy until the context exits."""
    return register_strategy(
        Strategy(name="toy", preference=4, rewrite=AttendWithToy, candidates=_candidates, sends=_sends)
    )
