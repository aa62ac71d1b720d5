"""Replace idioms around an inclusive scan by exclusive and reverse scans.

    cumsum(x) - x                        sp.scan(x, ..., exclusive)           exact: nothing is added and subtracted
    pad(cumsum(x), (1, 0))[..., :-1]     sp.scan(x, ..., exclusive)           also cat([zeros, cumsum(x)[:-1]]), and
                                                                              cumsum(pad(x, (1, -1))); ones for cumprod
    flip(cumsum(flip(x)))                sp.scan(x, ..., reverse)
    sum(x) - cumsum(x) + x               sp.scan(x, ..., reverse)             without + x: exclusive, too

In any order, and nested. Row i of an *inclusive* scan combines rows 0, ..., i; an *exclusive* one leaves out row i; a
*reverse* one starts at the last row. A *shift* is a padding by one row of a constant at one end of a dim that cuts one
row at the other end. Bytes moved: none. Unchanged: scans whose own value has a reader, except for shifted sums of
integers, which become `cumsum(x) - x`; and results of another dtype than the scan's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.scan.monoids import MONOIDS
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.canonical.pad_inputs import match_padding, pad_of_source
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, wrap_dim
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import (
    PadMatch,
    is_cast_op,
    is_only_read_by,
    is_same_call,
    is_wider_dtype,
    match_piece,
    match_slice,
    move_source,
    skip_reshapes,
    value_origin,
)
from sp_compile.passes.sharding.window_rules import simplify_size

from .scan_calls import CUMULATIVE_OPS, emit_scan, flipped_dims, is_flip_along, is_scannable_call

aten, sp = torch.ops.aten, torch.ops.sp
SIGNS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
SCAN_FORM_OPS = {*CUMULATIVE_OPS, sp.scan.default, sp.linear_scan.default}


def match_shift(node: Node) -> PadMatch | None:
    """Return the shift by one row that computes a value, as a padding of its source, or None.

    A shift adds one row of a constant at one end of a dim and cuts one at the other: a padding of (1, -1) or (-1, 1).
    It may be written as pad(x, (1, 0))[:-1], as pad(x[:-1], (1, 0)), or with a cat in place of the pad.
    """
    # Values between the source and the node must have no other reader, for which they would be computed in any case.
    piece = match_slice(node)
    pad = match_padding(node if piece is None else value_origin(piece.source))
    if piece is not None and pad is not None:  # pad(x, (1, 0))[:-1]: subtract the rows that the slice cuts
        if pad.dim != piece.dim or not is_only_read_by(value_origin(piece.source), node):
            return None
        cut_after = node_shape(piece.source)[pad.dim] - piece.start - piece.length
        pad = replace(pad, before=simplify_size(pad.before - piece.start), after=simplify_size(pad.after - cut_after))
    # pad(x[:-1], (1, 0)): a padding of a slice is a padding of x that also cuts rows.
    while pad is not None and (pad.before, pad.after) not in ((1, -1), (-1, 1)):
        pad = pad_of_source(pad) if is_only_read_by(pad.source, node) else None
    return pad


@dataclass(frozen=True)
class ScanMatch:
    """Scan of the graph, independent of its op."""

    node: Node  # result
    x: Node  # operand
    dim: int  # dim of the scan
    op: str  # operation, such as "sum"
    exclusive: bool = False  # True if row i of the result leaves out row i
    reverse: bool = False  # True if it scans from the last row to the first


def match_scan(node: object) -> ScanMatch | None:
    """Return the scan that computes a value, a torch op or an sp.scan of the global view; else None.

    Also None for an sp.scan with segments, its own accumulation dtype or a frame: no idiom applies to these.
    """
    node = value_origin(node)
    if not isinstance(node, Node) or node.target not in (*CUMULATIVE_OPS, sp.scan.default):
        return None
    call = OpCall(node)
    if call.ndim() == 0:
        return None
    if node.target in CUMULATIVE_OPS:
        scan = ScanMatch(node, call.operands[0], call.dim(), CUMULATIVE_OPS[node.target])
        return scan if is_scannable_call(call) else None
    if any(call[name] is not None for name in ("segments", "accumulate", "frame")):
        return None
    return ScanMatch(node, call.operands[0], call.dim(), call["op"], call["exclusive"], call["reverse"])


@register_pass
class RewriteScanIdioms(CanonicalPass):
    """Replacement of the scan idioms of one graph."""

    requires = frozenset({"scans", "mask predicates"})  # masks are matched in their original form
    provides = frozenset({"canonical", "scan idioms"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every idiom by one scan, and report scans between flips that are no reverse scans."""
        changes = 0
        if not any(node.target in SCAN_FORM_OPS for node in self.graph.nodes):
            return changes
        for node in list(self.graph.nodes):
            if node.op != "call_function" or not is_tensor(node):
                continue
            if self._rewrite(node) or self._rewrite_flip(node) or self._subtract_operand(node):
                changes += 1
            elif (reason := _reverse_refusal(node)) is not None:
                self.note_refusal(node, f"this is not a reverse scan, so it flips all rows: {reason}")
        return changes

    def _rewrite(self, node: Node) -> bool:
        """Replace an idiom, such as cumsum(x) - x, by the scan that it computes; return False for other nodes."""
        scan = _match_idiom(node)
        if scan is None:
            return False
        with self.graph.inserting_before(node):
            options = {"exclusive": scan.exclusive, "reverse": scan.reverse}
            new = emit_scan(self, scan.x, scan.dim, scan.op, node.meta["val"], node, **options)
            self.replace(node, new)
        return True

    def _rewrite_flip(self, node: Node) -> bool:
        """Rewrite flip(sp.linear_scan(flip(a), flip(b))) as a reverse recurrence, and flip(flip(x)) as a copy.

        Returns False for other nodes.
        """
        if node.target is not aten.flip.default:
            return False
        inner = value_origin(node.args[0])
        if inner.target is aten.flip.default and inner.args[1] == node.args[1]:
            with self.graph.inserting_before(node):
                # a clone, not x itself: a value that is written to later or has a hook must not be an alias of x
                self.replace(node, self.compute(aten.clone.default, (inner.args[0],), node))
            return True
        if inner.target is not sp.linear_scan.default or not is_only_read_by(inner, node):
            return False
        call = OpCall(inner)
        factors_and_terms, dim = [value_origin(x) for x in call.operands[:2]], call.dim(operand=1)
        if call["frame"] is not None or not all(is_flip_along(x, dim) for x in (node, *factors_and_terms)):
            return False
        operands = [x.args[0] for x in factors_and_terms] + call.operands[2:]  # before their flips; initial value
        args, kwargs = call.with_operands(operands, reverse=not call["reverse"])
        with self.graph.inserting_before(node):
            self.replace(node, self.emit(inner.target, args, node.meta["val"], node, kwargs))
        return True

    def _subtract_operand(self, node: Node) -> bool:
        """Rewrite a shifted cumsum of integers as cumsum(x) - x, which reads no row of another rank.

        It applies where `_rewrite` does not because other nodes read the inclusive cumsum, too. The difference is exact
        for integers. Returns False for other nodes.
        """
        scan = _match_exclusive(node)
        if scan is None or scan.op != "sum" or node.meta["val"].is_floating_point():
            return False
        with self.graph.inserting_before(node):
            x = self.cast(scan.x, node.meta["val"].dtype, node)
            self.replace(node, self.compute(aten.sub.Tensor, (scan.node, x), node))
        return True


