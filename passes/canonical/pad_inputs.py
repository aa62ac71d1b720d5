"""Fold constant padding into the op that reads it, so that no tensor is longer than its sequence.

    constant_pad_nd(x, (k, 0))[..., :S]              ->   sp.shift(x, dim, k, -k, value)
    conv1d(constant_pad_nd(x, (k, 0)), w)            ->   sp.conv_along(x, w, None, 2, k, 0)  also pools and unfold
    conv1d(x, w, padding=k)[..., :S]                 ->   sp.conv_along(x, w, None, 2, k, 0)
    cat([zeros of k rows, x[:-k]])                   ->   sp.shift(x, dim, k, -k, 0)

A *window op* is a convolution, pool or unfold, or sp.shift, which pads one end of a dim and cuts the other one. A
`PadMatch` is a padding (or cut, by negative numbers of rows) of a source; a `WindowCall` is the call of a window op,
whose `sliding.before` is its padding. Rows are counted along the padded dim, the dim of the sequence. Runs after scan
idioms, which use the same ops. Bytes moved: none. Unchanged: padding of several dims, padding and convolutions with
other readers, and lengths that are not provably those of the sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size, is_same_size
from sp_compile.passes.sharding.matchers import (
    PadMatch,
    constant_value,
    match_join,
    match_pad,
    match_slice,
    value_origin,
    value_readers,
)
from sp_compile.passes.sharding.window_rules import SlidingRows, WindowCall, simplify_size, sliding_calls

aten, sp = torch.ops.aten, torch.ops.sp


@register_pass
class FoldPaddings(CanonicalPass):
    """Replacement of the padded windows of one graph."""

    requires = frozenset({"scan idioms"})  # these use the same ops

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Fold paddings into the ops that read them, then slices into the ops whose results they cut."""
        changes = 0
        for rewrite in (self._fold_into_readers, self._fold_slices):  # in this order, as a reader may itself be sliced
            for node in list(self.graph.nodes):
                if node.op == "call_function" and node.users:
                    changes += rewrite(node)
        return changes

    def _fold_into_readers(self, node: Node) -> bool:
        """Replace a padded value, or all of its readers, by window ops that pad; return False if that is not possible.

        pad(x[:-1], (1, 0)) itself is a shift of x. In place of pad(x, (k, 0)), its reader conv1d pads x.
        """
        pad = match_padding(node)
        if pad is None:
            return False
        # pad(x[:-1], 1 row before) is a padding of x itself, which adds a row before and cuts one after.
        inner_pad = pad
        while (source_pad := pad_of_source(inner_pad)) is not None:
            inner_pad = source_pad
        length, rows = node_shape(node)[pad.dim], node_shape(inner_pad.source)[inner_pad.dim]
        # A padded slice (`inner_pad` differs from `pad`), or a cat of constants and a slice, is a shift itself if it is
        # not longer than the sequence. The shift computes all `length` rows of the padded value, from row 0 on.
        shift = _shift_call(inner_pad, start=0, length=length)
        is_cut_and_padded = match_join(node) is not None or inner_pad is not pad
        # sp ops pad by ints: `_is_static` is False for symbolic numbers of rows.
        if is_cut_and_padded and _is_within_sequence(length, inner_pad) and _is_static(shift, rows):
            self._replace_by_window([node], inner_pad.source, shift, inner_pad.dim)
            return True
        # Otherwise each reader must pad by itself.
        readers = value_readers(node)
        calls = [_fold_padding(inner_pad, node, reader) for reader in readers]
        static_calls = [call for call in calls if call is not None and _is_static(call, rows)]
        if len(static_calls) < len(calls):
            if any(call.op is not sp.shift.default for call in static_calls):  # one of the readers is a window op
                refused = next(reader for reader, call in zip(readers, calls) if call not in static_calls)
                self.note_refusal(refused, f"it reads {node.name} with its padding; pass the padding to the window op")
            return False
        for reader, call in zip(readers, static_calls):
            self._replace_by_window([reader], inner_pad.source, call, inner_pad.dim)
        return True

    def _fold_slices(self, node: Node) -> bool:
        """Replace conv1d(x, w, padding=k)[..., :S] by one window op that computes only the rows of the slice.

        The node is the window op. Returns False, and changes nothing, unless its result is longer than its operand
        along the rows, all its readers are equal slices, and the window op of the slice has constant padding, which
        sp:: ops take as ints.
        """
        if not isinstance(node.target, OpOverload):
            return False
        op_call = OpCall(node)
        for dim, call in sliding_calls(op_call).items():
            slices, rows, sliding = value_readers(node), op_call.shape(0)[dim], call.sliding  # rows of the operand
            spans = {_slice_span(user, node, dim) for user in slices}
            span = spans.pop() if len(spans) == 1 else None
            # `first`: an op that must be applied along other dims before the window op, which is not emitted here
            # `is_within`: the result is not longer than the operand, so that there are no rows to omit
            if call.first is not None or sliding.is_within(rows) or span is None:
                continue
            start, length = span
            before = simplify_size(sliding.before - start * sliding.stride)  # row `start` becomes row 0
            sliced_call = replace(call, sliding=replace(sliding, before=before, length=length))
            if _is_static(sliced_call, rows):
                self._replace_by_window(slices, op_call.operands[0], sliced_call, dim, before=node)
                return True
        return False

    def _replace_by_window(
        self, nodes: list[Node], x: Node, call: WindowCall, dim: int, before: Node | None = None
    ) -> None:
        """Replace nodes, which all have the same value, by one window op on `x`.

        Args:
            nodes: The nodes to replace.
            x: The operand.
            call: The window op and its arguments.
            dim: The dim of the rows.
            before: The node before which the op is inserted; None for the first of `nodes`.
        """
        with self.graph.inserting_before(before or nodes[0]):
            new = self.emit(call.op, (x, *call.args(node_shape(x)[dim])), nodes[0].meta["val"], nodes[0])
        for node in nodes:
            self.replace(node, new)


