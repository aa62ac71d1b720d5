"""Select one position of a sharded sequence (`x[:, -1]`, BERT's `x[:, 0]`) without a gather.

    select(x, S, i)           ->   all_reduce(sum(where(arange(S) == i, x, 0), S))
    slice(x, S, i, i + 1)     ->   the same, and the dim of one row remains

Exactly one rank has position i, so the sum is the value. Bytes sent: 2 (n-1)/n of one row instead of n-1 times the
shard. Unchanged (to be gathered): dtypes that are not summed (`is_summed`), such as bool.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.passes.context import NoteKind, PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import Size, as_size, assume_large, is_same_size, position_from_start, size_product
from sp_compile.passes.sharding.placement import Demand, Placement, PlacementPlan, Shard
from sp_compile.passes.sharding.rule import lookup_rule, rule_of

from .discharge import DemandPass, is_summed

aten, sp = torch.ops.aten, torch.ops.sp


class RowsPass(DemandPass):
    """Base of passes that send selected rows of a value to all ranks.

    A program may select more than half of the rows of a value in several places, as a loop over its rows does. Ranks
    then send more bytes than a gather would, and each has most of the value: this is reported as a gather.
    """

    kinds = frozenset({"gathered"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Rewrite the nodes that select rows, and return their number."""
        for source, span in _selected_spans(context.plan(gm)):
            set_node_info(source, selected=node_info(source).selected | {span})
        return super().apply(gm, context)

    def note_rows(self, rows: Node, text: str, excess: str) -> None:
        """Add a note on selected rows: a gather with the reason `excess`, if this is not "", else `text`."""
        self.note(rows, excess or text, kind=NoteKind.GATHERED if excess else NoteKind.REWRITTEN)

    def find_excess(self, node: Node, have: Placement) -> str:
        """Return text for the report if the program selects more than half of the rows of a value, else "".

        Args:
            node: A node that selects rows of it, before it is replaced.
            have: The placement of its operand.

        Raises:
            SpError: There is such a text, and the option is fallback="error".
        """
        spans = node_info(_find_source(OpCall(node).operands[0], self.plan)).selected
        selected = sum(assume_large(length) for _, length in spans)
        size = have.frame.size * have.frame.block if isinstance(have, Shard) else 0
        if not isinstance(have, Shard) or 2 * selected <= assume_large(size):
            return ""
        why = f"{len(spans)} selections of a value send {selected} rows of {size} to all ranks"
        if self.context.options.fallback == "error":
            raise SpError("SP305", f"fallback='error': the operand of {describe_node(node)} would be gathered: {why}.")
        return why


class SelectRow(RowsPass):
    """Selection of one row along the sharded dim, by select or slice."""

    provides = frozenset({"claimed", "selected rows"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node that selects one row, of a dtype that can be summed; else ""."""
        is_single_row = _row_position(node) is not None
        return None if is_single_row and is_summed(node.meta["val"].dtype) else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a selected row by a sum over the sequence in which all other rows are 0.

        Only one rank has the row, so the sum of the ranks is its value. Propagation places this sum over the sharded
        dim as Partial, and a later pass inserts its all_reduce.
        """
        call, value, excess = OpCall(node), node.meta["val"], self.find_excess(node, demands[0].have)
        x, dim = call.operands[0], call.dim()
        with self.graph.inserting_before(node):
            is_row = self.mark_position(self._position(call), call.shape()[dim], dim, call.ndim(), node)
            masked = self.compute(aten.where.ScalarOther, (is_row, x, 0), node)
            keeps_dim = node.target is not aten.select.int  # of a slice
            args = (masked, [dim], True) if keeps_dim else (masked, [dim])
            row = self.compute(aten.sum.dim_IntList, args, node, {"dtype": value.dtype})
        self.replace(node, row)
        self.note_rows(row, "one position: its rank broadcasts it", excess)

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
    start, length = selected_span(node) or (None, 0)
    return start if node.target is not sp.rows.default and is_same_size(length, 1) else None


def selected_span(node: Node) -> tuple[Size, Size] | None:
    """Return (start, number of rows) of a select, a slice or an sp::rows; None for other nodes.

    None also for a symbolic index that may be negative.

    Args:
        node: The node.
    """
    if node.target is sp.rows.default:
        call = OpCall(node)
        return call["start"], call["length"]
    if node.target is aten.select.int:
        call = OpCall(node)
        size = call.shape()[call.dim()]
        position = position_from_start(as_size(call["index"]), size, call.operands[0].meta["val"])
        return None if position is None else (position, 1)
    rule = rule_of(node) if node.target is aten.slice.Tensor else None
    return rule.spans[0] if rule is not None and rule.spans else None


def _selected_spans(plan: PlacementPlan) -> Iterator[tuple[Node, tuple[Size, Size]]]:
    """Yield (value, (start, number of rows)) for rows that all ranks read, by positions of the sequence.

    Rows that move to a frame of their own (`is_apart`) are not among them, as each rank receives a part of these.
    """
    for node in dict.fromkeys(demand.node for demand in plan.demands if demand.kind == "gathered"):
        span = selected_span(node)
        if span is None or node_info(node).is_apart:
            continue
        call = OpCall(node)
        have = plan.of(call.operands[0])
        if isinstance(have, Shard) and have.dim == call.dim():
            (start, length), block = span, have.frame.block
            yield _find_source(call.operands[0], plan), ((have.frame.start + start) * block, length * block)


def _find_source(node: Node, plan: PlacementPlan) -> Node:
    """Return the value of which a value has complete rows: the operand of views and slices, or the value itself.

    The rows of one sample, x[0], are not complete rows of x.

    Args:
        node: The value.
        plan: The plan of its graph.
    """
    while (found := lookup_rule(node)) is not None:
        call, rule = found
        if rule is None or not rule.lazy or len(call.operands) != 1:
            return node
        x = call.operands[0]
        have = plan.of(x)
        cuts_rows = isinstance(have, Shard) and have.dim == rule.window_dim
        if not cuts_rows and not is_same_size(size_product(call.shape()), size_product(node_shape(node))):
            return node
        node = x
    return node
