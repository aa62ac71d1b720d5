"""Gather each value once for all ops that need all its rows, including views of it.

    mm(view(x), w_q), mm(view(x), w_k)   ->   y = all_gather(x); mm(view(y), w_q), mm(view(y), w_k)

A rank sends (n - 1) times its shard of x. A demand is an operand of which a node needs all rows.
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
    """Pass that gathers operands of which all rows are needed, and shares gathered values.

    For graphs that are not differentiated: a gathered value is the same for all uses.
    """

    name = "full"
    kinds = GatherOperands.kinds | {"varying"}
    context: ScatterContext

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Gather the sharded operands of the demands; other operands have all rows, on every rank, already."""
        for demand in demands:
            source = demanded_operand(node, demand.operand)
            if isinstance(self.plan.of(source), Shard):
                replace_operand(node, demand.operand, self._gather_upstream(source))
                if node.op != "output":
                    self.note(node, demand.why)

    def _gather_upstream(self, source: Node) -> Node:
        """Return the gathered value of a sharded node; emit an all_gather if there is none yet.

        For a view or cast, its operand is gathered, and the op is repeated on the result. Results are cached in
        `context.gathered`, so that several views of one value share a gather.
        """
        gathered = self.context.gathered
        if source not in gathered:
            if _can_gather_operand(source) and isinstance(self.plan.of(OpCall(source).operands[0]), Shard):
                operand = self._gather_upstream(OpCall(source).operands[0])
                args, kwargs = OpCall(source).with_operands([operand])
                with self.insert_after(source):
                    gathered[source] = self.emit(source.target, args, source.meta["val"], source, kwargs)
            else:
                gathered[source] = self._emit_gather(source)
        return gathered[source]

    def _emit_gather(self, source: Node) -> Node:
        """Emit an all_gather of a sharded value, and a contiguous clone if its result would not be contiguous."""
        have = self.plan.of(source)
        assert isinstance(have, Shard)
        args = (source, have.dim, self.sizes.list(have.frame_arg()), self.context.ranks.n, self.context.ranks.group)
        value = source.meta["val"]
        with self.insert_after(source):
            result = self.emit(sp.all_gather.default, args, value, source)
        # Rows are gathered along a first dim, and viewed as `dim` again. The view is contiguous if all dims before it
        # have size 1; with an outer factor, the op copies the rows in any case.
        is_outermost = is_same_size(size_product(as_sizes(value.shape)[: have.dim]), 1)
        if have.outer != 1 or is_outermost:
            return result
        with self.insert_after(result):
            options = {"memory_format": torch.contiguous_format}
            return self.emit(aten.clone.default, (result,), value, source, options)


def _can_gather_operand(node: Node) -> bool:
    """Return True for a view or cast whose operand sends no more bytes in a gather than its result.

    A wait of a collective is excluded, because its operand is not complete before it.
    """
    if not is_move_op(node) or node.target is c10d.wait_tensor.default:
        return False
    return node.meta["val"].element_size() >= OpCall(node).operands[0].meta["val"].element_size()
