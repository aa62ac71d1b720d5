"""Scans that tracing unrolled into log2(S) rounds of strided slices become scans again.

    torch.associative_scan(combine_mode="generic"), Hillis-Steele, Blelloch: what combines neighbours, and interleaves
    x + pad(x[:-1]), then x + pad(x[:-2]), ...: rows that neighbours lack are the neutral element of what combines them
        ->  sp.linear_scan(a, b, None, dim)     cumsum     cumprod     logcumsumexp

No order of rounds is assumed. Every row of every value on the way is known by what it combines: rows i to j of a leaf
by an op, as `slice`, `cat`, `stack`, `flatten` and `pad` hand them on and the ops on elements combine them. A value of
S rows of which row t combines rows 0 to t is the scan. Bytes moved: none.
Leaves alone: rounds that permute other dims on the way, combinations that are neither of the above.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Spelling, register
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, is_tensor, overloads, shape_of
from sp_compile.passes.graph.sizes import same, sizes
from sp_compile.passes.sharding.matchers import PADS, Piece, constant_of, order_of, origin, pad_of, piece_of, slice_of
from sp_compile.passes.sharding.window_rules import plain

aten = torch.ops.aten
COMBINATIONS = {aten.mul.Tensor: "prod", aten.add.Tensor: "sum", aten.logaddexp.default: "logsumexp"}
SCANS = {"prod": aten.cumprod.default, "sum": aten.cumsum.default, "logsumexp": aten.logcumsumexp.default}
MOVEMENTS = overloads("slice.Tensor cat stack flatten.using_ints pad constant_pad_nd")
FIXED = ("zero",), ("unknown",), ("one",), ("least",)
ZERO_TERM, UNKNOWN_TERM, ONE_TERM, LEAST_TERM = range(4)
HOLD = {0: ZERO_TERM, 1: ONE_TERM, -math.inf: LEAST_TERM}  # rows of one number
NEUTRAL = {"sum": ZERO_TERM, "prod": ONE_TERM, "logsumexp": LEAST_TERM}
CUTS = (*overloads("slice.Tensor narrow"), operator.getitem)
LEAST_APART = 4  # in three rounds; two may be anything
Term = tuple[Any, ...]
"""(op, leaf, i, j): its rows i to j by the op, None of one row alone; ("carried", a, b, i, j, k): what a linear
recurrence of a and b carries from its rows i to j over to row k."""


@register
class ScanRounds(Spelling):
    """Rewrites the unrolled scans of one graph."""

    requires = frozenset({"loops are rolled"})  # whose states are read before all that only looks at rows
    provides = frozenset({"canonical", "scans"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        self.terms: list[Term] = [*FIXED]
        self.number: dict[Term, int] = {}
        self.values: dict[Node, Tensor] = {}  # the number of what each row is; all other dims are 1
        self.dims: dict[Node, int] = {}  # of the leaves
        shifts = [found for node in self.graph.nodes if (found := _shift(node)) is not None]
        if any(2 * one.apart >= one.extent > 2 for one in shifts):  # the last round; one shift alone is none
            self.dims = {leaf: one.dim for one in shifts for leaf in one.leaves}
        for node in self.graph.nodes:
            self.dims.update(_leaves(node))
        changes = self._rewrite() if self.dims else 0
        self._refuse()
        return changes

    def _rewrite(self) -> int:
        for node in self.graph.nodes:
            found = self._value(node)
            if found is None and node in self.dims:
                found = self._leaf(node)
            if found is not None:
                self.values[node] = found
        scans: dict[tuple[Any, Node], Node] = {}
        for node in self.values:
            scan = self._scan(node)
            if scan is not None:
                scans.setdefault(scan, node)
        for (op, leaf), node in scans.items():
            self._replace(node, op, leaf)
        return len(scans)

    def _refuse(self) -> None:
        """Say of what is left that it looks like the rounds of a scan: neighbours 1, 2, 4, ... rows apart."""
        rounds: dict[Node, int] = {}
        for node in self.graph.nodes:
            apart, source, extent = _apart(node)
            before = [n for n in source.all_input_nodes if rounds.get(n) == apart // 2] if source is not None else []
            if source is None or (apart > 1 and not before):
                continue
            rounds[node] = apart
            if apart >= LEAST_APART and 2 * apart >= extent:
                why = "they combine by no sum, product, log-sum-exp or linear recurrence alone"
                self.refused(node, f"rounds of neighbours 1, 2, 4, ... {apart} rows apart are no scan: {why}")

    def _leaf(self, node: Node) -> Tensor | None:
        value, dim = node.meta["val"], self.dims[node]
        shape = [1] * value.ndim
        shape[dim] = value.shape[dim]
        return _numbers([self._numbered((None, node, i, i)) for i in range(shape[dim])], shape)

    def _numbered(self, term: Term) -> int:
        if term not in self.number:
            self.number[term] = len(self.terms)
            self.terms.append(term)
        return self.number[term]

    def _value(self, node: Node) -> Tensor | None:
        if (known := origin(node)) in self.values:
            return self.values[known]
        if (piece := slice_of(node)) is not None and piece.source in self.values:
            return self._piece(piece)
        inputs = node.all_input_nodes
        if node.target is aten.cat.default and self.values:
            return self._joined(node)
        if node.op != "call_function" or not inputs or any(i not in self.values for i in inputs):
            return None
        if node.target in MOVEMENTS:
            return self._handed_on(node)
        if node.target not in COMBINATIONS or len(node.args) != 2 or len(inputs) != 2 or node.kwargs:
            return None
        left, right = (self.values[x] for x in node.args)
        if left.shape != right.shape:
            return None
        op = COMBINATIONS[node.target]
        pairs = zip(left.flatten().tolist(), right.flatten().tolist())
        return _numbers([self._combined(op, a, b) for a, b in pairs], left.shape)

    def _piece(self, piece: Piece) -> Tensor | None:
        rows, start, length = self.values[piece.source], plain(piece.start), plain(piece.length)
        if not isinstance(start, int) or not isinstance(length, int):
            return None
        everywhere = rows.shape[piece.dim] == 1  # the same in all positions
        return rows.narrow(piece.dim, 0, min(length, 1)) if everywhere else rows.narrow(piece.dim, start, length)

    def _joined(self, node: Node) -> Tensor | None:
        """Rows that are known, and rows that hold one number, behind each other."""
        dim, rows = Call(node).dim(), list[Tensor]()
        for x in Call(node).operands:
            known, extent = self.values.get(origin(x)), x.meta["val"].shape[dim]
            if known is None:
                held = constant_of(x)
                term = HOLD.get(held) if held is not None else None
                if term is None or not isinstance(extent, int):
                    return None
                known = _numbers([term] * extent, [extent if d == dim else 1 for d in range(x.meta["val"].ndim)])
            rows.append(known)
        shapes = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in rows}
        return torch.cat(rows, dim) if len(shapes) == 1 else None

    def _handed_on(self, node: Node) -> Tensor | None:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.target in PADS:
            term = HOLD.get(Call(node)["value"] or 0)
            if term is None or Call(node).get("mode", "constant") != "constant":
                return None
            found = torch.constant_pad_nd(args[0], args[1], term)
        else:
            found = node.target(*args, **kwargs)
        value = node.meta["val"]
        fits = found.ndim == value.ndim and all(a in (1, b) for a, b in zip(found.shape, value.shape))
        return found if fits else None

    def _combined(self, op: str, a: int, b: int) -> int:
        if NEUTRAL[op] in (a, b):
            return b if a == NEUTRAL[op] else a
        if ZERO_TERM in (a, b) and op == "prod":
            return ZERO_TERM
        if min(a, b) < len(FIXED):
            return UNKNOWN_TERM
        term = _combine(op, self.terms[a], self.terms[b]) or _combine(op, self.terms[b], self.terms[a])
        return UNKNOWN_TERM if term is None else self._numbered(term)

    def _scan(self, node: Node) -> tuple[Any, Node] | None:
        """(op, leaf) if row t of the value combines the leaf's rows 0 to t."""
        found = [self.terms[i] for i in self.values[node].flatten().tolist()]
        if not found or len(found[-1]) != 4:
            return None
        op, leaf = found[-1][:2]
        if op is None or any(term != (op if t else None, leaf, 0, t) for t, term in enumerate(found)):
            return None
        value, whole = node.meta["val"], leaf.meta["val"]
        factor = op[1].meta["val"] if isinstance(op, tuple) else whole
        alike = all(sizes(x.shape) == sizes(value.shape) and x.dtype == value.dtype for x in (whole, factor))
        alike = alike and (not isinstance(op, tuple) or value.is_floating_point())
        return (op, leaf) if alike and value.shape[self.dims[leaf]] == len(found) else None

    def _replace(self, node: Node, op: Any, leaf: Node) -> None:
        dim, undo = self.dims[leaf], None
        operands = [op[1], leaf] if isinstance(op, tuple) else [leaf]
        with self.graph.inserting_before(node):
            turned = _turned(operands, dim)
            if turned is not None:
                undo = operands[0]
                operands, dim = turned
            if isinstance(op, tuple):
                out = self.compute(torch.ops.sp.linear_scan.default, (*operands, None, dim), node)
            else:
                options = {} if op == "logsumexp" else {"dtype": node.meta["val"].dtype}
                out = self.compute(SCANS[op], (operands[0], dim), node, options)
            if undo is not None:
                out = self.compute(undo.target, (out, *undo.args[1:]), node)
        self.replace(node, out)


