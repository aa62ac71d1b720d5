"""Gathering for tensor parallelism: a value is gathered once, for all that need all its rows, views of it too.

    mm(view(x), w_q), mm(view(x), w_k)   ->   y = all_gather(x); mm(view(y), w_q), mm(view(y), w_k)

Bytes sent per rank: (n - 1) times its shard of x.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import Call
from sp_compile.passes.graph.sizes import product, same, sizes
from sp_compile.passes.sharding.placement import Demand, Shard
from sp_compile.passes.strategies.gather_demands import Gather, operand_of, replace_operand

from .varying import ScatterJob, moves

aten, c10d, sp = torch.ops.aten, torch.ops._c10d_functional, torch.ops.sp


class GatherOnce(Gather):
    """Claims what needs all rows; shares the gathered value, and what only moves it, between all that do.

    For graphs that nobody will differentiate: whatever a gathered value is used for, it is one and the same.
    """

    name = "full"
    kinds = Gather.kinds | {"varying"}
    job: ScatterJob

    def refuses(self, node: Node, demands: list[Demand]) -> str | None:
        return None

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        for demand in demands:
            source = operand_of(node, demand.operand)
            if isinstance(self.plan.of(source), Shard):
                replace_operand(node, demand.operand, self._whole(source))
                if node.op != "output":
                    self.note(node, demand.why)

    def _whole(self, source: Node) -> Node:
        """The value with all rows, gathered as far up as it is only moved."""
        wholes = self.job.wholes
        if source not in wholes:
            if _hands_on(source) and isinstance(self.plan.of(Call(source).operands[0]), Shard):
                moved = self._whole(Call(source).operands[0])
                args, kwargs = Call(source).rebuild([moved])
                with self.behind(source):
                    whole = self.emit(source.target, args, source.meta["val"], source, kwargs)
            else:
                whole = self._gathered(source)
            wholes[source] = whole
        return wholes[source]

    def _gathered(self, source: Node) -> Node:
        have = self.plan.of(source)
        assert isinstance(have, Shard)
        args = (source, have.dim, self.sizes.list(have.frame_arg()), self.job.ranks.n, self.job.ranks.group)
        value = source.meta["val"]
        with self.behind(source):
            whole = self.emit(sp.all_gather.default, args, value, source)
        if have.outer != 1 or same(product(sizes(value.shape)[: have.dim]), 1):
            return whole  # rows travel in front, so they arrive in order
        with self.behind(whole):
            options = {"memory_format": torch.contiguous_format}
            return self.emit(aten.clone.default, (whole,), value, source, options)


def _hands_on(node: Node) -> bool:
    """Is it as well to gather the operand? Not of a wait: what another group's exchange brings is not there before.

    And not of a cast whose results are fewer bytes to send.
    """
    if not moves(node) or node.target is c10d.wait_tensor.default:
        return False
    return node.meta["val"].element_size() >= Call(node).operands[0].meta["val"].element_size()
