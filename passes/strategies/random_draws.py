"""Broadcast rank 0's random draws on replicated values.

    y = dropout(x)   with x replicated   ->   y = sp.broadcast(dropout(sp.broadcast_grad(x)))

A draw is the result of a random op. Ranks have different random states, so replicated draws would differ without the
broadcast. The value and the gradient are then those of rank 0. Draws on shards are independent and need no exchange.
Bytes sent: the result once, from rank 0, forward; the operands' gradients backward.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.propagation.propagate import random_results
from sp_compile.passes.sharding.placement import Demand

from .discharge import DemandPass

sp = torch.ops.sp


class BroadcastDraws(DemandPass):
    """Broadcast of draws on replicated values, which would differ between ranks."""

    name = "draw"
    requires = DemandPass.requires | {"gathered"}  # ops on shards draw independently
    provides = frozenset({"broadcast draws"})
    kinds = frozenset({"draw"})

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace the results of a random op by those of rank 0, and the gradients of its operands by those of rank 0.

        sp::broadcast_grad, before the op, is the identity in the forward.
        """
        group = self.context.ranks.group
        with self.graph.inserting_before(node):
            for operand in filter(is_tensor, node.all_input_nodes):
                value = operand.meta["val"]
                if has_gradient_dtype(value):  # it may have a gradient
                    shared = self.emit(sp.broadcast_grad.default, (operand, group), value, node)
                    node.replace_input_with(operand, shared)
        for result in random_results(node):
            with self.insert_after(result):
                self.insert_between(result, self.emit(sp.broadcast.default, (result, group), result.meta["val"], node))
        self.note(node, "broadcasts the draw of rank 0")
