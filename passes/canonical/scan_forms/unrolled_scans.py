"""Replace an unrolled torch.associative_scan by the scan that its combine function defines.

torch.associative_scan(combine_mode="generic") has no op: Dynamo unrolls its Python code, and marks the ops
(`passes/capture/stand_ins/scan_stand_ins.py`). They are a tree of log2(S) levels along dim 0. A level combines the
rows of its leaf x in pairs, scans the pairs (the next level), and interleaves this scan with combinations of it and
every second row:

    pairs = combine(x[0:-1:2], x[1::2])                             half of the rows
    odd   = scan(pairs)                                             results at rows 1, 3, ...
    even  = cat([x[:1], combine(odd[:-1], x[2::2])])                results at rows 0, 2, ...
    flatten(stack([even, odd], 1), 0, 1)                      ->    sp.scan(x), sp.linear_scan(factors, x)

A recurrence has a second leaf, its factors. The first rows of a result, as expressions of rows of the leaves, show the
combine function, which is the same at all levels. Bytes moved: none. Unchanged: other combine functions, and scans that
a program computes in rounds of its own (Hillis and Steele), whose rounds are sharded or gathered one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.node_info import SCAN_CALL, find_scan_calls, scan_call
from sp_compile.passes.graph.sizes import is_same_shape
from sp_compile.passes.sharding.matchers import (
    PAD_OPS,
    is_gradient_stop,
    match_pad,
    match_piece,
    skip_widening_cast,
    value_origin,
)

from .associative_scan import COMBINE_FUNCTIONS, CombineOp, RewriteAssociativeScans, evaluate_node, unmoved_operands

aten = torch.ops.aten
TREE_OPS = ("sum", "prod", "logsumexp")  # a tree of maxima has other gradients than a scan where rows are equal
NUM_ROWS = 4  # first rows of a result that are compared; row 3 combines two combinations


@register_pass
class RewriteUnrolledScans(RewriteAssociativeScans):
    """Replacement of the unrolled scans of one graph with a known combine function."""

    requires = frozenset({"rolled loops"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every result of an unrolled scan that a known function combines; return the number of results."""
        if find_scan_calls(self.graph):
            erase_dead(self.graph)  # a dead node would count as a reader of a result
        changes = 0
        for mark, nodes in find_scan_calls(self.graph).items():
            results = [n for n in nodes if any(scan_call(user) != mark for user in n.users)]
            changes += sum(self._rewrite_result(n) for n in results)
        return changes

    def _rewrite_result(self, result: Node) -> bool:
        """Replace a result of an unrolled scan; return False if its combine function or dtypes are not supported."""
        op, leaves = _match_scan(result) or ("", [])
        scan = CombineOp(op, tuple(range(len(leaves))))  # of all leaves, by their indices
        has_equal_types = len({x.meta["val"].dtype for x in (*leaves, result)}) == 1
        if not leaves or not has_equal_types or not self.can_scan_dtypes(leaves, scan):
            return False
        # The new nodes inherit the metadata of the result, and are no part of the unrolled scan.
        result.meta["custom"] = {k: v for k, v in result.meta["custom"].items() if k != SCAN_CALL}
        with self.graph.inserting_before(result):
            out = self.emit_leaf_scan(scan, unmoved_operands(leaves), result)
        self.replace(result, out)
        return True


def _match_scan(result: Node) -> tuple[str, list[Node]] | None:
    """Return the scan that computes a result of an unrolled scan, or None.

    Returns:
        The op of `CombineOp`, and the leaves: the scanned value, after the factors of a recurrence.
    """
    length = node_shape(result)[0] if is_tensor(result) and result.meta["val"].ndim else 0
    if not isinstance(length, int) or length < 2:
        return None
    tree, num_rows = _TreeRows(result), min(length, NUM_ROWS)
    leaf = tree.leaves.get(tree.expression(result, 0))  # the first row is that of the scanned value
    if leaf is None or tree.expression(result, 1) is None:
        return None
    terms = [tree.symbol(leaf, i) for i in range(num_rows)]
    scans = [(op, [leaf], _combine_rows(COMBINE_FUNCTIONS[op], terms)) for op in TREE_OPS]
    for factors in dict.fromkeys(tree.leaves.values()):  # that rows 0 and 1 read
        steps = [(tree.symbol(factors, i), terms[i]) for i in range(num_rows)]
        scans.append(("linear", [factors, leaf], [state for _, state in _combine_rows(_compose_steps, steps)]))
    for i in range(1, num_rows):
        scans = [scan for scan in scans if scan[2][i] == tree.expression(result, i)]
        if not scans:
            return None
    op, leaves, _ = scans[0]
    return op, leaves


