"""Replace reads of one element per row by gather along the last dim, which leaves rows in place.

    x[arange(N), y]                          ->  gather(x, -1, arange(V)[y][..., None])[..., 0]
    x[arange(B)[:, None], arange(S), y]

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

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        found = [n for n in gm.graph.find_nodes(op="call_function", target=aten.index.Tensor) if _is_element_read(n)]
        for node in found:
            self._rewrite(node)
        return len(found)

    def _rewrite(self, node: Node) -> None:
        x, at = node.args[0], node.args[1][-1]
        with self.graph.inserting_before(node):
            options = {"device": at.meta["val"].device}
            numbers = self.compute(aten.arange.default, (self.sizes(node_shape(x)[-1]),), node, options)
            classes = self.compute(aten.index.Tensor, (numbers, [at]), node)
            each = self.compute(aten.unsqueeze.default, (classes, -1), node)
            picked = self.compute(aten.gather.default, (x, -1, each), node)
            self.replace(node, self.compute(aten.squeeze.dim, (picked, -1), node))


def _is_element_read(node: Node) -> bool:
    """Return True if the node reads one element of each row of x, in order."""
    x, indices = node.args
    rows = node_shape(x)[:-1]
    if not rows or len(indices) != len(rows) + 1 or any(index is None for index in indices):
        return False
    at = indices[-1]
    integers = at.meta["val"].dtype in (torch.int64, torch.int32)
    same_shape = at.meta["val"].device == x.meta["val"].device and is_same_shape(node_shape(at), rows)
    return integers and same_shape and all(_is_arange(index, rows, d) for d, index in enumerate(indices[:-1]))


def _is_arange(index: Node, rows: tuple[Size, ...], dim: int) -> bool:
    """Return True if the index is 0, 1, 2, ... along this dim of the rows and constant along others."""
    numbers, shape = skip_reshapes(index), node_shape(index)
    if not is_arange(numbers):
        return False
    ours = [extent if d == dim else 1 for d, extent in enumerate(rows)][len(rows) - len(shape) :]
    fits = len(rows) - len(shape) <= dim and is_same_shape(shape, tuple(ours))
    return (
        fits and is_same_size(as_size(OpCall(numbers)["end"]), rows[dim]) and not index.meta["val"].is_floating_point()
    )
