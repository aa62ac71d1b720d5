"""Replace an unrolled tree of combinations by the scan that its combine function defines.

    torch.associative_scan(combine_mode="generic"), which tracing unrolls into log2(S) levels: each level combines the
    rows of its leaves in pairs, and interleaves the scan of these with combinations of it and every second row
        ->  sp.scan     sp.linear_scan

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
from sp_compile.passes.graph.sizes import as_sizes
from sp_compile.passes.sharding.matchers import PAD_OPS, match_pad, match_piece, stops_gradient, value_origin

from .associative_scan import CombineOp, RewriteAssociativeScans, expression_of, operands_of, scan_of_leaf
from .scan_trees import match_interleaving, nodes_before, outermost_trees

aten = torch.ops.aten
KNOWN = ("sum", "prod", "logsumexp")  # a tree of maxima has other gradients than a scan where rows are equal
RowSlice = tuple[int, int, int]  # start, step, number


class _Level(NamedTuple):
    """Scan of a leaf at one level of a tree."""

    join: Node  # node that interleaves the rows
    leaf: Node  # scanned value
    dim: int  # dim of the scan
    rows: int  # number of rows of the leaf
    odd: Node  # scan of the pairs of rows
    even: Node | None  # rows between these, without the first


@register_pass
class UnrolledScans(RewriteAssociativeScans):
    """Replacement of the trees of one graph with a known combine function."""

    requires = frozenset({"rolled loops"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        if outermost_trees(gm.graph):
            erase_dead(self.graph)
        self.levels = {n: found for n in gm.graph.nodes if (found := _level(n)) is not None}
        outer = [self.levels[join] for join, _ in outermost_trees(gm.graph) if join in self.levels]
        halves = {level.rows // 2 for level in outer if self._function(level) is None}  # trees inside of unknown ones
        return sum(self._rewrite_tree(level) for level in outer if level.rows not in halves)

    def _rewrite_tree(self, level: _Level) -> bool:
        results = list(level.join.users) if level.rows % 2 else [level.join]
        found = self._function(level)
        if found is None:
            return False
        op, factors = found
        leaves = [x for x in (factors, level.leaf) if x is not None]
        one = CombineOp(op, tuple(range(len(leaves))))
        if len({(as_sizes(x.meta["val"].shape), x.meta["val"].dtype) for x in (*leaves, *results)}) > 1:
            return False
        if not self.fits(leaves, one):
            return False
        operands = operands_of(leaves, level.dim)
        with self.graph.inserting_before(level.join):
            out = self.restore_dims(self.scan_field(one, operands, level.join), operands, level.join)
        for result in results:
            self.replace(result, out)
        return True

    def _function(self, level: _Level) -> tuple[str, Node | None] | None:
        """Return (operation, leaf with the factors of a recurrence) if all levels combine by it, else None."""
        inner, half, rest = self.levels.get(level.odd), level.rows // 2, (level.rows - 1) // 2
        pairs = {(0, 2, half): "left", (1, 2, half): "right"}
        reduced = inner.leaf if inner is not None else level.odd
        found = _match(reduced, level.leaf, level, pairs)
        if found is None or node_shape(reduced)[level.dim] != half or (inner is None) != (half == 1):
            return None
        if (level.even is None) != (rest == 0):
            return None
        if level.even is not None and found != _match(level.even, level.leaf, level, {(2, 2, rest): "right"}, rest):
            return None
        below = self._function(inner) if inner is not None else (found[0], None)
        if below is None or below[0] != found[0]:
            return None
        if below[1] is not None and _match(below[1], found[1], level, pairs) != ("prod", None):
            return None
        return found


def _level(join: Node) -> _Level | None:
    """Return the level that ends in a node, None if its rows are not proven to be in order."""
    found = match_interleaving(join)
    if found is None:
        return None
    leaf, dim = value_origin(found[1].source), found[1].dim
    rows = node_shape(leaf)[dim]
    even, odd = map(value_origin, OpCall(join.args[0]).operands)
    parts = OpCall(even).operands if even.target is aten.cat.default and OpCall(even).dim() == dim else [even]
    if not isinstance(rows, int) or len(parts) > 2 or node_shape(join)[dim] != rows + rows % 2:
        return None
    if rows % 2:
        pad = match_pad(odd) if odd.target in PAD_OPS else None
        if pad is None or (pad.dim, pad.before, pad.after) != (dim, 0, 1):
            return None
        if any(_rows(user, dim) != (join, (0, 1, rows)) for user in join.users):
            return None
        odd = value_origin(pad.source)
    source, slice_key = _rows(odd, dim)
    odd = source if slice_key == (0, 1, rows // 2) else odd
    return _Level(join, leaf, dim, rows, odd, value_origin(parts[1]) if parts[1:] else None)


def _rows(x: Node, dim: int) -> tuple[Node, RowSlice | None]:
    """Return the value of which `x` holds some rows, and which."""
    x = value_origin(x)
    piece = match_piece(x)
    if piece is None or piece.dim != dim or not piece.keeps_dim:
        return x, (0, 1, node_shape(x)[dim]) if is_tensor(x) and x.meta["val"].ndim > dim else None
    source, slice_key = _rows(piece.source, dim)
    first = slice_key is not None and slice_key[:2] == (0, 1)
    return (source if first else value_origin(piece.source)), (piece.start, piece.step, piece.length)


def _match(
    value: Node, leaf: Node, level: _Level, sides: Mapping[RowSlice, str], prefixes: int = 0
) -> tuple[str, Node | None] | None:
    """Return the function by which a value combines rows of a leaf on the left and on the right.

    Args:
        value: The value.
        leaf: The leaf.
        level: The level of the tree.
        sides: Rows of the leaves that are operands, with their side.
        prefixes: The number of rows of the scan of pairs that are the left operand.
    """
    symbols: dict[sympy.Symbol, tuple[str, Node]] = {}

    def symbol(x: Node) -> sympy.Symbol | None:
        """Return the symbol of rows on the left or right; None for other values."""
        source, slice_key = _rows(x, level.dim)
        if source is level.odd and prefixes and slice_key == (0, 1, prefixes):
            side, source = "left", leaf
        elif slice_key is not None and slice_key in sides:
            side = sides[slice_key]
        else:
            return None
        found = sympy.Symbol(f"{side} {source.name}")
        symbols[found] = (side, source)
        return found

    if any(map(stops_gradient, nodes_before(value, lambda node: symbol(node) is not None))):
        return None
    found = expression_of(value, symbol)
    left, right = sympy.Symbol(f"left {leaf.name}"), sympy.Symbol(f"right {leaf.name}")
    if found is None:
        return None
    scan = scan_of_leaf(found, 0, [left], [right])
    if scan is not None:
        return (scan.op, None) if scan.op in KNOWN else None
    for other in found.free_symbols - {left, right}:
        side, factors = symbols[other]
        if side == "right" and found == sympy.expand(other * left + right):
            return "linear", factors
    return None
