"""Fused attention."""

from __future__ import annotations

import torch

from ..rule import Call, Dims, Factors, rule_of

aten = torch.ops.aten


@rule_of(aten.scaled_dot_product_attention.default)
def _scaled_dot_product_attention(call: Call) -> Factors:
    """ "b h q d, b h k d, b h k e, b h q k -> b h q e", attend="k", and "q k" when is_causal pairs their positions.

    Any number of leading dims, which may broadcast; with enable_gqa a rank's query heads meet its own key heads, as
    long as the ranks divide both.
    """
    results = call.result_shapes()[0]
    depth = len(results) - 2
    leading: Dims = tuple("h" if i == depth - 1 else f"b{depth - 2 - i}" for i in range(depth))
    tails = [("q", "d"), ("k", "d"), ("k", "e"), ("q", "k")]
    extent = {**dict(zip(leading, results)), "q": call.shape(0)[-2], "k": call.shape(1)[-2]}
    operands = []
    for i, tail in zip(range(len(call.operands)), tails):
        shape = call.shape(i)
        dims = (*leading, *tail)[depth + 2 - len(shape) :]
        operands.append(tuple("" if s == 1 and extent.get(f, 1) != 1 else f for s, f in zip(shape, dims)))
    kinds = {"k": "attend", "d": "whole"} | ({"q": "attend"} if call["is_causal"] else {})
    return Factors(tuple(operands), ((*leading, "q", "e"),), kinds, masks=(3,))
