"""Replace writes at a boolean mask by a selection of rows, whose backward has no data-dependent shape.

    index_put(x, [mask], v)     ->  where(mask[..., None], v, x)
                                    v: one value for every position
    index_put(x, [mask], rows)  ->  where(mask[..., None], cat([rows, 0])[at], x)
                                    at = cumsum(mask) - 1, the index of a position among the written ones

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
from sp_compile.passes.graph.sizes import Size, is_same_size, size_product

from .expert_loops import SCATTER_OPS

aten = torch.ops.aten


@register_pass
class ReplaceMaskedWrites(CanonicalPass):
    """Replacement of the writes at masks in one graph."""

    requires = frozenset({"normalized"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        found = [
            n for op in SCATTER_OPS for n in gm.graph.find_nodes(op="call_function", target=op) if _is_masked_write(n)
        ]
        for node in found:
            self._rewrite(node)
        return len(found)

    def _rewrite(self, node: Node) -> None:
        call = OpCall(node)
        x, mask, values = call["self"], call["indices"][0], call["values"]
        rest = node_shape(x)[len(node_shape(mask)) :]
        with self.graph.inserting_before(node):
            rows = self._rows(values, mask, rest, node)
            if call["accumulate"]:
                rows = self.compute(aten.add.Tensor, (x, rows), node)
            here = self.reshape(mask, (*node_shape(mask), *[1] * len(rest)), node)
            self.replace(node, self.compute(aten.where.self, (here, rows, x), node))

    def _rows(self, values: Node, mask: Node, rest: tuple[Size, ...], node: Node) -> Node:
        """Return one value for every position, or the row of each written position and zeros elsewhere."""
        shape = node_shape(values)
        if _is_single_value(shape, rest):
            return self.reshape(values, shape[max(0, len(shape) - len(rest)) :], node)
        n, device = shape[0], {"device": mask.meta["val"].device}
        zeros = self.compute(aten.new_zeros.default, (values, self.sizes.list((1, *node_shape(values)[1:]))), node)
        table = self.compute(aten.cat.default, ([values, zeros], 0), node)
        flat = self.reshape(mask, (size_product(node_shape(mask)),), node)
        counted = self.compute(aten.cumsum.default, (self.cast(flat, torch.int64, node), 0), node)
        set_node_info(counted, is_aside=True)
        number = self.reshape(self.compute(aten.sub.Tensor, (counted, 1), node), node_shape(mask), node)
        written = self.compute(aten.sum.default, (self.cast(mask, torch.int64, node),), node)
        last, beyond = (
            self.compute(aten.full.default, ([], self.sizes(size)), node, {**device, "dtype": torch.int64})
            for size in (n, n + 1)
        )
        at = self.compute(aten.where.self, (mask, number, last), node)
        fits = self.compute(aten.eq.Tensor, (written, last), node)
        at = self.compute(aten.where.self, (fits, at, beyond), node)
        return self.compute(aten.index.Tensor, (table, [at]), node)


def _is_masked_write(node: Node) -> bool:
    """Return True for a write at one mask of the first dims, of one value or of a row per position."""
    call = OpCall(node)
    indices = call["indices"]
    if indices[0] is None or any(index is not None for index in indices[1:]):
        return False
    mask, values = indices[0].meta["val"], call["values"].meta["val"]
    if mask.dtype is not torch.bool or mask.device != call["self"].meta["val"].device or not mask.ndim:
        return False
    rest = node_shape(call["self"])[mask.ndim :]
    shape = node_shape(call["values"])
    fits = len(shape) == len(rest) + 1 and all(is_same_size(a, b) for a, b in zip(shape[1:], rest))
    return _is_single_value(shape, rest) or (fits and values.device == mask.device)


def _is_single_value(shape: tuple[Size, ...], rest: tuple[Size, ...]) -> bool:
    """Return True for one value that broadcasts over the dims of a position."""
    return len(shape) <= len(rest) or all(is_same_size(s, 1) for s in shape[: len(shape) - len(rest)])
