"""Write triangles and identities over pairs of positions as comparisons, of which a rank can compute its rows.

    tril(x, d)    ->   masked_fill(x, arange(T) > arange(S)[:, None] + d, 0)
    triu(x, d)    ->   masked_fill(x, arange(T) < arange(S)[:, None] + d, 0)
    eye(S, T)     ->   arange(T) == arange(S)[:, None]

Their rules would gather both dims. Bytes sent: none. Unchanged: values whose last two dims are not as long
as a sequence.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, parse_overloads
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.axes import Axes

aten = torch.ops.aten
FILLED_SIDES = {aten.tril.default: aten.gt.Tensor, aten.triu.default: aten.lt.Tensor}
IDENTITIES = parse_overloads("eye eye.m")


class ComparePositions(Pass):
    """Replacement of triangles and identities over pairs of positions by comparisons."""

    requires = frozenset({"canonical", "sequences"})
    provides = frozenset({"compared positions"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace each triangle or identity whose last two dims are a sequence, and return their number."""
        if context.ranks.n == 1:
            return 0
        axes, targets = context.axes(gm), (*FILLED_SIDES, *IDENTITIES)
        nodes = [node for target in targets for node in gm.graph.find_nodes(op="call_function", target=target)]
        found = [node for node in nodes if _has_pairs(node, axes) and not is_written(node)]
        for node in found:
            with gm.graph.inserting_before(node):
                new = self._compare(node)
            self.replace(node, new)
        return len(found)

    def _compare(self, node: Node) -> Node:
        """Emit a tril, triu or eye as a comparison of the positions of rows and columns, and return its node."""
        num_rows, num_columns = node_shape(node)[-2:]
        options = {"device": node.meta["val"].device}
        columns = self.compute(aten.arange.default, (self.sizes(num_columns),), node, options)
        rows = self.compute(aten.arange.default, (self.sizes(num_rows),), node, options)
        rows = self.compute(aten.unsqueeze.default, (rows, 1), node)  # each row position is compared with all columns
        if node.target in IDENTITIES:
            is_diagonal = self.compute(aten.eq.Tensor, (columns, rows), node)
            return self.cast(is_diagonal, node.meta["val"].dtype, node)
        call = OpCall(node)
        diagonal = self.compute(aten.add.Tensor, (rows, call["diagonal"]), node)
        is_filled = self.compute(FILLED_SIDES[node.target], (columns, diagonal), node)
        return self.compute(aten.masked_fill.Scalar, (call.operands[0], is_filled, 0), node)


def _has_pairs(node: Node, axes: Axes) -> bool:
    """Return True if each of the last two dims of a value is a sequence, or as long as the longest sequence."""
    shape, sequence_dims = node_shape(node), axes.sequence_dims(node)
    length, ndim = axes.longest_sequence(), len(shape)
    return all(d in sequence_dims or is_same_size(shape[d], length) for d in (ndim - 2, ndim - 1))
