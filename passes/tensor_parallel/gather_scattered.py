"""Gathering for tensor parallelism: a value is gathered once, for all that need all its rows, views of it too.

    mm(view(x), w_q), mm(view(x), w_k)   ->   y = all_gather(x); mm(view(y), w_q), mm(view(y), w_k)

Bytes sent per rank: (n - 1) times its shard of x.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import as_sizes, is_same_size, size_product
from sp_compile.passes.sharding.placement import Demand, Shard
from sp_compile.passes.strategies.gather_demands import GatherOperands, demanded_operand, replace_operand

from .varying import ScatterContext, is_move_op

aten, c10d, sp = torch.ops.aten, torch.ops._c10d_functional, torch.ops.sp


class GatherScattered(GatherOperands):
    """Claims what needs all rows; shares the gathered value, and what only moves it, between all that do.

    For graphs that nobody will differentiate: whatever a gathered value is used for, it is one and the same.
    """

    name = "full"
    kinds = GatherOperands.kinds | {"varying"}
    job: ScatterContext

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        for demand in demands:
            source = demanded_operand(node, demand.operand)
            if isinstance(self.plan.of(source), Shard):
                replace_operand(node, demand.operand, self._gather_upstream(source))
                if node.op != "output":
                    self.note(node, demand.why)

    def _gather_upstream(self, source: Node) -> Node:
        """The value with all rows, gathered as far up as it is only moved."""
        wholes = self.job.gathered
        if source not in wholes:
            if _can_gather_operand(source) and isinstance(self.plan.of(OpCall(source).operands[0]), Shard):
                moved = self._gather_upstream(OpCall(source).operands[0])
                args, kwargs = OpCall(source).with_operands([moved])
                with self.insert_after(source):
                    whole = self.emit(source.target, args, source.meta["val"], source, kwargs)
            else:
                whole = self._gather_cached(source)
            wholes[source] = whole
        return wholes[source]

    def _gather_cached(self, source: Node) -> Node:
        have = self.plan.of(source)
        assert isinstance(have, Shard)
        args = (source, have.dim, self.sizes.list(have.frame_arg()), self.job.ranks.n, self.job.ranks.group)
        value = source.meta["val"]
        with self.insert_after(source):
            whole = self.emit(sp.all_gather.default, args, value, source)
        if have.outer != 1 or is_same_size(size_product(as_sizes(value.shape)[: have.dim]), 1):
            return whole  # rows travel in front, so they arrive in order
        with self.insert_after(whole):
            options = {"memory_format": torch.contiguous_format}
            return self.emit(aten.clone.default, (whole,), value, source, options)


def _can_gather_operand(node: Node) -> bool:
    """Is it as well to gather the operand? Not of a wait: what another group's exchange brings is not there before.

    And not of a cast whose results are fewer bytes to send.
    """
    if not is_move_op(node) or node.target is c10d.wait_tensor.default:
        return False
    return node.meta["val"].element_size() >= OpCall(node).operands[0].meta["val"].element_size()
