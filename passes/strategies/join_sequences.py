"""Join sequences in one frame, so that a concatenation of text and image tokens needs no gather.

    cat([a, b], S)  ->  where(arange(A + B) < A, pad(a, (0, B)), pad(b, (A, 0)))        a: A rows, b: B rows along S

The result is a sequence that attention attends over. In its frame, b is the window of the positions from A on: a rank
has the same positions of b and of the result, so that padding b moves no rows. `split(x, [A, B], S)` of the result
becomes slices: the long one is a window, and `SelectRows` sends the rows of the short one to all ranks. Bytes moved:
none for the concatenation.

The window of a short part a is on few ranks. If much work depends on its rows, a has a frame of its own, of which every
rank has A / n rows: they are gathered for the concatenation, and the rows of a slice are distributed again. Both are
`sp.rows`, at which the frame changes. Otherwise a with no more rows than a rank has of the result remains replicated,
and each rank selects its rows of it. Bytes moved: those of a, at each concatenation and slice.

Unchanged: concatenations along other dims, of symbolic lengths, of integers, of inputs (a cache), and those of which no
part is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, read_results
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import Size, assume_large, ceil_div, is_same_size, normalize_position
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.matchers import match_piece
from sp_compile.passes.sharding.rule import lookup_rule, rule_of
from sp_compile.passes.sharding.sharded_work import LARGE_SHARE, RowWork
from sp_compile.passes.sharding.window_rules import simplify_size

aten, sp = torch.ops.aten, torch.ops.sp
JOIN_OPS = (aten.cat.default, aten.slice_scatter.default)
PIECE_OPS = (aten.split_with_sizes.default, aten.slice.Tensor, aten.narrow.default)
MAX_JOIN_ROUNDS = 8  # each round may make a part of a concatenation a sequence, whose own parts are joined next


@dataclass(frozen=True)
class JoinedPart:
    """Part of a joined sequence."""

    value: Node  # has its rows: only these, or, if `is_placed`, those of all positions, with these at their positions
    start: Size  # position of the first row
    length: Size  # number of rows
    is_placed: bool  # True if `value` is as long as the joined sequence


class JoinSequences(Pass):
    """Replacement of concatenations, writes and splits of sequences."""

    requires = frozenset({"canonical", "marked collectives"})
    provides = frozenset({"joined sequences"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace concatenations, in at most MAX_JOIN_ROUNDS rounds, and splits of their results; return their number.

        First, concatenations of all pieces of one value, cat(split(x)), are replaced by the value (`_cancel_split`).
        Each round finds all concatenations along the sequence, and chooses for each the parts with frames of their own
        (`_find_apart`), before any of them is replaced, since a replacement makes the analysis `axes` outdated.
        """
        if context.ranks.n == 1:
            return 0
        cats = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
        changes = sum(map(self._cancel_split, cats))
        if changes:
            context.invalidate()
        self.apart: set[tuple[Size, Size, Size]] = set()  # (start, length, total) of parts with frames of their own
        # With the balanced layout only cat: it does not support the shifted rows of a write (slice_scatter).
        ops = JOIN_OPS[:1] if context.is_balanced else JOIN_OPS
        for _ in range(MAX_JOIN_ROUNDS):
            axes = context.axes(gm)
            parts_of = {n: _find_parts(n) for n in gm.graph.nodes if n.target in ops}
            joins = {n: x for n, x in parts_of.items() if _is_joined(x) and _is_along_sequence(n, x, axes)}
            if not joins:
                break
            work = RowWork(gm, axes)
            apart = [_find_apart(parts, OpCall(n).dim(), context.ranks.n, work, axes) for n, parts in joins.items()]
            for node, indices in zip(joins, apart):
                self._join(node, _find_parts(node), indices)  # an earlier join may have replaced a value of a part
            changes += len(joins)
            context.invalidate()
        return changes + (self._split(gm, context) if changes else 0)

    def _cancel_split(self, node: Node) -> bool:
        """Replace a concatenation of all pieces of one value, cat(split(x)), by a copy of the value.

        Return True if the node was such a concatenation.
        """
        parts = _find_parts(node)  # a placed part has the same positions in its value as in the node
        values = {part.value for part in parts}
        if len(values) != 1 or not all(part.is_placed for part in parts):
            return False
        value = values.pop()
        if value.meta["val"].dtype != node.meta["val"].dtype:
            return False
        with self.graph.inserting_before(node):
            self.replace(node, self.compute(aten.clone.default, (value,), node))  # the result is no alias of the value
        return True

    def _join(self, node: Node, parts: Sequence[JoinedPart], apart: Collection[int]) -> None:
        """Replace a concatenation by where(position < start of b, padded a, padded b), and so on for further parts.

        Args:
            node: The concatenation.
            parts: Its parts, in order.
            apart: The indices of the parts that have frames of their own, see `_find_apart`.
        """
        call, value = OpCall(node), node.meta["val"]
        dim, total = call.dim(), node_shape(node)[call.dim()]
        with self.graph.inserting_before(node):
            positions = self.compute(aten.arange.default, (self.sizes(total),), node, {"device": value.device})
            full_length = []  # each part, extended to the rows of the result, with its own rows in place
            for i, part in enumerate(parts):
                x = self.cast(part.value, value.dtype, node)
                if i in apart:
                    self.apart.add((part.start, part.length, total))
                    x = self._place(x, dim, positions, part.start, node)
                elif not part.is_placed:
                    x = self._pad(x, dim, part.start, simplify_size(total - part.start - part.length), node)
                full_length.append(x)
            # From the last part to the first: each result is read from the position of the next part on.
            joined = full_length[-1]
            shape = [self.sizes(total) if d == dim else 1 for d in range(value.ndim)]
            for x, next_part in reversed([*zip(full_length, parts[1:])]):
                is_before = self.compute(aten.lt.Scalar, (positions, self.sizes(next_part.start)), node)
                is_before = self.compute(aten.reshape.default, (is_before, shape), node)
                joined = self.compute(aten.where.self, (is_before, x, joined), node)
        lengths = [str(part.length) for part in parts]
        text = f"{len(parts)} sequences of {' and '.join(lengths)} positions are joined in place"
        if apart:
            text += f"; the {' and '.join(lengths[i] for i in apart)} are gathered from a frame of their own"
        self.note(joined, text)
        self.replace(node, joined)

    def _emit_rows(self, x: Node, dim: int, start: Size, length: Size, like: Node) -> Node:
        """Emit sp::rows, x[start : start + length] along a dim, whose result has another frame than x."""
        rows = self.compute(sp.rows.default, (x, dim, self.sizes(start), self.sizes(length)), like)
        set_node_info(rows, is_apart=True)
        return rows

    def _pad(self, x: Node, dim: int, before: Size, after: Size, like: Node) -> Node:
        """Emit a part of a concatenation with zeros before and after it, and mark that its frame is that of the result.

        Args:
            x: The part.
            dim: The dim of the concatenation.
            before: The number of rows of the parts before it.
            after: The number of rows of the parts after it.
            like: The concatenation.
        """
        widths = [0, 0] * (like.meta["val"].ndim - 1 - dim) + self.sizes.list((before, after))
        padded = self.compute(aten.constant_pad_nd.default, (x, widths), like)
        set_node_info(padded, joins=True)
        return padded

    def _place(self, x: Node, dim: int, positions: Node, start: Size, like: Node) -> Node:
        """Emit a value as long as a concatenation that has the rows of a part at their positions.

        For a part of 2 rows at position 1 of 5, it has the rows 0, 0, 1, 1, 1 of the part.

        All ranks get all rows of the part, which has a frame of its own; each then selects those of its positions. At
        positions outside of the part, the value has the nearest row, which is not used.

        Args:
            x: The part.
            dim: The dim of the concatenation.
            positions: The positions of the concatenation, an arange.
            start: The position of the first row of the part.
            like: The concatenation.
        """
        length = node_shape(x)[dim]
        index = self.compute(aten.sub.Tensor, (positions, self.sizes(start)), like)
        index = self.compute(aten.clamp.default, (index, 0, self.sizes(length - 1)), like)
        rows = self._emit_rows(x, dim, 0, length, like)
        placed = self.compute(aten.index_select.default, (rows, dim, index), like)
        set_node_info(placed, is_apart=True)  # its frame is that of the concatenation, not that of its operand
        return placed

    def _split(self, gm: GraphModule, context: PassContext) -> int:
        """Replace splits of sequences into pieces of given sizes by slices, and return the number of changes.

        A piece of a split, or a slice, that is a part with a frame of its own (`self.apart`) becomes sp::rows, at which
        the frame changes.
        """
        axes, changes = context.axes(gm), 0
        for node in [n for n in gm.graph.nodes if n.target in PIECE_OPS]:
            call, rule = lookup_rule(node) or (None, None)
            # `rule.window_dim` is the dim of the pieces, and `rule.spans` is the start and length of each.
            if call is None or rule is None or rule.window_dim not in axes.sequence_dims(call.operands[0]):
                continue
            x, dim = call.operands[0], rule.window_dim
            total, pieces = node_shape(x)[dim], dict[int, Node]()
            is_split = node.target is aten.split_with_sizes.default
            with self.graph.inserting_before(node):
                for index in read_results(node) if is_split else [0]:
                    start, length = rule.spans[index]
                    if (start, length, total) in self.apart:
                        pieces[index] = self._emit_rows(x, dim, start, length, node)
                    elif is_split:
                        args = (x, dim, self.sizes(start), self.sizes(start + length))
                        pieces[index] = self.compute(aten.slice.Tensor, args, node)
            if pieces and (not is_split or all(user.target is operator.getitem for user in node.users)):
                self.replace(node, pieces if is_split else pieces[0])
                changes += 1
        if changes:
            context.invalidate()
        return changes


