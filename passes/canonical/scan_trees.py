"""Scans by a function that is no known scan: their leaves are gathered once, and every rank computes the whole.

    torch.associative_scan(combine_mode="generic") of complex numbers, online softmax, matrices, a running argmax
        tracing unrolls it into a tree: combinations of every second row, interleaved, level by level
    torch.associative_scan, torch.scan as one op

Runs after all that rewrites scans, and marks what is left: the sequence is found by its dim, and the levels of a tree
are one piece, of which nothing begins anew on shards. Bytes moved: what the gather of the leaves takes. Leaves alone:
rows that are taken apart and interleaved without a combination of them, as rotary positions do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import associative_scan_op, scan_op
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, is_tensor, shape_of
from sp_compile.passes.graph.node_info import mark
from sp_compile.passes.graph.sizes import same
from sp_compile.passes.sharding.matchers import PADS, Piece, origin, pad_of, piece_of

aten = torch.ops.aten
NO_SCAN = (
    "it combines rows by a function that is no sum, product, maximum, minimum, log-sum-exp or linear recurrence of "
    "real numbers, so its leaves are gathered, once"
)
SCANNED = {associative_scan_op: 1, scan_op: 2}
"""The argument of an op that holds what is scanned, along dim 0."""


@register
class ScanTrees(Spelling):
    """Marks the scans of one graph that are left."""

    requires = frozenset({"scans"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in SCANNED:
                mark(node, scanned=(SCANNED[node.target], 0))
        outer = outermost_trees(gm.graph)
        for node, piece in outer:
            self._mark(node, piece)
        return len(outer)

    def _mark(self, join: Node, first: Piece) -> None:
        """Mark what lies between the leaves and the rows that are interleaved last.

        Leaves are known by their length, also one whose own result nobody reads.
        """
        rows = shape_of(first.source)[first.dim]

        def is_cut(node: Node) -> bool:
            piece = piece_of(node)
            return piece is not None and piece.dim == first.dim and same(shape_of(piece.source)[piece.dim], rows)

        before = nodes_before(join, is_cut)
        cuts = [node for node in before if is_cut(node)]
        inside = before & _after(cuts, until=join)
        inside |= {user for user in join.users if is_tensor(user) and piece_of(user) is not None}
        for node in inside:
            mark(node, no_rule=NO_SCAN, scanned=(0, first.dim) if node in cuts and _is_second(node) else None)


def outermost_trees(graph: Graph) -> list[tuple[Node, Piece]]:
    """Return the result of each tree, which is inside of no other one, and the first row of its leaf."""
    joins = [found for node in graph.nodes if (found := interleaving(node)) is not None]
    return [(node, piece) for node, piece in joins if not _is_inner(piece, joins)]


def _is_inner(piece: Piece, joins: Iterable[tuple[Node, Piece]]) -> bool:
    """Are the rows that a level takes apart combinations of every second row of another?"""
    rows = shape_of(piece.source)[piece.dim]
    larger = [
        one.source
        for _, one in joins
        if one.dim == piece.dim and same(shape_of(one.source)[one.dim] // 2, rows) and one.source is not piece.source
    ]
    starts = [cut for leaf in larger for cut in _cuts(leaf, piece.dim) if _is_second(cut)]
    return bool(starts) and piece.source in _after(starts, until=piece.source)


def interleaving(node: Node) -> tuple[Node, Piece] | None:
    """Return the node and the first row of the leaf, if it interleaves rows of a scan with combinations of them."""
    if node.target is not aten.flatten.using_ints or node.args[0].target is not aten.stack.default:
        return None
    stack, dim = node.args[0], Call(node)["start_dim"]
    rows = Call(stack).operands
    if len(rows) != 2 or Call(stack).get("dim", 0) != dim + 1 or Call(node)["end_dim"] != dim + 1:
        return None
    even, odd = map(origin, rows)
    if even.target is aten.cat.default:
        even = origin(Call(even).operands[0])
    if odd.target in PADS and (pad := pad_of(odd)) is not None:
        odd = origin(pad.source)
    first = piece_of(even)
    known = first is not None and first.keeps and first.dim == dim and same(first.start, 0) and same(first.length, 1)
    if not known or first is None:
        return None
    seconds = [cut for cut in _cuts(first.source, dim) if _is_second(cut)]
    return (node, first) if seconds and odd in _after(seconds, until=odd) else None


def _cuts(leaf: Node, dim: int) -> Iterator[Node]:
    """The pieces of a leaf along the dim, of itself or of what is the same."""
    for user in leaf.users:
        piece = piece_of(user)
        if piece is not None and piece.dim == dim and piece.keeps and origin(user.args[0]) is origin(leaf):
            yield user


def _is_second(cut: Node) -> bool:
    """Is it every second row from row 1 on?"""
    piece = piece_of(cut)
    return piece is not None and piece.step == 2 and same(piece.start, 1)


def _after(starts: Iterable[Node], until: Node) -> set[Node]:
    """The nodes, and what is computed from them, up to another one."""
    found, left = set[Node](), list(starts)
    while left:
        node = left.pop()
        if node in found or until < node:
            continue
        found.add(node)
        left += node.users
    return found


def nodes_before(node: Node, stops: Callable[[Node], bool]) -> set[Node]:
    """Return the node and all that it is computed from, up to the nodes that stop the search."""
    found, left = set[Node](), [node]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [] if stops(one) else one.all_input_nodes
    return found
