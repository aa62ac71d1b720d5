"""Replace an unrolled tree of combinations by the scan that its combine function defines.

torch.associative_scan(combine_mode="generic") has no op: it is Python code that Dynamo inlines, so only the graph shows
it, as log2(S) levels. A level combines the rows of its leaf in pairs, scans the pairs (the next level), and interleaves
this scan with combinations of it and every second row:

    pairs = combine(x[0:-1:2], x[1::2])                             half of the rows
    odd   = scan(pairs)                                             results at rows 1, 3, ...
    even  = cat([x[:1], combine(odd[:-1], x[2::2])])                results at rows 0, 2, ...
    flatten(stack([even, odd], dim + 1), dim, dim + 1)        ->    sp.scan(x), sp.linear_scan(factors, x)

Here x is the *leaf* of the level, the value that it scans; a recurrence has a second leaf, its *factors*. The scan of
the pairs is the *inner* level, and the node that interleaves is the *join*. A *tree* is a level with all inner ones. In
a combination, one operand has the *left* rows (earlier ones), the other one the *right* rows.

All levels must combine by one function. Bytes moved: none. Unchanged: other combine functions, and scans that a program
computes in rounds of its own (Hillis and Steele), whose rounds are sharded or gathered one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.sharding.matchers import PAD_OPS, is_gradient_stop, match_pad, match_piece, value_origin

from .associative_scan import CombineOp, RewriteAssociativeScans, expression_of, scan_of_leaf, unmoved_operands
from .scan_trees import match_interleaving, nodes_before, outermost_trees

aten = torch.ops.aten
KNOWN_OPS = ("sum", "prod", "logsumexp")  # a tree of maxima has other gradients than a scan where rows are equal


class _RowSlice(NamedTuple):
    """Rows start, start + step, ... of a value."""

    start: int  # first row
    step: int  # distance between rows
    length: int  # number of rows


class _LevelCombine(NamedTuple):
    """Combine function of a level, by the scan that it defines."""

    op: str  # operation of sp.scan, or "linear" for a recurrence
    factors: Node | None = None  # leaf with the factors of a recurrence


class _Level(NamedTuple):
    """Scan of a leaf at one level of a tree."""

    join: Node  # node that interleaves the rows
    leaf: Node  # scanned value
    dim: int  # dim of the scan
    rows: int  # number of rows of the leaf
    odd: Node  # results at odd rows: the scan of the pairs of rows
    even: Node | None  # results at rows 2, 4, ...; None if there are none


@register_pass
class RewriteUnrolledScans(RewriteAssociativeScans):
    """Replacement of the trees of one graph with a known combine function."""

    requires = frozenset({"rolled loops"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every outermost tree whose levels combine by one known function; return the number of trees."""
        if outermost_trees(gm.graph):
            erase_dead(self.graph)  # a dead node would count as a reader of a join
        self.levels = {n: level for n in gm.graph.nodes if (level := _match_level(n)) is not None}  # by join
        # `outermost_trees` returns pairs, (join, slice of the first row of the leaf).
        outer = [self.levels[join] for join, _ in outermost_trees(gm.graph) if join in self.levels]
        # A tree whose combine function is not known is gathered as a whole. Its inner level, which has half of its
        # rows, may also be among `outer`: skip the levels with that number of rows.
        inner_rows = {level.rows // 2 for level in outer if self._match_tree(level) is None}
        return sum(self._rewrite_tree(level) for level in outer if level.rows not in inner_rows)

    def _rewrite_tree(self, level: _Level) -> bool:
        """Replace the tree of an outermost level; return False if its combine function or dtypes are not supported."""
        combine = self._match_tree(level)
        if combine is None:
            return False
        # The result of an odd number of rows has a padding row, which the users of the join slice off.
        results = list(level.join.users) if level.rows % 2 else [level.join]
        leaves = [x for x in (combine.factors, level.leaf) if x is not None]  # as sp.linear_scan or sp.scan reads them
        scan = CombineOp(combine.op, tuple(range(len(leaves))))  # of all leaves, by their indices
        has_equal_types = len({(node_shape(x), x.meta["val"].dtype) for x in (*leaves, *results)}) == 1
        if not has_equal_types or not self.can_scan_dtypes(leaves, scan):
            return False
        with self.graph.inserting_before(level.join):
            # Scan the leaves as they were before torch moved the dim to the front, and flipped it for a reverse scan.
            out = self.emit_leaf_scan(scan, unmoved_operands(leaves, level.dim), level.join)
        for result in results:
            self.replace(result, out)
        return True

    def _match_tree(self, level: _Level) -> _LevelCombine | None:
        """Return the function by which this level and all inner levels combine rows.

        A level with the leaf x computes pairs = combine(x[0::2], x[1::2]), scans them at the inner level, and computes
        even = combine(scanned pairs, x[2::2]). The result is None if a step is missing, or if its function is unknown
        or differs from the others.
        """
        inner = self.levels.get(level.odd)
        num_pairs, num_even = level.rows // 2, (level.rows - 1) // 2  # even rows without row 0, which is the leaf's
        pairs = inner.leaf if inner is not None else level.odd  # the last level has one pair and scans nothing
        sides = {_RowSlice(0, 2, num_pairs): "left", _RowSlice(1, 2, num_pairs): "right"}  # x[0::2] and x[1::2]
        combine = _match_combine(pairs, level, level.leaf, sides)
        is_last_level = num_pairs == 1
        has_all_levels = node_shape(pairs)[level.dim] == num_pairs and (inner is None) == is_last_level
        if combine is None or not has_all_levels or (level.even is None) != (num_even == 0):
            return None
        if level.even is not None:
            even_sides = {_RowSlice(2, 2, num_even): "right"}  # the left operands are results of the inner level
            if combine != _match_combine(level.even, level, level.leaf, even_sides, num_even):
                return None
        # The last level has no inner one that could combine by another function.
        inner_combine = self._match_tree(inner) if inner is not None else _LevelCombine(combine.op)
        if inner_combine is None or inner_combine.op != combine.op:
            return None
        # The factors of a recurrence of pairs must be the products of the factors of their two rows.
        factors = inner_combine.factors
        if factors is not None and _match_combine(factors, level, combine.factors, sides) != _LevelCombine("prod"):
            return None
        return combine


def _match_level(join: Node) -> _Level | None:
    """Return the level of a tree of which a node is the join, flatten(stack([even, odd])), else None.

    Also None if it is not certain that the rows of the join, in order, are those of the result.
    """
    # The row x[:1] with which the even rows start: its source is the leaf x.
    first_row = match_interleaving(join)
    if first_row is None:
        return None
    leaf, dim = value_origin(first_row.source), first_row.dim
    rows = node_shape(leaf)[dim]
    even, odd = map(value_origin, OpCall(join.args[0]).operands)
    # [row 0 of the leaf, the results at rows 2, 4, ...], or row 0 alone
    even_parts = OpCall(even).operands if even.target is aten.cat.default and OpCall(even).dim() == dim else [even]
    if not isinstance(rows, int) or len(even_parts) > 2 or node_shape(join)[dim] != rows + rows % 2:
        return None
    if rows % 2:  # the odd rows are padded by one row, which every reader of the result drops
        pad = match_pad(odd) if odd.target in PAD_OPS else None
        if pad is None or (pad.dim, pad.before, pad.after) != (dim, 0, 1):
            return None
        if any(_match_rows(user, dim) != (join, (0, 1, rows)) for user in join.users):
            return None
        odd = value_origin(pad.source)
    # The inner level may itself drop a padding row: `odd` is then the slice of its join.
    source, row_slice = _match_rows(odd, dim)
    odd = source if row_slice == (0, 1, rows // 2) else odd
    later_even = value_origin(even_parts[1]) if len(even_parts) == 2 else None
    return _Level(join, leaf, dim, rows, odd, later_even)


def _match_rows(x: Node, dim: int) -> tuple[Node, _RowSlice | None]:
    """Return the value that `x` is a slice of along the dim, and which rows of that value it has.

    A value that is no slice has all rows of itself; the rows are None if it does not have the dim. For a slice of
    y[:n], the value is y: x = y[:n][1::2] is (y, rows 1, 3, ...), because rows of y[:n] have the same indices in y.
    """
    x = value_origin(x)
    piece = match_piece(x)
    if piece is None or piece.dim != dim or not piece.keeps_dim:
        has_dim = is_tensor(x) and x.meta["val"].ndim > dim
        return x, _RowSlice(0, 1, node_shape(x)[dim]) if has_dim else None
    source, row_slice = _match_rows(piece.source, dim)
    is_of_first_rows = row_slice is not None and row_slice[:2] == (0, 1)  # (start, step): indices are unchanged
    if not is_of_first_rows:
        source = value_origin(piece.source)
    return source, _RowSlice(piece.start, piece.step, piece.length)


def _match_combine(
    value: Node, level: _Level, leaf: Node | None, sides: Mapping[_RowSlice, str], num_results: int = 0
) -> _LevelCombine | None:
    """Return the function by which a value combines left (earlier) rows and right rows of a leaf, or None.

    The leaf is the value that the level scans. pairs = x[0::2] + x[1::2] of the leaf x, for example, is the expression
    "left x" + "right x", and thus _LevelCombine("sum").

    Args:
        value: The pairs of the level, its results at even rows, or the factors of its pairs.
        level: The level of the tree.
        leaf: The leaf, or the factors of a recurrence; None if there are no factors.
        sides: "left" or "right" for each slice of a leaf that is an operand.
        num_results: If not 0, the left operand is the first `num_results` rows of `level.odd` in place of a leaf.
    """
    if leaf is None:
        return None
    left, right = sympy.Symbol(f"left {leaf.name}"), sympy.Symbol(f"right {leaf.name}")
    right_leaves: dict[sympy.Symbol, Node] = {}  # symbol of right rows -> their leaf

    def symbol(x: Node) -> sympy.Symbol | None:
        """Return the symbol of an operand, left or right rows of a leaf; None for values computed from operands."""
        source, row_slice = _match_rows(x, level.dim)  # a value, and its rows as (start, step, number of rows)
        # At even rows, combine(odd[:-1], x[2::2]): the left operand is a result of the inner level, not rows of a leaf.
        if source is level.odd and num_results and row_slice == (0, 1, num_results):
            return left
        if row_slice is None or row_slice not in sides:
            return None
        operand = sympy.Symbol(f"{sides[row_slice]} {source.name}")
        if sides[row_slice] == "right":
            right_leaves[operand] = source
        return operand

    # A detached value would have the same expression, but no gradient.
    if any(map(is_gradient_stop, nodes_before(value, lambda node: symbol(node) is not None))):
        return None
    expression = expression_of(value, symbol)
    # A scan of the leaf alone combines its left and right rows by one op, such as a sum.
    scan = scan_of_leaf(expression, 0, [left], [right])  # of leaf 0, the only one
    if scan is not None:
        return _LevelCombine(scan.op) if scan.op in KNOWN_OPS else None
    # A recurrence multiplies the left rows by the right rows of a second leaf, the factors.
    for factor, factors in right_leaves.items():
        if factor != right and expression == sympy.expand(factor * left + right):
            return _LevelCombine("linear", factors)
    return None
