"""Replace reads of one element per row by gather along the last dim, and reads of a range of rows by slices.

    x[arange(N), y]                          ->  gather(x, -1, arange(V)[y][..., None])[..., 0]
    x[arange(B)[:, None], arange(S), y]
    x[:, arange(2, 5)]                       ->  x[:, 2:5]

A *row* is the last dim of x, of size V, at one index of each other dim, of which N, or (B, S), is the shape. A gather
leaves rows in place. Likelihoods of tokens are read from logits in this form. arange(V)[y] keeps the meaning of
negative indices and the error for indices out of range. Unchanged: rows in another order, several elements of a row,
masks.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size, as_size, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import ARANGE_OPS, is_arange, skip_reshapes

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


@register_pass
class SliceRanges(CanonicalPass):
    """Replacement of reads of rows start, start + 1, ... in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every read of a range of rows, such as x[:, arange(2, 5)], by a slice; return their number."""
        reads = gm.graph.find_nodes(op="call_function", target=aten.index.Tensor)
        found = [(node, span) for node in reads if (span := _match_range(node)) is not None]
        for node, span in found:
            with self.graph.inserting_before(node):
                rows = self.compute(aten.slice.Tensor, (node.args[0], *span), node)
                self.replace(node, self.compute(aten.clone.default, (rows,), node))  # indexing copies, too
        return len(found)


def _match_range(node: Node) -> tuple[int, int, int] | None:
    """Return (dim, start, end) if an indexing reads these rows of one dim in order, or None."""
    x, indices = node.args
    dims = [d for d, index in enumerate(indices) if index is not None]
    if len(dims) != 1 or indices[dims[0]].meta["val"].ndim != 1:
        return None
    numbers, size = skip_reshapes(indices[dims[0]]), node_shape(x)[dims[0]]
    call = OpCall(numbers) if numbers.target in ARANGE_OPS else None
    if call is None or call.get("step", 1) != 1 or numbers.meta["val"].is_floating_point():
        return None
    start, end = as_size(call.get("start", 0)), as_size(call["end"])
    if not all(isinstance(number, int) for number in (start, end, size)) or not 0 <= start < end <= size:
        return None
    return dims[0], start, end


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
