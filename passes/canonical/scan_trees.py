"""Mark scans by an unknown function: leaves are gathered once, and all ranks compute the result.

    torch.associative_scan(combine_mode="generic") of complex numbers, online softmax, matrices, a running argmax
        tracing unrolls it into a tree: combinations of every second row, interleaved, level by level
    torch.associative_scan, torch.scan as one op

Runs after all rewrites of scans and marks the remaining ones. The sequence is found by its dim, and the levels of a
tree form one region, inside of which no new sequence begins. Bytes moved: those of the gather of the leaves. Unchanged:
rows that are split and interleaved without a combination, as in rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import associative_scan_op, scan_op
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.matchers import PAD_OPS, SlicePiece, match_pad, match_piece, value_origin

aten = torch.ops.aten
NO_SCAN_REASON = (
    "it combines rows by a function that is no sum, product, maximum, minimum, log-sum-exp or linear recurrence of "
    "real numbers, so its leaves are gathered, once"
)
SCANNED_OPS = {associative_scan_op: 1, scan_op: 2}
"""Index of the argument with the scanned values, along dim 0."""


@register_pass
class MarkScanTrees(CanonicalPass):
    """Marking of the remaining scans of one graph."""

    requires = frozenset({"scans"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in SCANNED_OPS:
                set_node_info(node, scanned=(SCANNED_OPS[node.target], 0))
        outer = outermost_trees(gm.graph)
        for node, piece in outer:
            self._mark(node, piece)
        return len(outer)

    def _mark(self, join: Node, first: SlicePiece) -> None:
        """Mark the nodes between the leaves and the last interleaving.

        Leaves are matched by their length, including leaves whose own result has no reader.
        """
        rows = node_shape(first.source)[first.dim]

        def is_cut(node: Node) -> bool:
            """Return True if a node slices the same dim of a value with the same number of rows."""
            piece = match_piece(node)
            return (
                piece is not None and piece.dim == first.dim and is_same_size(node_shape(piece.source)[piece.dim], rows)
            )

        before = nodes_before(join, is_cut)
        cuts = [node for node in before if is_cut(node)]
        inside = before & _nodes_after(cuts, until=join)
        inside |= {user for user in join.users if is_tensor(user) and match_piece(user) is not None}
        for node in inside:
            set_node_info(
                node, no_rule=NO_SCAN_REASON, scanned=(0, first.dim) if node in cuts and _is_odd_rows(node) else None
            )


def outermost_trees(graph: Graph) -> list[tuple[Node, SlicePiece]]:
    """Return the result of each tree, which is inside of no other one, and the first row of its leaf."""
    joins = [found for node in graph.nodes if (found := match_interleaving(node)) is not None]
    return [(node, piece) for node, piece in joins if not _is_inner(piece, joins)]


def _is_inner(piece: SlicePiece, joins: Iterable[tuple[Node, SlicePiece]]) -> bool:
    """Return True if the rows that a level splits are combinations of every second row of another level."""
    rows = node_shape(piece.source)[piece.dim]
    larger = [
        one.source
        for _, one in joins
        if one.dim == piece.dim
        and is_same_size(node_shape(one.source)[one.dim] // 2, rows)
        and one.source is not piece.source
    ]
    starts = [cut for leaf in larger for cut in _leaf_slices(leaf, piece.dim) if _is_odd_rows(cut)]
    return bool(starts) and piece.source in _nodes_after(starts, until=piece.source)


def match_interleaving(node: Node) -> tuple[Node, SlicePiece] | None:
    """Return the node and the first row of the leaf, if it interleaves rows of a scan with combinations of them."""
    if node.target is not aten.flatten.using_ints or node.args[0].target is not aten.stack.default:
        return None
    stack, dim = node.args[0], OpCall(node)["start_dim"]
    rows = OpCall(stack).operands
    if len(rows) != 2 or OpCall(stack).get("dim", 0) != dim + 1 or OpCall(node)["end_dim"] != dim + 1:
        return None
    even, odd = map(value_origin, rows)
    if even.target is aten.cat.default:
        even = value_origin(OpCall(even).operands[0])
    if odd.target in PAD_OPS and (pad := match_pad(odd)) is not None:
        odd = value_origin(pad.source)
    first = match_piece(even)
    known = (
        first is not None
        and first.keeps_dim
        and first.dim == dim
        and is_same_size(first.start, 0)
        and is_same_size(first.length, 1)
    )
    if not known or first is None:
        return None
    seconds = [cut for cut in _leaf_slices(first.source, dim) if _is_odd_rows(cut)]
    return (node, first) if seconds and odd in _nodes_after(seconds, until=odd) else None


def _leaf_slices(leaf: Node, dim: int) -> Iterator[Node]:
    """Yield the slices of a leaf, or of an identical value, along the dim."""
    for user in leaf.users:
        piece = match_piece(user)
        if (
            piece is not None
            and piece.dim == dim
            and piece.keeps_dim
            and value_origin(user.args[0]) is value_origin(leaf)
        ):
            yield user


def _is_odd_rows(cut: Node) -> bool:
    """Return True for every second row from row 1 on."""
    piece = match_piece(cut)
    return piece is not None and piece.step == 2 and is_same_size(piece.start, 1)


def _nodes_after(starts: Iterable[Node], until: Node) -> set[Node]:
    """Return the nodes and everything computed from them, up to another node."""
    found, left = set[Node](), list(starts)
    while left:
        node = left.pop()
        if node in found or until < node:
            continue
        found.add(node)
        left += node.users
    return found


def nodes_before(node: Node, stops: Callable[[Node], bool]) -> set[Node]:
    """Return the node and everything it is computed from, up to the nodes that stop the search."""
    found, left = set[Node](), [node]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [] if stops(one) else one.all_input_nodes
    return found
