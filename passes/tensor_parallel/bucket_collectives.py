"""Bucket the all_reduces whose results only the output reads, directly or through another bucket.

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

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Bucket all_reduces of partial sums with equal reader, dtype, device and group; return the number of buckets.

        The reader is the output, or the cat of another bucket, such as one that then reduces these sums over another
        group. The new nodes are inserted before it.
        """
        assert context.input_placements is not None
        groups: dict[tuple[Any, ...], list[Node]] = {}  # reductions that may share a bucket
        for node in gm.graph.find_nodes(op="call_function", target=sp.all_reduce.default):
            origin = node_info(node).origin  # its node in the global view
            if origin is None or not isinstance(context.input_placements.of(origin.args[0]), Partial):
                continue
            value = node.meta["val"]
            _, readers = _find_moves_and_readers(node)  # empty if other ops read the sum
            if len(readers) == 1:
                (reader,) = readers
                # A bucket has one reader, dtype, device and group (the arguments after the operand).
                groups.setdefault((reader, value.dtype, value.device, *node.args[1:]), []).append(node)
        num_buckets = 0
        for (reader, *_), nodes in groups.items():
            for bucket in make_buckets(nodes):
                if len(bucket) > 1:
                    _reduce_bucket(self, bucket, reader)
                    num_buckets += 1
        return num_buckets


def _find_moves_and_readers(node: Node) -> tuple[set[Node], set[Node]]:
    """Return (views and casts of an all_reduce, readers): the readers read the sum or one of these views and casts.

    A reader is the output or the cat of a bucket. Both sets are empty if another op reads the value: a bucket is
    inserted directly before the reader, too late for that op.
    """
    # The node itself, and all values that only move or cast it.
    derived = reachable_set([node], lambda n: (x for x in n.users if not _is_bucket_reader(x) and is_move_op(x)))
    readers = {user for n in derived for user in n.users} - derived
    if not all(map(_is_bucket_reader, readers)):
        return set(), set()
    return derived - {node}, readers


def _is_bucket_reader(user: Node) -> bool:
    """Return True for the output, and for any cat, which is usually that of another bucket.

    Other cats are safe, too: the new nodes are inserted directly before the only reader.
    """
    return user.op == "output" or user.target is aten.cat.default


def _reduce_bucket(editor: GraphEditor, bucket: list[Node], reader: Node) -> None:
    """Replace several all_reduces by split(all_reduce(cat(operands))).

    Args:
        editor: Editor of the graph.
        bucket: The all_reduces.
        reader: The node that reads their results, also by views; the new nodes are inserted before it.
    """
    graph, first = editor.graph, bucket[0]
    moves: set[Node] = set()  # views and casts of the results
    for node in bucket:
        moves_of_node, _ = _find_moves_and_readers(node)
        moves |= moves_of_node
    with graph.inserting_before(reader):
        # cat, all_reduce
        flattened = [editor.compute(aten.reshape.default, (node.args[0], [-1]), node.args[0]) for node in bucket]
        flat = editor.compute(aten.cat.default, (flattened,), first)
        total = editor.emit(sp.all_reduce.default, (flat, *first.args[1:]), flat.meta["val"], first)
        # split
        shapes = [node_shape(node) for node in bucket]
        lengths = editor.sizes.list([size_product(shape) for shape in shapes])
        pieces = editor.compute(aten.split_with_sizes.default, (total, lengths), first)
        for i, (node, shape) in enumerate(zip(bucket, shapes)):
            piece = editor.emit(operator.getitem, (pieces, i), pieces.meta["val"][i], node)
            node.replace_all_uses_with(editor.compute(aten.reshape.default, (piece, editor.sizes.list(shape)), node))
    for node in sorted(moves):  # in graph order, move them directly before the reader: after the nodes they now read
        reader.prepend(node)
    for node in bucket:
        graph.erase_node(node)
