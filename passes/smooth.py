"""Finds shorter windows whose cut-off rows need no care: the label shift of every language model among them.

logits[:, :-1] -> view -> cross_entropy      the last row is masked in the sum; nothing before it can spoil a gradient
"""

from __future__ import annotations

import operator

from torch.fx import Node

from ..call import Call
from ..layout import Plan, Shard
from ..movement import Reshape, Window
from ..rule import Factors, lookup, transfer_of
from ..rules.smooth import SMOOTH
from ..sliding_calls import ON_SHARDS


def stays_smooth(node: Node, plan: Plan) -> bool:
    """Do only ops with finite derivatives see the value, up to where padding is masked or dropped?"""
    seen: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _reads_constants(user):
                continue
            if user.target is operator.getitem:
                todo.append(user)
            elif user in plan.wants and transfer_of(user.target) is None:
                if not _is_smooth(user):
                    return False
                if any(isinstance(p, Shard) for p in plan.placements[user]):
                    todo.append(user)
    return True


def _reads_constants(node: Node) -> bool:
    """Does it take constants for what lies outside the window? Then the cotangents there are exact zeros."""
    return node.target in ON_SHARDS and Call(node)["frame"] is not None


def _is_smooth(node: Node) -> bool:
    found = lookup(node)
    rule = found[1] if found is not None else None
    moves = isinstance(rule, (Reshape, Window)) or (isinstance(rule, Factors) and rule.lazy)
    return moves or node.target in SMOOTH