def _match_idiom(node: Node) -> ScanMatch | None:
    """Return the scan that an idiom computes, if the scan has the shape and dtype of the node's value; else None."""
    value = node.meta["val"]
    for match_form in (_match_shifted_scan, _match_scan_of_shift, _match_flipped, _match_combination):
        scan = match_form(node)
        if scan is None or scan.node.meta["val"].dtype != value.dtype:
            continue
        if is_same_shape(node_shape(scan.node), node_shape(node)):
            return scan
    return None


def _match_shifted_scan(node: Node) -> ScanMatch | None:
    """Match pad(cumsum(x), (1, 0))[..., :-1], an inclusive scan shifted by one row, as an exclusive scan.

    None if another node reads the inclusive scan, which then remains in any case.
    """
    scan = _match_exclusive(node)
    if scan is None or not is_only_read_by(scan.node, node):
        return None
    return replace(scan, exclusive=True)


def _match_exclusive(node: Node) -> ScanMatch | None:
    """Return the inclusive scan whose result, shifted by one row, is the value of a node; None for other nodes.

    The value is then the exclusive scan of the same operand.
    """
    shift = match_shift(node)
    if shift is None:
        return None
    scan = match_scan(shift.source)
    return scan if scan is not None and _is_exclusive(scan, shift) else None


