"""Replace writes at a boolean mask by a selection of rows, whose backward has no data-dependent shape.

    index_put(x, [mask], v)         ->  where(mask[..., None], v, x)
                                        v: one value for every position
    index_put(x, [mask], rows)      ->  where(mask[..., None], cat([rows, 0])[index], x)
                                        index = cumsum(mask) - 1, that of a position among the written ones
    masked_scatter(x, mask, rows)   ->  the same; a mask that repeats one of fewer dims writes rows, others elements

A *position* is an index of the mask; the *element* at a position has the dims of x after those of the mask.

With `accumulate` the value is added. So `x[mask] = features`, `x[~mask] = 0` and `x[mask] = parameter` run on shards,
as for image features, padding and masked frames; so does `x[:, mask] = v`. If rows and positions differ in number (for
masked_scatter: if there are fewer rows), every rank raises an index error. Bytes moved: integers, for the sum over
positions. Unchanged: masks combined with other indices, and masks of dtype uint8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, parse_overloads
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_same_size, size_product

from .expert_loops import SCATTER_OPS

aten = torch.ops.aten

# Ops whose result repeats an operand along its dims of size 1, or is equal to it.
REPEATING_OPS = parse_overloads("expand expand_as repeat to.dtype_layout to.dtype to.device")


@dataclass(frozen=True)
class MaskedWrite:
    """Write to x at the positions where a mask is true."""

    x: Node  # tensor to which the values are written
    mask: Node  # condition of each position
    start: int  # number of dims of x before those of the mask
    values: Node  # one value for all positions, or with a dim of one row for each written position
    accumulate: bool = False  # True to add the values
    needs_all_rows: bool = True  # True if rows and written positions must be equal in number

    @property
    def element_shape(self) -> tuple[Size, ...]:
        """Return the sizes of x after the dims of the mask."""
        return node_shape(self.x)[self.start + len(node_shape(self.mask)) :]

    @property
    def row_dim(self) -> int:
        """Return the dim of `values` that has one row for each written position; negative if there is none."""
        return len(node_shape(self.values)) - len(self.element_shape) - 1

    @property
    def is_single_value(self) -> bool:
        """Return True if `values` broadcasts to each position."""
        return self.row_dim < 0 or is_same_size(node_shape(self.values)[self.row_dim], 1)


@register_pass
class ReplaceMaskedWrites(CanonicalPass):
    """Replacement of the writes at masks in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every write at one boolean mask by where; return their number."""
        puts = [n for op in SCATTER_OPS for n in gm.graph.find_nodes(op="call_function", target=op)]
        puts = [n for n in puts if _is_masked_put(n)]
        scatters = gm.graph.find_nodes(op="call_function", target=aten.masked_scatter.default)
        scatters = [n for n in scatters if n.meta["val"].ndim]  # a value without dims has no positions
        for node in puts:
            self._replace_write(node, _read_put(node))
        for node in scatters:
            with self.graph.inserting_before(node):  # it emits views of the operands
                write = self._read_scatter(node)
            self._replace_write(node, write)
        return len(puts) + len(scatters)

    def _read_scatter(self, node: Node) -> MaskedWrite:
        """Return the write of masked_scatter(x, mask, source), with one row of the source for each written position.

        An element has the last dims of x, along which the mask does not change. The source is read in memory order; it
        may have more elements than the mask writes. For x (B, S, D) and a mask that is expanded from (B, S, 1), a
        position is (b, s), an element has D numbers, and the source becomes (rows, D).
        """
        call, shape = OpCall(node), node_shape(node)
        mask, num_elements = _without_repetition(call["mask"]), size_product(node_shape(call["source"]))
        # The number of dims of x up to the last one along which the mask changes; the dims after it are an element's.
        # It is at least 1, as positions need a dim.
        num_dims = max((d + 1 for d, n in enumerate(_align_shape(mask, shape)) if not is_same_size(n, 1)), default=1)
        num_rows = exact_quotient(num_elements, size_product(shape[num_dims:]))
        if num_rows is None:  # not a number of whole rows: elements are single numbers
            mask, num_dims, num_rows = call["mask"], len(shape), num_elements
        mask = self.reshape(mask, _align_shape(mask, shape)[:num_dims], node)
        values = self.reshape(call["source"], (num_rows, *shape[num_dims:]), node)
        x, mask = self.expand(call["self"], shape, node), self.expand(mask, shape[:num_dims], node)
        return MaskedWrite(x, mask, start=0, values=values, needs_all_rows=False)

    def _replace_write(self, node: Node, write: MaskedWrite) -> None:
        """Replace the op of a write by where(mask, values for every position, x)."""
        with self.graph.inserting_before(node):
            rows = self._single_value(write, node) if write.is_single_value else self._rows_by_position(write, node)
            if write.accumulate:
                rows = self.compute(aten.add.Tensor, (write.x, rows), node)
            element_dims = [1] * len(write.element_shape)
            condition = self.reshape(write.mask, (*node_shape(write.mask), *element_dims), node)
            self.replace(node, self.compute(aten.where.self, (condition, rows, write.x), node))

    def _single_value(self, write: MaskedWrite, like: Node) -> Node:
        """Return the one value of a write in a shape that broadcasts to x.

        For x[:, mask] = v with x (S, H, W, D) and a mask (H, W), values (S, 1, D) become (S, 1, 1, D).
        """
        shape, row_dim, start = node_shape(write.values), write.row_dim, write.start
        if row_dim < 0:  # no dim for the positions: the values have dims of an element only, or none
            return write.values
        leading_dims = shape[max(row_dim - start, 0) : row_dim]  # dims of x; any others before them have size 1
        position_dims = (1,) * len(node_shape(write.mask))  # x[mask] has one dim in place of them
        return self.reshape(write.values, (*leading_dims, *position_dims, *shape[row_dim + 1 :]), like)

    def _rows_by_position(self, write: MaskedWrite, like: Node) -> Node:
        """Emit a value with the N rows of a write, in order, where the mask is true, and zeros elsewhere.

        It is table[index], where the table has N + 1 rows, [rows, zeros]. The index is N where the mask is false. The
        mask must be true at N positions, or without `needs_all_rows` at N or fewer; otherwise the index is N + 1
        everywhere, which raises an error, as the replaced op does.
        """
        values, mask, row_dim = write.values, write.mask, write.row_dim
        shape = node_shape(values)
        zeros_shape = self.sizes.list((*shape[:row_dim], 1, *shape[row_dim + 1 :]))
        zeros = self.compute(aten.new_zeros.default, (values, zeros_shape), like)
        table = self.compute(aten.cat.default, ([values, zeros], row_dim), like)
        # The index of each written position among the written positions, in order.
        flat_mask = self.reshape(mask, (size_product(node_shape(mask)),), like)
        counted = self.compute(aten.cumsum.default, (self.cast(flat_mask, torch.int64, like), 0), like)
        set_node_info(counted, is_aside=True)  # this scan is no evidence that the dim is a sequence
        index = self.reshape(self.compute(aten.sub.Tensor, (counted, 1), like), node_shape(mask), like)
        num_written = self.compute(aten.sum.default, (self.cast(mask, torch.int64, like),), like)
        options = {"device": mask.meta["val"].device, "dtype": torch.int64}
        # N, which is the number of rows and the index of the row of zeros, and N + 1, which is out of range
        zero_row, invalid_row = (
            self.compute(aten.full.default, ([], self.sizes(n)), like, options)
            for n in (shape[row_dim], shape[row_dim] + 1)
        )
        index = self.compute(aten.where.self, (mask, index, zero_row), like)
        compare = aten.eq.Tensor if write.needs_all_rows else aten.le.Tensor
        is_valid = self.compute(compare, (num_written, zero_row), like)
        index = self.compute(aten.where.self, (is_valid, index, invalid_row), like)
        return self.compute(aten.index.Tensor, (table, [*[None] * row_dim, index]), like)


def _is_masked_put(node: Node) -> bool:
    """Return True for an index_put whose only index is a mask, whose values `_replace_write` supports.

    `values` must be one value for all positions, or one row for each position where the mask is true.
    """
    indices = [index.meta["val"] for index in OpCall(node)["indices"] if index is not None]
    if len(indices) != 1 or indices[0].dtype is not torch.bool or not indices[0].ndim:
        return False
    write = _read_put(node)
    if indices[0].device != write.x.meta["val"].device:
        return False
    # All dims of `values` before that of the rows must be dims of x before those of the mask.
    is_row_per_position = write.row_dim <= write.start and write.values.meta["val"].device == indices[0].device
    return write.is_single_value or is_row_per_position


def _read_put(node: Node) -> MaskedWrite:
    """Return the write of index_put(x, [.., mask], values)."""
    call = OpCall(node)
    start, mask = next((d, index) for d, index in enumerate(call["indices"]) if index is not None)
    return MaskedWrite(call["self"], mask, start, call["values"], call["accumulate"])


def _without_repetition(x: Node) -> Node:
    """Return the operand of which a node is a copy, or a repetition along dims of size 1; the node itself if none."""
    while x.target in REPEATING_OPS:
        operand = OpCall(x)["self"]
        sizes = zip(_align_shape(operand, node_shape(x)), node_shape(x), strict=True)
        is_same_kind = (
            operand.meta["val"].dtype == x.meta["val"].dtype and operand.meta["val"].device == x.meta["val"].device
        )
        if not is_same_kind or not all(is_same_size(n, 1) or is_same_size(n, size) for n, size in sizes):
            break
        x = operand
    return x


def _align_shape(x: Node, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return the shape of x, extended by first dims of size 1 to the number of dims of `shape`."""
    return (*[1] * (len(shape) - len(node_shape(x))), *node_shape(x))
