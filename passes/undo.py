"""Takes out exchanges that no longer fit: an exchange is an identity in the global view, so leaving it out is right.

    y = sp.unshard(x, dim=2)   where x is now sharded on dim 1   ->   y = x, and the demand is stated anew

A strategy writes its exchanges for the placements of one Plan. Discharging a demand upstream may move what lies
downstream of it. Bytes moved: none. Refuses nothing.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from ..call import Call, is_tensor
from ..layout import Demand
from .rewrite import Rewrite


class Undo(Rewrite):
    """Claims the demands of exchanges whose operands are not placed as they were written for."""

    name = "undo"
    kinds = frozenset({"stale"})

    def refuses(self, node: Node, demands: list[Demand]) -> str | None:
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        operands = Call(node).operands
        if is_tensor(node):
            node.replace_all_uses_with(operands[0])
        for piece in [u for u in node.users if u.target is operator.getitem]:
            piece.replace_all_uses_with(operands[piece.args[1]])
            self.graph.erase_node(piece)
        self.graph.erase_node(node)
