"""Replace slices with a step that divides their dim by a selection from groups of rows.

    x[:, 1::2]  ->  select(reshape(x, (B, H / 2, 2, W, C)), 2, 1)    x: (B, H, W, C)

So the result has a dim of groups, of which each rank has complete ones if x is sharded. Image models merge patches in
this form. Unchanged: tensors of fewer than 4 dims, which are no images; the first and the last dim, of batches and
channels; steps that do not divide the size, or of which the ranks cannot have equal numbers without much padding; and
symbolic sizes. Bytes moved: none; both are views.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import as_size, ceil_div, is_most_of

aten = torch.ops.aten


@register_pass
class GroupStridedSlices(CanonicalPass):
    """Replacement of slices with a step in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace each slice x[:, i::step] that reads one row of each group of `step` rows; return their number."""
        slices = [
            n
            for n in gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
            if _is_group_read(n, context.ranks.n)
        ]
        for node in slices:
            self._rewrite(OpCall(node))
        return len(slices)

    def _rewrite(self, call: OpCall) -> None:
        """Replace a slice by the selection of one row of each group."""
        node, dim, step, shape = call.node, call.dim(), call["step"], call.shape()
        with self.graph.inserting_before(node):
            groups = (*shape[:dim], shape[dim] // step, step, *shape[dim + 1 :])
            grouped = self.reshape(call.operands[0], groups, node)
            self.replace(node, self.compute(aten.select.int, (grouped, dim + 1, call["start"] or 0), node))


def _is_group_read(node: Node, n: int) -> bool:
    """Return True for a slice along an inner dim that reads one row of each group of `step` rows, on n ranks.

    For x[:, 1::2] with 6 rows, the groups are (0, 1), (2, 3) and (4, 5), of which the slice reads rows 1, 3 and 5.
    """
    call = OpCall(node)
    dim, size, step = call.dim(), call.shape()[call.dim()], as_size(call["step"])
    start, end = call["start"] or 0, call["end"]
    if not (isinstance(size, int) and isinstance(step, int) and isinstance(start, int)) or step <= 1:
        return False
    padded_size = step * n * ceil_div(size, step * n)  # each rank has the same number of complete groups
    if call.ndim() < 4 or not is_most_of(size, padded_size):
        return False
    row_of_last_group = size - step + start
    reads_first_group = 0 <= start < step
    reads_last_group = end is None or (isinstance(end, int) and end > row_of_last_group)
    is_inner_dim, has_complete_groups = 0 < dim < call.ndim() - 1, size > step and size % step == 0
    return is_inner_dim and has_complete_groups and reads_first_group and reads_last_group
