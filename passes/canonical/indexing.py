"""Replace reads of one element per row by gather along the last dim, which leaves rows in place.

    x[arange(N), y]                          ->  gather(x, -1, arange(V)[y][..., None])[..., 0]
    x[arange(B)[:, None], arange(S), y]

A *row* is the last dim of x, of size V, at one index of each other dim, of which N, or (B, S), is the shape.
Likelihoods of tokens are read from logits in this form. arange(V)[y] keeps the meaning of negative indices and the
error for indices out of range. Unchanged: rows in another order, several elements of a row, masks.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size, as_size, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import is_arange, skip_reshapes

aten = torch.ops.aten


@register_pass
class RewriteElementReads(CanonicalPass):
    """Replacement of reads of one element per row in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every read of one element per row, such as x[arange(N), y], by a gather; return their number."""
        reads = [n for n in gm.graph.find_nodes(op="call_function", target=aten.index.Tensor) if _is_element_read(n)]
        for node in reads:
            self._rewrite(node)
        return len(reads)

    def _rewrite(self, node: Node) -> None:
        """Replace x[arange(N), y] by gather(x, -1, arange(V)[y][..., None])[..., 0], where V is the size of a row.

        Indexing accepts negative numbers in y, and gather does not; arange(V)[y] has the nonnegative ones.
        """
        x, y = node.args[0], node.args[1][-1]
        with self.graph.inserting_before(node):
            options = {"device": y.meta["val"].device}
            columns = self.compute(aten.arange.default, (self.sizes(node_shape(x)[-1]),), node, options)
            nonnegative = self.compute(aten.index.Tensor, (columns, [y]), node)
            index = self.compute(aten.unsqueeze.default, (nonnegative, -1), node)
            elements = self.compute(aten.gather.default, (x, -1, index), node)
            self.replace(node, self.compute(aten.squeeze.dim, (elements, -1), node))


def _is_element_read(node: Node) -> bool:
    """Return True if an indexing reads one element of each row (the last dim) of x, in the order of the rows.

    An example is x[arange(B)[:, None], arange(S), y] for x of shape (B, S, V) and y of shape (B, S).
    """
    x, indices = node.args
    rows = node_shape(x)[:-1]  # the shape of the rows
    if not rows or len(indices) != len(rows) + 1 or any(index is None for index in indices):
        return False
    y, value = indices[-1], indices[-1].meta["val"]
    if value.dtype not in (torch.int64, torch.int32) or value.device != x.meta["val"].device:
        return False
    return is_same_shape(node_shape(y), rows) and all(_is_row_index(i, rows, d) for d, i in enumerate(indices[:-1]))


def _is_row_index(index: Node, rows: tuple[Size, ...], dim: int) -> bool:
    """Return True if an index is 0, 1, 2, ... along one dim of the rows and constant along the others.

    Args:
        index: The index tensor of dim `dim` of x.
        rows: The shape of x without its last dim, to which the index broadcasts.
        dim: The dim that the index must count.
    """
    numbers = skip_reshapes(index)
    num_missing = len(rows) - index.meta["val"].ndim  # leading dims that broadcasting adds
    if not is_arange(numbers) or index.meta["val"].is_floating_point() or num_missing > dim:
        return False
    expected_shape = [extent if d == dim else 1 for d, extent in enumerate(rows)][num_missing:]
    return is_same_shape(node_shape(index), expected_shape) and is_same_size(as_size(OpCall(numbers)["end"]), rows[dim])
