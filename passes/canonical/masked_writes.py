"""Writes at a boolean mask become a choice of rows: their backward needs no shape that depends on data.

    index_put(x, [mask], v)     ->  where(mask[..., None], v, x)
                                    v: one value for every position
    index_put(x, [mask], rows)  ->  where(mask[..., None], cat([rows, 0])[at], x)
                                    at = cumsum(mask) - 1, the number of a position among those that are written

With accumulate the value is added. So `x[mask] = features`, `x[~mask] = 0` and `x[mask] = parameter` are done on
shards: features of images, padding, masked frames. A number of rows other than that of positions is an index out of
range, on every rank. Bytes moved: the integers that the sum over positions takes. Leaves alone: masks beside other
indices or after slices, masks of bytes.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Spelling, register
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, shape_of
from sp_compile.passes.graph.node_info import mark
from sp_compile.passes.graph.sizes import Size, product, same

from .expert_loops import PUTS

aten = torch.ops.aten


@register
class MaskedWrites(Spelling):
    """Rewrites the writes at masks in one graph."""

    requires = frozenset({"explicit"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        found = [n for op in PUTS for n in gm.graph.find_nodes(op="call_function", target=op) if _is_masked(n)]
        for node in found:
            self._respell(node)
        return len(found)

    def _respell(self, node: Node) -> None:
        call = Call(node)
        x, mask, values = call["self"], call["indices"][0], call["values"]
        rest = shape_of(x)[len(shape_of(mask)) :]
        with self.graph.inserting_before(node):
            rows = self._rows(values, mask, rest, node)
            if call["accumulate"]:
                rows = self.compute(aten.add.Tensor, (x, rows), node)
            here = self.reshaped(mask, (*shape_of(mask), *[1] * len(rest)), node)
            self.replace(node, self.compute(aten.where.self, (here, rows, x), node))

    def _rows(self, values: Node, mask: Node, rest: tuple[Size, ...], node: Node) -> Node:
        """One value for every position; or the row of each that is written, and zeros for the others."""
        shape = shape_of(values)
        if _is_one(shape, rest):
            return self.reshaped(values, shape[max(0, len(shape) - len(rest)) :], node)
        n, device = shape[0], {"device": mask.meta["val"].device}
        zeros = self.compute(aten.new_zeros.default, (values, self.sizes.list((1, *shape_of(values)[1:]))), node)
        table = self.compute(aten.cat.default, ([values, zeros], 0), node)
        flat = self.reshaped(mask, (product(shape_of(mask)),), node)
        counted = self.compute(aten.cumsum.default, (self.cast(flat, torch.int64, node), 0), node)
        mark(counted, aside=True)
        number = self.reshaped(self.compute(aten.sub.Tensor, (counted, 1), node), shape_of(mask), node)
        written = self.compute(aten.sum.default, (self.cast(mask, torch.int64, node),), node)
        last, beyond = (
            self.compute(aten.full.default, ([], self.sizes(size)), node, {**device, "dtype": torch.int64})
            for size in (n, n + 1)
        )
        at = self.compute(aten.where.self, (mask, number, last), node)
        fits = self.compute(aten.eq.Tensor, (written, last), node)
        at = self.compute(aten.where.self, (fits, at, beyond), node)
        return self.compute(aten.index.Tensor, (table, [at]), node)


def _is_masked(node: Node) -> bool:
    """Does it write at one mask of the first dims, a value for all positions or a row for each?"""
    call = Call(node)
    indices = call["indices"]
    if indices[0] is None or any(index is not None for index in indices[1:]):
        return False
    mask, values = indices[0].meta["val"], call["values"].meta["val"]
    if mask.dtype is not torch.bool or mask.device != call["self"].meta["val"].device or not mask.ndim:
        return False
    rest = shape_of(call["self"])[mask.ndim :]
    shape = shape_of(call["values"])
    fits = len(shape) == len(rest) + 1 and all(same(a, b) for a, b in zip(shape[1:], rest))
    return _is_one(shape, rest) or (fits and values.device == mask.device)


def _is_one(shape: tuple[Size, ...], rest: tuple[Size, ...]) -> bool:
    """Is it one value for every position, broadcast over what a position has?"""
    return len(shape) <= len(rest) or all(same(s, 1) for s in shape[: len(shape) - len(rest)])
