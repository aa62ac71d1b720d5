"""Send a few rows of a sharded sequence to all ranks: the text tokens of a joint sequence.

    slice(x, S, start, start + k)  ->  sp.rows(x, S, start, k, frame, n, group), whose result is partial

Each rank contributes the rows that it has, and zeros for the others; the sum over the ranks is the slice. Bytes sent:
2 (n - 1) / n of the k rows, instead of n - 1 times the shard. If several slices of a value have more than half of its
rows, this is reported as a gather (`RowsPass`). Unchanged (to be gathered): a slice of more than half of the rows,
dtypes that are not summed (`is_summed`), and dims with more than the sequence.

A part of a concatenation may have a frame of its own (`JoinSequences`), of which every rank has k / n rows:

    sp.rows(x, S, start, k)   of the joint sequence  ->  sp.reduce_scatter(sp.rows(x, S, start, k, frame, n, group))
    sp.rows(x, S, 0, k)       of all rows of a part  ->  sp.all_gather(x), which the concatenation pads

Bytes sent: (n - 1) / n of the k rows.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import Size, assume_large, is_same_size
from sp_compile.passes.sharding.placement import Demand, Shard

from .discharge import is_summed
from .select_row import RowsPass, selected_span

aten, sp = torch.ops.aten, torch.ops.sp


class SelectRows(RowsPass):
    """Selection of few adjacent rows along the sharded dim."""

    requires = RowsPass.requires | {"selected rows"}

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace slices of few rows of a sharded sequence, and return their number."""
        self.axes = context.axes(gm)
        return super().apply(gm, context)

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, or "" if it is no slice of few rows of a sharded dim."""
        have, span = demands[0].have, _sliced_span(node)
        if span is None or not isinstance(have, Shard) or not is_summed(node.meta["val"].dtype):
            return ""
        _, length = span
        is_simple = have.is_only_factor and not have.frame.order.is_balanced
        # A slice whose rows have a frame of their own (`is_apart`) may have any number of rows.
        is_short = node_info(node).is_apart or 2 * assume_large(length) <= assume_large(have.frame.size)
        is_along_sharded_dim = have.dim == OpCall(node).dim()
        return None if is_simple and is_short and is_along_sharded_dim else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a slice by sp::rows, or by an all_gather if it has all rows of its operand.

        The result of sp::rows has the rows of the slice that this rank stores, and zeros for the others: the slice is
        the sum over the ranks. If the slice has a frame of its own (`is_apart`), a reduce_scatter adds this sum here,
        and each rank gets its part. Otherwise it remains partial, and a demand of its reader adds it on all ranks.
        """
        call, have, span = OpCall(node), demands[0].have, _sliced_span(node)
        assert isinstance(have, Shard)
        assert span is not None
        x, (start, length) = call.operands[0], span
        has_all_rows = is_same_size(length, node_shape(x)[have.dim])
        excess = "" if node_info(node).is_apart else self.find_excess(node, have)
        placement = (self.sizes.list(have.frame_arg()), self.context.ranks.n, self.context.ranks.group)
        with self.graph.inserting_before(node):
            if has_all_rows:
                rows = self.emit(sp.all_gather.default, (x, have.dim, *placement), node.meta["val"], node)
            else:
                args = (x, have.dim, self.sizes(start), self.sizes(length), *placement)
                rows = self.emit(sp.rows.default, args, node.meta["val"], node)
            set_node_info(rows, is_apart=node_info(node).is_apart)
            new = rows if has_all_rows else self._distribute(rows, node)
        self.replace(node, new)
        receiver = "all ranks" if new is rows else "a frame of their own"
        self.note_rows(rows, f"{length} rows of {have.frame.size} are sent to {receiver}", excess)

    def _distribute(self, rows: Node, node: Node) -> Node:
        """Emit a reduce_scatter of the selected rows, if they have a frame of their own; else return them unchanged.

        Args:
            rows: The rows that each rank has, a partial value.
            node: The slice that they replace.
        """
        shard = self.axes.shard(node) if node_info(node).is_apart else None
        # Without a scatter the rows remain partial. Their reader demands another placement: a sum on all ranks.
        if shard is None or shard.frame.order.is_balanced:  # a balanced order is a table, which no frame contains
            return rows
        args = (rows, shard.dim, self.sizes.list(shard.frame_arg()), self.context.ranks.n, self.context.ranks.group)
        return self.emit(sp.reduce_scatter.default, args, rows.meta["val"], node)


def _sliced_span(node: Node) -> tuple[Size, Size] | None:
    """Return (start, number of rows) of a slice, or of an sp::rows without a frame.

    The result is None for other nodes, and for an sp::rows with a frame, which is rewritten already.
    """
    is_new = node.target is sp.rows.default and OpCall(node)["frame"] is None
    return selected_span(node) if is_new or node.target is aten.slice.Tensor else None