def _numbers(values: list[int], shape: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu").view(list(shape))


class _Shift(NamedTuple):
    """A value combined with rows of one that come `apart` rows later, behind rows of one number."""

    leaves: tuple[Node, Node]
    dim: int
    apart: int
    extent: int


def _shift(node: Node) -> _Shift | None:
    if node.op != "call_function" or node.target not in COMBINATIONS or len(node.args) != 2:
        return None
    for x, y in (node.args, node.args[::-1]):
        moved = _moved(origin(y)) if is_tensor(x) and is_tensor(y) else None
        if moved is None or sizes(x.meta["val"].shape) != sizes(y.meta["val"].shape):
            continue
        source, dim, apart = moved
        extent = source.meta["val"].shape[dim]
        if isinstance(extent, int) and same(shape_of(y)[dim], extent):
            return _Shift((origin(x), source), dim, apart, extent)
    return None


def _moved(node: Node) -> tuple[Node, int, int] | None:
    """(source, dim, by how many rows) of rows that come later behind rows of one number, which need not be as many."""
    piece, pad = slice_of(node), pad_of(node) if node.target in PADS else None
    if piece is not None and piece.source.target in PADS:
        pad = pad_of(piece.source)
        if pad is None or pad.dim != piece.dim or piece.start != 0:
            return None
    if pad is not None and isinstance(pad.before, int) and pad.before > 0:
        inner = slice_of(origin(pad.source))
        return origin(inner.source if inner is not None and inner.dim == pad.dim else pad.source), pad.dim, pad.before
    if node.target is not aten.cat.default or len(Call(node).operands) != 2:
        return None
    rows, inner = Call(node).operands[0], slice_of(origin(Call(node).operands[1]))
    apart = rows.meta["val"].shape[Call(node).dim()]
    known = inner is not None and inner.dim == Call(node).dim() and constant_of(rows) in HOLD and isinstance(apart, int)
    return (origin(inner.source), inner.dim, apart) if known and inner is not None else None


def _leaves(node: Node) -> dict[Node, int]:
    """What may be scanned, and along which dim: the sources of two slices that start elsewhere and are combined."""
    if node.op != "call_function" or node.target not in COMBINATIONS or len(node.args) != 2:
        return {}
    one, other = (piece_of(origin(x)) if is_tensor(x) else None for x in node.args)
    if one is None or other is None or not (one.keeps and other.keeps):
        return {}
    if one.dim != other.dim or same(one.start, other.start):
        return {}
    sources = [origin(piece.source) for piece in (one, other)]
    whole = all(isinstance(x.meta["val"].shape[one.dim], int) for x in sources)
    return dict.fromkeys(sources, one.dim) if whole else {}


def _apart(node: Node) -> tuple[int, Node | None, int]:
    """(by how many rows, of which value, of how many rows) are the two slices apart that an op on elements combines?"""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    given = [origin(x) for x in node.all_input_nodes if is_tensor(x)] if pointwise else []
    pieces = [piece for x in given if x.target in CUTS and (piece := slice_of(x)) is not None]
    if len(given) != 2 or len(pieces) != 2:
        return 0, None, 0
    one, other = pieces
    source, numbers = origin(one.source), (one.start, other.start, extent := shape_of(one.source)[one.dim])
    alike = origin(other.source) is source and one.dim == other.dim and all(isinstance(n, int) for n in numbers)
    apart = abs(one.start - other.start) if alike else 0
    return (apart, source, extent) if apart and apart & (apart - 1) == 0 else (0, None, 0)


def _combine(op: str, before: Term, after: Term) -> Term | None:
    """What rows are that stand before others, combined with them."""
    if before[0] == "carried":
        _, factor, leaf, i, j, k = before
        joins = op == "sum" and after in ((None, leaf, k, k), (("linear", factor), leaf, j + 1, k))
        return (("linear", factor), leaf, i, k) if joins else None
    if after[0] == "carried" or before[3] + 1 != after[2]:
        return None
    (first, leaf, i, j), (second, other, _, k) = before, after
    if leaf is other and {first, second} <= {None, op}:
        return (op, leaf, i, k)
    carries = op == "prod" and leaf is not other and second in (None, "prod")
    return ("carried", other, leaf, i, j, k) if carries and first in (None, ("linear", other)) else None


def _turned(operands: list[Node], dim: int) -> tuple[list[Node], int] | None:
    """The operands before their dims were turned alike, and which of those was `dim`."""
    orders = {order_of(x) for x in operands}
    order = orders.pop()
    return ([x.args[0] for x in operands], order[dim]) if order is not None and not orders else None