def _shift_call(pad: PadMatch, start: Size, length: Size) -> WindowCall:
    """Return the sp.shift of the source that computes `length` rows of a padded value from row `start` on."""
    sliding = SlidingRows(length, before=simplify_size(pad.before - start))
    return WindowCall(sliding, sp.shift.default, head=(pad.dim,), tail=(pad.fill,))


def _is_static(call: WindowCall, rows: Size) -> bool:
    """Return True if a window op pads an operand of `rows` rows by ints at both ends, as sp ops require."""
    return isinstance(call.sliding.before, int) and isinstance(call.sliding.num_after(rows), int)


def pad_of_source(pad: PadMatch) -> PadMatch | None:
    """Return a padding of a slice as a padding of the tensor that is sliced.

    In a PadMatch, negative numbers cut rows: x[:-1] with one row before it is x with the padding (1, -1). The result is
    None if the source is no slice, or if rows that the slice cuts would appear in place of padding.
    """
    piece = match_slice(pad.source)
    if piece is None or piece.dim != pad.dim:
        return None
    source = value_origin(piece.source)
    cut_after = simplify_size(node_shape(source)[pad.dim] - piece.start - piece.length)
    if not _is_one_padding(pad.before, piece.start) or not _is_one_padding(pad.after, cut_after):
        return None
    before, after = simplify_size(pad.before - piece.start), simplify_size(pad.after - cut_after)
    return replace(pad, source=source, before=before, after=after)


def _is_one_padding(pad: Size, cut: Size) -> bool:
    """Return True if cutting and then padding one end of a dim equals one padding by the difference.

    That holds if either does nothing: no rows are cut, or no rows are added. Two rows of padding in place of two rows
    that were cut, for example, are not the tensor itself.

    Args:
        pad: The number of rows added at that end.
        cut: The number of rows that the slice cuts there.
    """
    return is_same_size(cut, 0) or (isinstance(pad, int) and pad <= 0)


def _is_within_sequence(length: Size, pad: PadMatch) -> bool:
    """Return True if a padded value of `length` rows is not longer than the tensor whose rows it pads.

    If the padding is of a slice, this is the tensor that was sliced, of the length of the sequence.
    """
    source = pad.source
    while (piece := match_slice(source)) is not None:
        source = value_origin(piece.source)
    return SlidingRows(length).is_within(node_shape(source)[pad.dim])  # `<=`, proved for symbolic sizes, too


