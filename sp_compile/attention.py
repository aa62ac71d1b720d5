"""Which ops are attention, and what the passes and the analyses ask of one, whatever its mask is written in."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .call import Call
from .predicate import symbols

ATTENTION = (torch.ops.aten.scaled_dot_product_attention.default, torch.ops.sp.masked_attention.default)
"""q, k, v are their first three tensor operands; both take dropout_p, scale and enable_gqa."""


SHARDED = (
    torch.ops.sp.ring_attention.default,
    torch.ops.sp.hybrid_attention.default,
    torch.ops.sp.gathered_attention.default,
)
"""What a pass made of an attention: q, k, v first, as above, and exchanges of their own."""


def attention_nodes(gm: GraphModule) -> list[Node]:
    """Every attention of the graph that no pass has sharded yet, in its order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in ATTENTION]


def attending_nodes(gm: GraphModule) -> list[Node]:
    """Every attention of the graph, sharded or not, in its order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in (*ATTENTION, *SHARDED)]


def predicate_of(call: Call) -> str | None:
    """The predicate of an attention's mask; None if data describes it."""
    if "predicate" in call.args:
        return str(call["predicate"])
    if call["attn_mask"] is not None:
        return None
    return "k <= q" if call["is_causal"] else ""


def reads_position(call: Call) -> bool:
    """Does the mask read the index of the query, directly or through a vector that is looked up by it?"""
    names = symbols(predicate_of(call) or "")
    return any(name == "q" or name.startswith("row") for name in names)