def _combine_rows(combine: Callable[[Any, Any], Any], rows: Sequence[Any]) -> list[Any]:
    """Return the scan of at most NUM_ROWS rows, combined in the order of the tree."""
    results = [rows[0], combine(rows[0], rows[1])]
    if len(rows) > 2:
        results.append(combine(results[1], rows[2]))
    if len(rows) > 3:
        results.append(combine(results[1], combine(rows[2], rows[3])))
    return results


def _compose_steps(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """Combine two steps (factor, state) of a linear recurrence."""
    return left[0] * right[0], sympy.expand(right[0] * left[1] + right[1])


class _TreeRows:
    """Rows of the values of an unrolled scan, as expressions of rows of its leaves.

    The leaves are values of other code with the shape of the result.
    """

    def __init__(self, result: Node) -> None:
        self.mark, self.shape = scan_call(result), node_shape(result)
        self.leaves: dict[Any, Node] = {}  # symbol of a row -> the leaf
        self._known: dict[tuple[Node, int], sympy.Expr | None] = {}  # expressions by value and row

    def symbol(self, leaf: Node, row: int) -> sympy.Symbol:
        """Return the symbol of a row of a leaf."""
        symbol = sympy.Symbol(f"{leaf.name}[{row}]")
        self.leaves[symbol] = leaf
        return symbol

    def expression(self, value: Any, row: int) -> sympy.Expr | None:
        """Return a row of a value as an expanded expression of rows of the leaves, or None if it is unknown."""
        if (value, row) not in self._known:
            self._known[value, row] = self._evaluate(value, row)
        return self._known[value, row]

    def _evaluate(self, value: Any, row: int) -> sympy.Expr | None:
        """Return the expression of a row that is not in `_known`."""
        node = value_origin(skip_widening_cast(value) or value)
        if scan_call(node) != self.mark and is_same_shape(node_shape(node), self.shape):
            return self.symbol(node, row)
        if scan_call(node) is None or is_gradient_stop(node):  # a detached value is equal, but has no gradient
            return None
        source, source_row = self._find_row(node, row)
        if source is not None:
            return self.expression(source, source_row)
        operands = OpCall(node).operands
        if not operands or not all(is_same_shape(node_shape(x), node_shape(node)) for x in operands):
            return None  # also if it combines values of different rows
        result = evaluate_node(node, {x: self.expression(x, row) for x in operands})
        return None if result is None else sympy.expand(result)

    def _find_row(self, node: Node, row: int) -> tuple[Node | None, int]:
        """Return the operand with a row of a node that only moves rows along dim 0, and its row there; else None."""
        if node.target is aten.flatten.using_ints and node.args[0].target is aten.stack.default:
            stack = OpCall(node.args[0])
            dims = stack.get("dim", 0), OpCall(node)["start_dim"], OpCall(node)["end_dim"]
            if len(stack.operands) == 2 and dims == (1, 0, 1):  # it interleaves two operands
                return stack.operands[row % 2], row // 2
        elif node.target is aten.cat.default and OpCall(node).dim() == 0:
            for part in OpCall(node).operands:
                if row < node_shape(part)[0]:
                    return part, row
                row -= node_shape(part)[0]
        elif node.target in PAD_OPS:
            pad = match_pad(node)
            if pad is not None and (pad.dim, pad.before) == (0, 0) and row < node_shape(pad.source)[0]:
                return pad.source, row
        else:
            piece = match_piece(node)
            if piece is not None and piece.dim == 0 and piece.keeps_dim:
                return piece.source, piece.start + piece.step * row
        return None, row