def _find_apart(parts: Sequence[JoinedPart], dim: int, n: int, work: RowWork, axes: Axes) -> list[int]:
    """Return the indices of the parts of a concatenation that should have frames of their own.

    In the frame of the result, a short part is on few ranks: of 8 and 56 joined rows on 4 ranks, all 8 are on rank 0.
    In a frame of its own, each rank has 2 of them, which must be exchanged. A part gets one if each rank then has fewer
    rows of it, and if the work on these rows would otherwise be at least `LARGE_SHARE` of the FLOPs of a rank. The
    longest part gets one only if it has no more rows than a rank has of the result.

    Args:
        parts: The parts.
        dim: The dim of their rows.
        n: The number of ranks.
        work: The work of the graph.
        axes: Its axes.
    """
    lengths = [assume_large(part.length) for part in parts]
    longest, joined_rows = lengths.index(max(lengths)), ceil_div(sum(lengths), n)
    apart = []
    for i, (part, length) in enumerate(zip(parts, lengths)):
        # A placed part is read from a value as long as the joined sequence, which has the frame of the result already.
        if part.is_placed or (i == longest and n * length > sum(lengths)):
            continue
        rows = min(length, joined_rows)  # that a rank computes without a frame of its own
        atoms = axes.canonical(axes.dims[part.value, 0][dim])  # factors of the rows, usually one
        # FLOPs of products whose results have these rows; an upper bound for several factors.
        flops = min((work.by_rows[a] for a in atoms), default=0.0)
        # FLOPs of a rank if the part has no frame of its own.
        rank_flops_of_part, other_rank_flops = flops * rows / length, (work.total - flops) / n
        is_large = rank_flops_of_part >= LARGE_SHARE * (rank_flops_of_part + other_rank_flops)
        if ceil_div(length, n) < rows and rank_flops_of_part > 0 and is_large:
            apart.append(i)
    return apart


