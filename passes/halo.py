"""Windows along a sharded sequence: each rank takes the rows that it lacks from its neighbours, and keeps its own.

    conv1d(x, w, b, padding=2)[..., :S]   ->   sp.conv1d(x, w, b, 2, 0, ..., frame, result, n, group)

So for avg_pool1d, max_pool1d, unfold, roll, shifts (constant_pad_nd by k and -k) and `cat` of a row and a shorter slice,
which is a shift and a `where`. Bytes sent: the rows that other ranks lack, forward and backward: one shift for each
direction that a window reaches in, as long as it reaches no further than the next rank. Two windows of one sequence
that meet (`x[:, 1:] - x[:, :-1]`) are brought in line by a shift as well. Leaves alone (to be gathered): zigzag
sequences, strides that the ranks do not divide, windows of more than half the sequence.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..call import Call
from ..layout import Demand, Shard
from ..shapes import same
from ..sliding_calls import Slides, slides_of
from .rewrite import Rewrite

sp = torch.ops.sp


class Halo(Rewrite):
    """Claims the demands of windows on shards."""

    name = "halo"
    kinds = frozenset({"halo"})

    def refuses(self, node: Node, demands: list[Demand]) -> str | None:
        return None if node in self.plan.wants else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        call, (have, *_), (result,) = Call(node), self.plan.wants[node], self.plan.placements[node]
        assert isinstance(have, Shard)
        assert isinstance(result, Shard)
        slides = slides_of(call)[have.dim]
        frames = {"frame": self.frame(have), "result": self.frame(result)}
        if slides.op is sp.roll.default:
            del frames["result"]
        ranks = self.job.ranks
        with self.graph.inserting_before(node):
            x = self._others_first(slides, call.operands[0], node)
            args = (x, *slides.args(call.shape()[have.dim]), *frames.values(), ranks.n, ranks.group)
            new = self.emit(slides.op, args, node.meta["val"], node)
        self.note(new, "TODO")
        self.replace(node, new)

    def _others_first(self, slides: Slides, x: Node, node: Node) -> Node:
        if slides.first is None:
            return x
        op, args = slides.first
        return self.compute(op, (x, *args), node)
