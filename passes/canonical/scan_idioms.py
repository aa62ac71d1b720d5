"""Replace idioms around an inclusive scan by exclusive and reverse scans.

    cumsum(x) - x                        sp.scan(x, ..., exclusive)           exact: nothing is added and subtracted
    pad(cumsum(x), (1, 0))[..., :-1]     sp.scan(x, ..., exclusive)           also cat([zeros, cumsum(x)[:-1]]), and
                                                                              cumsum(pad(x, (1, -1))); ones for cumprod
    flip(cumsum(flip(x)))                sp.scan(x, ..., reverse)
    sum(x) - cumsum(x) + x               sp.scan(x, ..., reverse)             without + x: exclusive, too

In any order, and nested. Part of canonicalize. Bytes moved: none. Unchanged: scans whose own value has a reader, except
for shifted sums of integers, which become `cumsum(x) - x`; and results of another dtype than the scan's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.scan.monoids import MONOIDS
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import as_sizes, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import (
    PadMatch,
    is_cast_op,
    is_only_read_by,
    is_same_call,
    match_piece,
    match_slice,
    move_source,
    skip_reshapes,
    value_origin,
)
from sp_compile.passes.sharding.window_rules import simplify_size

from .pad_inputs import match_padding, pad_of_source
from .scan_calls import CUMULATIVE_OPS, emit_scan, flipped_dims, flips_along, is_scannable_call

aten, sp = torch.ops.aten, torch.ops.sp
SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
SCAN_FORM_OPS = {*CUMULATIVE_OPS, sp.scan.default, sp.linear_scan.default}
SHIFT_BY_ONE = ((1, -1), (-1, 1))


def match_shift(node: Node) -> PadMatch | None:
    """Return a value as rows of a source shifted by one, with a constant in the free row; else None."""
    piece = match_slice(node)
    pad = match_padding(node if piece is None else value_origin(piece.source))
    if piece is not None and pad is not None:
        if pad.dim != piece.dim or not is_only_read_by(value_origin(piece.source), node):
            return None
        cut_after = node_shape(piece.source)[pad.dim] - piece.start - piece.length
        pad = replace(pad, before=simplify_size(pad.before - piece.start), after=simplify_size(pad.after - cut_after))
    while pad is not None and (pad.before, pad.after) not in SHIFT_BY_ONE:
        pad = pad_of_source(pad) if is_only_read_by(pad.source, node) else None
    return pad


@dataclass(frozen=True)
class ScanMatch:
    """Scan of the graph, independent of its op."""

    node: Node  # result
    x: Node  # operand
    dim: int  # dim of the scan
    op: str  # operation, such as "sum"
    exclusive: bool = False  # True if the element itself is excluded
    reverse: bool = False  # True if it scans from the last row to the first


def match_scan(node: object) -> ScanMatch | None:
    """Return the scan that computes a value, or None for scans with segments, frames or options."""
    node = value_origin(node)
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in CUMULATIVE_OPS:
        call = OpCall(node)
        known = call.ndim() > 0 and is_scannable_call(call)
        return ScanMatch(node, call.operands[0], call.dim(), CUMULATIVE_OPS[node.target]) if known else None
    if node.target is not torch.ops.sp.scan.default:
        return None
    call = OpCall(node)
    if any(call[name] is not None for name in ("segments", "accumulate", "frame")) or call.ndim() == 0:
        return None
    return ScanMatch(node, call.operands[0], call.dim(), call["op"], call["exclusive"], call["reverse"])


@register_pass
class RewriteScanIdioms(CanonicalPass):
    """Replacement of the scan idioms of one graph."""

    requires = frozenset({"scans", "mask predicates"})  # masks are matched in their original form
    provides = frozenset({"canonical", "scan idioms"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        changes = 0
        if not any(node.target in SCAN_FORM_OPS for node in self.graph.nodes):
            return changes
        for node in list(self.graph.nodes):
            if node.op != "call_function" or not is_tensor(node):
                continue
            meant = _match_idiom(node)
            if meant is not None:
                self._rewrite(node, meant)
            changed = meant is not None or self._reverse_recurrence(node) or self._subtract_operand(node)
            why = _reverse_refusal(node) if not changed else None
            if why is not None:
                self.note_refusal(node, f"this is not a reverse scan, so it flips all rows: {why}")
            changes += changed
        return changes

    def _rewrite(self, node: Node, meant: ScanMatch) -> None:
        with self.graph.inserting_before(node):
            options = (meant.exclusive, meant.reverse)
            fresh = emit_scan(self, meant.x, meant.dim, meant.op, node.meta["val"], node, *options)
        self.replace(node, fresh)

    def _reverse_recurrence(self, node: Node) -> bool:
        """Rewrite flip(sp.linear_scan(flip(a), flip(b))) as a reverse recurrence, and flip(flip(x)) as a copy.

        A result that is written to later, or a value with a hook, must not become an alias of another one.
        """
        if node.target is not aten.flip.default:
            return False
        inner = value_origin(node.args[0])
        if inner.target is aten.flip.default and inner.args[1] == node.args[1]:
            with self.graph.inserting_before(node):
                self.replace(node, self.compute(aten.clone.default, (inner.args[0],), node))
            return True
        if inner.target is not sp.linear_scan.default or not is_only_read_by(inner, node):
            return False
        call = OpCall(inner)
        rows, dim = [value_origin(x) for x in call.operands[:2]], call.dim(operand=1)
        if call["frame"] is not None or not all(flips_along(x, dim) for x in (node, *rows)):
            return False
        operands = [x.args[0] for x in rows] + call.operands[2:]
        args, kwargs = call.with_operands(operands, reverse=not call["reverse"])
        with self.graph.inserting_before(node):
            fresh = self.emit(inner.target, args, node.meta["val"], node, kwargs)
        self.replace(node, fresh)
        return True

    def _subtract_operand(self, node: Node) -> bool:
        """Rewrite an exclusive sum of integers as the inclusive one minus x, which needs no neighbor."""
        inner = _match_exclusive(node)
        if inner is None or inner.op != "sum" or node.meta["val"].is_floating_point():
            return False
        with self.graph.inserting_before(node):
            each = self.cast(inner.x, node.meta["val"].dtype, node)
            fresh = self.compute(aten.sub.Tensor, (inner.node, each), node)
        self.replace(node, fresh)
        return True


def _match_idiom(node: Node) -> ScanMatch | None:
    """Return the scan that a value computes in another form, or None."""
    for idiom in SCAN_IDIOMS:
        meant = idiom(node)
        if meant is not None and _has_same_result(meant, node):
            return meant
    return None


def _has_same_result(meant: ScanMatch, node: Node) -> bool:
    """Return True if the value has the shape and dtype of the scan."""
    mine, value = node.meta["val"], meant.node.meta["val"]
    return mine.dtype == value.dtype and is_same_shape(as_sizes(mine.shape), as_sizes(value.shape))


def _match_shifted_scan(node: Node) -> ScanMatch | None:
    """Match a scan without its last row, after the identity."""
    inner = _match_exclusive(node)
    return replace(inner, exclusive=True) if inner is not None and is_only_read_by(inner.node, node) else None


def _match_exclusive(node: Node) -> ScanMatch | None:
    """Return the inclusive scan whose rows, shifted by one, are the value."""
    move = match_shift(node)
    inner = match_scan(move.source) if move is not None else None
    return inner if move is not None and inner is not None and _excludes_element(inner, move) else None


def _match_scan_of_shift(node: Node) -> ScanMatch | None:
    outer = match_scan(node)
    move = match_shift(value_origin(outer.x)) if outer is not None else None
    if outer is None or move is None or not _excludes_element(outer, move):
        return None
    return replace(outer, x=move.source, exclusive=True)


def _excludes_element(inner: ScanMatch, move: PadMatch) -> bool:
    """Return True if an inclusive scan of these shifted rows excludes the element itself."""
    identity = MONOIDS[inner.op].identity(move.source.meta["val"].dtype)
    onwards = move.before == (-1 if inner.reverse else 1)
    return not inner.exclusive and onwards and move.dim == inner.dim and move.fill == identity


def _match_flipped(node: Node) -> ScanMatch | None:
    """Match a scan between two flips of its dim."""
    inner = match_scan(node.args[0]) if node.target is aten.flip.default else None
    source = value_origin(inner.x) if inner is not None else None
    if inner is None or source is None or not is_only_read_by(inner.node, node):
        return None
    if not flips_along(node, inner.dim) or not flips_along(source, inner.dim):
        return None
    return replace(inner, x=source.args[0], reverse=not inner.reverse)


def _reverse_refusal(node: Node) -> str | None:
    """Return the reason against a rewrite of a scan between two flips; None for other nodes."""
    if node.target is not aten.flip.default:
        return None
    inner = value_origin(node.args[0])
    form = match_scan(inner)
    if form is not None:
        rows, dim = [value_origin(form.x)], form.dim
    elif inner.target is sp.linear_scan.default:
        call = OpCall(inner)
        rows, dim = [value_origin(x) for x in call.operands[:2]], call.dim(operand=1)
    else:
        return None
    flips = [x for x in iterate_reachable(rows, _pointwise_operands) if dim in flipped_dims(x)]
    if not flips or dim not in flipped_dims(node):
        return None
    if not all(flips_along(x, dim) for x in (node, *flips)):
        return f"other dims than {dim} are flipped with it; flip them separately"
    if not is_only_read_by(inner, node):
        return f"another op reads the scan ({inner.name}) before it is flipped back"
    return "its operand is computed from flipped rows; iterate in reverse, or flip the operand of the scan"


def _pointwise_operands(node: Node) -> list[Node]:
    """Return the operands of a pointwise op."""
    return node.all_input_nodes if torch.Tag.pointwise in getattr(node.target, "tags", ()) else []


def _match_combination(node: Node) -> ScanMatch | None:
    """Match a sum of a scan, its operand and its total, with signs."""
    if node.target not in SIGNS:
        return None
    terms = _signed_terms(node)
    scans = [s for s in map(match_scan, terms) if s is not None and s.op == "sum"]
    if len(scans) != 1 or len(terms) > 3:
        return None
    found = scans[0]
    own, total = _find_term(terms, lambda t: _is_cast_of(t, found)), _find_term(terms, lambda t: _is_total_of(t, found))
    parts = (terms[found.node], own[0], total[0])
    known = {found.node, *own[1], *total[1]}
    if known != set(terms) or not is_only_read_by(found.node, node):
        return None
    if (found.exclusive, parts) not in _SUM_OPS:
        return None
    exclusive, turned = _SUM_OPS[found.exclusive, parts]
    return replace(found, exclusive=exclusive, reverse=found.reverse != turned)


# (exclusive scan?, signs of the scan, of its operand, of the total): (exclusive, in the other direction)
_SUM_OPS = {
    (False, (1, -1, 0)): (True, False),
    (False, (-1, 0, 1)): (True, True),
    (False, (-1, 1, 1)): (False, True),
    (True, (1, 1, 0)): (False, False),
    (True, (-1, 0, 1)): (False, True),
    (True, (-1, -1, 1)): (True, True),
}


def _signed_terms(root: Node) -> Counter[Node]:
    """Return the leaves of a tree of additions and subtractions with their signs."""
    terms: Counter[Node] = Counter()

    def adds(node: Node) -> bool:
        """Return True for an addition or subtraction of tensors that only the sum reads."""
        if node.target not in SIGNS or node.kwargs.get("alpha", 1) != 1:
            return False
        return all(map(is_tensor, node.args)) and (node is root or is_only_read_by(node, root))

    def visit(node: Node, sign: int) -> None:
        """Count the terms below a node with their signs."""
        if adds(node):
            visit(value_origin(node.args[0]), sign)
            visit(value_origin(node.args[1]), sign * SIGNS[node.target])
        else:
            terms[node] += sign

    visit(root, 1)
    return terms


def _find_term(terms: Counter[Node], wanted: Callable[[Node], bool]) -> tuple[int, list[Node]]:
    found = [t for t in terms if wanted(t)]
    return sum(terms[t] for t in found), found


def _is_cast_of(term: Node, scan: ScanMatch) -> bool:
    """Return True if the term is the operand of the scan, or a copy of it in a wider dtype."""
    x, wide = value_origin(scan.x), term.meta["val"].dtype
    exact = torch.promote_types(x.meta["val"].dtype, wide) == wide
    return (
        value_origin(term) is x
        or (exact and is_cast_op(term) and value_origin(move_source(term)) is x)
        or is_same_call(term, x)
    )


def _is_total_of(term: Node, scan: ScanMatch) -> bool:
    """Return True if the term is the sum of the operand, with the dim kept at size 1."""
    shape, term_shape = node_shape(scan.node), node_shape(term)
    wanted = (*shape[: scan.dim], 1, *shape[scan.dim + 1 :])
    if not is_same_shape(term_shape, wanted):
        return False
    term = skip_reshapes(term)
    if term.target is aten.sum.dim_IntList:
        call = OpCall(term)
        dims = [int(d) % call.ndim() for d in call["dim"] or ()]
        return dims == [scan.dim] and _is_cast_of(call.operands[0], scan)
    piece = match_piece(term)
    if piece is None or value_origin(piece.source) is not scan.node or scan.exclusive or piece.dim != scan.dim:
        return False
    return is_same_size(piece.length, 1) and is_same_size(piece.start, 0 if scan.reverse else shape[scan.dim] - 1)


SCAN_IDIOMS = (_match_shifted_scan, _match_scan_of_shift, _match_flipped, _match_combination)