def _find_parts(node: Node) -> list[JoinedPart]:
    """Return the parts of a cat, or of a slice_scatter into a value: rows before the slice, the slice, rows after it.

    The result is [] if the op cannot be joined, such as for a write to an input, or with a step.
    """
    if node_info(node).no_rule is not None:  # marked by an earlier pass: it needs gathered operands
        return []
    call, total = OpCall(node), node_shape(node)
    dim = call.dim()
    if node.target is aten.cat.default:
        if any(x.meta["val"].ndim != len(total) for x in call.operands):
            return []
        lengths = [node_shape(x)[dim] for x in call.operands]
        starts = [simplify_size(end - length) for end, length in zip(accumulate(lengths), lengths)]
        return [_find_part(x, dim, start, total[dim]) for x, start in zip(call.operands, starts)]
    base, rows = call.operands
    start, length, size = call["start"] or 0, node_shape(rows)[dim], total[dim]
    if call["step"] != 1 or not all(isinstance(x, int) for x in (start, length, size)) or not _is_computed(base):
        return []
    start = min(max(normalize_position(start, size), 0), size)  # as torch clamps it
    # `base` is as long as the result, so that its rows are at their positions there (`is_placed`).
    before = JoinedPart(base, 0, start, is_placed=True)
    written = JoinedPart(rows, start, length, is_placed=False)
    after = JoinedPart(base, start + length, size - start - length, is_placed=True)
    return [part for part in (before, written, after) if part.length]