def match_padding(node: Node) -> PadMatch | None:
    """Return the padding of one dim that a node computes, as a pad or as a cat with constants; else None."""
    joined = match_join(node)
    if joined is not None:
        dim, is_new_dim = joined  # a new dim: of stack
        return None if is_new_dim else _match_padding_cat(node, dim)
    pad = match_pad(node)
    return replace(pad, source=value_origin(pad.source)) if pad is not None else None


def _match_padding_cat(node: Node, dim: int) -> PadMatch | None:
    """Return cat([constants, x, constants]) along `dim` as a padding of x; None for other operands of the cat."""
    call, dtype = OpCall(node), node.meta["val"].dtype
    if len({x.meta["val"].ndim for x in call.operands}) > 1:
        return None  # cat accepts empty one-dimensional operands, too
    fills = [_padding_constant(x, dtype) for x in call.operands]
    constants = {fill for fill in fills if fill is not None}
    if fills.count(None) != 1 or len(constants) != 1:
        return None
    index = fills.index(None)  # of x, the only operand that is no constant
    x = call.operands[index]
    if x.meta["val"].dtype != dtype:
        return None
    extents = [node_shape(operand)[dim] for operand in call.operands]
    before, after = (simplify_size(sum(rows, start=0)) for rows in (extents[:index], extents[index + 1 :]))
    return PadMatch(value_origin(x), dim, before, after, constants.pop())


def _padding_constant(x: Node, dtype: torch.dtype) -> Any:
    """Return the constant that fills an operand of a cat with this result dtype, or None.

    None if the operand is no constant, or if its constant may be rounded in the result dtype.
    """
    fill = constant_value(x)
    return fill if x.meta["val"].dtype == dtype or fill in (0, 1) else None


def _slice_span(user: Node, node: Node, dim: int) -> tuple[Size, Size] | None:
    """Return (start, length) of the rows that the user slices from the node along the dim; None for another user."""
    piece = match_slice(user)
    if piece is None or piece.dim != dim or value_origin(piece.source) is not value_origin(node):
        return None
    return piece.start, piece.length


def _fold_padding(pad: PadMatch, node: Node, reader: Node) -> WindowCall | None:
    """Return the window op that pads by itself, and whose result on `pad.source` is that of a reader of `node`.

    The result is None if there is no such op.

    Args:
        pad: The padding that `node` computes.
        node: The padded value.
        reader: A reader of it, such as conv1d(pad(x, (k, 0)), w).
    """
    span = _slice_span(reader, node, pad.dim)
    if span is not None:  # a slice of the padded value, which is a shift of the source
        return _shift_call(pad, *span)
    if not isinstance(reader.target, OpOverload) or value_origin(reader.all_input_nodes[0]) is not value_origin(node):
        return None
    op_call = OpCall(reader)
    call = sliding_calls(op_call).get(pad.dim)
    num_reads = [value_origin(x) for x in op_call.operands].count(value_origin(node))
    if call is None or call.op in (sp.roll.default, sp.shift.default) or num_reads > 1:
        return None
    # The op pads with one constant, so that of its own padding and that of the folded one must be equal. It is 0 or,
    # for the two ops below, the argument `tail[0]` (the first one after the numbers of padded rows), which is free if
    # the op does not pad yet.
    fill: Any = 0
    if call.op in (sp.max_pool1d.default, sp.unfold.default):
        if not _has_padding(call.sliding, op_call.shape()[pad.dim]):
            call = replace(call, tail=(pad.fill, *call.tail[1:]))
        fill = call.tail[0]
    if fill != pad.fill:
        return None
    before = simplify_size(call.sliding.before + pad.before)
    return replace(call, sliding=replace(call.sliding, before=before))


def _has_padding(sliding: SlidingRows, rows: Size) -> bool:
    """Return True unless a window op provably adds no padding to an operand of `rows` rows."""
    after = sliding.num_after(rows)
    return not (is_same_size(sliding.before, 0) and isinstance(after, int) and after <= 0)
