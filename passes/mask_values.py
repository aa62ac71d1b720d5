"""Which values reach nothing but masks."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ..rule import Factors, lookup


def only_masks(gm: GraphModule) -> set[Node]:
    """Values that reach nothing but masks: every rank needs them whole, so they are not worth sharding."""
    whole: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if (
            node.op == "call_function"
            and node.users
            and all(_as_mask(node, u) or u in whole for u in node.users)
        ):
            whole.add(node)
    return whole


def _as_mask(node: Node, user: Node) -> bool:
    found = lookup(user)
    if found is None:
        return False
    call, rule = found
    if not isinstance(rule, Factors):
        return False
    at = [i for i, operand in enumerate(call.operands) if operand is node]
    return bool(at) and all(i in rule.masks for i in at)
