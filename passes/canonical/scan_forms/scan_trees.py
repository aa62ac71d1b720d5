"""Mark scans by an unknown function: leaves are gathered once, and all ranks compute the result.

    torch.associative_scan(combine_mode="generic") of complex numbers, online softmax, matrices, a running argmax
        tracing unrolls it into a tree: combinations of every second row, interleaved, level by level
    torch.associative_scan, torch.scan as one op

The scanned values are the *leaves*. A *level* of a tree combines the rows of a leaf in pairs, and scans the pairs: the
*inner* level. It then combines that scan with every second row of the leaf. Its last step, the *join*, interleaves both
halves: flatten(stack([even rows, odd rows])). `unrolled_scans.py` shows the code of a level.

Runs after all rewrites of scans and marks the remaining ones: propagation gathers the operands of marked nodes. The
sequence is found by its dim, and the levels of a tree form one region, inside of which no new sequence begins. Bytes
moved: those of the gather of the leaves. Unchanged: rows that are split and interleaved without a combination, as in
rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import associative_scan_op, scan_op
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.matchers import PAD_OPS, SlicePiece, match_pad, match_piece, value_origin

aten = torch.ops.aten
NO_SCAN_REASON = (
    "it combines rows by a function that is no sum, product, maximum, minimum, log-sum-exp or linear recurrence of "
    "real numbers, so its leaves are gathered, once"
)
SCANNED_OPS = {associative_scan_op: 1, scan_op: 2}  # index of the argument with the scanned values, along dim 0


@register_pass
class MarkScanTrees(CanonicalPass):
    """Marking of the remaining scans of one graph."""

    requires = frozenset({"scans"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Mark the remaining scan ops and unrolled trees of scans, so that their operands are gathered once.

        Returns the number of trees, without the marked scan ops. The mark `scanned`, the index of an argument and the
        dim along which it is scanned, is evidence that the dim is a sequence.
        """
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in SCANNED_OPS:
                set_node_info(node, scanned=(SCANNED_OPS[node.target], 0))
        outer = outermost_trees(gm.graph)  # (last node of a tree, slice of the first row of a leaf)
        for join, first_row in outer:
            self._mark(join, first_row)
        return len(outer)

    def _mark(self, join: Node, first_row: SlicePiece) -> None:
        """Mark the nodes of a tree, from the slices of its leaves to its last node, so that leaves are gathered.

        A scan of several leaves, such as values and their indices, has one join for each result that is read. To find
        the other leaves, too, slices are matched by the number of rows of the sliced value.

        Args:
            join: The last node of the tree, which interleaves the results at even and odd rows.
            first_row: The slice of the first row of a leaf.
        """
        dim, num_rows = first_row.dim, node_shape(first_row.source)[first_row.dim]

        def is_leaf_slice(node: Node) -> bool:
            """Return True if a node slices a value with the number of rows of a leaf along the same dim."""
            piece = match_piece(node)
            return piece is not None and piece.dim == dim and is_same_size(node_shape(piece.source)[dim], num_rows)

        before_join = nodes_before(join, is_leaf_slice)
        leaf_slices = [node for node in before_join if is_leaf_slice(node)]
        inside = before_join & _nodes_after(leaf_slices, until=join)
        # Slices of the result, such as the one that drops the padding row of an odd length.
        inside |= {user for user in join.users if is_tensor(user) and match_piece(user) is not None}
        for node in inside:
            # Propagation gathers the operands of a node with `no_rule`, which is the reason. `scanned` makes the dim of
            # operand 0 a sequence. Each leaf has one slice of its odd rows.
            starts_here = node in leaf_slices and _is_odd_rows(node)
            set_node_info(node, no_rule=NO_SCAN_REASON, scanned=(0, dim) if starts_here else None)


def outermost_trees(graph: Graph) -> list[tuple[Node, SlicePiece]]:
    """Return each unrolled scan of the graph that is not a level of another one.

    A tree computes a scan of a value, its leaf, from a scan of pairs of rows (the inner level), recursively.

    Returns:
        For each tree, the node that interleaves its results (`match_interleaving`), and the slice of its leaf's first
        row.
    """
    first_rows = {node: row for node in graph.nodes if (row := match_interleaving(node)) is not None}
    return [(node, row) for node, row in first_rows.items() if not _is_inner(row, first_rows.values())]


