"""Exchange the missing rows of windows along a sharded sequence between neighbors.

    conv1d(x, w, b, padding=1)   ->   sp.conv1d(x, w, b, 1, 1, ..., frame, result, n, group)
    cat([row, x[:, :-1]], 1)     ->   where(arange(S) == 0, row, sp.shift(x[:, :-1], 1, 1, 0, ...))
    x[:, 1:] - x[:, :-1]         ->   x[:, 1:] - sp.shift(x[:, :-1], 1, 0, 0, ...), placed as the other window

Also for avg_pool1d, max_pool1d, unfold, roll and constant_pad_nd that shifts. Bytes sent: the rows that another rank
lacks, forward and backward. Each direction takes one shift while the window does not reach beyond the next rank.
Unchanged (to be gathered): zigzag sequences, strides that do not divide the shards, windows of more than half the
sequence.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import is_same_size
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


class ExchangeHalos(DemandPass):
    """Exchange of halos for windows on shards, for one more row at a shard, and for shifted shards."""

    requires = DemandPass.requires | {"selected rows"}  # a single row is sent separately
    kinds = frozenset({"halo", "whole", "align"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        claimed = self._match_cat(node) is not None or (
            node in self.plan.wants
            and any(d.kind == "halo" or self._match_neighbors(node, d) is not None for d in demands)
        )
        return None if claimed else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a window, shift or pad by an op that fetches the missing rows from neighbors."""
        joined = self._match_cat(node)
        if joined is not None:
            self._join(node, *joined)
        elif any(d.kind == "halo" for d in demands):
            self._rewrite_window(node)
        else:
            for demand in demands:
                self._move(node, demand)

    # Windows.

    def _rewrite_window(self, node: Node) -> None:
        call, (have, *_), (result,) = OpCall(node), self.plan.wants[node], self.plan.placements[node]
        assert isinstance(have, Shard)
        assert isinstance(result, Shard)
        slides = sliding_calls(call)[have.dim]
        with self.graph.inserting_before(node):
            x = call.operands[0]
            if slides.first is not None:
                op, args = slides.first
                x = self.compute(op, (x, *args), node)
            new = self._rewrite_on_shards(slides, x, have, result, node.meta["val"], node)
        self.replace(node, new)

    def _rewrite_on_shards(
        self, slides: WindowCall, x: Node, have: Shard, result: Shard, value: torch.Tensor, like: Node
    ) -> Node:
        ranks, frames = self.job.ranks, [self.sizes.list(shard.frame_arg()) for shard in (have, result)]
        if slides.sliding.rolls is not None:
            frames = frames[:1]
        args = (x, *slides.args(have.frame.length), *frames, ranks.n, ranks.group)
        new = self.emit(slides.op, args, value, like)
        shifts = [_from_hop(hop, rows) for hop, rows in window_shift_sizes(OpCall(new), ranks.n)]
        self.note(new, ", ".join(shifts) or "no rows of other ranks")
        return new

    # A row and a slice.

    def _match_cat(self, node: Node) -> tuple[int, Shard, Shard] | None:
        """Return (index of the sharded operand, its shard, the shard of the cat) of a cat with one row."""
        if node.target is not aten.cat.default:
            return None
        call = OpCall(node)
        have = [self.plan.of(o) for o in call.operands]
        sharded = [i for i, p in enumerate(have) if isinstance(p, Shard) and p.dim == call.dim()]
        if len(have) != 2 or len(sharded) != 1 or not isinstance(have[1 - sharded[0]], (Replicate, Partial)):
            return None
        (i,) = sharded
        shard, row = have[i], call.operands[1 - i]
        assert isinstance(shard, Shard)
        same = all(o.meta["val"].dtype == node.meta["val"].dtype for o in call.operands)
        if not same or not is_same_size(call.shape(1 - i)[shard.dim], 1) or row is call.operands[i]:
            return None
        placed = place_window(self._extend_by_row(call, i), shard, self.job.ranks.n)
        return (i, shard, placed) if isinstance(placed, Shard) else None

    def _extend_by_row(self, call: OpCall, i: int) -> SlidingRows:
        """Return x with a row before it, or after it if it comes first."""
        return SlidingRows(call.result_shapes()[0][call.dim()], before=i)

    def _join(self, node: Node, i: int, have: Shard, result: Shard) -> None:
        call = OpCall(node)
        slides = WindowCall(self._extend_by_row(call, i), sp.shift.default, (have.dim,), (0,))
        length = call.result_shapes()[0][have.dim]
        with self.graph.inserting_before(node):
            shifted = self._rewrite_on_shards(slides, call.operands[i], have, result, node.meta["val"], node)
            position = self.sizes(0 if i else length - 1)
            here = self.mark_position(position, length, have.dim, call.ndim(), node)
            row = call.operands[1 - i]
            new = self.compute(aten.where.self, (here, row, shifted), node)
        self.replace(node, new)

    # Two windows of one sequence.

    def _match_neighbors(self, node: Node, demand: Demand) -> tuple[Shard, Shard] | None:
        """Return (shard of an operand, shard that the node needs) if only their starts differ."""
        wants = self.plan.wants.get(node, ())
        want: Placement = wants[demand.operand] if demand.operand < len(wants) else Replicate()
        have = demand.have
        if demand.kind != "align" or not isinstance(have, Shard) or not isinstance(want, Shard):
            return None
        found = place_window(SlidingRows(have.frame.length), have, self.job.ranks.n)
        if isinstance(found, str) or have.dim != want.dim or not want.frame.order.is_in_order:
            return None
        same = is_same_size(have.frame.size, want.frame.size) and is_same_size(have.frame.length, want.frame.length)
        return (have, want) if same and is_same_size(want.outer, 1) and is_same_size(want.inner, 1) else None

    def _move(self, node: Node, demand: Demand) -> None:
        found = self._match_neighbors(node, demand)
        if found is None:
            return
        have, want = found
        x = demanded_operand(node, demand.operand)
        slides = WindowCall(SlidingRows(have.frame.length), sp.shift.default, (have.dim,), (0,))
        with self.graph.inserting_before(node):
            moved = self._rewrite_on_shards(slides, x, have, want, x.meta["val"], node)
        replace_operand(node, demand.operand, moved)


def _from_hop(hop: int, rows: object) -> str:
    return f"{rows} row{'' if rows == 1 else 's'} from rank r {'-' if hop > 0 else '+'} {abs(hop)}"
