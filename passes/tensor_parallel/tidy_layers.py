"""Draw random values for all rows, so that they do not depend on the sharding, and drop overwrites.

    rand_like(x)      ->   rand(sizes of x)
    dropout(x, p)     ->   x * dropout(ones, p)

Ranks of a tensor-parallel group have the same seed and the same draws; each then uses the draws of its rows. A compiler
that computes each draw from its index computes only those. The result depends on x by its shape and dtype only, so that
x does not determine its placement. The rewrite adds no traffic.

    aten.copy(x, y)   ->   y

Functionalization emits such copies for in-place writes, for example by dist.all_reduce(x).
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.mutation import can_replace_copy
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import as_sizes
from sp_compile.passes.sharding.axes import name_axes

from .varying import ScatterContext, find_varying_nodes

aten = torch.ops.aten
LIKE_OPS = {aten.rand_like.default: aten.rand.default, aten.randn_like.default: aten.randn.default}
DROPOUT_OPS = (aten.dropout.default, aten.native_dropout.default)


class DrawFullTensors(Pass):
    """Pass that rewrites replicated random draws, so that scattering does not change their values."""

    requires = frozenset({"known differences"})
    provides = frozenset({"replicated draws"})

    def apply(self, gm: GraphModule, context: ScatterContext) -> int:
        """Rewrite the draws whose operands are replicated, and return their number.

        The ranks have the same random state, so they draw equal values for the full tensor. If a rank drew only for its
        shard, all ranks would use the first values.
        """
        draws = [n for n in gm.graph.nodes if is_random(n) and n.target in (*LIKE_OPS, *DROPOUT_OPS)]
        varying = find_varying_nodes(gm, name_axes(gm), context.varying) if draws else set()
        replicated = [node for node in draws if node not in varying]
        for node in replicated:
            if node.target in LIKE_OPS:
                _replace_rand_like(self, node)
            else:
                _replace_dropout(self, node)
        return len(replicated)


def _replace_rand_like(editor: GraphEditor, node: Node) -> None:
    """Replace rand_like(x) or randn_like(x) by rand or randn of its sizes: full tensors, even if x is sharded."""
    value = node.meta["val"]
    with editor.graph.inserting_before(node):
        kwargs = {"dtype": value.dtype, "device": value.device}
        shape = editor.sizes.list(as_sizes(value.shape))
        editor.replace(node, editor.emit(LIKE_OPS[node.target], (shape,), value, node, kwargs))


def _replace_dropout(editor: GraphEditor, node: Node) -> None:
    """Replace dropout(x) by x * dropout(ones), which draws for the full tensor even if x is sharded.

    native_dropout also returns a mask, which becomes that of dropout(ones).
    """
    call = OpCall(node)
    x = call.operands[0]
    value = x.meta["val"]
    with editor.graph.inserting_before(node):
        kwargs = {"dtype": value.dtype, "device": value.device}
        ones = editor.emit(aten.ones.default, (editor.sizes.list(as_sizes(value.shape)),), value, node, kwargs)
        args, options = call.with_operands([ones])
        dropped = editor.emit(node.target, args, node.meta["val"], node, options)
        if is_tensor(node):
            editor.replace(node, editor.emit(aten.mul.Tensor, (x, dropped), value, node))
            return
        results = enumerate(node.meta["val"])  # of native_dropout
        factor, mask = (editor.emit(operator.getitem, (dropped, i), result, node) for i, result in results)
        editor.replace(node, (editor.emit(aten.mul.Tensor, (x, factor), value, node), mask))


class DropOverwrites(Pass):
    """Pass that replaces an overwritten value by the written one.

    A write that casts or broadcasts is not changed, nor one to a value that is not contiguous, with other strides. A
    result of the graph keeps memory of its own.
    """

    provides = frozenset({"no overwrites"})

    def apply(self, gm: GraphModule, context: ScatterContext) -> int:
        """Replace aten.copy(x, y), the values of y with the strides of x, by y or a contiguous clone of y.

        Return the number of replaced copies. `context.facts`, which may refer to them, is updated.
        """
        replaced: dict[Node, Node] = {}
        num_cloned = 0
        for node in gm.graph.find_nodes(op="call_function", target=aten.copy.default):
            x, y = node.args[:2]
            old, new = x.meta["val"], y.meta["val"]
            if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
                continue
            if old.stride() == new.stride() and can_replace_copy(node, y):
                replaced[node] = y
                node.replace_all_uses_with(y)
                gm.graph.erase_node(node)
            elif old.is_contiguous():
                node.target, node.args = aten.clone.default, (y,)
                node.kwargs = {"memory_format": torch.contiguous_format}
                num_cloned += 1
        context.facts = context.facts.for_graph(replaced)
        return len(replaced) + num_cloned
