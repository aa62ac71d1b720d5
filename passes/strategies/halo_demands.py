"""Exchange the missing rows of windows along a sharded sequence between neighbors.

    conv1d(x, w, b, padding=1)   ->   sp.conv_along(x, w, b, 2, 1, 1, ..., frame, result, n, group)
    cat([row, x[:, :-1]], 1)     ->   where(arange(S) == 0, row, sp.shift(x[:, :-1], 1, 1, 0, ...))
    x[:, 1:] - x[:, :-1]         ->   x[:, 1:] - sp.shift(x[:, :-1], 1, 0, 0, ...), placed as the other window

A halo is the rows of neighbors that the windows at the ends of a shard need. A window is also a part of a sequence,
such as x[:, 1:]. Also for avg_pool1d, max_pool1d, unfold, roll and constant_pad_nd that shifts. Bytes sent: the rows
that another rank lacks, forward and backward. Each direction takes one shift while the window does not reach beyond the
next rank. Unchanged (to be gathered): zigzag sequences, strides that do not divide the shards, windows of more than
half the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import is_same_shape, is_same_size
from sp_compile.passes.sharding.placement import Demand, Partial, Placement, Replicate, Shard
from sp_compile.passes.sharding.window_rules import (
    SlidingRows,
    WindowCall,
    place_window,
    sliding_calls,
    window_shift_sizes,
)

from .discharge import DemandPass
from .gather_demands import demanded_operand, replace_operand

aten, sp = torch.ops.aten, torch.ops.sp


class CatOfRow(NamedTuple):
    """A cat of a sharded tensor with one replicated row, before or after it."""

    operand: int  # index of the sharded operand: 1 if the row comes first, else 0
    shard: Shard  # its placement
    result: Shard  # the placement of the cat


class ExchangeHalos(DemandPass):
    """Exchange of halos for windows on shards, for one more row at a shard, and for shifted shards."""

    requires = DemandPass.requires | {"selected rows"}  # a single row is sent separately
    kinds = frozenset({"halo", "gathered", "align"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, or "" if no exchange with neighbors meets any of them.

        Those that `rewrite` does not meet remain for a later pass, which gathers.
        """
        if self._match_cat(node) is not None:
            return None
        if node not in self.plan.wants:  # it does not run on shards
            return ""
        is_met = any(d.kind == "halo" or self._match_neighbors(node, d) is not None for d in demands)
        return None if is_met else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a window, a cat with one row, or an operand, by an op that fetches missing rows from neighbors."""
        cat = self._match_cat(node)
        if cat is not None:
            self._rewrite_cat(node, cat)
        elif any(d.kind == "halo" for d in demands):
            self._rewrite_window(node)
        else:
            for demand in demands:
                self._shift_operand(node, demand)

    # Windows.

    def _rewrite_window(self, node: Node) -> None:
        """Replace an op with windows (conv1d, max_pool1d, roll) by its sp:: op on shards."""
        call, (result,) = OpCall(node), self.plan.placements[node]
        have, *_ = self.plan.wants[node]  # of the first operand, on whose rows the windows are; others are weights
        assert isinstance(have, Shard)
        assert isinstance(result, Shard)
        window_call = sliding_calls(call)[have.dim]  # the sp:: op for windows along the sharded dim
        with self.graph.inserting_before(node):
            x = call.operands[0]
            if window_call.first is not None:  # an op of several dims, such as a pad: the other dims come first
                op, args = window_call.first
                x = self.compute(op, (x, *args), node)
            new = self._emit_on_shards(window_call, x, have, result, node.meta["val"], node)
        # A pad of `JoinSequences`, a part of a concatenation that is padded to its length, remains marked as such.
        set_node_info(new, joins=node_info(node).joins, side=node_info(node).side)
        self.replace(node, new)

    def _emit_on_shards(
        self, window_call: WindowCall, x: Node, have: Shard, result: Shard, value: torch.Tensor, like: Node
    ) -> Node:
        """Emit an sp:: op on shards, which fetches the rows that its windows lack, and note these rows in the report.

        Args:
            window_call: The op and its windows.
            x: The operand with the rows.
            have: The placement of x.
            result: The placement of the result.
            value: The fake result, in the global view.
            like: The node whose metadata the op gets.
        """
        ranks, frames = self.context.ranks, [self.sizes.list(shard.frame_arg()) for shard in (have, result)]
        if window_call.sliding.rolls is not None:  # the result of a roll is placed as its operand
            frames = frames[:1]
        args = (x, *window_call.args(have.frame.length), *frames, ranks.n, ranks.group)
        new = self.emit(window_call.op, args, value, like)
        shifts = [_describe_shift(hop, rows) for hop, rows in window_shift_sizes(OpCall(new), ranks.n)]
        self.note(new, ", ".join(shifts) or "no rows of other ranks")
        return new

    # A row and a slice.

    def _match_cat(self, node: Node) -> CatOfRow | None:
        """Match cat([row, x]) or cat([x, row]) along the sharded dim of x; else return None.

        The row is replicated, or partial; a later pass then reduces it.
        """
        if node.target is not aten.cat.default:
            return None
        call = OpCall(node)
        placements = [self.plan.of(x) for x in call.operands]
        sharded = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == call.dim()]
        if len(placements) != 2 or len(sharded) != 1:
            return None
        (i,) = sharded
        shard = placements[i]
        assert isinstance(shard, Shard)
        same_dtype = all(x.meta["val"].dtype == node.meta["val"].dtype for x in call.operands)
        is_row = is_same_size(call.shape(1 - i)[shard.dim], 1)
        if not same_dtype or not is_row or not isinstance(placements[1 - i], (Replicate, Partial)):
            return None
        # The shard of the result, or a str: the reason why ranks lack rows for it that no neighbor has.
        result = place_window(self._rows_of_x(call, i), shard, self.context.ranks.n)
        return CatOfRow(i, shard, result) if isinstance(result, Shard) else None

    def _rows_of_x(self, call: OpCall, index: int) -> SlidingRows:
        """Return the rows of x that the rows of cat([x, row]) or cat([row, x]) read, as windows of one row.

        Args:
            call: The cat.
            index: The index of x. If it is 1, row j of the result is row j - 1 of x.
        """
        return SlidingRows(call.result_shapes()[0][call.dim()], before=index)

    def _rewrite_cat(self, node: Node, cat: CatOfRow) -> None:
        """Replace a cat with one row by where(arange(S) == position of the row, row, shifted x)."""
        call, dim = OpCall(node), cat.shard.dim
        x, row = call.operands[cat.operand], call.operands[1 - cat.operand]
        # sp.shift(x, dim, before, after, 0): rows outside of x are 0, and the other operand has the row.
        shift = WindowCall(self._rows_of_x(call, cat.operand), sp.shift.default, (dim,), (0,))
        length = call.result_shapes()[0][dim]
        with self.graph.inserting_before(node):
            shifted = self._emit_on_shards(shift, x, cat.shard, cat.result, node.meta["val"], node)
            position = self.sizes(0 if cat.operand == 1 else length - 1)
            is_row = self.mark_position(position, length, dim, call.ndim(), node)
            new = self.compute(aten.where.self, (is_row, row, shifted), node)
        self.replace(node, new)

    # Two windows of one sequence.

    def _match_neighbors(self, node: Node, demand: Demand) -> tuple[Shard, Shard] | None:
        """Match an operand with the required number of rows that start at another position of the same sequence.

        In x[:, 1:] - x[:, :-1], each rank needs the row of x[:, :-1] that belongs to each of its rows of x[:, 1:]. The
        windows start at the positions 1 and 0, so a rank lacks one row: propagation demands it with the kind "align".

        Returns:
            (the shard of the operand, the shard that the node needs), or None.
        """
        wants = self.plan.wants.get(node, ())  # () for a node that runs on replicated operands
        want: Placement = wants[demand.operand] if demand.operand < len(wants) else Replicate()
        have = demand.have
        if demand.kind != "align" or not isinstance(have, Shard) or not isinstance(want, Shard):
            return None
        # Windows of one row without padding: only to learn if rows can move to neighbors (a str is the reason why not).
        placed = place_window(SlidingRows(have.frame.length), have, self.context.ranks.n)
        if isinstance(placed, str) or have.dim != want.dim or not want.frame.order.is_in_order:
            return None
        # Both frames are windows of equal length in equal sequences, which differ in their start only.
        sizes, wanted_sizes = ((frame.size, frame.length) for frame in (have.frame, want.frame))
        return (have, want) if want.is_only_factor and is_same_shape(sizes, wanted_sizes) else None

    def _shift_operand(self, node: Node, demand: Demand) -> None:
        """Replace an operand by its rows moved to the ranks that need them, if `_match_neighbors` matches."""
        matched = self._match_neighbors(node, demand)
        if matched is None:
            return
        have, want = matched
        x = demanded_operand(node, demand.operand)
        # A shift by no rows, whose result has the frame `want`: row j is row j of x, on the rank that needs it.
        shift = WindowCall(SlidingRows(have.frame.length), sp.shift.default, (have.dim,), (0,))
        with self.graph.inserting_before(node):
            moved = self._emit_on_shards(shift, x, have, want, x.meta["val"], node)
        replace_operand(node, demand.operand, moved)


def _describe_shift(hop: int, rows: object) -> str:
    """Return text for the report on rows that rank r receives from rank r - hop: "2 rows from rank r - 1"."""
    noun = "row" if rows == 1 else "rows"
    sign = "-" if hop > 0 else "+"
    return f"{rows} {noun} from rank r {sign} {abs(hop)}"
