"""Attention that does its own exchanges: its frame arguments spell where q, k, v and the result lie."""

from __future__ import annotations

import torch

from ..layout import REPLICATE, Placement, Replicate, Shard
from ..rule import Call, Dims, Factors, rule_of
from .redistribute import frame_of

sp = torch.ops.sp
SEQUENCE = 2


@rule_of(sp.ring_attention.default, sp.hybrid_attention.default, sp.gathered_attention.default)
def _sharded_attention(call: Call) -> Factors:
    """ "b h q d, b g k d, b g k e -> b h q e"; masks, vectors and a seed are read whole."""
    queries = Shard(SEQUENCE, frame_of(call, "q_frame")[0])
    keys: Placement = Replicate(partial_grad=True)
    if len(call["k_frame"]):
        keys = Shard(SEQUENCE, frame_of(call, "k_frame")[0])
    others = call.operands[3:]
    mask = [Replicate(partial_grad=True)] if call["mask"] is not None else []
    placed = (queries, keys, keys, *mask, *[REPLICATE] * (len(others) - len(mask)))
    named: tuple[Dims, ...] = (("b", "h", "q", "d"), ("b", "g", "k", "d"), ("b", "g", "k", "e"))
    rest = tuple(tuple(f"{i}.{d}" for d in range(call.ndim(i))) for i in range(3, len(call.operands)))
    lost = {f: "whole" for dims in (("g", "k", "d"), *rest) for f in dims}
    return Factors((*named, *rest), (("b", "h", "q", "e"),), lost, wants=placed, gives=queries)