def _is_inner(first_row: SlicePiece, first_rows: Iterable[SlicePiece]) -> bool:
    """Return True if a level of a tree is the inner level of another one.

    A level is given by x[:1], the slice of the first row of its leaf x, the value that it scans. The leaf of an inner
    level has half of the rows of the outer level's leaf, and is computed from the odd rows of that leaf, as the pairs
    combine(x[0::2], x[1::2]).

    Args:
        first_row: The slice for the level in question.
        first_rows: The slices for all levels of the graph.
    """
    leaf, dim = first_row.source, first_row.dim
    num_rows = node_shape(leaf)[dim]
    odd_rows: list[Node] = []  # slices of the leaves that may be those of the outer level
    for outer_row in first_rows:
        outer_leaf = outer_row.source
        if outer_row.dim == dim and outer_leaf is not leaf and is_same_size(node_shape(outer_leaf)[dim] // 2, num_rows):
            odd_rows += [node for node in _leaf_slices(outer_leaf, dim) if _is_odd_rows(node)]
    return bool(odd_rows) and leaf in _nodes_after(odd_rows, until=leaf)


def match_interleaving(node: Node) -> SlicePiece | None:
    """Match the last node of a level of an unrolled scan: flatten(stack([even, odd], dim + 1), dim, dim + 1).

    It interleaves the results at even rows with those at odd rows. The first even row is that of the scanned value, the
    leaf; the odd rows are computed from x[1::2] of the leaf x.

    Returns:
        The slice of the leaf's first row, or None for another node.
    """
    if node.target is not aten.flatten.using_ints or node.args[0].target is not aten.stack.default:
        return None
    stack, dim = node.args[0], OpCall(node)["start_dim"]
    operands = OpCall(stack).operands
    if len(operands) != 2 or OpCall(stack).get("dim", 0) != dim + 1 or OpCall(node)["end_dim"] != dim + 1:
        return None
    even, odd = map(value_origin, operands)
    if even.target is aten.cat.default:  # row 0 of the leaf, then the other even rows
        even = value_origin(OpCall(even).operands[0])
    if odd.target in PAD_OPS and (pad := match_pad(odd)) is not None:  # an odd number of rows
        odd = value_origin(pad.source)
    first_row = match_piece(even)
    if first_row is None or not first_row.keeps_dim or first_row.dim != dim:
        return None
    if not is_same_size(first_row.start, 0) or not is_same_size(first_row.length, 1):
        return None
    odd_rows = [x for x in _leaf_slices(first_row.source, dim) if _is_odd_rows(x)]
    return first_row if odd_rows and odd in _nodes_after(odd_rows, until=odd) else None


def _leaf_slices(leaf: Node, dim: int) -> Iterator[Node]:
    """Yield the users of a leaf that slice it along the dim and keep the dim, as x[1::2] does and x[0] does not."""
    for user in leaf.users:
        piece = match_piece(user)
        is_slice = piece is not None and piece.dim == dim and piece.keeps_dim
        if is_slice and value_origin(user.args[0]) is value_origin(leaf):
            yield user


def _is_odd_rows(node: Node) -> bool:
    """Return True for a slice of every second row from row 1 on, x[1::2]."""
    piece = match_piece(node)
    return piece is not None and piece.step == 2 and is_same_size(piece.start, 1)


def _nodes_after(starts: Iterable[Node], until: Node) -> set[Node]:
    """Return the nodes `starts` and all nodes computed from them, up to the node `until` in the order of the graph."""
    return reachable_set([n for n in starts if n <= until], lambda n: [user for user in n.users if user <= until])


def nodes_before(node: Node, stops: Callable[[Node], bool]) -> set[Node]:
    """Return the node and all nodes that it is computed from, up to and including nodes where `stops` is True."""
    return reachable_set([node], lambda n: () if stops(n) else n.all_input_nodes)
