"""Replace writes at a boolean mask by a selection of rows, whose backward has no data-dependent shape.

    index_put(x, [mask], v)     ->  where(mask[..., None], v, x)
                                    v: one value for every position
    index_put(x, [mask], rows)  ->  where(mask[..., None], cat([rows, 0])[index], x)
                                    index = cumsum(mask) - 1, that of a position among the written ones

A *position* is an index of the mask, which has the first dims of x; the *element* at a position has the other dims.

With `accumulate` the value is added. So `x[mask] = features`, `x[~mask] = 0` and `x[mask] = parameter` run on shards,
as for image features, padding and masked frames. If rows and positions differ in number, every rank raises an index
error. Bytes moved: integers, for the sum over positions. Unchanged: masks combined with other indices or after slices,
and masks of dtype uint8.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import Size, is_same_shape, is_same_size, size_product

from .expert_loops import SCATTER_OPS

aten = torch.ops.aten


@register_pass
class ReplaceMaskedWrites(CanonicalPass):
    """Replacement of the writes at masks in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Replace every index_put at one boolean mask, x[mask] = values, by where; return their number."""
        writes = [n for op in SCATTER_OPS for n in gm.graph.find_nodes(op="call_function", target=op)]
        writes = [n for n in writes if _is_masked_write(n)]
        for node in writes:
            self._rewrite(node)
        return len(writes)

    def _rewrite(self, node: Node) -> None:
        """Replace index_put(x, [mask], values) by where(mask, values for every position, x).

        A position is an index of the mask, which has the first dims of x; the element at a position has the others.
        """
        call = OpCall(node)
        x, mask, values = call["self"], call["indices"][0], call["values"]
        element_shape = node_shape(x)[len(node_shape(mask)) :]
        with self.graph.inserting_before(node):
            if _is_single_value(node_shape(values), element_shape):
                shape = node_shape(values)
                num_leading = max(0, len(shape) - len(element_shape))  # dims of size 1, which an element does not have
                rows = self.reshape(values, shape[num_leading:], node)
            else:
                rows = self._rows_by_position(values, mask, node)
            if call["accumulate"]:
                rows = self.compute(aten.add.Tensor, (x, rows), node)
            condition = self.reshape(mask, (*node_shape(mask), *[1] * len(element_shape)), node)
            self.replace(node, self.compute(aten.where.self, (condition, rows, x), node))

    def _rows_by_position(self, values: Node, mask: Node, like: Node) -> Node:
        """Emit a value with the N rows `values`, in order, where the mask is true, and zeros elsewhere.

        It is table[index], where the table has N + 1 rows, [values, zeros]. The index is N where the mask is false. If
        the mask is true at another number of positions than N, the index is N + 1 everywhere, which raises an error, as
        the replaced op does.
        """
        num_rows = node_shape(values)[0]
        zeros = self.compute(aten.new_zeros.default, (values, self.sizes.list((1, *node_shape(values)[1:]))), like)
        table = self.compute(aten.cat.default, ([values, zeros], 0), like)
        # The index of each written position among the written positions, in order.
        flat_mask = self.reshape(mask, (size_product(node_shape(mask)),), like)
        counted = self.compute(aten.cumsum.default, (self.cast(flat_mask, torch.int64, like), 0), like)
        set_node_info(counted, is_aside=True)  # this scan is no evidence that the dim is a sequence
        index = self.reshape(self.compute(aten.sub.Tensor, (counted, 1), like), node_shape(mask), like)
        num_written = self.compute(aten.sum.default, (self.cast(mask, torch.int64, like),), like)
        options = {"device": mask.meta["val"].device, "dtype": torch.int64}
        # The numbers N, the index of the row of zeros, and N + 1, which is out of range.
        zero_row, invalid_row = (
            self.compute(aten.full.default, ([], self.sizes(n)), like, options) for n in (num_rows, num_rows + 1)
        )
        index = self.compute(aten.where.self, (mask, index, zero_row), like)
        is_valid = self.compute(aten.eq.Tensor, (num_written, zero_row), like)  # num_written == N
        index = self.compute(aten.where.self, (is_valid, index, invalid_row), like)
        return self.compute(aten.index.Tensor, (table, [index]), like)


def _is_masked_write(node: Node) -> bool:
    """Return True for a write x[mask] = values that `_rewrite` supports; the mask has the first dims of x.

    `values` must be one value for all positions, or one row for each position where the mask is true.
    """
    call = OpCall(node)
    indices = call["indices"]
    if indices[0] is None or any(index is not None for index in indices[1:]):
        return False
    mask, values = indices[0].meta["val"], call["values"].meta["val"]
    if mask.dtype is not torch.bool or mask.device != call["self"].meta["val"].device or not mask.ndim:
        return False
    element_shape, shape = node_shape(call["self"])[mask.ndim :], node_shape(call["values"])
    is_row_per_position = len(shape) == len(element_shape) + 1 and is_same_shape(shape[1:], element_shape)
    return _is_single_value(shape, element_shape) or (is_row_per_position and values.device == mask.device)


def _is_single_value(shape: tuple[Size, ...], element_shape: tuple[Size, ...]) -> bool:
    """Return True if a tensor of this shape is one value for all positions: it broadcasts to an element's shape."""
    leading_dims = shape[: max(0, len(shape) - len(element_shape))]
    return all(is_same_size(size, 1) for size in leading_dims)
