"""Join sequences in one frame, so that a concatenation of text and image tokens needs no gather.

    cat([a, b], S)  ->  where(arange(A + B) < A, pad(a, (0, B)), pad(b, (A, 0)))        a: A rows, b: B rows along S

The result is a sequence that attention attends over. In its frame, b is the window of the positions from A on: a rank
has the same positions of b and of the result, so that padding b moves no rows. A short part, with no more rows than a
rank has of the result, remains replicated, and each rank selects its rows of it. `split(x, [A, B], S)` of the result
becomes slices: the long one is a window, and `SelectRows` sends the rows of the short one to all ranks. Bytes moved:
none for the concatenation.

Unchanged: concatenations along other dims, of symbolic lengths, of integers, of inputs (a cache), and those of which no
part is computed.
"""

from __future__ import annotations

import operator
from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, read_results
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import Size, assume_large, is_same_size
from sp_compile.passes.sharding.rule import lookup_rule
from sp_compile.passes.sharding.window_rules import simplify_size

aten = torch.ops.aten
MAX_JOIN_ROUNDS = 8  # each round may make a part of a concatenation a sequence, whose own parts are joined next


class JoinSequences(Pass):
    """Replacement of concatenations and splits of sequences."""

    requires = frozenset({"canonical", "marked collectives"})
    provides = frozenset({"joined sequences"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Replace concatenations until none is left, then the splits of their results; return their number."""
        changes = 0
        for _ in range(MAX_JOIN_ROUNDS if job.ranks.n > 1 else 0):
            axes = job.axes(gm)
            cats = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
            found = [n for n in cats if OpCall(n).dim() in axes.sequence_dims(n) and _is_joined(n)]
            if not found:
                break
            for node in found:
                self._join(node)
            changes += len(found)
            job.invalidate()
        return changes + (self._split(gm, job) if changes else 0)

    def _join(self, node: Node) -> None:
        """Replace a concatenation by a selection from its padded parts."""
        call = OpCall(node)
        parts, dim, ndim = call.operands, call.dim(), call.ndim()
        lengths = [node_shape(x)[dim] for x in parts]
        total, ends = sum(lengths), list(accumulate(lengths))
        with self.graph.inserting_before(node):
            padded = [
                self._pad(x, dim, end - length, total - end, node) for x, length, end in zip(parts, lengths, ends)
            ]
            options = {"device": node.meta["val"].device}
            positions = self.compute(aten.arange.default, (self.sizes(total),), node, options)
            joined = padded[-1]
            for x, end in reversed([*zip(padded, ends)][:-1]):
                is_before = self.compute(aten.lt.Scalar, (positions, self.sizes(end)), node)
                shape = [self.sizes(total) if d == dim else 1 for d in range(ndim)]
                is_before = self.compute(aten.reshape.default, (is_before, shape), node)
                joined = self.compute(aten.where.self, (is_before, x, joined), node)
        self.note(joined, f"{len(parts)} sequences of {' and '.join(map(str, lengths))} positions are joined in place")
        self.replace(node, joined)

    def _pad(self, x: Node, dim: int, before: Size, after: Size, like: Node) -> Node:
        """Emit zeros before and after a part of a concatenation, and mark that its frame is that of the result."""
        pair = (simplify_size(before), simplify_size(after))
        widths = [0, 0] * (like.meta["val"].ndim - 1 - dim) + self.sizes.list(pair)
        x = self.cast(x, like.meta["val"].dtype, like)
        padded = self.compute(aten.constant_pad_nd.default, (x, widths), like)
        set_node_info(padded, joins=True)
        return padded

    def _split(self, gm: GraphModule, job: PassContext) -> int:
        """Replace splits of joined sequences into pieces of different sizes by slices; return their number."""
        axes, changes = job.axes(gm), 0
        for node in gm.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
            call, rule = lookup_rule(node) or (None, None)
            if call is None or rule is None or call.dim() not in axes.sequence_dims(call.operands[0]):
                continue
            pieces = {}
            with self.graph.inserting_before(node):
                for index in read_results(node):
                    start, length = rule.spans[index]
                    args = (call.operands[0], call.dim(), self.sizes(start), self.sizes(start + length))
                    pieces[index] = self.compute(aten.slice.Tensor, args, node)
            if pieces and all(user.target is operator.getitem for user in node.users):
                self.replace(node, pieces)
                changes += 1
        if changes:
            job.invalidate()
        return changes


def _is_joined(node: Node) -> bool:
    """Return True if a concatenation joins computed floats, of which none has all rows."""
    call = OpCall(node)
    dim, rows = call.dim(), node_shape(node)
    parts = [x for x in call.operands if x.meta["val"].ndim == len(rows) and not is_same_size(node_shape(x)[dim], 0)]
    if len(parts) < 2 or len(parts) < len(call.operands) or not node.meta["val"].is_floating_point():
        return False
    if not all(isinstance(node_shape(x)[dim], int) for x in parts):
        return False
    return _is_computed(max(parts, key=lambda x: assume_large(node_shape(x)[dim])))


def _is_computed(x: Node) -> bool:
    """Return True if an op computes the value; False for inputs and for ops that only move their rows."""
    while x.op == "call_function":
        _, rule = lookup_rule(x) or (None, None)
        if rule is None or not rule.lazy or not x.all_input_nodes:
            return True
        x = x.all_input_nodes[0]
    return False