def _find_part(x: Node, dim: int, start: Size, total: Size) -> JoinedPart:
    """Return an operand of a cat as a part.

    In cat([x[:, :2], b], 1), the operand x[:, :2] is replaced by x if x is as long as the result: its rows are in place
    there.

    Args:
        x: The operand.
        dim: The dim of the cat.
        start: The position of its first row in the result.
        total: The number of rows of the result.
    """
    length, piece = node_shape(x)[dim], match_piece(x)
    if piece is None or not piece.keeps_dim or piece.step != 1 or piece.dim != dim:
        return JoinedPart(x, start, length, is_placed=False)
    is_placed = is_same_size(piece.start, start) and is_same_size(node_shape(piece.source)[dim], total)
    return JoinedPart(piece.source if is_placed else x, start, length, is_placed)


def _is_joined(parts: Sequence[JoinedPart]) -> bool:
    """Return True if `JoinSequences` should replace a concatenation of these parts by a selection from padded parts.

    It has several parts of known lengths, and the longest of them has floats that the program computes: inputs and
    integers, such as a cache or token ids, are not worth a selection. Placed parts, whose values are as long as the
    result, count only if all parts are placed. A shift by one row is left to `ExchangeHalos`, which sends one row.
    """
    if len(parts) < 2 or not all(isinstance(part.length, int) and part.length for part in parts):
        return False
    if _is_row_shift(parts):
        return False
    longest = max(parts, key=lambda part: (not part.is_placed, assume_large(part.length))).value
    is_number = longest.meta["val"].is_floating_point() or longest.meta["val"].is_complex()  # complex: rotary angles
    return is_number and _is_computed(longest)


def _is_along_sequence(node: Node, parts: Sequence[JoinedPart], axes: Axes) -> bool:
    """Return True for a concatenation along a sequence, or that repeats an earlier one: cat([a, b]) of its two slices.

    A repeated concatenation need not be attended over. A part of it has the position of a part of a joined sequence,
    which has the length of the result.
    """
    dim, total = OpCall(node).dim(), node_shape(node)[OpCall(node).dim()]
    if dim in axes.sequence_dims(node):
        return True
    joined = {(axes.find(atom.name), atom.size, start) for atom, start in axes.joined}
    for part in parts if joined else ():
        (atom, *others) = axes.dims[part.value, 0][dim]
        name = axes.find(atom.name)
        sizes = (a.size for a in axes.atoms() if axes.find(a.name) == name)
        if not others and (name, part.length, part.start) in joined and any(is_same_size(x, total) for x in sizes):
            return True
    return False


def _is_row_shift(parts: Sequence[JoinedPart]) -> bool:
    """Return True for a shift by one row, cat([row, x[:, :-1]], 1) or cat([x[:, 1:], row], 1).

    `ExchangeHalos` replaces it by an exchange of one row.
    """
    lengths = [part.length for part in parts]
    if len(parts) != 2 or 1 not in lengths:
        return False
    other_rows = parts[1 - lengths.index(1)].value
    piece = match_piece(other_rows)  # x[:, :-1] or x[:, 1:], if x is as long as the result
    return piece is not None and piece.keeps_dim and is_same_size(node_shape(piece.source)[piece.dim], sum(lengths))


def _is_computed(x: Node) -> bool:
    """Return True if an op computes the elements of a value; False for inputs, and views and copies of them."""
    while x.op == "call_function":
        rule = rule_of(x)
        if rule is None or not rule.lazy or not x.all_input_nodes:
            return True
        x = x.all_input_nodes[0]
    return False
