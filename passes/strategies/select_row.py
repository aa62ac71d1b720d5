"""Select one position of a sharded sequence (`x[:, -1]`, BERT's `x[:, 0]`) without a gather.

    select(x, S, i)           ->   all_reduce(sum(where(arange(S) == i, x, 0), S))
    slice(x, S, i, i + 1)     ->   the same, and the dim of one row remains

Exactly one rank has position i, so the sum is the value. Bytes sent: 2 (n-1)/n of one row instead of n-1 times the
shard. Unchanged (to be gathered): dtypes that are not summed (`is_summed`), such as bool.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size, as_size, is_same_size, position_from_start
from sp_compile.passes.sharding.placement import Demand
from sp_compile.passes.sharding.rule import rule_of

from .discharge import DemandPass, is_summed

aten = torch.ops.aten


class SelectRow(DemandPass):
    """Selection of one row along the sharded dim, by select or slice."""

    provides = frozenset({"claimed", "selected rows"})
    kinds = frozenset({"gathered"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node that selects one row, of a dtype that can be summed; else ""."""
        is_single_row = _row_position(node) is not None
        return None if is_single_row and is_summed(node.meta["val"].dtype) else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a selected row by a sum over the sequence in which all other rows are 0.

        Only one rank has the row, so the sum of the ranks is its value. Propagation places this sum over the sharded
        dim as Partial, and a later pass inserts its all_reduce.
        """
        call, value = OpCall(node), node.meta["val"]
        x, dim = call.operands[0], call.dim()
        with self.graph.inserting_before(node):
            is_row = self.mark_position(self._position(call), call.shape()[dim], dim, call.ndim(), node)
            masked = self.compute(aten.where.ScalarOther, (is_row, x, 0), node)
            keeps_dim = node.target is not aten.select.int  # of a slice
            args = (masked, [dim], True) if keeps_dim else (masked, [dim])
            row = self.compute(aten.sum.dim_IntList, args, node, {"dtype": value.dtype})
        self.replace(node, row)
        self.note(row, "one position: its rank broadcasts it")

    def _position(self, call: OpCall) -> int | Node:
        """Return the position of the row that a select or slice reads, counted from the start: an int or a node."""
        row, index = _row_position(call.node), call.get("index")
        assert row is not None
        if isinstance(index, Node) and is_same_size(as_size(index), row):  # no input may have this size
            return index
        return self.sizes(row)


def _row_position(node: Node) -> Size | None:
    """Return the position of the row of a select, or of a slice of one row, x[:, i : i + 1]; None for other nodes.

    None also for a symbolic index that may be negative.
    """
    if node.target is aten.select.int:
        call = OpCall(node)
        return position_from_start(as_size(call["index"]), call.shape()[call.dim()], call.operands[0].meta["val"])
    rule = rule_of(node) if node.target is aten.slice.Tensor else None
    if rule is None or not rule.spans:
        return None
    ((start, length),) = rule.spans  # of the sliced dim
    return start if is_same_size(length, 1) else None