def _match_scan_of_shift(node: Node) -> ScanMatch | None:
    """Match cumsum(pad(x, (1, -1))), an inclusive scan of rows shifted by one, as an exclusive scan of x."""
    scan = match_scan(node)
    if scan is None:
        return None
    shift = match_shift(value_origin(scan.x))
    if shift is None or not _is_exclusive(scan, shift):
        return None
    return replace(scan, x=shift.source, exclusive=True)


def _is_exclusive(scan: ScanMatch, shift: PadMatch) -> bool:
    """Return True if a scan and a shift by one row, one applied to the result of the other, are the exclusive scan.

    The scan must be inclusive, the rows must move in its direction, and the row that the shift adds must contain the
    neutral element of the op, such as 0 of a sum.
    """
    neutral = MONOIDS[scan.op].identity(shift.source.meta["val"].dtype)
    same_direction = shift.before == (-1 if scan.reverse else 1)
    return not scan.exclusive and same_direction and shift.dim == scan.dim and shift.fill == neutral


def _match_flipped(node: Node) -> ScanMatch | None:
    """Match flip(cumsum(flip(x))), a scan between two flips of its dim, as a scan of x in the other direction."""
    scan = match_scan(node.args[0]) if flipped_dims(node) else None
    if scan is None or not is_only_read_by(scan.node, node):
        return None
    flipped = value_origin(scan.x)
    if not is_flip_along(node, scan.dim) or not is_flip_along(flipped, scan.dim):
        return None
    return replace(scan, x=flipped.args[0], reverse=not scan.reverse)


def _reverse_refusal(node: Node) -> str | None:
    """Return the reason why a flip of a scan of flipped rows is no reverse scan, with a fix, for the report.

    None if the node is no flip of a scan or recurrence along the scan's dim, or if the operands are not flipped. An
    operand may also be computed from flipped rows by pointwise ops, as in flip(cumsum(exp(flip(x)))).
    """
    if node.target is not aten.flip.default:
        return None
    inner = value_origin(node.args[0])
    scan = match_scan(inner)
    if scan is not None:
        operands, dim = [value_origin(scan.x)], scan.dim
    elif inner.target is sp.linear_scan.default:
        call = OpCall(inner)
        # linear_scan(a, b, initial): the rows are those of a and b, and b has the scanned dim.
        operands, dim = [value_origin(x) for x in call.operands[:2]], call.dim(operand=1)
    else:
        return None
    flips = [x for x in iterate_reachable(operands, _pointwise_operands) if dim in flipped_dims(x)]
    if not flips or dim not in flipped_dims(node):
        return None
    if not all(is_flip_along(x, dim) for x in (node, *flips)):  # True for a flip of this dim only
        return f"other dims than {dim} are flipped with it; flip them separately"
    if not is_only_read_by(inner, node):
        return f"another op reads the scan ({inner.name}) before it is flipped back"
    return "its operand is computed from flipped rows; iterate in reverse, or flip the operand of the scan"


def _pointwise_operands(node: Node) -> list[Node]:
    """Return the operands of a pointwise op, or [] for another op, to search for flips before pointwise ops."""
    return node.all_input_nodes if torch.Tag.pointwise in getattr(node.target, "tags", ()) else []


class _SumSigns(NamedTuple):
    """Signs of the terms of a sum, 0 for a term that is missing."""

    scan: int  # of a scan
    operand: int  # of the operand of the scan
    total: int  # of the sum of all rows of the operand


# (whether the scan is exclusive, signs of the sum) -> (whether the sum is an exclusive scan, whether it is reversed).
# Example: total - cumsum(x) is the sum of all later rows, an exclusive scan in the other direction.
_SUM_FORMS = {
    (False, _SumSigns(1, -1, 0)): (True, False),
    (False, _SumSigns(-1, 0, 1)): (True, True),
    (False, _SumSigns(-1, 1, 1)): (False, True),
    (True, _SumSigns(1, 1, 0)): (False, False),
    (True, _SumSigns(-1, 0, 1)): (False, True),
    (True, _SumSigns(-1, -1, 1)): (True, True),
}


