"""Bucket the all_reduces that only outputs, or the bucket of another reduction, read.

    all_reduce(dw1), all_reduce(dw2)   ->   split(all_reduce(cat(dw1, dw2)))

These sum the partial gradients of norm weights after a backward on shards. The number of bytes does not change; the
latency is that of one collective.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import node_shape
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import size_product
from sp_compile.passes.localize.reduce_gradients import make_buckets
from sp_compile.passes.sharding.placement import Partial

from .varying import is_move_op

aten, sp = torch.ops.aten, torch.ops.sp


class BucketReductions(Pass):
    """Pass that buckets reductions in the graph of one rank. A sum with other readers is not changed."""

    requires = frozenset({"local"})
    provides = frozenset({"local ops"})  # which the validation requires

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        assert job.input_placements is not None
        kinds: dict[tuple[Any, ...], list[Node]] = {}
        for node in gm.graph.find_nodes(op="call_function", target=sp.all_reduce.default):
            origin = node_info(node).origin
            if origin is None or not isinstance(job.input_placements.of(origin.args[0]), Partial):
                continue
            value = node.meta["val"]
            _, ends = _derived_nodes(node)
            if len(ends) == 1:
                kinds.setdefault((value.dtype, value.device, ends.pop(), *node.args[1:]), []).append(node)
        together = [(b, end) for (_, _, end, *_), nodes in kinds.items() for b in make_buckets(nodes) if len(b) > 1]
        for bucket, end in together:
            _reduce_together(self, bucket, end)
        return len(together)


def _derived_nodes(node: Node) -> tuple[set[Node], set[Node]]:
    """Return the moves of a value, and its final readers: outputs or a bucket. Empty for other readers."""
    derived = reachable_set(
        [node], lambda n: [user for user in n.users if not _is_graph_end(user) and is_move_op(user)]
    )
    readers = {user for n in derived for user in n.users} - derived
    return (derived - {node}, readers) if all(map(_is_graph_end, readers)) else (set(), set())


def _is_graph_end(user: Node) -> bool:
    return user.op == "output" or user.target is aten.cat.default


def _reduce_together(editor: GraphEditor, bucket: list[Node], end: Node) -> None:
    graph, first = editor.graph, bucket[0]
    derived = set().union(*(_derived_nodes(node)[0] for node in bucket))
    with graph.inserting_before(end):
        parts = [node.args[0] for node in bucket]
        shapes = [node_shape(node) for node in bucket]
        rows = [editor.compute(aten.reshape.default, (part, [-1]), part) for part in parts]
        flat = editor.compute(aten.cat.default, (rows,), first)
        total = editor.emit(sp.all_reduce.default, (flat, *first.args[1:]), flat.meta["val"], first)
        lengths = editor.sizes.list([size_product(shape) for shape in shapes])
        pieces = editor.compute(aten.split_with_sizes.default, (total, lengths), first)
        for i, (node, shape) in enumerate(zip(bucket, shapes)):
            piece = editor.emit(operator.getitem, (pieces, i), pieces.meta["val"][i], node)
            whole = editor.compute(aten.reshape.default, (piece, editor.sizes.list(shape)), node)
            node.replace_all_uses_with(whole)
    for node in sorted(derived):  # after their new operands
        end.prepend(node)
    for node in bucket:
        graph.erase_node(node)
