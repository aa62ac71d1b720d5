"""Send a few rows of a sharded sequence to all ranks: the text tokens of a joint sequence.

    slice(x, S, start, start + k)  ->  sp.rows(x, S, start, k, frame, n, group), whose result is partial

Each rank contributes the rows that it has, and zeros for the others; the sum over the ranks is the slice. Bytes sent:
2 (n - 1) / n of the k rows, instead of n - 1 times the shard. Unchanged (to be gathered): more than half of the rows,
bools, and dims with more than the sequence.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import assume_large, is_same_size
from sp_compile.passes.sharding.placement import Demand, Shard
from sp_compile.passes.sharding.rule import rule_of

from .discharge import DemandPass

aten, sp = torch.ops.aten, torch.ops.sp


class SelectRows(DemandPass):
    """Selection of few adjacent rows along the sharded dim."""

    requires = DemandPass.requires | {"selected rows"}
    kinds = frozenset({"whole"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        rule, have = rule_of(node) if node.target is aten.slice.Tensor else None, demands[0].have
        if rule is None or not rule.spans or not isinstance(have, Shard) or node.meta["val"].dtype == torch.bool:
            return ""
        ((_, length),) = rule.spans
        is_simple = is_same_size(have.outer, 1) and is_same_size(have.inner, 1) and not have.frame.order.is_balanced
        is_short = 2 * assume_large(length) <= assume_large(have.frame.size)
        return None if is_simple and is_short and have.dim == OpCall(node).dim() else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace the slice by the rows that each rank has of it, which the ranks add."""
        call, have, rule = OpCall(node), demands[0].have, rule_of(node)
        assert isinstance(have, Shard)
        assert rule is not None
        ((start, length),) = rule.spans
        ranks = self.job.ranks
        placement = (self.sizes.list(have.frame_arg()), ranks.n, ranks.group)
        args = (call.operands[0], have.dim, self.sizes(start), self.sizes(length), *placement)
        with self.graph.inserting_before(node):
            rows = self.emit(sp.rows.default, args, node.meta["val"], node)
        self.replace(node, rows)
        self.note(rows, f"{length} rows of {have.frame.size} are sent to all ranks")