def _match_combination(node: Node) -> ScanMatch | None:
    """Match a signed sum of a cumsum, its operand x and the total of x that equals another scan of x.

    The total is the sum of all rows. Examples are cumsum(x) - x, and sum(x) - cumsum(x) + x; `_SUM_FORMS` lists all.
    """
    if node.target not in SIGNS:
        return None
    terms = _signed_terms(node)  # term -> 1 or -1
    scans = [scan for scan in map(match_scan, terms) if scan is not None and scan.op == "sum"]
    if len(scans) != 1 or len(terms) > 3:
        return None
    scan = scans[0]
    operands = [term for term in terms if _is_cast_of(term, scan)]
    totals = [term for term in terms if _is_total_of(term, scan)]
    if {scan.node, *operands, *totals} != set(terms) or not is_only_read_by(scan.node, node):
        return None
    signs = _SumSigns(terms[scan.node], sum(terms[x] for x in operands), sum(terms[x] for x in totals))
    if (scan.exclusive, signs) not in _SUM_FORMS:
        return None
    exclusive, is_reversed = _SUM_FORMS[scan.exclusive, signs]  # of the sum; reversed relative to `scan`
    return replace(scan, exclusive=exclusive, reverse=scan.reverse != is_reversed)


def _signed_terms(root: Node) -> Counter[Node]:
    """Return the terms of nested additions and subtractions with their signs: {a: 1, b: -1, c: 1} of a - (b - c).

    The signs of a term that repeats are added.
    """
    terms: Counter[Node] = Counter()

    def is_sum_of_terms(node: Node) -> bool:
        """Return True for a + b or a - b of tensors that is the root or is read only to compute the root."""
        if node.target not in SIGNS or node.kwargs.get("alpha", 1) != 1:
            return False
        return all(map(is_tensor, node.args)) and (node is root or is_only_read_by(node, root))

    def add_terms(node: Node, sign: int) -> None:
        """Add the terms of `sign * node` to `terms`."""
        if is_sum_of_terms(node):
            add_terms(value_origin(node.args[0]), sign)
            add_terms(value_origin(node.args[1]), sign * SIGNS[node.target])
        else:
            terms[node] += sign

    add_terms(root, 1)
    return terms


def _is_cast_of(term: Node, scan: ScanMatch) -> bool:
    """Return True if the term equals the operand of the scan, possibly in another dtype.

    It is the same node, an equal call of a pure op, or a cast. A cast to the dtype of the scan may round, as the scan
    casts its operand in the same way.
    """
    x = value_origin(scan.x)
    if value_origin(term) is x or is_same_call(term, x):
        return True
    dtype, x_dtype = term.meta["val"].dtype, x.meta["val"].dtype
    is_exact = x_dtype == torch.bool or is_wider_dtype(dtype, x_dtype) or dtype == scan.node.meta["val"].dtype
    return is_exact and is_cast_op(term) and value_origin(move_source(term)) is x


def _is_total_of(term: Node, scan: ScanMatch) -> bool:
    """Return True if the term is the sum of all rows of the scan's operand, with a dim of size 1 in place of the rows.

    That is x.sum(dim, keepdim=True), or the last result of the inclusive scan, cumsum(x)[:, -1:].
    """
    shape = node_shape(scan.node)
    if not is_same_shape(node_shape(term), (*shape[: scan.dim], 1, *shape[scan.dim + 1 :])):
        return False
    term = skip_reshapes(term)
    if term.target is aten.sum.dim_IntList:
        call = OpCall(term)
        dims = [wrap_dim(d, call.ndim()) for d in call["dim"] or ()]
        return dims == [scan.dim] and _is_cast_of(call.operands[0], scan)
    piece = match_piece(term)
    if piece is None or value_origin(piece.source) is not scan.node or scan.exclusive or piece.dim != scan.dim:
        return False
    last_row = 0 if scan.reverse else shape[scan.dim] - 1
    return is_same_size(piece.length, 1) and is_same_size(piece.start, last_row)
